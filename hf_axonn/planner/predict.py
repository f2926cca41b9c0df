"""How long an optimizer step takes on a grid, and what it needs: `predict(job, grid)`.

    time of a step = micro_batches * (forward + backward + head) + averages over data that nothing hides + optimizer

On a grid with a pipeline it is that of the rank that ends last, and `bubble`: what it waits for others
(planner/pipelined.py).

What overlaps hide of a layer's communication is in planner/time/exposed.py. Averages over data hide behind what is
left of the last backward pass. What is hidden slows the computation beside it (`Machine.slowdown`).

Two schedules: `hf_axonn`, whose collectives are those of planner/traffic/volumes.py and so of the engine, byte by
byte; `axonn`, the paper's, whose volumes are equations (1) to (5), where ranks of y repeat attention and ranks of x
repeat norms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from hf_axonn.planner.dense import BASES, BLOCK, Step
from hf_axonn.planner.job import Job
from hf_axonn.planner.memory import RESERVE, Memory, memory
from hf_axonn.planner.pipelined import Pipelined, held_by_ranks, least, pipelined
from hf_axonn.planner.shapes import ExpertsShape, LinearShape, ModelShape
from hf_axonn.planner.time.compute import Compute
from hf_axonn.planner.time.exposed import Overlaps, behind_backward, layer_time
from hf_axonn.planner.time.links import Links
from hf_axonn.planner.time.schedules import LayerSeconds, Traffic, of_axonn, of_engine
from hf_axonn.planner.ways import no_way, ways
from hf_axonn.topology.axis_order import ORDER
from hf_axonn.topology.grid import Grid, divisors
from hf_axonn.topology.weight_kind import WeightKind


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a step on a grid comes to.

    Args:
        job, grid, order, micro_batches: of what.
        seconds: parts of the step: gemm, attention, elementwise, head, optimizer, slowdown (compute; the last: what
            communication beside it costs); exposed x/y, exposed z, exposed data, other (communication that nothing
            hides; other: embedding, head and loss); bubble (what a rank of a pipeline waits for others).
        memory: bytes of a rank; fits: whether it fits the machine's GPU.
        travels: the payloads of what travels; None with a pipeline, where `payloads` makes it when it is asked for.
        pipelined: how the stages lie; None without a pipeline.
    """

    job: Job
    grid: Grid
    order: tuple[str, ...]
    micro_batches: int
    seconds: dict[str, float]
    memory: Memory
    fits: bool
    travels: Traffic | None = field(repr=False)
    pipelined: Pipelined | None = None

    @property
    def traffic(self) -> dict[str, float]:
        """Seconds of all communication, hidden or not, by axes ("y", "x", "z", "data", "x+y", ...); what goes from
        stage to stage is not in it."""
        links = Links(self.job.machine, self.grid, self.order)
        return self.payloads.by_axes(links, self.micro_batches)

    @property
    def payloads(self) -> Traffic:
        """The payloads of what travels, with a pipeline for the rank that ends last."""
        if self.travels is not None:
            return self.travels
        assert self.pipelined is not None
        step = step_of(self.job, self.grid, self.micro_batches)
        return of_engine(self.pipelined.held, self.grid, step, layout_of(self.job.shape, self.grid))

    @property
    def layers(self) -> list[tuple[LayerSeconds, int]]:
        """Seconds of the collectives of one decoder layer and micro-batch, hidden or not, and how many such layers."""
        links = Links(self.job.machine, self.grid, self.order)
        return [(traffic.seconds(links), count) for _, traffic, count in self.payloads.layers]

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def exposed(self) -> float:
        """Seconds of communication that nothing hides."""
        return sum(value for name, value in self.seconds.items() if name in ("other",) or name.startswith("exposed"))

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.job.tokens / self.total

    @property
    def flops(self) -> float:
        """Hardware FLOP/s of one GPU, recomputation included."""
        return self.job.hardware_flops() / self.total / self.grid.size

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: of the advertised peak."""
        return self.job.model_flops() / self.total / self.grid.size / self.job.machine.peak_flops

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: with what is computed again."""
        return self.flops / self.job.machine.peak_flops


def step_of(job: Job, grid: Grid, micro_batches: int) -> Step:
    """One (data, z) position's part of a step."""
    return Step(
        rows=job.sequences // (grid.dp_size * micro_batches),
        seq=job.seq,
        micro_batches=micro_batches,
        compute_bytes=job.compute_bytes,
        param_bytes=job.param_bytes,
        reduce_bytes=job.reduce_bytes,
        residual_bytes=job.residual_bytes,
        checkpointing=job.checkpointing,
        kept_layers=job.kept_layers,
        lora=job.lora,
        block_bytes=BASES[job.base],
        keeps_recomputed=job.keep_gathered == "recomputed",
        counted=True,
    )


