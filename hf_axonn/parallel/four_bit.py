"""Models of bitsandbytes' 4-bit Linears: what of them can be sharded, and how their weights become matrices of bytes.

    refuse_quantized(model)          every other quantization, before anything is looked at
    check_four_bit(model, ...)       Linears that cannot be cut at their blocks, before anything is changed
    pack_four_bit(model)             each Params4bit becomes a parameter of bytes (engine/four_bit.py), full or meta
    add_second_scales(model)         double quantization of weights whose shards were quantized while they were read

The modules stay what they are, so that PEFT adapts them as on one process.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_axonn.compat.bitsandbytes import is_four_bit, parts_of
from hf_axonn.engine.dtensors import local, local_slices, whole
from hf_axonn.engine.four_bit import FourBit, four_bit_of, with_marks, with_shard
from hf_axonn.engine.state import parallel_state
from hf_axonn.topology.grid import Grid
from hf_axonn.topology.weight_kind import WeightKind


# Libraries whose Linears hold their weights in fewer bits.
QUANTIZERS = {"aqlm", "auto_gptq", "awq", "bitsandbytes", "eetq", "gptqmodel", "hqq", "optimum", "quanto", "torchao"}


def four_bit_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The 4-bit Linears of a model, by name."""
    return ((name, module) for name, module in model.named_modules() if is_four_bit(module))


def refuse_quantized(model: nn.Module) -> None:
    """Refuse a model that is quantized in another way than in bitsandbytes' 4 bits. Changes nothing.

    Raises:
        ValueError: it is.
    """
    others = (module for module in model.modules() if not is_four_bit(module))
    kinds = {f"{library}'s {name}" for library, name in map(_origin, others) if library in QUANTIZERS}
    kinds |= {f"torchao's {name}" for library, name in map(_origin, model.parameters()) if library == "torchao"}
    marked = getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None
    if kinds or (marked and not any(True for _ in four_bit_modules(model))):
        method = getattr(model, "quantization_method", None)
        what = min(kinds) if kinds else getattr(method, "value", method) or "an unknown method"
        raise ValueError(
            f"a quantized model cannot be sharded over a grid, but for bitsandbytes' 4 bits, and this one has {what}: "
            "load it with BitsAndBytesConfig(load_in_4bit=True), or without quantization_config."
        )


def _origin(thing: object) -> tuple[str, str]:
    return type(thing).__module__.partition(".")[0], type(thing).__name__


def check_four_bit(model: nn.Module, kinds: dict[int, WeightKind], grid: Grid) -> None:
    """Refuse 4-bit Linears that a grid cannot have. Changes nothing.

    Args:
        kinds: of the model's weights, by id of the parameter.
    Raises:
        ValueError: a Linear is sharded otherwise than as a Linear (a head), its weight is not quantized yet, or its
            rows are not whole blocks on every rank.
    """
    for name, module in four_bit_modules(model):
        weight, kind = module.weight, kinds.get(id(module.weight), WeightKind.REPLICATED)
        if kind not in (WeightKind.COLUMN, WeightKind.ROW, WeightKind.LINEAR):
            raise ValueError(
                f"{name} is a Linear of 4 bits whose weight is used as a {kind} weight, which cannot be sharded over "
                f"{grid}: name it in llm_int8_skip_modules of BitsAndBytesConfig, so that it stays as it is."
            )
        if not weight.is_meta and getattr(weight, "quant_state", None) is None:
            raise ValueError(
                f"{name} is not quantized yet: move the model to its device first, with model.to(device)."
            )
        axis = "x" if kind == WeightKind.ROW else "y"
        parts, block = getattr(grid, axis), block_of(weight)
        if module.in_features % (block * parts):
            fits = [size for size in range(1, parts) if parts % size == 0 and module.in_features % (block * size) == 0]
            remedy = f"use {axis}={fits[-1]}" if fits else f"name {name.rpartition('.')[2]} in llm_int8_skip_modules"
            raise ValueError(
                f"{name} has rows of {module.in_features} numbers, which {axis}={parts} does not divide into whole "
                f"blocks of {block} ({block} * {parts} = {block * parts}), and a block of 4-bit numbers has one "
                f"scale: {remedy}."
            )


def block_of(weight: Any) -> int:
    """Numbers of a block of a Params4bit."""
    state = getattr(weight, "quant_state", None)
    return int(weight.blocksize if state is None else state.blocksize)


def pack_four_bit(model: nn.Module) -> list[Tensor]:
    """Replace every Params4bit by a parameter of bytes, [N, K / 64 * 36]; one that is on the meta device has no bytes.
    No communication.

    Returns:
        What else its numbers are made of, for a broadcast: second scales.
    """
    beside: list[Tensor] = []
    for _, module in four_bit_modules(model):
        weight, rows, cols = module.weight, module.out_features, module.in_features
        if weight.is_meta:
            found = FourBit(rows, cols, block_of(weight), weight.quant_type, weight.dtype, module.compute_dtype)
            found.wants_second = bool(weight.compress_statistics)
            stored = torch.empty(found.shape, dtype=torch.uint8, device="meta")
        else:
            found, stored = four_bit_of(parts_of(weight), rows, cols, module.compute_dtype)
        packed = nn.Parameter(stored, requires_grad=False)
        # What PEFT asks a weight of 4 bits for.
        vars(packed).update(
            four_bit=found, quant_type=found.quant_type, compress_statistics=weight.compress_statistics
        )
        module.weight = packed
        module.quant_state = None
        vars(module)["_apply"] = functools.partial(with_marks, module)
        if found.second is not None:
            beside += [found.second.scales, found.second.levels, found.second.offset]
    return beside


@torch.no_grad()
def add_second_scales(model: nn.Module) -> None:
    """Quantize the scales of weights that want it, as of the whole weight on one process, to the bit.

    Their mean is an offset and their blocks do not end where shards do, so every rank has all scales of one weight for
    a moment, 1/16 byte a number. Collectives: for each such weight all-gathers of its scales over z, x and y.
    """
    state = parallel_state(model)
    if state is None:
        return
    for _, module in four_bit_modules(model):
        weight = module._parameters["weight"]
        bits: FourBit = weight.four_bit
        if not bits.wants_second:
            continue
        mesh, placements, shape = state.grid_mesh, weight.placements, (bits.rows, bits.cols // bits.block)
        stored = local(weight)
        scales = stored.view(len(stored), -1, bits.block_bytes)[..., bits.block // 2 :].contiguous()
        own = scales.view(torch.float32).squeeze(2)
        everything = whole(
            DTensor.from_local(
                own, mesh.storage_mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
            )
        )
        rows, blocks = local_slices(shape, placements, mesh)
        stored = bits.with_second_scales(stored, everything, (rows, blocks))
        module._parameters["weight"] = with_shard(weight, stored, bits)
