"""Shards of a parameter as DTensors: which slice of the full tensor each rank holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hf_axonn.compat.torch import (
    as_parameter,
    grid_of,
    lie_as,
    like_dtensor,
    placement_of,
    returns_gradient,
    shard_in,
    take_gradient_hooks,
)
from hf_axonn.distributed.mesh import GridMesh
from hf_axonn.topology.grid import WEIGHT_AXES, Grid, GridPosition
from hf_axonn.topology.local_slices import slices_at
from hf_axonn.topology.weight_kind import SHARDED_DIMS, WeightKind


def sharded_dims(placements: Sequence[Placement]) -> tuple[int | None, ...]:
    """Return the dim that each axis of the mesh shards, None where it replicates."""
    return tuple(placement.dim if isinstance(placement, Shard) else None for placement in placements)


def weight_dims(placements: Sequence[Placement], grid: Grid) -> tuple[int | None, ...]:
    """Return the dim that each of WEIGHT_AXES (y, x, z) shards, None where it replicates or has one rank.

    `placements` are those of the storage mesh of `grid`.
    """
    dims = dict(zip(grid.storage_axes, sharded_dims(placements), strict=True))
    return tuple(dims.get(axis) for axis in WEIGHT_AXES)


def local_slices(shape: Sequence[int], placements: Sequence[Placement], place: GridPosition) -> tuple[slice, ...]:
    """Return the slice of a global tensor that lies at `place`; `placements` are those of the storage mesh. No
    communication."""
    sizes, coordinates = zip(*((place.size(axis), place.index(axis)) for axis in place.grid.storage_axes), strict=True)
    return slices_at(shape, sharded_dims(placements), sizes, coordinates)


def mesh_slices(shape: Sequence[int], placements: Sequence[Placement], mesh: DeviceMesh) -> tuple[slice, ...]:
    """The slice of a global tensor that this rank holds, for any mesh of DTensors. No communication."""
    axes = range(mesh.ndim)
    coordinates = [mesh.get_local_rank(axis) for axis in axes]
    return slices_at(shape, sharded_dims(placements), [mesh.size(axis) for axis in axes], coordinates)


def shard_of(tensor: Tensor, placements: Sequence[Placement], mesh: GridMesh) -> Tensor:
    """Return this rank's shard of a full tensor, as a view. No communication."""
    return tensor[local_slices(tensor.shape, placements, mesh)]


def shard_like(full: Tensor, other: DTensor) -> DTensor:
    """Return this rank's shard of a full tensor, the same on all ranks, which lies as `other` does. No
    communication."""
    shard = full[mesh_slices(full.shape, other.placements, other.device_mesh)]
    return lie_as(shard.clone(memory_format=torch.contiguous_format), other)


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor: of a DTensor what all ranks of its mesh have together, by its gather or reduction."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_number(number: DTensor) -> Tensor:
    """Return a number that was made of parameters as a plain tensor, in the graph. Collectives: as `full_tensor`.

    Raises:
        ValueError: over a grid with pipe, where it is made of the parameters of this rank's stages alone.
    """
    grid = grid_of(number.device_mesh)
    if grid is not None and grid.pipe > 1:
        raise ValueError(
            "a number that was computed from parameters or gradients, as a penalty or a norm, meets a plain tensor, "
            "as the loss; but over a grid with pipe this rank has the parameters of its own stages only. Let the "
            "optimizer decay weights (weight_decay), or use a grid without pipe; full_tensor() gives the number of "
            "these stages."
        )
    return number.full_tensor()


def distribute_parameter(parameter: nn.Parameter, placements: Sequence[Placement], mesh: GridMesh) -> nn.Parameter:
    """Return a full parameter, the same on all ranks, as a DTensor. No communication."""
    full = parameter.detach().contiguous()
    shard = shard_of(full, placements, mesh)
    if any(isinstance(placement, Shard) for placement in placements):
        shard = shard.clone(memory_format=torch.contiguous_format)
    stride = torch.empty(full.shape, device="meta").stride()
    tensor = DTensor.from_local(shard, mesh.storage_mesh, placements, run_check=False, shape=full.shape, stride=stride)
    sharded = as_parameter(tensor, parameter.requires_grad)
    sharded.__dict__.update(parameter.__dict__)
    take_gradient_hooks(sharded, parameter)
    parameter.sharded_as = sharded  # for an optimizer that was made on it
    return sharded


