"""A job: a model to train, a batch, a machine, and the settings of a step."""

from __future__ import annotations

from dataclasses import dataclass

from hf_axonn.planner.dense import BASES
from hf_axonn.planner.machine import Machine
from hf_axonn.planner.shapes import ModelShape
from hf_axonn.planner.time.pipeline import PIPELINES


MOST_TOKENS = 10**10  # of a batch; more is a slip, and its divisors take long to find
SCHEDULES = ("hf_axonn", "axonn")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be trained, and on what.

    Args:
        shape, machine: the model and the machine.
        sequences, seq: samples of the full batch, and tokens a sample.
        compute_bytes, param_bytes, reduce_bytes, residual_bytes: as `Step`; bf16 on fp32 weights by default.
        checkpointing: whether layers run again in backward.
        lora: as `Step`.
        base: what the weights of frozen Linears are, one of `BASES`: 4bit as of bitsandbytes, 4bit-double with double
            quantization.
        keep_gathered: recomputed, none, all or a number of layers, as in the settings of a run (config.py).
        micro_batches: how many; None: the fewest that fit.
        attention: name of the attention kernel, of those of the machine; None: its first.
        all_gather, reduce_scatter, all_reduce: the three overlaps.
        schedule: one of SCHEDULES.
        pipeline, stages_per_rank: on grids with a pipeline one of PIPELINES, and V; None: the fastest of TRIED.
    Raises:
        ValueError: a size below 1, or an unknown schedule or pipeline.
    """

    shape: ModelShape
    machine: Machine
    sequences: int
    seq: int
    compute_bytes: int = 2
    param_bytes: int = 4
    reduce_bytes: int = 4
    residual_bytes: int | None = None
    checkpointing: bool = True
    lora: int = 0
    base: str = "full"
    keep_gathered: str | int = "recomputed"
    micro_batches: int | None = None
    attention: str | None = None
    all_gather: bool = True
    reduce_scatter: bool = True
    all_reduce: bool = True
    schedule: str = "hf_axonn"
    pipeline: str | None = None
    stages_per_rank: int | None = None

    def __post_init__(self) -> None:
        for name in ("sequences", "seq"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but a batch has at least 1.")
        if self.tokens > MOST_TOKENS:
            raise ValueError(f"a batch of {self.tokens} tokens cannot be planned: at most {MOST_TOKENS} can.")
        if self.micro_batches is not None and self.micro_batches < 1:
            raise ValueError(f"micro_batches is {self.micro_batches}, but a step has at least 1.")
        if self.base not in BASES:
            raise ValueError(f"base is {self.base!r}, but it is one of {', '.join(BASES)}.")
        if self.base != "full" and not self.lora:
            raise ValueError(f"base is {self.base!r}, whose weights cannot be trained: give a rank of adapters, lora.")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule is {self.schedule!r}, but it is one of {', '.join(SCHEDULES)}.")
        if self.pipeline not in (None, *PIPELINES):
            raise ValueError(f"pipeline is {self.pipeline!r}, but it is one of {', '.join(PIPELINES)}.")
        if self.stages_per_rank is not None and self.stages_per_rank < 1:
            raise ValueError(f"stages_per_rank is {self.stages_per_rank}, but a rank has at least 1 stage.")

    @property
    def way(self) -> tuple[str, int]:
        """The pipeline and stages of a rank, of a job that names both."""
        assert self.pipeline is not None and self.stages_per_rank is not None
        return self.pipeline, self.stages_per_rank

    @property
    def tokens(self) -> int:
        """Tokens of the full batch."""
        return self.sequences * self.seq

    @property
    def kept_layers(self) -> int:
        """Layers whose gathered weights are kept from forward to backward."""
        if isinstance(self.keep_gathered, int):
            return self.keep_gathered
        return self.shape.depth if self.keep_gathered == "all" else 0

    def model_flops(self) -> float:
        """FLOP of one step that the model asks for, as `ModelShape.model_flops`. Adapters are not counted."""
        return self.tokens * self.shape.model_flops(self.seq, trained=0 if self.lora else 1)

    def hardware_flops(self) -> float:
        """`model_flops`, and those of layers that run again. For a GPT under checkpointing this is the formula of the
        AxoNN paper, 96 B s L h^2 (1 + s / 6h + V / 16 L h)."""
        return self.model_flops() + (self.layers_flops() if self.checkpointing else 0)

    def layers_flops(self) -> float:
        """FLOP of one forward pass of all decoder layers."""
        return self.tokens * self.shape.flops(self.seq)
