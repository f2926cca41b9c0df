"""Point to point between stages, in the graph: what is sent forward has its gradient sent back.

A stage that has sent something has no use for what comes of it, but its backward pass must run. So `send`
returns a number that stands for it, and what the last stage shares with all ranks of pipe depends on that number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hf_axonn.distributed.collectives import broadcast_over, receive_, send_
from hf_axonn.distributed.mesh import GridMesh


def receive(outlines: Sequence[Tensor], mesh: GridMesh, stage: int) -> tuple[Tensor, ...]:
    """Receive what stage number `stage` sends; the gradients go back there. Point to point over pipe.

    `outlines`: empty tensors of its shapes and dtypes, on the meta device.
    """
    peer = stage % mesh.size("pipe")
    return cast("tuple[Tensor, ...]", _Receive.apply(_anchor(mesh), outlines, mesh, peer))


def send(handed: Sequence[Tensor], mesh: GridMesh, stage: int) -> Tensor:
    """Send something to stage number `stage`, from which its gradients will come -> a number that stands for it in the
    graph. Point to point over pipe."""
    peer = stage % mesh.size("pipe")
    return cast(Tensor, _Send.apply(_anchor(mesh), mesh, peer, *handed))


def share(value: Tensor, group: ProcessGroup, source: int, sent: Sequence[Tensor]) -> Tensor:
    """Return a tensor of rank `source` of `group` on all of its ranks, which then repeat the same work.

    Backward: to where it comes from; on the others it begins with what they have `sent`. One broadcast over `group`.
    """
    return cast(Tensor, _Share.apply(value, group, source, *sent))


def _anchor(mesh: GridMesh) -> Tensor:
    """Return a number that makes a node of the graph where nothing else would."""
    return torch.zeros((), device=mesh.device, requires_grad=torch.is_grad_enabled())


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, outlines: Sequence[Tensor], mesh: GridMesh, peer: int
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.peer = mesh.group("pipe"), peer
        room = [torch.empty_like(outline, device=mesh.device, requires_grad=False) for outline in outlines]
        return tuple(receive_(each, peer, ctx.group) for each in room)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        for grad in grads:  # of all in one node: the other rank waits for them in this order
            send_(grad, ctx.peer, ctx.group)
        return None, None, None, None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, mesh: GridMesh, peer: int, *handed: Tensor) -> Tensor:
        ctx.group, ctx.peer, ctx.device = mesh.group("pipe"), peer, mesh.device
        ctx.outlines = [torch.empty_like(each, device="meta") for each in handed]
        for each in handed:
            send_(each, peer, ctx.group)
        return handed[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor | None, ...]:
        room = [torch.empty_like(outline, device=ctx.device) for outline in ctx.outlines]
        return None, None, None, *(receive_(each, ctx.peer, ctx.group) for each in room)


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: ProcessGroup, source: int, *sent: Tensor) -> Tensor:
        ctx.zeros = [each.detach() for each in sent]
        return broadcast_over(value.detach().clone(memory_format=torch.contiguous_format), source, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, *ctx.zeros
