"""Frozen weights of 4 bits (QLoRA's): stored, sharded and gathered as bytes, made into numbers after the gather.

    a block       64 numbers of a row: 32 bytes of codes, then its scale, 4 bytes, or 1 of double quantization
    stored        [N, K / 64 * 36] in uint8: a matrix of whole blocks, sharded over (y, x, z) as the weight [N, K] is
    gathered      these bytes, over z
    in use        [n, k] in the compute dtype, for one product at a time

Quantization is local to a block, so shards that are cut at blocks have the bits of the whole. With double quantization
a scale is one of 256 levels times a second scale for each 256 of all blocks of the weight, row after row, plus an
offset: shards do not begin where these do, so every rank has all second scales (1/4096 byte a number).

Source: QLoRA, Dettmers et al. 2023 (arXiv 2305.14314), section 3; bitsandbytes 0.50 has the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_axonn.compat.bitsandbytes import Parts, dequantize, quantize, scales_in_8_bits
from hf_axonn.compat.torch import apply_of_class
from hf_axonn.distributed.mesh import GridMesh
from hf_axonn.engine.dtensors import weight_dims
from hf_axonn.engine.sharded_weight import ShardedWeight
from hf_axonn.engine.weight_layout import WeightLayout
from hf_axonn.topology.local_slices import slices_at


@dataclass
class SecondScales:
    """Numbers of double quantization for a whole weight; every rank holds all of them.

    Args:
        scales: float32, one for each `block` blocks of the weight, row after row.
        levels: the 256 float32 numbers that a byte stands for.
        offset: what is added, a float32 number.
    """

    scales: Tensor
    levels: Tensor
    offset: Tensor
    block: int = 256

    def first_scales(self, stored: Tensor, first: tuple[int, int], row: int) -> Tensor:
        """Stored bytes [n, m] of a weight with `row` blocks a row -> float32 scales [n, m].

        Args:
            first: row, and block in its row, of the first one. What lies behind the weight's end is padding.
        """
        n, m = stored.shape
        rows = torch.arange(first[0], first[0] + n, device=stored.device).unsqueeze(1)
        blocks = torch.arange(first[1], first[1] + m, device=stored.device)
        index = torch.div(rows * row + blocks, self.block, rounding_mode="floor").clamp_(max=len(self.scales) - 1)
        return self.levels[stored.long()] * self.scales[index] + self.offset


@dataclass
class FourBit:
    """The format in which the bytes of one weight [N, K] hold its numbers. Hangs on its parameter as
    `parameter.four_bit`.

    Args:
        rows, cols: N and K; K is a multiple of `block`.
        block: numbers that share a scale.
        quant_type: nf4 or fp4.
        dtype: of what was quantized.
        compute_dtype: that products outside of autocast are to have (bnb_4bit_compute_dtype); None: of their input.
        second: of double quantization.
        wants_second: whether double quantization is still to come, when all shards have been read.
    """

    rows: int
    cols: int
    block: int
    quant_type: str
    dtype: torch.dtype
    compute_dtype: torch.dtype | None = None
    second: SecondScales | None = None
    wants_second: bool = False

    @property
    def block_bytes(self) -> int:
        return self.block // 2 + (4 if self.second is None else 1)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the bytes."""
        return self.rows, self.cols // self.block * self.block_bytes

    def pack(self, codes: Tensor, scales: Tensor, rows: int) -> Tensor:
        """Codes and scales of `rows` rows of a part of the weight -> its bytes [rows, ...]."""
        blocks = len(scales) // max(rows, 1)
        codes, scales = codes.view(rows, blocks, self.block // 2), scales.view(rows, blocks, 1).view(torch.uint8)
        return torch.cat([codes, scales], dim=2).view(rows, -1)

    def parts(self, stored: Tensor) -> Parts:
        """The bytes of the whole weight as codes and scales."""
        blocks, half = stored.view(-1, self.block_bytes), self.block // 2
        codes, scales = blocks[:, :half].reshape(-1), blocks[:, half:].contiguous()
        found = Parts(codes, scales.view(-1), self.block, self.quant_type, self.dtype)
        if self.second is None:
            found.scales = scales.view(torch.float32).view(-1)
        else:
            found.second = self.second.scales, self.second.levels, self.second.offset
            found.second_block = self.second.block
        return found

    def quantize(self, values: Tensor) -> Tensor:
        """A part [n, k] of the weight, whole blocks of each row -> its bytes."""
        return self.pack(*quantize(values, self.block, self.quant_type), len(values))

    def numbers(self, stored: Tensor, dtype: torch.dtype, first: tuple[int, int] = (0, 0)) -> Tensor:
        """The bytes of a part [n, ...] of the weight -> its numbers [n, k].

        Args:
            first: row of the part's first block, and its place in the row.
        """
        rows = len(stored)
        blocks = stored.reshape(rows, stored.shape[1] // self.block_bytes, self.block_bytes)
        half = self.block // 2
        scales = blocks[..., half:].contiguous()
        if self.second is None:
            scales = scales.view(torch.float32)
        else:
            scales = self.second.first_scales(scales.squeeze(2), first, self.cols // self.block)
        shape = rows, blocks.shape[1] * self.block
        codes = blocks[..., :half].reshape(-1)
        return dequantize(codes, scales.reshape(-1), shape, self.block, self.quant_type, dtype)

    def with_second_scales(self, stored: Tensor, scales: Tensor, part: tuple[slice, slice]) -> Tensor:
        """Quantize the scales, too: the bytes [n, ...] of a part of the weight as they are then.

        Args:
            scales: of the whole weight [N, K / block], float32.
            part: rows and blocks of a row that `stored` has.
        """
        levels, second = scales_in_8_bits(scales.reshape(-1))
        blocks = stored.reshape(len(stored), -1, self.block_bytes)[..., : self.block // 2]
        own = levels.view(scales.shape)[part].unsqueeze(2)
        self.second, self.wants_second = SecondScales(*second), False
        return torch.cat([blocks, own], dim=2).flatten(1)


def four_bit_of(parts: Parts, rows: int, cols: int, compute_dtype: torch.dtype | None) -> tuple[FourBit, Tensor]:
    """A quantized weight [N, K] as (how its bytes are read, its bytes)."""
    second = None if parts.second is None else SecondScales(*parts.second, block=parts.second_block)
    found = FourBit(rows, cols, parts.block, parts.quant_type, parts.dtype, compute_dtype, second)
    return found, found.pack(parts.codes, parts.scales, rows)


def with_shard(weight: Any, shard: Tensor, bits: FourBit) -> Any:
    """A sharded weight of 4 bits with other bytes, and all else that hangs on it. No communication."""
    sharded = DTensor.from_local(
        shard,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=torch.Size(bits.shape),
        stride=(bits.shape[1], 1),
    )
    new: Any = nn.Parameter(sharded, requires_grad=False)
    new.four_bit = bits
    keep_marks(new, vars(weight))
    return new


def keep_marks(new: Tensor, marks: dict[str, Any]) -> None:
    """Let a parameter have what hung on the one in whose place it stands, where it has nothing of that name."""
    for name, value in marks.items():
        vars(new).setdefault(name, value)


def with_marks(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """`module._apply`, as `module.to` and others call it, which makes DTensors anew: with what hangs on the weight."""
    parameters: dict[str, Any] = module._parameters
    marks = dict(vars(parameters["weight"]))  # a copy: torch exchanges the insides of the two
    result = apply_of_class(module, *args, **kwargs)
    keep_marks(parameters["weight"], marks)
    return result


def elements_of(parameter: Tensor) -> int:
    """Return how many numbers a parameter has; one of 4 bits, sharded or bitsandbytes' own, stores two in a byte."""
    four_bit, quantized = getattr(parameter, "four_bit", None), getattr(parameter, "quant_state", None)
    if four_bit is None:
        return parameter.numel() if quantized is None else quantized.shape.numel()
    return four_bit.rows * four_bit.cols


class FourBitWeight(ShardedWeight):
    """A frozen weight of 4 bits: its shard and what travels are bytes, the block of a product is made of them."""

    def __init__(self, module: nn.Module, name: str, mesh: GridMesh) -> None:
        super().__init__(module, name)
        parameter: Any = self.parameter
        self._bits: FourBit = parameter.four_bit
        # Rows, and blocks of a row, that the ranks of z have together.
        dims, y, x = weight_dims(parameter.placements, mesh.grid)[:2], "y", "x"
        shape = self._bits.rows, self._bits.cols // self._bits.block
        self._part = slices_at(shape, dims, (mesh.size(y), mesh.size(x)), (mesh.index(y), mesh.index(x)))

    @property
    def dtype(self) -> torch.dtype:
        return self._bits.dtype

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return self._bits.compute_dtype

    @property
    def elements(self) -> int:
        return self._bits.rows * self._bits.cols

    def travels_as(self, dtype: torch.dtype) -> torch.dtype:
        return torch.uint8

    def to_gather(self, dtype: torch.dtype) -> Tensor:
        return self.shard

    def from_gathered(self, gathered: Tensor, layout: WeightLayout, dtype: torch.dtype) -> Tensor:
        return layout.block(self._numbers(gathered.reshape(layout.z * layout.z_rows, -1), dtype))

    def block(self, layout: WeightLayout, dtype: torch.dtype) -> Tensor:
        return layout.block(self._numbers(self.shard, dtype))

    def _numbers(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Bytes of rows from the first one of this rank's block."""
        rows, blocks = self._part
        return self._bits.numbers(stored, dtype, (rows.start, blocks.start))