def refusal(job: Job, grid: Grid) -> str:
    """Why a batch cannot be divided over a grid, or nothing."""
    if job.sequences % grid.dp_size:
        return f"{job.sequences} sequences are not divisible by data * z = {grid.dp_size}"
    if grid.x * grid.y > job.sequences // grid.dp_size * job.seq:
        return f"a (data, z) position has fewer tokens than x * y = {grid.x * grid.y}"
    if BASES[job.base] and (linear := cut_inside(job.shape, grid)):
        return f"x and y do not divide rows of {linear.cols} numbers into whole blocks of {BLOCK}"
    rows = job.sequences // grid.dp_size
    if job.micro_batches and rows % job.micro_batches:
        return f"{rows} sequences of a (data, z) position do not make {job.micro_batches} micro-batches of one size"
    if grid.pipe == 1:
        return ""
    if job.schedule != "hf_axonn" or job.lora:
        return "pipelines are planned for this engine, and not with adapters alone"
    if isinstance(job.keep_gathered, int):
        return f"keep_gathered is {job.keep_gathered}: with a pipeline it is all, none or recomputed"
    return "" if ways(job, grid) else no_way(job, grid)


def cut_inside(shape: ModelShape, grid: Grid) -> LinearShape | None:
    """A Linear whose blocks of 4-bit numbers a grid would cut, if there is one."""
    for layer, _ in shape.kinds:
        for part in layer.parts:
            for kind, linears in part.groups() if not isinstance(part, ExpertsShape) else ():
                for linear in linears:
                    if linear.cols % (BLOCK * (grid.x if kind == WeightKind.ROW else grid.y)):
                        return linear
    return None


def fewest_micro_batches(job: Job, grid: Grid) -> tuple[int, Memory]:
    """The fewest micro-batches that fit a GPU, and what they need; one sample each where none fits. Those of the job,
    where it says how many."""
    rows = job.sequences // grid.dp_size
    layout = layout_of(job.shape, grid)
    if job.micro_batches is not None:
        return job.micro_batches, memory(job.shape, grid, step_of(job, grid, job.micro_batches), layout=layout)
    for count in divisors(rows):
        needed = memory(job.shape, grid, step_of(job, grid, count), layout=layout)
        if needed.fits(job.machine.memory) or count == rows:
            return count, needed
    raise AssertionError("rows divides itself")


def layout_of(shape: ModelShape, grid: Grid) -> str:
    """The layout of the residual stream that the engine takes."""
    return "feature" if shape.features and grid.y > 1 else "token"


def predict(job: Job, grid: Grid, *, order: tuple[str, ...] = ORDER) -> Prediction:
    """Time, utilisation and memory of one optimizer step.

    Args:
        job, grid: of what.
        order: axes from the innermost on.
    Raises:
        ValueError: the batch cannot be divided so.
    """
    why = refusal(job, grid)
    if why:
        raise ValueError(f"grid {grid}: {why}.")
    if grid.pipe > 1:
        found = fastest_way([job], grid, order)
        assert found is not None, "there is no limit"
        return played(found)
    return predict_with(job, grid, *fewest_micro_batches(job, grid), order=order)


def predict_with(
    job: Job, grid: Grid, micro_batches: int, needed: Memory, *, order: tuple[str, ...] = ORDER
) -> Prediction:
    """`predict`, where micro-batches and what they need are known (`fewest_micro_batches`)."""
    step = step_of(job, grid, micro_batches)
    if job.schedule == "axonn":
        traffic = of_axonn(job.shape, grid, step)
    else:
        traffic = of_engine(job.shape, grid, step, layout_of(job.shape, grid))
    compute = _compute(job, grid, step)
    return _assemble(job, grid, order, traffic, compute, needed)


def fastest_way(
    jobs: Sequence[Job], grid: Grid, order: tuple[str, ...] = ORDER, *, limit: float = math.inf
) -> Prediction | None:
    """The fastest of several jobs on a grid with a pipeline by the closed forms, of those that fit; of the smallest
    where none fits; None where all take longer than `limit`.

    Args:
        jobs: the same with other settings.
        grid, order: as `predict`.
        limit: seconds.
    """
    quick = _by_time([job for job in jobs if not job.checkpointing], grid, order)
    if not quick or quick[0][0] <= limit and not _fits(*quick[0][1:], grid):
        # To compute the same again only takes time, unless without it not even the fastest fits.
        quick = sorted(quick + _by_time([job for job in jobs if job.checkpointing], grid, order), key=itemgetter(0))
    if quick[0][0] > limit:
        return None
    _, job, count = next((each for each in quick if _fits(*each[1:], grid)), None) or min(
        quick, key=lambda each: _most(each[1], each[2], grid)
    )
    return with_pipeline(job, grid, order, count)


