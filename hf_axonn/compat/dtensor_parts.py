"""Writes to parts of DTensors on a grid's mesh: `weight[:8] = 0`, `gradient[rows].zero_()`.

A part of a sharded dim lies on several ranks. torch puts it together in a copy, and what is written there is lost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hf_axonn.compat.torch import grid_of


OPERATORS = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")
NO_WRITES = ("requires_grad_", "rename_", "share_memory_")


@functools.cache
def write_to_parts(shard_like: Callable[[torch.Tensor, DTensor], DTensor]) -> None:
    """Let `tensor[key] = value` of a DTensor on an `unnamed_mesh` do what it does with a plain tensor, and refuse
    methods that would change a copy in place of a part of one. Once.

    Args:
        shard_like: makes this rank's shard of a full plain tensor.
    Collectives then: `tensor[key] = value` those of `full_tensor`.
    """
    set_item: Callable = DTensor.__setitem__

    def write(tensor: DTensor, key: Any, value: Any) -> None:
        if grid_of(tensor.device_mesh) is None:
            return set_item(tensor, key, value)
        _refuse_copy(tensor, "[...] =")
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise ValueError(
                f"a part of a tensor of shape {list(tensor.shape)}, which requires a gradient and is sharded over a "
                "grid, is to be changed in place: do so under torch.no_grad(), or change its .data."
            )
        with torch.no_grad():
            full = tensor.full_tensor()
            key, value = torch.utils._pytree.tree_map_only(DTensor, DTensor.full_tensor, (key, value))
            full[key] = value
            tensor.copy_(shard_like(full, tensor))

    setattr(DTensor, "__setitem__", write)  # noqa: B010 - a method of another class
    methods = [name for name in dir(torch.Tensor) if name.endswith("_") and name[0] != "_" and name not in NO_WRITES]
    for name in (*methods, *(f"__{operator}__" for operator in OPERATORS)):
        setattr(DTensor, name, _refusing(name, getattr(DTensor, name)))


def _refusing(name: str, method: Callable) -> Callable:
    @functools.wraps(method)
    def in_place(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
        if tensor._is_view():
            _refuse_copy(tensor, name.removeprefix("__").removesuffix("__"))
        return method(tensor, *args, **kwargs)

    return in_place


def _refuse_copy(tensor: DTensor, name: str) -> None:
    """Raises ValueError: a tensor is a part of another one, put together in a copy: to change it has no effect."""
    whole = tensor._base
    if not isinstance(whole, DTensor) or grid_of(whole.device_mesh) is None:
        return
    if tensor._local_tensor.untyped_storage()._cdata != whole._local_tensor.untyped_storage()._cdata:
        raise ValueError(
            f"{name} in place of a part of shape {list(tensor.shape)} of a tensor of shape {list(whole.shape)}, which "
            "is sharded over a grid: the part was put together from several ranks, and the tensor would not change. "
            "Write tensor[key] = value, as in weight.grad[:8] = 0 or weight.data[rows] = 2 * weight.data[rows], or "
            "change full = tensor.full_tensor() and set parameter.data = full."
        )
