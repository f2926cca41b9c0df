"""A job: a model to train, a batch, a machine, and the settings of its steps."""

from __future__ import annotations

from dataclasses import dataclass

from hf_axonn.planner.machine import Machine
from hf_axonn.planner.shapes import ModelShape
from hf_axonn.planner.step import BASES, OPTIMIZERS, StepSettings
from hf_axonn.planner.time.pipeline import PIPELINES, problem
from hf_axonn.topology.experts import EXPERTS


MOST_TOKENS = 10**10  # of a batch; more is a slip, and its divisors take long to find


@dataclass(frozen=True, kw_only=True)
class Job(StepSettings):
    """A model to train, a batch, a machine, and the settings of its steps: `StepSettings` and those below. By default
    in bf16 on fp32 weights, and with checkpointing.

    Args:
        shape, machine: the model and the machine.
        sequences: samples of the full batch.
        micro_batches: number of them; None: the fewest that fit.
        attention: name of the attention kernel, of those of the machine; None: its first.
        all_gather, reduce_scatter, all_reduce: the three overlaps.
        pipeline, stages_per_rank: on grids with a pipeline one of PIPELINES, and V; None: the fastest of TRIED.
    Raises:
        ValueError: a size below 1, an unknown base, optimizer or pipeline, stages that a pipeline cannot have, or
            `offload` of what it cannot serve.
    """

    shape: ModelShape
    machine: Machine
    sequences: int
    checkpointing: bool = True
    micro_batches: int | None = None
    attention: str | None = None
    all_gather: bool = True
    reduce_scatter: bool = True
    all_reduce: bool = True
    pipeline: str | None = None
    stages_per_rank: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sequences", "seq"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but a batch has at least 1.")
        if self.tokens > MOST_TOKENS:
            raise ValueError(f"a batch of {self.tokens} tokens cannot be planned: at most {MOST_TOKENS} can.")
        for name in ("micro_batches", "stages_per_rank"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= 1):
                raise ValueError(f"{name} is {value!r}, but it is a whole number of at least 1.")
        if not isinstance(self.keep_gathered, (str, int)):
            raise ValueError(f"keep_gathered is {self.keep_gathered!r}, but it is a word or a number of layers.")
        if self.experts not in EXPERTS:
            raise ValueError(f"experts is {self.experts!r}, but it is one of {', '.join(EXPERTS)}.")
        if self.base not in BASES:
            raise ValueError(f"base is {self.base!r}, but it is one of {', '.join(BASES)}.")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer is {self.optimizer!r}, but it is one of {', '.join(OPTIMIZERS)}.")
        if self.base != "full" and not self.lora:
            raise ValueError(f"base is {self.base!r}, whose weights cannot be trained: give a rank of adapters, lora.")
        if self.pipeline not in (None, *PIPELINES):
            raise ValueError(f"pipeline is {self.pipeline!r}, but it is one of {', '.join(PIPELINES)}.")
        if self.pipeline and self.stages_per_rank and (why := problem(self.pipeline, 1, self.stages_per_rank, 1)):
            raise ValueError(f"{why}: change one of the two settings, or leave it out.")
        if self.residual_bytes is not None and self.compute_bytes > 2:
            raise ValueError("residual_dtype is bf16, and products are not: leave one of them out.")

    @property
    def pipeline_schedule(self) -> tuple[str, int]:
        """The pipeline and the stages of a rank, of a job that names both."""
        assert self.pipeline is not None and self.stages_per_rank is not None
        return self.pipeline, self.stages_per_rank

    @property
    def untimed(self) -> list[str]:
        """Sentences on what the predicted seconds leave out."""
        found = []
        if self.compute_bytes > 2:
            found.append("products in float32 are taken to be as fast as those that the machine's file times")
        if self.offload == "optimizer":
            found.append("copies of moments and weights from and to host memory are not in the seconds")
        if self.optimizer == "muon":
            found.append("what Muon sends and multiplies to orthogonalize matrices is not in the seconds")
        return found

    @property
    def tokens(self) -> int:
        """Tokens of the full batch."""
        return self.sequences * self.seq

    def model_flops(self) -> float:
        """FLOP of one step that the model asks for, as `ModelShape.model_flops`. Adapters are not counted."""
        return self.tokens * self.shape.model_flops(self.seq, trained=0 if self.lora else 1)

    def hardware_flops(self) -> float:
        """`model_flops`, and those of layers that run again. For a GPT under checkpointing this is the formula of the
        AxoNN paper, 96 B s L h^2 (1 + s / 6h + V / 16 L h)."""
        again = self.tokens * self.shape.flops(self.seq) if self.checkpointing else 0
        return self.model_flops() + again