def _by_time(jobs: Sequence[Job], grid: Grid, order: tuple[str, ...]) -> list[tuple[float, Job, int]]:
    """Seconds by the closed form, a job with one of its ways, and micro-batches: the fastest first."""
    found = []
    for each in jobs:
        overlaps, layout = overlaps_of(each), layout_of(each.shape, grid)
        for pipeline, per_rank, count in ways(each, grid):
            job = replace(each, pipeline=pipeline, stages_per_rank=per_rank)
            found.append((least(job, grid, step_of(job, grid, count), order, overlaps, layout), job, count))
    return sorted(found, key=itemgetter(0))


def _most(job: Job, micro_batches: int, grid: Grid) -> float:
    """Bytes of the rank that needs most."""
    step = step_of(job, grid, micro_batches)
    return max(needed.total for needed in held_by_ranks(job, grid, step, layout_of(job.shape, grid)))


def _fits(job: Job, micro_batches: int, grid: Grid) -> bool:
    return _most(job, micro_batches, grid) <= (1 - RESERVE) * job.machine.memory


def with_pipeline(
    job: Job, grid: Grid, order: tuple[str, ...], micro_batches: int, *, play: bool = False
) -> Prediction:
    """A job, which says which pipeline, on a grid with one."""
    step, layout = step_of(job, grid, micro_batches), layout_of(job.shape, grid)
    found = pipelined(job, grid, step, order, overlaps_of(job), layout, play=play)
    return Prediction(
        job=job,
        grid=grid,
        order=tuple(order),
        micro_batches=micro_batches,
        seconds=found.seconds,
        memory=found.memory,
        fits=found.memory.fits(job.machine.memory),
        travels=None,
        pipelined=found,
    )


def played(entry: Prediction) -> Prediction:
    """The same, with the schedule of its pipeline played action by action."""
    if entry.pipelined is None or entry.pipelined.simulated:
        return entry
    return with_pipeline(entry.job, entry.grid, entry.order, entry.micro_batches, play=True)


def reorder(prediction: Prediction, order: tuple[str, ...]) -> Prediction:
    """The same grid with its axes in another order on the machine."""
    job, grid = prediction.job, prediction.grid
    if prediction.pipelined is not None:
        return with_pipeline(job, grid, order, prediction.micro_batches, play=prediction.pipelined.simulated)
    compute = _compute(job, grid, step_of(job, grid, prediction.micro_batches))
    return _assemble(job, grid, order, prediction.payloads, compute, prediction.memory)


def overlaps_of(job: Job) -> Overlaps:
    """What overlaps a job has."""
    return Overlaps(
        all_gather=job.all_gather,
        reduce_scatter=job.reduce_scatter,
        all_reduce=job.all_reduce,
        checkpointing=job.checkpointing,
        share=job.machine.overlap,
        # On GPUs, where moving data takes nothing from computing; the paper's code has one group over z.
        apart=job.schedule == "hf_axonn" and job.machine.overlap == 1,
        layer_ahead=job.schedule == "hf_axonn",
    )


def _compute(job: Job, grid: Grid, step: Step) -> Compute:
    return Compute(job.shape, job.machine, grid, step, ours=job.schedule == "hf_axonn", attention=job.attention)


def _assemble(
    job: Job, grid: Grid, order: tuple[str, ...], traffic: Traffic, compute: Compute, needed: Memory
) -> Prediction:
    links = Links(job.machine, grid, order)
    times, overlaps = compute.step.micro_batches, overlaps_of(job)
    seconds: dict[str, float] = {}
    slack = 0.0
    for layer, travels, count in traffic.layers:
        each = layer_time(layer, travels, compute, overlaps, links)
        for part, of_part in each.parts.items():
            seconds[part] = seconds.get(part, 0.0) + times * count * of_part
        slack += count * each.slack
    data = links.all_of(traffic.gradients)
    hidden = behind_backward(overlaps, data, slack)
    seconds["slowdown"] += job.machine.slowdown * hidden
    seconds |= {
        "head": times * sum(compute.head()),
        "optimizer": compute.optimizer(needed.trained),
        "exposed data": data - hidden,
        "other": times * links.all_of(traffic.rest),
        "bubble": 0.0,
    }
    return Prediction(
        job=job,
        grid=grid,
        order=tuple(order),
        micro_batches=times,
        seconds=seconds,
        memory=needed,
        fits=needed.fits(job.machine.memory),
        travels=traffic,
    )
