"""A step on a grid with a pipeline: the schedules that a job may have, and what a step on one of them takes.

    pipeline_candidates(job, grid)              every schedule that a job may have, a candidate each
    estimate_seconds(candidate, order)          seconds of its micro-batches by the closed form
    predict_pipeline(candidate, order, play)    seconds of a step, and a Pipelined

Stages and memory are those of planner/stages.py. A layer takes as long as on a grid without a pipeline (planner/time),
also over z: its weights are gathered and its gradients reduced for every micro-batch, or gathered once a step with
`keep_gathered: all`. Head and loss make their gradients in forward, as in the engine. Between stages goes the residual
stream as it is sharded, T / (x y) tokens of H features, between ranks of equal coordinates. Averages over data come
after the last backward pass of a rank; with tied embeddings the first and the last rank then exchange their gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from hf_axonn.planner.candidate import Candidate
from hf_axonn.planner.job import Job
from hf_axonn.planner.machine import Machine
from hf_axonn.planner.shapes import LayerShape, ModelShape
from hf_axonn.planner.stages import ModelStages, StageShape
from hf_axonn.planner.step import Step
from hf_axonn.planner.time.compute import Compute
from hf_axonn.planner.time.exposed import LayerTime, Overlaps, hide_averages, layer_time
from hf_axonn.planner.time.layer_traffic import layer_traffic
from hf_axonn.planner.time.links import Links
from hf_axonn.planner.time.pipeline import StageTime, Timeline, estimate, in_flight, pipeline_time, problem
from hf_axonn.planner.traffic.volumes import StepAccount
from hf_axonn.topology.grid import Grid, divisors


# Pipelines that are tried where a job does not name one, and stages of a rank; of equally fast ones the first is
# taken. gpipe takes as long as 1f1b and holds more.
TRIED = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero_bubble", 1), ("zero_bubble", 2))
MOST_IDLE = 2.0  # times as long as without a bubble: what waits longer by the closed form is not tried
SMALLEST = 3  # sizes of micro-batches that are tried with a pipeline, from one sequence on: few make long bubbles


def pipeline_candidates(job: Job, grid: Grid) -> Iterator[Candidate]:
    """Yield a candidate for every schedule, stages of a rank and micro-batches that the job and torch allow on a grid
    with a pipeline."""
    for pipeline, per_rank in _schedules(job):
        for count in _counts(job, grid):
            if not _problem(job, grid, pipeline, per_rank, count):
                yield Candidate(replace(job, pipeline=pipeline, stages_per_rank=per_rank), grid, count)


def why_no_pipeline(job: Job, grid: Grid) -> str:
    """Return why the first schedule cannot be, of a job without candidates on a grid."""
    pipeline, per_rank = _schedules(job)[0]
    return _problem(job, grid, pipeline, per_rank, _counts(job, grid)[0])


def _schedules(job: Job) -> list[tuple[str, int]]:
    """Pipelines, and stages of a rank, that a job may have."""
    found = [(name, v) for name, v in TRIED if job.pipeline in (None, name) and job.stages_per_rank in (None, v)]
    return found or [(job.pipeline or "interleaved", job.stages_per_rank or 1)]


def _counts(job: Job, grid: Grid) -> list[int]:
    """Numbers of micro-batches that a job may have on a grid with a pipeline, the most first."""
    if job.micro_batches is not None:
        return [job.micro_batches]
    rows = job.sequences // grid.dp_size
    return [count for count in divisors(rows)[::-1] if count * grid.x * grid.y <= rows * job.positions(grid)][
        :SMALLEST
    ]


def _problem(job: Job, grid: Grid, pipeline: str, per_rank: int, count: int) -> str:
    """Return why a job cannot have a schedule with `count` micro-batches, or nothing."""
    stages = grid.pipe * per_rank
    if stages > job.shape.depth:
        return f"{job.shape.depth} layers are fewer than pipe * stages_per_rank = {stages} stages"
    if why := problem(pipeline, grid.pipe, per_rank, count):
        return why
    if not job.micro_batches and 1 + (grid.pipe - 1) / (per_rank * count) > MOST_IDLE:
        return f"{count} micro-batches are few for {grid.pipe} pipeline ranks: most of them would wait"
    return ""


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """A step on a pipeline.

    Args:
        stages: the layers of each stage.
        rank: the rank along pipe that ends last.
        bubble: share of all ranks' time in which they wait, averages and the optimizer left out.
        imbalance: how much more than the mean the busiest rank has to do.
        in_flight: of each rank, (stage, micro-batch) whose activations it holds at most.
        hop: seconds between two stages, the slowest.
        simulated: whether the schedule was played (time/pipeline.py), or its closed form taken.
    """

    stages: ModelStages
    rank: int
    bubble: float
    imbalance: float
    in_flight: tuple[int, ...]
    hop: float
    simulated: bool

    @property
    def held(self) -> ModelShape:
        """The part of the model of the rank that ends last."""
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
    links, account = Links(machine, grid, order), StepAccount(shape, grid, step, layout)
    compute = Compute(shape, machine, grid, step, attention=attention)
    kept = step.kept_layers > 0
    layers = {
        layer: layer_time(layer, layer_traffic(account, layer, kept=kept), compute, overlaps, links)
        for layer, _ in shape.kinds
    }
    embedding, end = account.embedding(), account.end()
    if shape.outside is not None:
        end.include(account.layer(shape.outside, once=True))
    looked_up = compute.embedding()
    return MicroBatch(
        layers,
        looked_up,
        (links.ledger_seconds(embedding, "forward"), links.ledger_seconds(embedding, "backward")),
        sum(compute.head()) - looked_up,
        (links.ledger_seconds(end, "forward"), links.ledger_seconds(end, "backward")),
    )


class PassTimes(NamedTuple):
    """Seconds of one micro-batch: its parts, of each stage, and from each stage to the next one."""

    each: MicroBatch
    stages: list[StageTime]
    hops: list[float]


def _pass_times(candidate: Candidate, order: tuple[str, ...]) -> PassTimes:
    """Seconds of a micro-batch."""
    job, grid, stages, overlaps = candidate.job, candidate.grid, candidate.stages, candidate.overlaps
    if job.pipeline == "zero_bubble":  # the weight gradient beside which the sum over x or y would travel comes later
        overlaps = replace(overlaps, all_reduce=False)
    inside = {"x", "y", "z"} == set(order[:3])  # then pipe and data do not change where their ranks are
    alone = replace(grid, data=1, pipe=1) if inside else grid
    step = replace(candidate.step, micro_batches=1)
    each = _micro_batch(candidate.shape, job.machine, alone, step, order, overlaps, job.attention, candidate.layout)
    own = step.padded_tokens(grid) * job.shape.hidden // (grid.x * grid.y)
    hops = Links(job.machine, grid, order).hops("pipe", own * step.stream_bytes)
    parts = [_stage_time(each, part, step) for part in stages.parts]
    between = [hops[index % grid.pipe] for index in range(len(stages.layers) - 1)]
    return PassTimes(each, [parts[index] for index in stages.part], between)


def estimate_seconds(candidate: Candidate, order: tuple[str, ...]) -> float:
    """Seconds of the micro-batches of a step by the closed form."""
    _, stages, hops = _pass_times(candidate, order)
    return estimate(candidate.job.pipeline_schedule[0], stages, candidate.grid.pipe, candidate.micro_batches, hops)


class _Rest(NamedTuple):
    """Seconds of a rank beside its passes: averages that nothing hides, averages that are hidden, and gathers that are
    made once a step."""

    averages: float
    hidden: float
    gathers: float


def predict_pipeline(
    candidate: Candidate, order: tuple[str, ...], *, play: bool
) -> tuple[dict[str, float], Pipelined]:
    """Predict one step: seconds by parts, as in `Prediction`, of the rank that ends last, and how the stages lie.

    Args:
        candidate: its job names the pipeline.
        order: axes from the innermost on.
        play: whether the schedule is played, or the closed form taken.
    """
    job, grid, step, stages = candidate.job, candidate.grid, candidate.step, candidate.stages
    ranks, count, (pipeline, per_rank) = grid.pipe, step.micro_batches, job.pipeline_schedule
    each, stage_times, hops = _pass_times(candidate, order)
    if play:
        line = pipeline_time(pipeline, stage_times, ranks, count, hops)
    else:
        busy = [count * sum(map(sum, stage_times[rank::ranks])) for rank in range(ranks)]
        line = Timeline([estimate(pipeline, stage_times, ranks, count, hops)] * ranks, busy)
    rest = _rest_of_ranks(candidate, each, Links(job.machine, grid, order))
    slowest = max(range(ranks), key=lambda rank: line.ends[rank] + rest[rank].averages + rest[rank].gathers)
    seconds = _parts(each, stages.held[slowest], step)
    seconds["exposed z"] += rest[slowest].gathers
    seconds["exposed data"] = rest[slowest].averages
    seconds["slowdown"] += job.machine.slowdown * rest[slowest].hidden
    seconds["optimizer"] = candidate.compute.optimizer(max(needed.trained for needed in candidate.needs))
    seconds["bubble"] = max(0.0, line.ends[slowest] - line.busy[slowest])
    return seconds, Pipelined(
        stages=stages,
        rank=slowest,
        bubble=line.bubble,
        imbalance=max(line.busy) * ranks / sum(line.busy) - 1,
        in_flight=tuple(in_flight(pipeline, ranks, rank, per_rank, count)[0] for rank in range(ranks)),
        hop=max(hops),
        simulated=play,
    )


def _rest_of_ranks(candidate: Candidate, each: MicroBatch, links: Links) -> list[_Rest]:
    """Seconds of each rank beside its passes."""
    shape, grid, step, stages = candidate.shape, candidate.grid, candidate.step, candidate.stages
    tied = 0.0
    if shape.tied:  # the first and the last rank exchange their gradients of the shared weight
        size = max(step.param_bytes, step.reduce_bytes)
        tied = links.hops("pipe", shape.vocab * shape.hidden / (grid.x * grid.y * grid.z) * size)[-1]
    found: dict[int, _Rest] = {}
    for own, having in stages.distinct:
        data = links.ledger_seconds(StepAccount(own, grid, step, candidate.layout).gradients())
        slack = sum(count * each.layers[layer].slack for layer, count in own.kinds)
        hidden = hide_averages(candidate.overlaps, data, slack)
        gathers = sum(count * each.layers[layer].first_z for layer, count in own.kinds) if step.kept_layers else 0.0
        for rank in having:
            found[rank] = _Rest(data - hidden + (tied if rank in (0, grid.pipe - 1) else 0.0), hidden, gathers)
    return [found[rank] for rank in range(grid.pipe)]


def _stage_time(each: MicroBatch, part: StageShape, step: Step) -> StageTime:
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


def _parts(each: MicroBatch, shape: ModelShape, step: Step) -> dict[str, float]:
    """Seconds of a rank's work on all micro-batches, by parts of a step."""
    seconds: dict[str, float] = {}
    times = step.micro_batches
    for layer, count in shape.kinds:
        of_layer = each.layers[layer]
        for part, of_part in of_layer.parts.items():
            seconds[part] = seconds.get(part, 0.0) + times * count * of_part
        if step.kept_layers:
            seconds["exposed z"] -= times * count * of_layer.first_z
    seconds["head"] = times * (shape.begins * each.embedding + shape.ends * each.head)
    seconds["other"] = times * (shape.begins * sum(each.embedding_waits) + shape.ends * sum(each.head_waits))
    return seconds
