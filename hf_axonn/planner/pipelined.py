"""A step on a grid with a pipeline: time, memory of the rank that needs most, and how the stages lie.

    pipelined(job, grid, step, ...)  -> Pipelined

Stages are those of planner/stages.py. A layer takes as long as on a grid without a pipeline (planner/time), also over
z: its weights are gathered and its gradients reduced for every micro-batch, or gathered once a step with
`keep_gathered: all`. Head and loss make their gradients in forward, as in the engine. Between stages goes the residual
stream as it is sharded, T / (x y) tokens of H features, between ranks of equal coordinates. Averages over data come
after the last backward pass of a rank; with tied embeddings the first and the last rank then exchange their gradients.

Memory: weights, gradients and moments of a rank's own stages, and what forward saves of as many (stage, micro-batch)
as the schedule has in flight. With weight gradients apart, everything that a layer saves without checkpointing is
there from the gradient of the input to that of the weight. Buffers for what comes from other stages are not counted.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

from hf_axonn.planner.dense import Step
from hf_axonn.planner.job import Job
from hf_axonn.planner.machine import Machine
from hf_axonn.planner.memory import Memory, kept_bytes, memory
from hf_axonn.planner.shapes import LayerShape, ModelShape
from hf_axonn.planner.stages import ModelStages, StageShape, stages_of
from hf_axonn.planner.time.compute import Compute
from hf_axonn.planner.time.exposed import LayerTime, Overlaps, behind_backward, layer_time
from hf_axonn.planner.time.links import Links
from hf_axonn.planner.time.pipeline import StageTime, Timeline, estimate, in_flight, pipeline_time
from hf_axonn.planner.time.schedules import layer_of_engine
from hf_axonn.planner.traffic.volumes import Account
from hf_axonn.topology.grid import Grid


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """What a step on a pipeline comes to.

    Args:
        stages: which layers are where.
        rank: the rank along pipe that ends last, to which `seconds` and `busiest` belong.
        seconds: as of a `Prediction`; bubble: in which the rank waits for others.
        memory: of the rank along pipe that needs most.
        bubble: share of all ranks' time in which they wait, averages and the optimizer left out.
        imbalance: by how much the busiest rank has more to do than the mean.
        in_flight: of each rank, (stage, micro-batch) whose activations it holds at most.
        hop: seconds between two stages, the slowest.
        simulated: whether the schedule was played (time/pipeline.py), or its closed form taken.
    """

    stages: ModelStages
    rank: int
    seconds: dict[str, float]
    memory: Memory
    bubble: float
    imbalance: float
    in_flight: tuple[int, ...]
    hop: float
    simulated: bool

    @property
    def held(self) -> ModelShape:
        """What the rank that ends last has."""
        return self.stages.held[self.rank]


class MicroBatch(NamedTuple):
    """Seconds of one micro-batch: of each kind of layer; of the embedding and of what comes after the layers, forward
    and backward: what is computed, and what waits for communication."""

    layers: dict[LayerShape, LayerTime]
    embedding: float
    embedding_waits: tuple[float, float]
    head: float
    head_waits: tuple[float, float]


@functools.lru_cache(maxsize=4096)  # grids that differ in data and pipe alone share it
def _micro_batch(
    shape: ModelShape,
    machine: Machine,
    grid: Grid,
    step: Step,
    order: tuple[str, ...],
    overlaps: Overlaps,
    attention: str | None,
    layout: str,
) -> MicroBatch:
    links, account = Links(machine, grid, order), Account(shape, grid, step, layout)
    compute = Compute(shape, machine, grid, step, attention=attention)
    kept = step.kept_layers > 0
    layers = {
        layer: layer_time(layer, layer_of_engine(account, layer, kept=kept), compute, overlaps, links)
        for layer, _ in shape.kinds
    }
    embedding, end = account.embedding(), account.end()
    if shape.outside is not None:
        end.include(account.layer(shape.outside, once=True))
    looked_up = compute.embedding()
    return MicroBatch(
        layers,
        looked_up,
        (links.all_of(embedding, "forward"), links.all_of(embedding, "backward")),
        sum(compute.head()) - looked_up,
        (links.all_of(end, "forward"), links.all_of(end, "backward")),
    )


class PassTimes(NamedTuple):
    """Seconds of one micro-batch: its parts, of each stage, and from each stage to the next one."""

    each: MicroBatch
    stages: list[StageTime]
    hops: list[float]


def passes(job: Job, grid: Grid, step: Step, order: tuple[str, ...], overlaps: Overlaps, layout: str) -> PassTimes:
    """Seconds of a micro-batch. Arguments as `pipelined`."""
    stages = stages_of(job.shape, grid.pipe, job.way[1], job.seq)
    if job.pipeline == "zero_bubble":  # the weight gradient beside which the sum over x or y would travel comes later
        overlaps = replace(overlaps, all_reduce=False)
    inside = {"x", "y", "z"} == set(order[:3])  # then pipe and data do not change where their ranks are
    alone = Grid(z=grid.z, y=grid.y, x=grid.x) if inside else grid
    step = replace(step, micro_batches=1)
    each = _micro_batch(job.shape, job.machine, alone, step, order, overlaps, job.attention, layout)
    own = step.padded(grid) * job.shape.hidden // (grid.x * grid.y)
    hops = Links(job.machine, grid, order).hops("pipe", own * step.stream_bytes)
    of_parts = [_stage(each, part, step) for part in stages.parts]
    between = [hops[index % grid.pipe] for index in range(len(stages.layers) - 1)]
    return PassTimes(each, [of_parts[index] for index in stages.part], between)


def least(job: Job, grid: Grid, step: Step, order: tuple[str, ...], overlaps: Overlaps, layout: str) -> float:
    """Seconds of the micro-batches of a step by the closed form. Arguments as `pipelined`."""
    _, stages, hops = passes(job, grid, step, order, overlaps, layout)
    return estimate(job.way[0], stages, grid.pipe, step.micro_batches, hops)


def pipelined(
    job: Job,
    grid: Grid,
    step: Step,
    order: tuple[str, ...],
    overlaps: Overlaps,
    layout: str,
    *,
    play: bool,
) -> Pipelined:
    """One step.

    Args:
        job, grid: of what; the job says which pipeline.
        step: with the micro-batches.
        order: axes from the innermost on.
        overlaps, layout: of the grid.
        play: whether the schedule is played, or the closed form taken.
    """
    shape, times, ranks = job.shape, step.micro_batches, grid.pipe
    pipeline, per_rank = job.way
    stages = stages_of(shape, ranks, per_rank, job.seq)
    each, of_stages, hops = passes(job, grid, step, order, overlaps, layout)
    if play:
        line = pipeline_time(pipeline, of_stages, ranks, times, hops)
    else:
        busy = [times * sum(map(sum, of_stages[rank::ranks])) for rank in range(ranks)]
        line = Timeline([estimate(pipeline, of_stages, ranks, times, hops)] * ranks, busy)
    links = Links(job.machine, grid, order)
    tied = links.hops("pipe", _tied(shape, grid, step))[-1] if shape.tied else 0.0
    averages, hidden, gathers = {}, {}, {}
    for stack, having in stages.distinct:
        data = links.all_of(Account(stack, grid, step, layout).gradients())
        slack = sum(count * each.layers[layer].slack for layer, count in stack.kinds)
        hides = behind_backward(overlaps, data, slack)
        once = sum(count * each.layers[layer].first_z for layer, count in stack.kinds) if step.kept_layers else 0.0
        for rank in having:
            averages[rank] = data - hides + (tied if rank in (0, ranks - 1) else 0.0)
            hidden[rank], gathers[rank] = hides, once
    slowest = max(range(ranks), key=lambda rank: line.ends[rank] + averages[rank] + gathers[rank])
    held = held_by_ranks(job, grid, step, layout)
    seconds = _parts(each, stages.held[slowest], step)
    seconds["exposed z"] += gathers[slowest]
    seconds["exposed data"] = averages[slowest]
    seconds["slowdown"] += job.machine.slowdown * hidden[slowest]
    seconds["optimizer"] = Compute(shape, job.machine, grid, step).optimizer(max(needed.trained for needed in held))
    seconds["bubble"] = max(0.0, line.ends[slowest] - line.busy[slowest])
    return Pipelined(
        stages=stages,
        rank=slowest,
        seconds=seconds,
        memory=max(held, key=lambda needed: needed.total),
        bubble=line.bubble,
        imbalance=max(line.busy) * ranks / sum(line.busy) - 1,
        in_flight=tuple(in_flight(pipeline, ranks, rank, per_rank, times)[0] for rank in range(ranks)),
        hop=max(hops),
        simulated=play,
    )


def _stage(each: MicroBatch, part: StageShape, step: Step) -> StageTime:
    """Seconds of a stage. Gathers that are made once a step are not in it."""
    forward = everything = weight_gradient = 0.0
    for layer, count in part.kinds:
        of_layer = each.layers[layer]
        once = of_layer.first_z if step.kept_layers else 0.0
        forward += count * (of_layer.forward - once)
        everything += count * (sum(of_layer.parts.values()) - once)
        weight_gradient += count * of_layer.weight_gradient
    backward = everything - forward - weight_gradient
    if part.begins:
        forward += each.embedding / 3 + each.embedding_waits[0]
        backward += 2 * each.embedding / 3 + each.embedding_waits[1]
    if part.ends:
        forward += each.head + each.head_waits[0]
        backward += each.head_waits[1]
    return StageTime(forward, backward, weight_gradient)


def _parts(each: MicroBatch, stack: ModelShape, step: Step) -> dict[str, float]:
    """Seconds of a rank's work on all micro-batches, by parts of a step."""
    seconds: dict[str, float] = {}
    times = step.micro_batches
    for layer, count in stack.kinds:
        of_layer = each.layers[layer]
        for part, of_part in of_layer.parts.items():
            seconds[part] = seconds.get(part, 0.0) + times * count * of_part
        if step.kept_layers:
            seconds["exposed z"] -= times * count * of_layer.first_z
    seconds["head"] = times * (stack.begins * each.embedding + stack.ends * each.head)
    seconds["other"] = times * (stack.begins * sum(each.embedding_waits) + stack.ends * sum(each.head_waits))
    return seconds


