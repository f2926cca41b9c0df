"""Shards of a parameter as DTensors: which slice of the full tensor each rank holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hf_axonn.distributed.collectives import broadcast_
from hf_axonn.distributed.mesh import GridMesh
from hf_axonn.engine.activation_layouts import bounds
from hf_axonn.topology.grid import WEIGHT_AXES
from hf_axonn.topology.weight_kind import WeightKind


# On the axes (y, x, z) of the storage mesh.
PLACEMENTS: dict[WeightKind, tuple[Placement, Placement, Placement]] = {
    WeightKind.COLUMN: (Shard(1), Shard(0), Shard(0)),
    WeightKind.LINEAR: (Shard(1), Shard(0), Shard(0)),
    WeightKind.ROW: (Shard(0), Shard(1), Shard(0)),
    WeightKind.VOCABULARY: (Shard(0), Shard(0), Shard(0)),
    WeightKind.GATHERED: (Shard(0), Shard(0), Shard(0)),
    WeightKind.EXPERTS: (Shard(0), Shard(0), Shard(2)),
    WeightKind.REPLICATED: (Replicate(), Replicate(), Replicate()),
    WeightKind.ADAPTER: (Replicate(), Replicate(), Replicate()),
}


def shard_slices(shape: torch.Size, placements: Sequence[Placement], mesh: GridMesh) -> tuple[slice, ...]:
    """Where this rank's piece of a full tensor lies, as DTensor cuts it on the storage mesh (y, x, z)."""
    spans = [(0, size) for size in shape]
    for axis, placement in zip(WEIGHT_AXES, placements, strict=True):
        if isinstance(placement, Shard):
            begin, end = spans[placement.dim]
            start, stop = bounds(end - begin, mesh.size(axis), mesh.index(axis))
            spans[placement.dim] = (begin + start, begin + stop)
    return tuple(slice(*span) for span in spans)


def shard_of(tensor: Tensor, placements: Sequence[Placement], mesh: GridMesh) -> Tensor:
    """This rank's piece of a full tensor, as a view. No communication."""
    return tensor[shard_slices(tensor.shape, placements, mesh)]


def distributed(parameter: nn.Parameter, placements: Sequence[Placement], mesh: GridMesh) -> nn.Parameter:
    """A whole parameter as a DTensor; the values of rank 0 count. One broadcast over the world, none on the meta
    device."""
    full = parameter.detach()
    if not full.is_meta:
        full = broadcast_(full.contiguous())
    local = shard_of(full, placements, mesh)
    if any(isinstance(its, Shard) for its in placements):
        local = local.clone(memory_format=torch.contiguous_format)
    whole = DTensor.from_local(
        local, mesh.storage_mesh, placements, run_check=False, shape=full.shape, stride=_strides(full)
    )
    sharded = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    sharded.__dict__.update(parameter.__dict__)
    parameter.sharded_as = sharded  # for an optimizer that was made on it
    return sharded


def take_shards(model: nn.Module, state_dict: dict, prefix: str, *_) -> None:
    """Before `load_state_dict`: of whole tensors this rank takes its shards. No communication."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for key, value in state_dict.items():
        own = parameters.get(key.removeprefix(prefix)) if key.startswith(prefix) else None
        if isinstance(own, DTensor) and not isinstance(value, DTensor) and own.shape == value.shape:
            local = shard_of(value, own.placements, model.axonn.mesh).clone(memory_format=torch.contiguous_format)
            state_dict[key] = DTensor.from_local(
                local, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
            )


def _strides(full: Tensor) -> tuple[int, ...]:
    return torch.empty(full.shape, device="meta").stride()


def shard_placements(kind: WeightKind, *, transposed: bool = False) -> list[Placement]:
    """Placements of a weight on the storage mesh (y, x, z); `transposed` where it is stored as [K, N]."""
    placements = PLACEMENTS[kind]
    return [Shard(1 - its.dim) if transposed and isinstance(its, Shard) else its for its in placements]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, in the graph; a plain tensor itself. No communication."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def replicated_local(parameter: nn.Parameter, mesh: GridMesh, partial_axes: tuple[str, ...]) -> Tensor:
    """The plain tensor of a replicated parameter, for use on this rank's share of the work. No communication.

    `partial_axes` are the axes of (y, x) on which the ranks do different work, so that each has only a share of the
    gradient. It is multiplied by their number here and averaged over the world by `sync_gradients`: a sum over them,
    and an average over data and z; averaging twice changes nothing.
    """
    shard = local(parameter)
    return scale_gradient(shard, mesh.size(*partial_axes)) if shard.requires_grad else shard


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, factor):
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def scale_gradient(value: Tensor, factor: float) -> Tensor:
    """`value` itself; its gradient is multiplied by `factor`."""
    return value if factor == 1 else _ScaleGradient.apply(value, factor)
