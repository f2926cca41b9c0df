"""One optimizer step, as one (data, z) position of the grid sees it, and the settings that it shares with its job.

Where context is 1 such a position has whole rows, else its positions of the rows that the ranks of context share.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from hf_axonn.topology.grid import Grid


BLOCK = 64  # numbers of 4 bits that share a scale
# A frozen base -> bytes of a block of its layers' Linears: codes, and a scale of 4 bytes or of 1; 0: not in blocks.
BASES = {"full": 0, "4bit": 36, "4bit-double": 33}
OPTIMIZERS = ("adamw", "adamw_8bit", "muon")


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Settings that a job and its steps have in common.

    Args:
        seq: tokens of a sample, padding included.
        compute_bytes: bytes an element of activations and gathered weights (2 for bf16).
        param_bytes: bytes an element of parameters and of their gradients (4 for fp32 master weights).
        reduce_bytes: bytes an element of `reduce_dtype`.
        residual_bytes: bytes an element of the residual stream (`residual_dtype`); None: those of parameters, as it
            begins as the rows of the embedding.
        checkpointing: whether every layer runs again in backward (not reentrant, which is Transformers' default).
        keep_gathered: recomputed, none, all or a number of layers, as in the settings of a run (config.py).
        context_attention: auto, heads or keys, as in the settings of a run.
        offload: none or optimizer, as in the settings of a run.
        optimizer: one of `OPTIMIZERS`: AdamW of torch, or of bitsandbytes in 8 bits with embeddings in 32, as Trainer
            sets it up; or torch's Muon for the matrices of layers (or for all adapters), beside AdamW for the rest.
        lora: rank of the adapters of every Linear of the layers, which alone are trained, in float32; 0: none, all of
            the model is trained.
        experts: auto, gather or move, how tokens and the experts of a mixture meet (topology/experts.py).
        base: form of the frozen weights of the layers' Linears, one of `BASES`: 4bit as in bitsandbytes, 4bit-double
            with double quantization.
    """

    seq: int
    compute_bytes: int = 2
    param_bytes: int = 4
    reduce_bytes: int = 4
    residual_bytes: int | None = None
    checkpointing: bool = False
    keep_gathered: str | int = "recomputed"
    context_attention: str = "auto"
    offload: str = "none"
    optimizer: str = "adamw"
    lora: int = 0
    base: str = "full"
    experts: str = "auto"

    def __post_init__(self) -> None:
        if self.offload == "optimizer" and self.optimizer != "adamw":
            raise ValueError(
                f"offload: optimizer is not possible with {self.optimizer}: it moves moments of torch's elementwise "
                "optimizers, such as adamw. Omit one of the two."
            )

    @property
    def kept_layers(self) -> int:
        """Layers, the last ones, whose gathered weights are kept from forward to backward; more than any model has
        for `all`."""
        if isinstance(self.keep_gathered, int):
            return self.keep_gathered
        return sys.maxsize if self.keep_gathered == "all" else 0

    @property
    def keeps_recomputed(self) -> bool:
        """True if a layer that runs again keeps what it gathers then."""
        return self.keep_gathered == "recomputed"

    def positions(self, grid: Grid) -> int:
        """Positions of a sample on one rank, of the last one those that fill it up included."""
        return grid.positions(self.seq)

    @property
    def weights_on_host(self) -> bool:
        """True if float32 weights that only products read lie in host memory, and the device has rounded copies."""
        return self.offload == "optimizer" and not self.lora and self.compute_bytes < self.param_bytes == 4

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the layers' Linears where these are frozen in 4 bits, else 0."""
        return BASES[self.base]

    @property
    def stream_bytes(self) -> int:
        """Bytes an element of the residual stream."""
        return self.param_bytes if self.residual_bytes is None else self.residual_bytes


@dataclass(frozen=True, kw_only=True)
class Step(StepSettings):
    """One optimizer step, as one (data, z) position of the grid sees it: `StepSettings`, and those below.

    Args:
        rows: samples of a micro-batch at one (data, z) position, of which context may divide the positions.
        micro_batches: forward and backward passes before the optimizer steps.
        counted: whether the number of kept tokens is known beforehand (num_items_in_batch, as Trainer passes it).
    """

    rows: int
    micro_batches: int = 1
    counted: bool = False

    def weight_bytes(self, elements: int) -> int:
        """Bytes that elements of the layers' Linears take in memory."""
        return elements * self.block_bytes // BLOCK if self.block_bytes else elements * self.param_bytes

    def gather_bytes(self, elements: int) -> int:
        """Bytes that elements of the layers' Linears take in a gather."""
        return elements * self.block_bytes // BLOCK if self.block_bytes else elements * self.compute_bytes

    def tokens(self, grid: Grid) -> int:
        """Tokens of a micro-batch at one (data, z) position."""
        return self.rows * self.positions(grid)

    def padded_tokens(self, grid: Grid) -> int:
        """Tokens after padding to a multiple of x * y."""
        parts = grid.x * grid.y
        return -(-self.tokens(grid) // parts) * parts
