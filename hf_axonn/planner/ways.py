"""Ways to run a pipeline on a grid: its schedule, stages of a rank and micro-batches, as a job and torch allow."""

from __future__ import annotations

from hf_axonn.planner.job import Job
from hf_axonn.planner.time.pipeline import problem
from hf_axonn.topology.grid import Grid, divisors


# Pipelines that are tried where a job does not name one, and stages of a rank; of equally fast ones the first is
# taken. gpipe takes as long as 1f1b and holds more.
TRIED = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero_bubble", 1), ("zero_bubble", 2))
MOST_IDLE = 2.0  # times as long as without a bubble: what waits longer by the closed form is not tried
SMALLEST = 3  # sizes of micro-batches that are tried with a pipeline, from one sequence on: few make long bubbles


def ways(job: Job, grid: Grid) -> list[tuple[str, int, int]]:
    """(pipeline, stages of a rank, micro-batches) that a job may have on a grid with a pipeline."""
    return [
        (name, per_rank, count)
        for name, per_rank in _named(job)
        for count in _counts(job, grid)
        if grid.pipe * per_rank <= job.shape.depth
        and not problem(name, grid.pipe, per_rank, count)
        and (job.micro_batches or 1 + (grid.pipe - 1) / (per_rank * count) <= MOST_IDLE)
    ]


def _named(job: Job) -> list[tuple[str, int]]:
    """Pipelines, and stages of a rank, that a job may have."""
    if job.pipeline and job.stages_per_rank:
        return [(job.pipeline, job.stages_per_rank)]
    if job.pipeline == "gpipe":
        return [("gpipe", 1)]
    return [(name, v) for name, v in TRIED if job.pipeline in (None, name) and job.stages_per_rank in (None, v)]


def _counts(job: Job, grid: Grid) -> list[int]:
    """Numbers of micro-batches that a job may have on a grid with a pipeline, the most first."""
    if job.micro_batches is not None:
        return [job.micro_batches]
    rows = job.sequences // grid.dp_size
    return [count for count in divisors(rows)[::-1] if count * grid.x * grid.y <= rows * job.seq][:SMALLEST]


def no_way(job: Job, grid: Grid) -> str:
    """Why there is no way."""
    fewest = min(per_rank for _, per_rank in _named(job)) if _named(job) else job.stages_per_rank or 1
    if grid.pipe * fewest > job.shape.depth:
        return f"{job.shape.depth} layers are fewer than pipe * stages_per_rank = {grid.pipe * fewest} stages"
    for name, per_rank in _named(job):
        for count in _counts(job, grid)[:1]:
            why = problem(name, grid.pipe, per_rank, count)
            return why or f"{count} micro-batches are few for {grid.pipe} pipeline ranks: most of them would wait"
    return f"no pipeline {job.pipeline} with {job.stages_per_rank} stages a rank is known"
