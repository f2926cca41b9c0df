"""Point to point between stages, in the graph: what is sent forward has its gradient sent back.

A stage that has sent the residual stream has no use for what comes of it, but its backward pass must run. So `send`
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


def receive(shape: Sequence[int], dtype: torch.dtype, mesh: GridMesh, stage: int) -> Tensor:
    """The residual stream as stage number `stage` sends it; its gradient goes back there. Point to point over pipe."""
    peer = stage % mesh.size("pipe")
    return cast(Tensor, _Receive.apply(_anchor(mesh), shape, dtype, mesh, peer))  # type: ignore[no-untyped-call]


def send(hidden: Tensor, mesh: GridMesh, stage: int) -> Tensor:
    """Send the residual stream to stage number `stage`, from which its gradient will come -> a number that stands for
    it in the graph. Point to point over pipe."""
    peer = stage % mesh.size("pipe")
    return cast(Tensor, _Send.apply(hidden, _anchor(mesh), mesh, peer))  # type: ignore[no-untyped-call]


def share(value: Tensor, group: ProcessGroup, source: int, sent: Sequence[Tensor]) -> Tensor:
    """A tensor of rank `source` of `group` on all of its ranks, each of which then repeats the same work.

    Backward: to where it comes from; on the others it begins with what they have `sent`. One broadcast over `group`.
    """
    return cast(Tensor, _Share.apply(value, group, source, *sent))  # type: ignore[no-untyped-call]


def _anchor(mesh: GridMesh) -> Tensor:
    """What makes a node of the graph where nothing else would."""
    return torch.zeros((), device=mesh.device, requires_grad=torch.is_grad_enabled())


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, shape: Sequence[int], dtype: torch.dtype, mesh: GridMesh, peer: int
    ) -> Tensor:
        ctx.group, ctx.peer = mesh.group("pipe"), peer
        return receive_(torch.empty(*shape, dtype=dtype, device=mesh.device), peer, ctx.group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        send_(grad, ctx.peer, ctx.group)
        return None, None, None, None, None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, _anchor: Tensor, mesh: GridMesh, peer: int) -> Tensor:
        ctx.group, ctx.peer = mesh.group("pipe"), peer
        ctx.shape, ctx.dtype, ctx.device = hidden.shape, hidden.dtype, hidden.device
        send_(hidden, peer, ctx.group)
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = torch.empty(ctx.shape, dtype=ctx.dtype, device=ctx.device)
        return receive_(grad, ctx.peer, ctx.group), None, None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: ProcessGroup, source: int, *sent: Tensor) -> Tensor:
        ctx.zeros = [each.detach() for each in sent]
        return broadcast_over(value.detach().clone(memory_format=torch.contiguous_format), source, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, *ctx.zeros
