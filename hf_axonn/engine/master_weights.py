"""Float32 weights for training in mixed precision ("master weights").

bfloat16 has 8 significant bits: at a weight of 0.02 its numbers are 6e-5 to 1.2e-4 apart, so steps at a learning rate
of 2e-5 are rounded away. Under mixed precision matmuls need no more, but what an optimizer adds to does.

A checkpoint says in which dtype it is stored, and nothing about training. `from_pretrained` therefore reads that dtype
and marks the parameters unless the caller asks for one, and what is handed an optimizer (Accelerate's `prepare`,
Trainer's `train`, Lightning's strategies) calls `make_masters`: trained parameters that are marked become float32,
where they stand. So a model that only generates, a reference model and the frozen base of adapters stay as they are.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_axonn.compat.messages import get_logger
from hf_axonn.distributed.collectives import world_rank


logger = get_logger(__name__)

HALVES = (torch.bfloat16, torch.float16)
MIXED = {"bf16": torch.bfloat16, "fp16": torch.float16}  # accelerate's mixed_precision -> the dtype of products


def leave_dtype_open(model: nn.Module) -> None:
    """Mark a model whose dtype the user has not chosen: `make_masters` may change it. No communication."""
    for parameter in model.parameters():
        if parameter.dtype in HALVES:
            parameter.dtype_is_open = True  # type: ignore[attr-defined]  # beside the values, as `sharded_as` is


@torch.no_grad()
def make_masters(parameters: Iterable[torch.Tensor], *, mixed_precision: str) -> None:
    """Give marked parameters that are trained float32 values, in place, and warn once of others in half precision.

    A parameter stays the same object, so an optimizer that was made on it before keeps it. One shard after the other
    is converted: memory grows to that of the float32 shards, and by one shard for a moment. No communication.

    Args:
        parameters: those of a model or of an optimizer, plain or DTensors; frozen ones stay as they are.
        mixed_precision: that of the run, as accelerate names it; nothing is converted under "no".
    """
    left = None
    for parameter in parameters:
        if not parameter.requires_grad or parameter.dtype not in HALVES:
            continue
        if mixed_precision in MIXED and hasattr(parameter, "dtype_is_open") and parameter.grad is None:
            parameter.data = parameter.data.float()
        else:
            left = parameter.dtype
    if left is not None and world_rank() == 0:
        _warn(str(left).removeprefix("torch."))


def _look(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Look, before the first step of an optimizer, for what a loop of the user's own trains in half precision without
    `prepare`, of the models that were loaded or sharded here."""
    if optimizer not in _looked_at:
        _looked_at.add(optimizer)
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        ours = (each for each in parameters if isinstance(each, DTensor) or hasattr(each, "dtype_is_open"))
        make_masters(ours, mixed_precision="no")


_looked_at: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
register_optimizer_step_pre_hook(_look)


@functools.cache
def _warn(dtype: str) -> None:
    """Warn once, however many models are trained."""
    logger.warning(
        f"the weights that are trained are {dtype}, and so are their gradients and the optimizer's moments: steps "
        "smaller than half the distance between two such numbers are lost, at a learning rate of 2e-5 those of most "
        "weights. Load the model with dtype=torch.float32 (--dtype float32) and train it with mixed_precision: bf16."
    )
