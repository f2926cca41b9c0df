"""What each rank of a pipeline has of a model: its stages' layers, and what it holds as a ModelShape of its own.

Layers are divided by what they cost in forward, in FLOP a token: products and attention under a causal mask; the last
stage has the head besides (topology/stages.py). Stage s lies on rank s mod P. The first stage has the embeddings, the
last one the last norm, head and loss; tied ones are on both.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, fields
from itertools import groupby
from typing import NamedTuple

from hf_axonn.planner.shapes import LayerShape, ModelShape
from hf_axonn.topology.stages import divide_layers


class StageShape(NamedTuple):
    """What a stage has: see `ModelStages`."""

    kinds: tuple[tuple[LayerShape, int], ...]
    begins: bool
    ends: bool


@dataclass(frozen=True, kw_only=True)
class ModelStages:
    """A model over the ranks of a pipeline.

    Args:
        layers: of each stage, the indices of its layers.
        parts: what stages have, each once: kinds of layers and how many of each, whether it is the first stage, and
            whether it is the last one.
        part: of each stage, which of them.
        held: of each rank, what it has; equal ones are one object.
    """

    layers: tuple[range, ...]
    parts: tuple[StageShape, ...]
    part: tuple[int, ...]
    held: tuple[ModelShape, ...]

    @property
    def per_rank(self) -> int:
        """Stages of a rank."""
        return len(self.layers) // len(self.held)

    @functools.cached_property
    def distinct(self) -> tuple[tuple[ModelShape, tuple[int, ...]], ...]:
        """Each ModelShape that a rank has, and which ranks have it."""
        ranks: dict[ModelShape, list[int]] = {}
        for rank, stack in enumerate(self.held):
            ranks.setdefault(stack, []).append(rank)
        return tuple((stack, tuple(having)) for stack, having in ranks.items())


def layer_costs(shape: ModelShape, seq: int) -> tuple[list[float], float]:
    """FLOP a token of one forward pass: of each decoder layer in its order, and of the head."""
    costs: list[float] = []
    for layer, count in shape.runs:
        attention = sum(
            2 * block.keys(seq) * (block.query_features + block.value_features)
            for block in layer.blocks
            if block.query
        )
        costs += count * [sum(part.flops() for part in layer.parts) + 2 * layer.routed * shape.hidden + attention]
    return costs, 2.0 * shape.vocab * shape.hidden


@functools.lru_cache(maxsize=1024)  # a search asks for the same ones again and again
def stages_of(shape: ModelShape, ranks: int, per_rank: int, seq: int) -> ModelStages:
    """The stages of a model.

    Args:
        shape: the model.
        ranks, per_rank: ranks along the axis pipe, and stages of each.
        seq: tokens of a sequence, by which attention weighs.
    Raises:
        ValueError: there are fewer layers than stages.
    """
    costs, head = layer_costs(shape, seq)
    layers = divide_layers(costs, ranks * per_rank, last=head)
    each = [layer for layer, count in shape.runs for _ in range(count)]
    held: dict[tuple[object, ...], ModelShape] = {}
    for rank in range(ranks):
        own = [each[index] for stage in layers[rank::ranks] for index in stage]
        runs = tuple((layer, len(list(run))) for layer, run in groupby(own))
        key = (runs, rank == 0, rank == ranks - 1)
        held.setdefault(key, _own(shape, *key))
        held[rank,] = held[key]
    parts = [
        StageShape(tuple(Counter(each[index] for index in stage).items()), stage == layers[0], stage == layers[-1])
        for stage in layers
    ]
    once = tuple(dict.fromkeys(parts))
    return ModelStages(
        layers=tuple(layers),
        parts=once,
        part=tuple(map(once.index, parts)),
        held=tuple(held[rank,] for rank in range(ranks)),
    )


def _own(shape: ModelShape, runs: tuple[tuple[LayerShape, int], ...], begins: bool, ends: bool) -> ModelShape:
    """A part of a model; what runs after the layers and what gets no gradient is with the last one."""
    values = {item.name: getattr(shape, item.name) for item in fields(ModelShape)}
    values |= {"runs": runs, "begins": begins, "ends": ends}
    return ModelShape(**values if ends else values | {"outside": None, "idle": ()})
