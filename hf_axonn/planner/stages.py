"""Stages of a pipeline: their layers, each rank's part of the model as a ModelShape of its own, and its memory.

Layers are divided by what they cost in forward, in FLOP a token: products and attention under a causal mask; the last
stage has the head besides (topology/stages.py). Stage s lies on rank s mod P. The first stage has the embeddings, the
last one the last norm, head and loss; tied ones are on both.

Memory: weights, gradients and moments of a rank's own stages, and what forward saves of each (stage, micro-batch) that
the schedule has in flight. With weight gradients apart, everything that a layer saves without checkpointing is there
from the gradient of the input to that of the weight. Buffers for what comes from other stages are not counted.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import NamedTuple

from hf_axonn.planner.memory import Memory, kept_bytes, memory
from hf_axonn.planner.shapes import LayerShape, ModelShape
from hf_axonn.planner.step import Step
from hf_axonn.planner.time.pipeline import in_flight
from hf_axonn.topology.grid import Grid
from hf_axonn.topology.stages import as_listed, divide_layers


class StageShape(NamedTuple):
    """A stage: kinds of layers and how many of each, whether it is the first stage, and whether it is the last one."""

    kinds: tuple[tuple[LayerShape, int], ...]
    begins: bool
    ends: bool


@dataclass(frozen=True, kw_only=True)
class ModelStages:
    """A model over the ranks of a pipeline.

    Args:
        layers: of each stage, the indices of its layers.
        parts: the stages that differ, each once.
        part: of each stage, its index in `parts`.
        held: of each rank, its part of the model; equal ones are one object.
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
        """Each part of the model that a rank has, and the ranks that have it."""
        ranks: dict[ModelShape, list[int]] = {}
        for rank, shape in enumerate(self.held):
            ranks.setdefault(shape, []).append(rank)
        return tuple((shape, tuple(having)) for shape, having in ranks.items())


def layer_costs(shape: ModelShape, seq: int) -> tuple[list[float], float]:
    """FLOP a token of one forward pass: of each decoder layer in its order, and of the head."""
    costs: list[float] = []
    for layer, count in shape.runs:
        attention = sum(
            2 * block.keys(seq) * (block.query_features + block.value_features)
            for block in layer.blocks
            if block.is_attention
        )
        costs += count * [sum(part.flops() for part in layer.parts) + 2 * layer.routed * shape.hidden + attention]
    return costs, 2.0 * shape.vocab * shape.hidden


@functools.lru_cache(maxsize=1024)  # a search divides the same ones again and again
def divide_model(
    shape: ModelShape, ranks: int, per_rank: int, seq: int, listed: tuple[int, ...] | None = None
) -> ModelStages:
    """Divide the layers of a model into stages.

    Args:
        shape: the model.
        ranks, per_rank: ranks along the axis pipe, and stages of each.
        seq: tokens of a sequence, by which attention weighs.
        listed: how many layers each stage has; None: divided by what they cost.
    Raises:
        ValueError: there are fewer layers than stages, or those that are listed are not all.
    """
    costs, head = layer_costs(shape, seq)
    layers = as_listed(listed, len(costs)) if listed else divide_layers(costs, ranks * per_rank, last=head)
    each = [layer for layer, count in shape.runs for _ in range(count)]
    held: dict[tuple[object, ...], ModelShape] = {}
    for rank in range(ranks):
        own = [each[index] for stage in layers[rank::ranks] for index in stage]
        runs = tuple((layer, len(list(run))) for layer, run in groupby(own))
        key = (runs, rank == 0, rank == ranks - 1)
        held.setdefault(key, _cut_model(shape, *key))
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


def _cut_model(shape: ModelShape, runs: tuple[tuple[LayerShape, int], ...], begins: bool, ends: bool) -> ModelShape:
    """Cut a part out of a model; what runs after the layers and what gets no gradient is with the last one."""
    values = {item.name: getattr(shape, item.name) for item in fields(ModelShape)}
    values |= {"runs": runs, "begins": begins, "ends": ends}
    return ModelShape(**values if ends else values | {"outside": None, "idle": ()})


def memory_of_ranks(
    stages: ModelStages, schedule: tuple[str, int], grid: Grid, step: Step, layout: str
) -> tuple[Memory, ...]:
    """Memory of the ranks of a pipeline, of those with equal parts the first and the last one: what is in flight grows
    or falls along them. Arguments as `memory_of_rank`."""
    return tuple(
        memory_of_rank(schedule, grid, step, layout, shape, rank)
        for shape, ranks in stages.distinct
        for rank in sorted({ranks[0], ranks[-1]})
    )


@functools.lru_cache(maxsize=4096)
def _memory_alone(shape: ModelShape, grid: Grid, step: Step, layout: str) -> Memory:
    """Memory of a rank with this part of the model, and one micro-batch at a time."""
    return memory(shape, grid, step, layout=layout)


def memory_of_rank(
    schedule: tuple[str, int], grid: Grid, step: Step, layout: str, shape: ModelShape, rank: int
) -> Memory:
    """Memory of one rank of a pipeline.

    Args:
        schedule: the pipeline, and stages of a rank.
        grid, step, layout: as `memory`.
        shape: the part of the model that the rank has (`divide_model`).
        rank: its place along pipe.
    """
    pipeline, per_rank = schedule
    forward, waiting = in_flight(pipeline, grid.pipe, rank, per_rank, step.micro_batches)
    # Equal on all grids with averages over data, and with micro-batches.
    grid = replace(grid, data=min(grid.data, 2), pipe=1)
    step = replace(step, micro_batches=min(step.micro_batches, 2))
    needed = _memory_alone(shape, grid, step, layout)
    kept = kept_bytes(shape, grid, step)
    activations = kept + (needed.activations - kept) * forward / per_rank
    if pipeline == "zero_bubble":
        everything = needed
        if step.checkpointing:  # the stage whose weight gradients follow has made everything again
            everything = _memory_alone(shape, grid, replace(step, checkpointing=False), layout)
            waiting += 1
        activations += (everything.activations - kept) * waiting / per_rank
    return Memory(**needed._asdict() | {"activations": activations})
