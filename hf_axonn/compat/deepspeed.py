"""Parts of parameters that a rank of DeepSpeed's ZeRO holds, by private names; DeepSpeed itself is not imported.

ZeRO-1 and ZeRO-2 give every rank a part of the flat list of all parameters, whose fp32 numbers and gradients it alone
has, beside a whole copy of the model; ZeRO-3 gives it a part of every parameter, and of the copy. Both are read where
DeepSpeed keeps them, so that no collective is added.

Checked with deepspeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Part:
    """A rank's part of a parameter: the shape of the whole, where the part begins in it, flat, and its values."""

    shape: tuple[int, ...]
    start: int
    values: Tensor


def is_divided(parameter: nn.Parameter) -> bool:
    """Return whether ZeRO gives parts of a parameter to ranks."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def part_of(parameter: Any, *, gradients: bool) -> Part | None:
    """Return this rank's own part of a divided parameter in fp32, or of its gradient; None: it has none.

    Raises:
        ValueError: DeepSpeed has other numbers of gradients than of parameters.
    """
    if hasattr(parameter, "ds_id"):
        return _part_of_zero3(parameter, gradients)
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    address = mapping.lp_fragment_address
    if gradients:
        values = mapping.get_lp_grad_fragment(parameter._index_in_param_group).flatten()
    else:
        values = mapping.get_hp_fragment()
    if values.numel() != address.numel:
        raise ValueError(f"DeepSpeed holds {values.numel()} numbers where a part of {address.numel} is.")
    return Part(tuple(parameter.shape), address.start, values)


def _part_of_zero3(parameter: Any, gradients: bool) -> Part | None:
    if not parameter.requires_grad:
        return None if gradients else _part(parameter, parameter.ds_tensor)
    optimizer = parameter._z3_optimizer
    read = optimizer.get_local_fp32_grad_for_param if gradients else optimizer.get_local_fp32_param
    return _part(parameter, read(parameter))


def _part(parameter: Any, values: Tensor) -> Part | None:
    """Return this rank's part of the flat parameter, which is filled up so that every rank has as much."""
    start = torch.distributed.get_rank() * parameter.ds_tensor.ds_numel
    size = min(values.numel(), parameter.ds_numel - start)
    return Part(tuple(parameter.ds_shape), start, values.flatten()[:size]) if size > 0 else None


def copies_of(parameter: Any) -> Iterator[Part]:
    """Yield what this rank's model has of a divided parameter, in its own dtype: all of it in ZeRO-1 and ZeRO-2, a
    part in ZeRO-3, and there all of it too where that is kept."""
    if not hasattr(parameter, "ds_id"):
        yield Part(tuple(parameter.shape), 0, parameter.detach().flatten())
        return
    part = _part(parameter, parameter.ds_tensor)
    if part is not None:
        yield part
    if parameter.numel() == parameter.ds_numel:
        yield Part(tuple(parameter.ds_shape), 0, parameter.detach().flatten())