def _tied(shape: ModelShape, grid: Grid, step: Step) -> float:
    """Bytes of a rank's part of the gradient of a tied embedding."""
    return shape.vocab * shape.hidden / (grid.x * grid.y * grid.z) * max(step.param_bytes, step.reduce_bytes)


def held_by_ranks(job: Job, grid: Grid, step: Step, layout: str) -> list[Memory]:
    """What ranks hold, of those of a kind the first and the last one: what is in flight grows or falls along them."""
    stages = stages_of(job.shape, grid.pipe, job.way[1], job.seq)
    return [
        memory_of_rank(job.way, grid, step, layout, stack, rank)
        for stack, ranks in stages.distinct
        for rank in sorted({ranks[0], ranks[-1]})
    ]


@functools.lru_cache(maxsize=4096)
def _alone(stack: ModelShape, grid: Grid, step: Step, layout: str) -> Memory:
    """What a rank would hold that has this part of the model, and one micro-batch at a time."""
    return memory(stack, grid, step, layout=layout)


def memory_of_rank(way: tuple[str, int], grid: Grid, step: Step, layout: str, stack: ModelShape, rank: int) -> Memory:
    """What a rank holds.

    Args:
        way: the pipeline, and stages of a rank.
        grid, step, layout: as `pipelined`.
        stack: the part of the model that it has (`stages_of`).
        rank: which one of pipe.
    """
    pipeline, per_rank = way
    forward, waiting = in_flight(pipeline, grid.pipe, rank, per_rank, step.micro_batches)
    # Equal on all grids with averages over data, and with micro-batches.
    grid = Grid(data=min(grid.data, 2), z=grid.z, y=grid.y, x=grid.x)
    step = replace(step, micro_batches=min(step.micro_batches, 2))
    needed = _alone(stack, grid, step, layout)
    kept = kept_bytes(stack, grid, step)
    activations = kept + (needed.activations - kept) * forward / per_rank
    if pipeline == "zero_bubble":
        everything = needed
        if step.checkpointing:  # the stage whose weight gradients follow has made everything again
            everything, waiting = _alone(stack, grid, replace(step, checkpointing=False), layout), waiting + 1
        activations += (everything.activations - kept) * waiting / per_rank
    return Memory(**needed._asdict() | {"activations": activations})
