"""Gradients after backward: averaged over the ranks that saw different samples.

After a backward pass the gradient of a sharded weight is averaged over z already (matmul3d.py); what is left is the
average over data. The gradient of a replicated parameter is this rank's share, multiplied so that the *average* over
the whole world is right (state.py). Both are averages: doing it twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from hf_axonn.collectives import reduce_
from hf_axonn.state import ModelState, is_parallelized


BUCKET_BYTES = 64 * 2**20


def find_state(model: nn.Module) -> ModelState | None:
    """The state of a parallelized model, also inside of wrappers (PEFT, accelerate); None for a plain model."""
    for module in model.modules():
        if is_parallelized(module):
            return module.axonn
    return None


def sync_gradients(model: nn.Module) -> None:
    """Average all gradients over the ranks that saw different samples. Call it after backward, before clipping.

    `accelerator.backward` and Trainer do this by themselves. Every rank must call it. With gradient accumulation call
    it once, after the last micro-batch. Calling it again changes nothing.

    Collectives: an all-reduce over the world of one number a parameter; all-reduces over data of sharded gradients,
    and over the world of replicated ones, in buckets of 64 MiB.
    """
    state = find_state(model)
    if state is None:
        return
    sharded, replicated = [], []
    for grad in _agreed_gradients(model, state):
        is_sharded = isinstance(grad, DTensor) and any(isinstance(place, Shard) for place in grad.placements)
        (sharded if is_sharded else replicated).append(grad.to_local() if isinstance(grad, DTensor) else grad)
    _average(sharded, state.mesh.group("data"))
    _average(replicated, dist.group.WORLD)


def _agreed_gradients(model: nn.Module, state: ModelState) -> list[Tensor]:
    """The gradients that some rank has; a rank whose samples did not reach a parameter gets zeros for it.

    A parameter that no rank's samples reached keeps None, so that the optimizer leaves it alone as on one process.
    One all-reduce of a number a parameter, over the world.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        return []
    has = torch.tensor(
        [parameter.grad is not None for parameter in trained], dtype=torch.int32, device=state.mesh.device
    )
    grads = []
    for parameter, somewhere in zip(trained, reduce_(has, dist.group.WORLD, op="max").tolist(), strict=True):
        if somewhere and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if somewhere:
            grads.append(parameter.grad)
    return grads


def _average(grads: Iterable[Tensor], group) -> None:
    if group.size() == 1:
        return
    bucket, size = [], 0
    for grad in sorted(grads, key=lambda grad: str(grad.dtype)):  # sorting is stable: the same order on all ranks
        nbytes = grad.numel() * grad.element_size()
        if bucket and (size + nbytes > BUCKET_BYTES or bucket[0].dtype != grad.dtype):
            _average_bucket(bucket, group)
            bucket, size = [], 0
        bucket.append(grad)
        size += nbytes
    if bucket:
        _average_bucket(bucket, group)


def _average_bucket(bucket: list[Tensor], group) -> None:
    flat = reduce_(torch.cat([grad.reshape(-1) for grad in bucket]), group, op="mean")
    for grad, mean in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
        grad.copy_(mean.view_as(grad))
