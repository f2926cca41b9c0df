"""Predicts how long an optimizer step takes on a grid, and what it needs: `predict(job, grid)`.

    time of a step = micro_batches * (forward + backward + head) + averages over data that nothing hides + optimizer

On a grid with a pipeline it is that of the rank that ends last, and `bubble`: what it waits for others
(planner/pipelined.py).

Collectives are those of planner/traffic/volumes.py and so of the engine, byte by byte; planner/time/exposed.py says
what overlaps hide of a layer's communication. Averages over data hide behind what is left of the last backward pass.
Hidden communication slows the computation beside it (`Machine.slowdown`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter

from hf_axonn.planner.candidate import Candidate
from hf_axonn.planner.experts import choose_way, why_gathered
from hf_axonn.planner.job import Job
from hf_axonn.planner.memory import Memory
from hf_axonn.planner.pipelined import (
    Pipelined,
    estimate_seconds,
    pipeline_candidates,
    predict_pipeline,
    why_no_pipeline,
)
from hf_axonn.planner.shapes import ExpertsShape, LinearShape, ModelShape, undivided_heads
from hf_axonn.planner.step import BASES, BLOCK
from hf_axonn.planner.time.exposed import hide_averages, layer_time
from hf_axonn.planner.time.layer_traffic import LayerSeconds, Traffic, step_traffic
from hf_axonn.planner.time.links import Links
from hf_axonn.topology.axis_order import ORDER
from hf_axonn.topology.grid import Grid
from hf_axonn.topology.weight_kind import WeightKind


OMIT = "leave that setting out"  # the remedy where no other batch or grid would help


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step on a grid.

    Args:
        candidate: the job, the grid and the micro-batches.
        order: of the axes on the machine, from the innermost on.
        seconds: parts of the step: gemm, attention, elementwise, head, optimizer, slowdown (compute; the last: what
            communication beside it costs); exposed x/y, exposed z, exposed data, other (communication that nothing
            hides; other: embedding, head and loss); bubble (what a rank of a pipeline waits for others).
        pipelined: how the stages lie; None without a pipeline.
    """

    candidate: Candidate
    order: tuple[str, ...]
    seconds: dict[str, float]
    pipelined: Pipelined | None = None

    @property
    def job(self) -> Job:
        """The job; with a pipeline it names the schedule."""
        return self.candidate.job

    @property
    def grid(self) -> Grid:
        """The grid."""
        return self.candidate.grid

    @property
    def experts(self) -> str:
        """The way in which tokens and experts meet, gather or move, where the grid allows both; else empty."""
        return "" if why_gathered(self.job.shape, self.grid) else self.job.experts

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.candidate.micro_batches

    @property
    def memory(self) -> Memory:
        """Bytes of the rank that needs most."""
        return self.candidate.memory

    @property
    def fits(self) -> bool:
        """True if every rank fits the machine's GPU."""
        return self.candidate.fits

    @cached_property
    def links(self) -> Links:
        """The groups of the grid on the machine."""
        return Links(self.job.machine, self.grid, self.order)

    @cached_property
    def payloads(self) -> Traffic:
        """The payloads of what travels, with a pipeline for the rank that ends last."""
        if self.pipelined is None:
            return self.candidate.traffic
        return step_traffic(self.pipelined.held, self.grid, self.candidate.step, self.candidate.layout)

    @property
    def traffic(self) -> dict[str, float]:
        """Seconds of all communication, hidden or not, by axes ("y", "x", "z", "data", "x+y", ...); what goes from
        stage to stage is not in it."""
        return self.payloads.by_axes(self.links, self.micro_batches)

    @property
    def layers(self) -> list[tuple[LayerSeconds, int]]:
        """Seconds of the collectives of one decoder layer and micro-batch, hidden or not, and how many such layers."""
        return [(traffic.seconds(self.links), count) for _, traffic, count in self.payloads.layers]

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def exposed(self) -> float:
        """Seconds of communication that nothing hides."""
        return sum(value for name, value in self.seconds.items() if name == "other" or name.startswith("exposed"))

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of all ranks together."""
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

    def simulate(self) -> Prediction:
        """Return the same, with the schedule of its pipeline played action by action."""
        if self.pipelined is None or self.pipelined.simulated:
            return self
        return predict_candidate(self.candidate, self.order, play=True)

    def reorder(self, order: tuple[str, ...]) -> Prediction:
        """Return the same grid with its axes in another order on the machine."""
        play = self.pipelined is not None and self.pipelined.simulated
        return predict_candidate(self.candidate, order, play=play)


def refusal(job: Job, grid: Grid) -> str:
    """Return why a batch cannot be divided over a grid, or nothing."""
    if job.sequences % grid.dp_size:
        ranks = "data * z" if grid.context == 1 else "data * z / context"
        return f"{job.sequences} sequences are not divisible by {ranks} = {grid.dp_size}"
    if job.experts == "move" and (why := why_gathered(job.shape, grid)):
        return f"experts is move, but {why}: {OMIT}"
    if grid.context > 1 and (why := why_whole_rows(job, grid)):
        return why
    if grid.x * grid.y > job.sequences // grid.dp_size * job.positions(grid):
        return f"a (data, z) position has fewer tokens than x * y = {grid.x * grid.y}"
    if BASES[job.base] and (linear := cut_inside(job.shape, grid)):
        return f"x and y do not divide rows of {linear.cols} numbers into whole blocks of {BLOCK}"
    if refuses_residual(job, grid):
        return (
            "residual_dtype is bf16, but one rank, or a model whose layers are not known, leaves the stream as it is: "
            f"{OMIT}"
        )
    if job.shape.loose and isinstance(job.keep_gathered, int):
        return f"keep_gathered is {job.keep_gathered}, but the layers of this model are not known: {OMIT}"
    rows = job.sequences // grid.dp_size
    if job.micro_batches and rows % job.micro_batches:
        return f"{rows} sequences of a (data, z) position do not make {job.micro_batches} micro-batches of one size"
    if grid.pipe == 1:
        return ""
    if not job.shape.divides_layers:
        return f"pipe is {grid.pipe}, but the layers of this model cannot be divided into stages"
    if job.lora:
        return "pipelines are not planned with adapters alone"
    if isinstance(job.keep_gathered, int):
        return f"keep_gathered is {job.keep_gathered}: with a pipeline it is all, none or recomputed, so {OMIT}"
    return "" if any(pipeline_candidates(job, grid)) else why_no_pipeline(job, grid)


def refuses_residual(job: Job, grid: Grid) -> bool:
    """Return whether a launch refuses the residual_dtype of a job on a grid."""
    return job.residual_bytes is not None and (grid.size == 1 or job.shape.loose)


def why_whole_rows(job: Job, grid: Grid) -> str:
    """Return why the context of a grid cannot divide the sequences of a job, or nothing."""
    if not job.shape.divides_rows:
        return f"context is {grid.context}, but it is not known that the rows of this model can be divided"
    if grid.context > job.seq:
        return f"context = {grid.context} is more than the {job.seq} positions of a sequence"
    heads = undivided_heads(job.shape, grid) if job.context_attention == "heads" else 0
    return f"{heads} query heads of a rank of (x, y) are not divisible by context = {grid.context}" if heads else ""


def cut_inside(shape: ModelShape, grid: Grid) -> LinearShape | None:
    """Return a Linear whose blocks of 4-bit numbers a grid would cut, if there is one."""
    for layer, _ in shape.kinds:
        for part in layer.parts:
            for kind, linears in part.groups() if not isinstance(part, ExpertsShape) else ():
                for linear in linears:
                    if linear.cols % (BLOCK * (grid.x if kind == WeightKind.ROW else grid.y)):
                        return linear
    return None


def predict(job: Job, grid: Grid, *, order: tuple[str, ...] = ORDER) -> Prediction:
    """Predict time, utilisation and memory of one optimizer step.

    Args:
        job, grid: what is trained, and where.
        order: axes from the innermost on.
    Raises:
        ValueError: the batch cannot be divided so.
    """
    why = refusal(job, grid)
    if why:
        raise ValueError(f"grid {grid}: {why}.")
    if job.shape.experts:
        job = replace(job, experts=choose_way(job.shape, grid, job.experts))
    if grid.pipe > 1:
        found = fastest_pipeline([job], grid, order)
        assert found is not None, "there is no limit"
        return found.simulate()
    return predict_candidate(Candidate.fewest(job, grid), order)


def fastest_pipeline(
    jobs: Sequence[Job], grid: Grid, order: tuple[str, ...] = ORDER, *, limit: float = math.inf
) -> Prediction | None:
    """Return the fastest of several jobs on a grid with a pipeline, by the closed forms and of those that fit; the
    smallest where none fits; None where all take longer than `limit`.

    Args:
        jobs: the same with other settings.
        grid, order: as `predict`.
        limit: seconds.
    """
    quick = _sort_by_time([job for job in jobs if not job.checkpointing], grid, order)
    if not quick or quick[0][0] <= limit and not quick[0][1].fits:
        # To compute the same again only takes time, unless without it not even the fastest fits.
        again = _sort_by_time([job for job in jobs if job.checkpointing], grid, order)
        quick = sorted(quick + again, key=itemgetter(0))
    if quick[0][0] > limit:
        return None
    candidates = [candidate for _, candidate in quick]
    chosen = next((candidate for candidate in candidates if candidate.fits), None)
    return predict_candidate(chosen or min(candidates, key=lambda candidate: candidate.memory.total), order)


def _sort_by_time(jobs: Sequence[Job], grid: Grid, order: tuple[str, ...]) -> list[tuple[float, Candidate]]:
    """Return seconds by the closed form and candidate, the fastest first."""
    found = [(estimate_seconds(each, order), each) for job in jobs for each in pipeline_candidates(job, grid)]
    return sorted(found, key=itemgetter(0))


def predict_candidate(candidate: Candidate, order: tuple[str, ...], *, play: bool = False) -> Prediction:
    """Predict a candidate with its axes in an order. `play`: whether the schedule of a pipeline is played action by
    action, or its closed form taken."""
    order = tuple(order)
    if candidate.grid.pipe > 1:
        seconds, pipelined = predict_pipeline(candidate, order, play=play)
        return Prediction(candidate=candidate, order=order, seconds=seconds, pipelined=pipelined)
    machine, traffic, count = candidate.job.machine, candidate.traffic, candidate.micro_batches
    links = Links(machine, candidate.grid, order)
    seconds = {}
    slack = 0.0
    for layer, travels, layers in traffic.layers:
        each = layer_time(layer, travels, candidate.compute, candidate.overlaps, links)
        for part, of_part in each.parts.items():
            seconds[part] = seconds.get(part, 0.0) + count * layers * of_part
        slack += layers * each.slack
    data = links.ledger_seconds(traffic.gradients)
    hidden = hide_averages(candidate.overlaps, data, slack)
    seconds["slowdown"] += machine.slowdown * hidden
    seconds |= {
        "head": count * sum(candidate.compute.head()),
        "optimizer": candidate.compute.optimizer(candidate.memory.trained),
        "exposed data": data - hidden,
        "other": count * links.ledger_seconds(traffic.rest),
        "bubble": 0.0,
    }
    return Prediction(candidate=candidate, order=order, seconds=seconds)
