"""Transformers' Adafactor over a grid: the same numbers from shards of parameters.

Adafactor keeps, of the squared gradients of a matrix [N, K], the means of rows [N] and of columns [K], and scales by
root mean squares of full tensors. On shards these are sums that are added up over the ranks that divide a dim:

    row means     summed over K, reduced over the axes that shard K; sharded as N is
    column means  summed over N, reduced over the axes that shard N; sharded as K is
    RMS           reduced over every axis that shards the tensor

State has the names that Transformers' own has, as DTensors, so that checkpoints of any grid and of one process fit.

Source: Shazeer and Stern 2018 (arXiv 1804.04235), algorithms 4 and 5, with the options of transformers 5.23
(optimization.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from hf_axonn.compat.transformers import adafactor_rate
from hf_axonn.distributed.collectives import reduce_
from hf_axonn.engine.dtensors import local, mesh_slices


FACTORS = {"exp_avg_sq_row": -1, "exp_avg_sq_col": -2}  # the dim that a mean leaves out


@torch.no_grad()
def step_adafactor(optimizer: Any) -> None:
    """Take a step of Transformers' Adafactor on shards. Collectives: up to eight small all-reduces for each parameter
    that is sharded."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                _step_one(optimizer, group, parameter, _wide(local(parameter.grad)))


def _step_one(optimizer: Any, group: dict, parameter: Tensor, grad: Tensor) -> None:
    own = local(parameter)
    value = _wide(own)
    state = _state_of(optimizer, group, parameter, grad)
    state["step"] += 1
    state["RMS"] = _rms(value, parameter)
    rate = adafactor_rate(optimizer, group, state)
    decay = 1.0 - state["step"] ** group["decay_rate"]
    squares = grad**2 + group["eps"][0]
    if parameter.dim() >= 2:
        row, column = (
            local(state[name]).mul_(decay).add_(_mean(squares, parameter, dim), alpha=1.0 - decay)
            for name, dim in FACTORS.items()
        )
        total = _sum_over_ranks(row.sum(dim=-1, keepdim=True), parameter, parameter.dim() - 2)
        row_mean = total / parameter.shape[-2]
        update = (row / row_mean).rsqrt().unsqueeze(-1) * column.rsqrt().unsqueeze(-2)
    else:
        update = local(state["exp_avg_sq"]).mul_(decay).add_(squares, alpha=1.0 - decay).rsqrt()
    update = update * grad
    update /= (_rms(update, parameter) / group["clip_threshold"]).clamp(min=1.0)
    update *= rate
    if group["beta1"] is not None:
        update = local(state["exp_avg"]).mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
    if group["weight_decay"] != 0:
        value.add_(value, alpha=-group["weight_decay"] * float(rate))
    own.copy_(value - update)


def _state_of(optimizer: Any, group: dict, parameter: Tensor, grad: Tensor) -> dict:
    """Return the state of a parameter, made if there is none; what one process has saved is sharded."""
    state = optimizer.state[parameter]
    if not state:
        state.update(step=0, RMS=0)
    names: dict[str, int | None] = {**FACTORS} if parameter.dim() >= 2 else {"exp_avg_sq": None}
    if group["beta1"] is not None:
        names["exp_avg"] = None
    for name, left_out in names.items():
        value = state.get(name)
        if not (isinstance(value, Tensor) and isinstance(value, DTensor) == isinstance(parameter, DTensor)):
            value = _sharded_like(value, parameter, left_out, grad)
        if local(value).dtype != grad.dtype or local(value).device != grad.device:
            value = value.to(device=grad.device, dtype=grad.dtype)
        state[name] = value
    return state


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _sum_over_ranks(value: Tensor, parameter: Tensor, *dims: int) -> Tensor:
    """Add up over the ranks among which these dims of the parameter are divided. At most three all-reduces."""
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard) and placement.dim in dims and parameter.device_mesh.size(axis) > 1:
                value = reduce_(value.contiguous(), parameter.device_mesh.get_group(axis))
    return value


def _mean(value: Tensor, parameter: Tensor, dim: int) -> Tensor:
    """Return the mean over one dim of the global tensor."""
    return _sum_over_ranks(value.sum(dim=dim), parameter, parameter.dim() + dim) / parameter.shape[dim]


def _rms(value: Tensor, parameter: Tensor) -> Tensor:
    """Return the root mean square of the global tensor, 0-d."""
    return (_sum_over_ranks((value * value).sum(), parameter, *range(parameter.dim())) / parameter.numel()).sqrt()


def _sharded_like(value: Tensor | None, parameter: Tensor, left_out: int | None, grad: Tensor) -> Tensor:
    """Shard a full tensor, or zeros for None, as the parameter is, but for one dim that a mean has left out."""
    shape = list(parameter.shape)
    own = list(grad.shape)
    if left_out is not None:
        left_out += parameter.dim()
        del shape[left_out], own[left_out]
    if not isinstance(parameter, DTensor):
        return grad.new_zeros(shape) if value is None else value
    placements = [_without(placement, left_out) for placement in parameter.placements]
    if value is None:
        shard = grad.new_zeros(own)
    else:
        shard = value.to(grad)[mesh_slices(shape, placements, parameter.device_mesh)].clone()
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        shard, parameter.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _without(placement, left_out: int | None):
    """Return the placement of a tensor that has lost one of its dims."""
    if left_out is None or not isinstance(placement, Shard):
        return placement
    if placement.dim == left_out:
        return Replicate()
    return Shard(placement.dim - (placement.dim > left_out))
