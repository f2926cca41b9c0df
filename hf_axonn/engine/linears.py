"""Linears: torch's, GPT-2's Conv1D, and classes of Transformers that are one, or one for each expert."""

from __future__ import annotations

from torch import nn

from hf_axonn.compat.bitsandbytes import is_four_bit


# Of transformers 5.23: multiplies and adds its bias, nothing else.
PLAIN_LINEARS = ("FalconLinear",)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is Transformers' Conv1D: a Linear that stores its weight as [K, N]."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a Linear that can be sharded: nn.Linear itself, Conv1D, one of 4 bits, or a subclass
    that is known to add nothing. Others may do anything."""
    plain = type(module) is nn.Linear or type(module).__name__ in PLAIN_LINEARS
    return plain or is_conv1d(module) or is_four_bit(module)


def is_stacked(module: nn.Module) -> bool:
    """Return whether a module is the Linears of several experts, in one weight [E, N, K]: it is called with rows
    [T, K], those of the first expert first, and their numbers."""
    if not type(module).__name__.endswith("ParallelExperts") or set(module._parameters) != {"weight"}:
        return False
    sizes = (getattr(module, name, None) for name in ("num_experts", "output_size", "input_size"))
    return module.get_parameter("weight").shape == tuple(sizes)


def linear_size(linear: nn.Module) -> tuple[int, int]:
    """(N, K) = (out_features, in_features) of what `is_linear` or `is_stacked` accepts."""
    if is_stacked(linear):
        _, rows, cols = linear.get_parameter("weight").shape
        return rows, cols
    return (linear.nf, linear.nx) if is_conv1d(linear) else (linear.out_features, linear.in_features)
