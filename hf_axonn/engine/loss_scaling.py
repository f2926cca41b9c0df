"""fp16: one answer for all ranks whether gradients are finite.

A GradScaler multiplies the loss, divides the gradients (`unscale_`), skips the step if one of them is inf or NaN, and
changes its scale by that. On a grid an element of a shard is seen by one rank alone, and after a step that some ranks
skip and others take, the parameters are those of no model. torch's DTensors reduce the answer over the dims that shard
the first of the gradients: over none if that is a norm's, and never over data. Here it is the world's.

This covers every way to a scaler (torch.amp.GradScaler in a bare loop, Accelerate, Trainer, fused optimizers): all of
them ask by the one operator that is handled here.
"""

from __future__ import annotations

from torch import Tensor

from hf_axonn.compat.torch import decide_finiteness
from hf_axonn.distributed.collectives import reduce_, world_group


def check_gradients_together() -> None:
    """Give a GradScaler's `unscale_` of gradients on a grid the same answer on all ranks from now on.

    Every rank must unscale the same optimizers in the same order, with the gradients that `sync_gradients` leaves. The
    host does not wait. Collectives then: an all-reduce over the world of one number for each dtype of gradients.
    """
    decide_finiteness(_found_by_any)


def _found_by_any(found_inf: Tensor) -> None:
    reduce_(found_inf, world_group(), op="max")
