"""Private names of torch's Muon. Checked with torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.optim import _muon

from hf_axonn.compat.replaced import replace_attributes


orthogonalize: Callable[..., Tensor] = _muon._zeropower_via_newtonschulz  # (update [N, K], options) -> [N, K]
adjust_rate: Callable[..., float] = _muon._adjust_lr  # (lr, adjust_lr_fn, shape of the matrix) -> lr


def replace_parts(**parts: Any) -> AbstractContextManager[None]:
    """Let Muon's step call other functions inside: `orthogonalize`, then `adjust_rate`, once for each parameter with a
    gradient, in the order of its groups."""
    names = {"orthogonalize": "_zeropower_via_newtonschulz", "adjust_rate": "_adjust_lr"}
    return replace_attributes({(_muon, names[part]): function for part, function in parts.items()})