def take_shards(model: nn.Module, state_dict: dict, prefix: str, *_) -> None:
    """Replace full tensors by this rank's shards, before `load_state_dict`. No communication."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for key, value in state_dict.items():
        own = parameters.get(key.removeprefix(prefix)) if key.startswith(prefix) else None
        if isinstance(own, DTensor) and not isinstance(value, DTensor) and own.shape == value.shape:
            state_dict[key] = shard_like(value, own)


def shard_placements(kind: WeightKind, grid: Grid, *, transposed: bool = False) -> list[Placement]:
    """Return the placements of a weight on the storage mesh of a grid; `transposed` where it is stored as [K, N]."""
    dims = dict(zip(WEIGHT_AXES, SHARDED_DIMS[kind], strict=True))
    sharded = [dims[axis] for axis in grid.storage_axes]
    return [Replicate() if dim is None else Shard(1 - dim if transposed else dim) for dim in sharded]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, in the graph; a plain tensor itself. No communication."""
    return shard_of_parameter(tensor) if isinstance(tensor, DTensor) else tensor


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or the tensor itself, outside of the graph. No communication."""
    return local(tensor).detach()


def shard_of_parameter(
    parameter: DTensor,
    view: Callable[[Tensor], Tensor] | None = None,
    finish: Callable[[Tensor], Tensor] | None = None,
    *,
    share: bool = False,
) -> Tensor:
    """Return this rank's part of a DTensor, in the graph where gradients are wanted. No communication.

    As `to_local()`, but for the processor time: a third, forward and backward (tests/benchmarks/host/host_time.py).

    Args:
        view: how the part is seen; of its own shape if None.
        finish: makes of the gradient that arrives the one that is returned, in the shape of the part.
        share: whether that is this rank's share of the gradient alone, which is yet to be averaged.
    Raises (in backward): RuntimeError: it is a share, and `torch.autograd.grad` would return it.
    """
    if torch.is_grad_enabled() and parameter.requires_grad:
        return _ToLocal.apply(parameter, view, finish, share)
    shard = shard_in(parameter)
    return shard if view is None else view(shard)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter, view, finish, share):
        ctx.placement, ctx.finish, ctx.share = placement_of(parameter), finish, share
        shard = shard_in(parameter).detach()  # another tensor: what a Function returns becomes part of the graph
        return shard if view is None else view(shard)

    @staticmethod
    def backward(ctx, grad):
        if ctx.share and returns_gradient(ctx):
            raise RuntimeError(
                "torch.autograd.grad of parameters that every rank of a grid holds, as norms and biases: it would "
                "return this rank's share of their gradients, which are averaged in .grad only. Call loss.backward() "
                "and, in a loop without Accelerate, hf_axonn.sync_gradients(model), and read parameter.grad."
            )
        grad = grad if ctx.finish is None else ctx.finish(grad)
        return like_dtensor(grad, ctx.placement), None, None, None


def replicated_local(parameter: nn.Parameter, mesh: GridMesh, partial_axes: tuple[str, ...]) -> Tensor:
    """The plain tensor of a replicated parameter, for use on this rank's share of the work. No communication.

    `partial_axes` are the axes of (y, x) on which the ranks do different work, so that each has only a share of the
    gradient. It is multiplied by their number here and averaged over the world by `sync_gradients`: a sum over them,
    and an average over data and z; averaging twice changes nothing.
    """
    factor = mesh.size(*partial_axes)
    if not isinstance(parameter, DTensor):
        return scale_gradient(parameter, factor) if parameter.requires_grad else parameter
    finish = None if factor == 1 else partial(torch.mul, other=factor)
    return shard_of_parameter(parameter, finish=finish, share=factor > 1 or mesh.size("data", "z") > 1)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, factor):
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def scale_gradient(value: Tensor, factor: float) -> Tensor:
    """Return `value` itself; its gradient is multiplied by `factor`."""
    return value if factor == 1 else _ScaleGradient.apply(value, factor)
