"""What travels in a step, group by group, for the engine's schedule and for AxoNN's.

    of_engine    the collectives of volumes.py
    of_axonn     equations (1) to (5) of the paper, every all-reduce in one piece

A decoder layer has four groups of Linears: q, k, v; o; up (and gate); down. Payloads as in ledger.py, bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hf_axonn.grid import Grid
from hf_axonn.perf.ledger import Ledger
from hf_axonn.perf.links import Links
from hf_axonn.perf.paper import decoder_layers
from hf_axonn.perf.shapes import ModelShape, Step
from hf_axonn.perf.volumes import Account


class Layer(NamedTuple):
    """Seconds of a decoder layer's collectives.

    gathers, reduces: over z, of each group, one pass; gathers_again: whether recomputation gathers once more.
    forward, backward: over x and y, what nothing hides (with recomputation: its share is in backward).
    hidden: over x or y, of each group, what runs beside its weight gradient.
    """

    gathers: list[float]
    reduces: list[float]
    gathers_again: bool
    forward: float
    backward: float
    hidden: list[float]


@dataclass(frozen=True)
class LayerTraffic:
    """Payloads of a decoder layer's collectives.

    Args:
        gathers, reduces: payload over z of each group, one pass.
        gathers_again: whether recomputation gathers once more.
        ledger: collectives over x and y that nothing hides.
        hidden: (kind, axis, payload) over x or y beside the weight gradient of each group; None for none.
    """

    gathers: list[int]
    reduces: list[int]
    gathers_again: bool
    ledger: Ledger
    hidden: list[tuple[str, str, float] | None]

    def seconds(self, links: Links) -> Layer:
        """On a machine."""
        entries = self.ledger.entries.items()
        return Layer(
            gathers=[links.seconds("all_gather", ("z",), payload) for payload in self.gathers],
            reduces=[links.seconds("reduce_scatter", ("z",), payload) for payload in self.reduces],
            gathers_again=self.gathers_again,
            forward=sum(links.of(key, volume) for key, volume in entries if key.phase == "forward"),
            backward=sum(links.of(key, volume) for key, volume in entries if key.phase != "forward"),
            hidden=[links.seconds(each[0], (each[1],), each[2]) if each else 0.0 for each in self.hidden],
        )


@dataclass(frozen=True)
class Traffic:
    """What travels in a step.

    Args:
        layer: of one decoder layer and micro-batch.
        rest: of embedding, head and loss, one micro-batch.
        gradients: after the last one.
        checkpointing: whether layers run again.
    """

    layer: LayerTraffic
    rest: Ledger
    gradients: Ledger
    checkpointing: bool

    def by_axes(self, links: Links, layers: int, micro_batches: int) -> dict[str, float]:
        """Seconds of a whole step by axes, hidden or not."""
        layer = self.layer.seconds(links)
        gathers = 2 + (self.checkpointing and layer.gathers_again)
        found = {"z": layers * micro_batches * (gathers * sum(layer.gathers) + sum(layer.reduces))}

        def enter(axes: tuple[str, ...], seconds: float) -> None:
            found["+".join(axes)] = found.get("+".join(axes), 0.0) + seconds

        for each, seconds in zip(self.layer.hidden, layer.hidden, strict=True):
            if each:
                enter((each[1],), layers * micro_batches * seconds)
        for times, ledger in (
            (layers * micro_batches, self.layer.ledger),
            (micro_batches, self.rest),
            (1, self.gradients),
        ):
            for key, volume in ledger.entries.items():
                enter(key.axes, times * links.of(key, volume))
        return {axes: seconds for axes, seconds in found.items() if seconds}


def of_engine(shape: ModelShape, grid: Grid, step: Step, layout: str) -> Traffic:
    """The engine's own collectives, see volumes.py."""
    account = Account(shape, grid, step, layout)
    layer = account.layer()
    gathers, reduces = [], []
    for columns, row in (shape.attention(), shape.mlp()):
        for kind, linears in (("column", columns), ("row", [row])):
            elements = account.travels(kind, linears)
            gathers.append(elements * step.compute_bytes)
            reduces.append(elements * max(step.compute_bytes, step.reduce_bytes))
    hidden: list[tuple[str, str, float] | None] = []
    for axis, payload in zip("xyxy", account.beside_weight_gradients(), strict=True):
        hidden.append(("reduce_scatter", axis, payload) if payload and getattr(grid, axis) > 1 else None)
        if hidden[-1]:
            layer.add("backward", "reduce_scatter", (axis,), -payload, -1)
    for key in [key for key in layer.entries if key.axes == ("z",)]:
        del layer.entries[key]
    rest = account.embedding()
    rest.include(account.end())
    traffic = LayerTraffic(gathers, reduces, True, layer, hidden)
    return Traffic(traffic, rest, account.gradients(), step.checkpointing)


def of_axonn(shape: ModelShape, grid: Grid, step: Step) -> Traffic:
    """Equations (1) to (5): all-reduces after every product, bf16 over z, fp32 over data.

    Under checkpointing forward all-reduces run again; the weights that were gathered for the recomputation serve
    backward too (so does the authors' script count). Embedding, head and loss are not in the paper's model: their
    gradients travel over data and z as all weights do, their activations are all-reduced once each way.
    """
    ledger, size = Ledger(grid), step.compute_bytes
    gathers, reduces, hidden = [], [], []
    weights = 0.0
    for layer in decoder_layers(shape):
        block = layer.k * layer.n / (grid.x * grid.y)
        weights += shape.layers * block / grid.z
        gathers.append(block / grid.z * size)
        reduces.append(block / grid.z * size)
        inner, outer = ("x", "y") if layer.transposed else ("y", "x")  # the axes that cut k and n
        forward = step.tokens * layer.n / getattr(grid, outer) * size
        ledger.add("forward", "all_reduce", (inner,), forward)
        if step.checkpointing:
            ledger.add("backward", "all_reduce", (inner,), forward)
        backward = step.tokens * layer.k / getattr(grid, inner) * size
        hidden.append(("all_reduce", outer, backward) if getattr(grid, outer) > 1 else None)
    rest, gradients = Ledger(grid), Ledger(grid)
    stream = step.tokens * shape.hidden * size
    for phase in ("forward", "backward"):
        rest.add(phase, "all_reduce", ("x", "y"), stream)
    vocabulary = shape.vocab * shape.hidden / (grid.x * grid.y * grid.z)
    rest.add("forward", "all_gather", ("z",), vocabulary * size)
    rest.add("backward", "reduce_scatter", ("z",), vocabulary * size)
    gradients.add("gradients", "all_reduce", ("data",), 4 * (weights + vocabulary), 4 * shape.layers)
    return Traffic(LayerTraffic(gathers, reduces, False, ledger, hidden), rest, gradients, step.checkpointing)
