"""A candidate of a search: a job on a grid with a number of micro-batches, and all that follows from the three."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Self

from hf_axonn.planner.experts import place_experts
from hf_axonn.planner.job import Job
from hf_axonn.planner.memory import Memory, memory
from hf_axonn.planner.shapes import ModelShape
from hf_axonn.planner.stages import ModelStages, divide_model, memory_of_ranks
from hf_axonn.planner.step import Step, StepSettings
from hf_axonn.planner.time.compute import Compute
from hf_axonn.planner.time.exposed import Overlaps
from hf_axonn.planner.time.layer_traffic import Traffic, step_traffic
from hf_axonn.topology.grid import Grid, divisors


@dataclass(frozen=True)
class Candidate:
    """A job on a grid with a number of micro-batches. What follows from them is computed when it is first read, and
    once; nothing of it depends on the order of the axes on the machine.

    With a pipeline the job names its schedule.
    """

    job: Job
    grid: Grid
    micro_batches: int

    @classmethod
    def fewest(cls, job: Job, grid: Grid) -> Self:
        """The candidate with the fewest micro-batches that fit a GPU, one sample each where none fits; with those of
        the job, where it names a number. Not for grids with a pipeline."""
        if job.micro_batches is not None:
            return cls(job, grid, job.micro_batches)
        for count in divisors(job.sequences // grid.dp_size):
            candidate = cls(job, grid, count)
            if candidate.fits:
                break
        return candidate

    @cached_property
    def step(self) -> Step:
        """One (data, z) position's part of a step."""
        shared = {item.name: getattr(self.job, item.name) for item in fields(StepSettings)}
        rows = self.job.sequences // (self.grid.dp_size * self.micro_batches)
        return Step(**shared, rows=rows, micro_batches=self.micro_batches, counted=True)

    @cached_property
    def shape(self) -> ModelShape:
        """The model as it is sharded on the grid."""
        return place_experts(self.job.shape, self.grid, self.job.experts)

    @cached_property
    def layout(self) -> str:
        """The layout of the residual stream that the engine takes."""
        return self.shape.layout(self.grid)

    @cached_property
    def stages(self) -> ModelStages:
        """The stages of the model, on a grid with a pipeline."""
        return divide_model(self.shape, self.grid.pipe, self.job.pipeline_schedule[1], self.job.seq)

    @cached_property
    def needs(self) -> tuple[Memory, ...]:
        """Memory of rank 0, or of the ranks of a pipeline that may need most."""
        if self.grid.pipe == 1:
            return (memory(self.shape, self.grid, self.step, layout=self.layout),)
        return memory_of_ranks(self.stages, self.job.pipeline_schedule, self.grid, self.step, self.layout)

    @property
    def memory(self) -> Memory:
        """Memory of the rank that needs most."""
        return max(self.needs, key=lambda needed: needed.total)

    @property
    def fits(self) -> bool:
        """True if every rank fits the machine's GPU."""
        return all(needed.fits(self.job.machine.memory) for needed in self.needs)

    @cached_property
    def overlaps(self) -> Overlaps:
        """The overlaps of the job."""
        job = self.job
        return Overlaps(
            all_gather=job.all_gather,
            reduce_scatter=job.reduce_scatter,
            all_reduce=job.all_reduce,
            checkpointing=job.checkpointing,
            share=job.machine.overlap,
            apart=job.machine.overlap == 1,  # on GPUs, where moving data takes nothing from computing
            layer_ahead=True,
        )

    @cached_property
    def compute(self) -> Compute:
        """Seconds that a rank computes; with a pipeline, as if it had all layers."""
        job = self.job
        return Compute(self.shape, job.machine, self.grid, self.step, attention=job.attention)

    @cached_property
    def traffic(self) -> Traffic:
        """Payloads of what travels; with a pipeline, as if a rank had all layers."""
        return step_traffic(self.shape, self.grid, self.step, self.layout)
