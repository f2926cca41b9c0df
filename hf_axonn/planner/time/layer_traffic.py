"""Traffic of a step by layers and groups of weights: the collectives of planner/traffic/volumes.py.

A decoder layer has groups of weights that are gathered and multiplied together: q, k, v; o; up (and gate); down;
the experts of a mixture are one (of which nothing is gathered where tokens travel to them), and so is each Linear that
makes latents. Payloads as in planner/traffic/ledger.py,
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from hf_axonn.planner.shapes import BlockShape, ExpertsShape, LayerShape, ModelShape
from hf_axonn.planner.step import Step
from hf_axonn.planner.time.links import Links
from hf_axonn.planner.traffic.ledger import Ledger
from hf_axonn.planner.traffic.volumes import StepAccount
from hf_axonn.topology.experts import DISPATCH
from hf_axonn.topology.grid import Grid
from hf_axonn.topology.weight_kind import WeightKind


class Dispatch(NamedTuple):
    """Tokens on their way to experts, and the groups that are computed meanwhile.

    sent, returned: of hidden states and choices in forward, and of their gradients in backward: payloads in
        `LayerTraffic`, seconds in `LayerSeconds`. They are in the collectives of forward and backward, too.
    """

    sent: list[float]
    returned: list[float]
    groups: range


class LayerSeconds(NamedTuple):
    """Seconds of a decoder layer's collectives.

    gathers, reduces: over z, of each group, one pass; gathers_again: whether recomputation gathers once more; kept:
        whether the first gather serves backward and recomputation, too.
    forward, backward: those of the ledger of `LayerTraffic` (with recomputation: its share is in backward).
    hidden: over x or y, of each group, those that run beside its weight gradient.
    dispatches: tokens beside which other groups are computed.
    """

    gathers: list[float]
    reduces: list[float]
    gathers_again: bool
    forward: float
    backward: float
    hidden: list[float]
    kept: bool = False
    dispatches: tuple[Dispatch, ...] = ()


@dataclass(frozen=True)
class LayerTraffic:
    """Payloads of a decoder layer's collectives.

    Args:
        gathers, reduces: payload over z of each group, one pass.
        gathers_again: whether recomputation gathers once more.
        ledger: collectives that nothing hides: over x, y and context, and over z those of gathered parameters.
        hidden: (kind, axis, payload) over x or y beside the weight gradient of each group; None for none.
        once: groups that backward does not gather once more after recomputation.
        kept: whether the first gather serves backward and recomputation, too (`keep_gathered`).
        dispatches: tokens beside which other groups are computed.
    """

    gathers: list[float]
    reduces: list[float]
    gathers_again: bool
    ledger: Ledger
    hidden: list[tuple[str, str, float] | None]
    once: tuple[int, ...] = ()
    kept: bool = False
    dispatches: tuple[Dispatch, ...] = ()

    def seconds(self, links: Links) -> LayerSeconds:
        """Seconds of the collectives on a machine."""
        entries = self.ledger.entries.items()

        def exchanges(payloads: list[float]) -> list[float]:
            return [links.seconds("exchange", DISPATCH, payload) for payload in payloads]

        return LayerSeconds(
            gathers=[links.seconds("all_gather", ("z",), payload) for payload in self.gathers],
            reduces=[links.seconds("reduce_scatter", ("z",), payload, bool(payload)) for payload in self.reduces],
            gathers_again=self.gathers_again,
            forward=sum(links.entry_seconds(key, volume) for key, volume in entries if key.phase == "forward"),
            backward=sum(links.entry_seconds(key, volume) for key, volume in entries if key.phase != "forward"),
            hidden=[links.seconds(each[0], (each[1],), each[2]) if each else 0.0 for each in self.hidden],
            kept=self.kept,
            dispatches=tuple(
                Dispatch(exchanges(each.sent), exchanges(each.returned), each.groups) for each in self.dispatches
            ),
        )


@dataclass(frozen=True)
class Traffic:
    """Payloads of a step's collectives.

    Args:
        layers: (a kind of decoder layer, payloads of one in a micro-batch, number of such layers).
        rest: of embedding, head and loss, one micro-batch.
        gradients: after the last one.
        checkpointing: whether layers run again.
    """

    layers: tuple[tuple[LayerShape, LayerTraffic, int], ...]
    rest: Ledger
    gradients: Ledger
    checkpointing: bool

    def by_axes(self, links: Links, micro_batches: int) -> dict[str, float]:
        """Seconds of one step by axes, hidden or not."""
        found: dict[str, float] = {}

        def enter(axes: tuple[str, ...], seconds: float) -> None:
            found["+".join(axes)] = found.get("+".join(axes), 0.0) + seconds

        def enter_ledger(ledger: Ledger, times: int) -> None:
            for key, volume in ledger.entries.items():
                enter(key.axes, times * links.entry_seconds(key, volume))

        for _, traffic, count in self.layers:
            layer, times = traffic.seconds(links), count * micro_batches
            gathers = sum(layer.gathers) * (1 if layer.kept else 2)
            if self.checkpointing and layer.gathers_again and not layer.kept:
                gathers += sum(layer.gathers) - sum(layer.gathers[index] for index in traffic.once)
            enter(("z",), times * (gathers + sum(layer.reduces)))
            for each, seconds in zip(traffic.hidden, layer.hidden, strict=True):
                if each:
                    enter((each[1],), times * seconds)
            enter_ledger(traffic.ledger, times)
        enter_ledger(self.rest, micro_batches)
        enter_ledger(self.gradients, 1)
        return {axes: seconds for axes, seconds in found.items() if seconds}


def step_traffic(shape: ModelShape, grid: Grid, step: Step, layout: str) -> Traffic:
    """Payloads of a step of the engine."""
    account = StepAccount(shape, grid, step, layout)
    kept, layers = step.kept_layers, []
    for layer, count in reversed(shape.runs):  # kept: the last ones
        held = min(kept, count)
        kept -= held
        for keeps, number in ((True, held), (False, count - held)):
            if number:
                layers.append((layer, layer_traffic(account, layer, kept=keeps), number))
    rest = account.embedding()
    if shape.outside is not None:
        rest.include(account.layer(shape.outside, once=True))
    rest.include(account.end())
    return Traffic(tuple(layers), rest, account.gradients(), step.checkpointing)


def layer_traffic(account: StepAccount, layer: LayerShape, *, kept: bool) -> LayerTraffic:
    """Payloads of the engine for one decoder layer and micro-batch. `kept`: as in `LayerTraffic`."""
    step, grid = account.step, account.grid
    ledger = account.layer(layer)
    elements: list[int] = []
    gathers: list[float] = []
    once: list[int] = []
    hidden: list[tuple[str, str, float] | None] = []
    dispatches: list[Dispatch] = []
    begins: list[int] = []  # the first group of each part

    def hide(axis: str, payload: int) -> None:
        hidden.append(("reduce_scatter", axis, payload) if payload and getattr(grid, axis) > 1 else None)
        if hidden[-1]:
            ledger.add("backward", "reduce_scatter", (axis,), -payload, -1)

    for index, part in enumerate(layer.parts):
        begins.append(len(elements))
        if isinstance(part, ExpertsShape):
            if meanwhile := layer.find_meanwhile(index):
                sent = account.find_dispatched(part)
                groups = range(begins[meanwhile.start], len(elements))
                dispatches.append(Dispatch([*sent["forward"]], [*sent["backward"]], groups))
            once.append(len(elements))
            elements.append(account.expert_elements(part))
            gathers.append(elements[-1] * step.compute_bytes)
            hidden.append(None)
            continue
        of_columns, of_row = account.beside_weight_gradients(part) if isinstance(part, BlockShape) else (0, 0)
        for kind, linears in part.groups():
            elements.append(account.shard_elements(kind, linears))
            gathers.append(step.gather_bytes(elements[-1]))
            payloads = {WeightKind.ROW: of_row, WeightKind.COLUMN: of_columns}
            hide("y" if kind == WeightKind.ROW else "x", payloads.get(kind, 0))
    # What is gathered for its module hides behind nothing.
    weights = account.layer(replace(layer, gathered=())) if layer.gathered else ledger
    for key, volume in [*weights.chosen(axes=("z",))]:
        if key.kind in ("all_gather", "reduce_scatter"):
            ledger.add(key.phase, key.kind, key.axes, -volume.payload, -volume.calls)
    if step.keeps_recomputed:
        once = list(range(len(elements)))
    size = max(step.compute_bytes, step.reduce_bytes)
    reduces: list[float] = [0 if step.lora else count * size for count in elements]
    return LayerTraffic(gathers, reduces, True, ledger, hidden, tuple(once), kept, tuple(dispatches))
