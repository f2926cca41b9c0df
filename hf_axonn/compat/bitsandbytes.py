"""The 4-bit Linears of bitsandbytes: what is used of that library, imported where it is needed. Checked with 0.50.

is_four_bit(module)       whether it is a Linear4bit
parts_of(weight)          codes and scales of a quantized weight; saved_form(parts, shape): as they are saved
quantize, dequantize      its own kernels, on the device of the tensor
scales_in_8_bits          its double quantization
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


# The dtypes to which its kernels dequantize; on CPUs others leave memory as it was.
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_four_bit(module: nn.Module) -> bool:
    """Return whether a module is one of bitsandbytes' 4-bit Linears. Others of its classes are not."""
    library = getattr(sys.modules.get("bitsandbytes"), "nn", None)
    return library is not None and type(module) in (library.Linear4bit, library.LinearNF4, library.LinearFP4)


@dataclass
class Parts:
    """A quantized weight [N, K].

    Attributes:
        codes: [N * K / 2] in uint8, two numbers a byte, row after row.
        scales: [N * K / block], the largest magnitude of each block: in float32, or in uint8 where these were
            quantized once more (`second`).
        block: numbers that share a scale.
        quant_type: nf4 or fp4.
        dtype: of what was quantized.
        second: (float32 scale of each `second_block` scales, the 256 levels, an offset), or None.
    """

    codes: Tensor
    scales: Tensor
    block: int
    quant_type: str
    dtype: torch.dtype
    second: tuple[Tensor, Tensor, Tensor] | None = None
    second_block: int = 256


def parts_of(weight: Tensor) -> Parts:
    """The parts of a quantized Params4bit, on its device."""
    return _parts(weight.data, vars(weight)["quant_state"])


def parts_of_saved(codes: Tensor, stored: dict[str, Any]) -> Parts:
    """The parts of a weight in a checkpoint: its codes, and what is stored beside them by name (weight.absmax ...)."""
    from bitsandbytes.functional import QuantState

    return _parts(codes, QuantState.from_dict(stored, device=codes.device))


def _parts(codes: Tensor, state: Any) -> Parts:
    if getattr(state, "packing_format_for_cpu", False):  # a forward pass in eval mode on some CPUs lays it out anew
        from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse

        codes, state = _convert_weight_packed_for_cpu_inverse(codes, state)
    found = Parts(
        codes.contiguous().view(-1).view(torch.uint8),
        state.absmax.reshape(-1),
        state.blocksize,
        state.quant_type,
        state.dtype,
    )
    if state.nested:
        found.second = state.state2.absmax, state.state2.code, state.offset
        found.second_block = state.state2.blocksize
    return found


def saved_form(parts: Parts, shape: tuple[int, int]) -> dict[str, Tensor]:
    """A weight [N, K] = `shape` as a checkpoint of bitsandbytes has it: "" its codes, ".absmax" and so on."""
    from bitsandbytes.functional import QuantState, get_4bit_type

    inner, offset = None, None
    if parts.second is not None:
        scales, levels, offset = parts.second
        inner = QuantState(scales, code=levels, blocksize=parts.second_block, dtype=torch.float32)
    state = QuantState(
        parts.scales,
        shape=torch.Size(shape),
        code=get_4bit_type(parts.quant_type, device=parts.codes.device),
        blocksize=parts.block,
        quant_type=parts.quant_type,
        dtype=parts.dtype,
        offset=offset,
        state2=inner,
    )
    return {"": parts.codes.view(-1, 1)} | {f".{key}": value for key, value in state.as_dict(packed=True).items()}


def quantize(values: Tensor, block: int, quant_type: str) -> tuple[Tensor, Tensor]:
    """[n, k], k a multiple of the block -> (codes [n * k / 2], float32 scales [n * k / block])."""
    from bitsandbytes.functional import quantize_4bit

    if not values.numel():
        empty = values.new_empty(0, dtype=torch.uint8)
        return empty, empty.float()
    codes, state = quantize_4bit(values.contiguous(), blocksize=block, quant_type=quant_type)
    return codes.view(-1), state.absmax.view(-1)


def dequantize(
    codes: Tensor, scales: Tensor, shape: tuple[int, int], block: int, quant_type: str, dtype: torch.dtype
) -> Tensor:
    """The numbers [n, k] = `shape` of codes and float32 scales, made in a kernel's dtype; float64 out of float32."""
    from bitsandbytes.functional import QuantState, dequantize_4bit

    made = dtype if dtype in KERNEL_DTYPES else torch.float32
    if not codes.numel():
        return torch.empty(shape, dtype=dtype, device=codes.device)
    state = QuantState(scales, shape=torch.Size(shape), blocksize=block, quant_type=quant_type, dtype=made)
    return dequantize_4bit(codes.view(-1, 1), state).to(dtype)


def scales_in_8_bits(scales: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """All float32 scales of a weight -> (uint8, (scale of each block of them, levels, offset)), by its own rule."""
    from bitsandbytes.functional import quantize_blockwise

    offset = scales.mean()
    levels, state = quantize_blockwise(scales - offset, blocksize=Parts.second_block)
    return levels, (state.absmax, state.code, offset)
