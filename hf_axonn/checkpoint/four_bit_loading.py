"""Weights of 4 bits while Transformers' loader reads a model: each rank quantizes its own shard, as it reads it.

    a file in full precision     of each Linear the rank reads the blocks that it will hold, and quantizes them: blocks
                                 are quantized one by one, so these are the codes and scales of the whole
    a file in 4 bits             codes and scales of one Linear at a time are read in full, and cut

No full-precision model is ever in memory, and of one weight in full precision no more than a rank's shard.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_axonn.checkpoint.lazy_tensors import LazyTensor, Region, read
from hf_axonn.compat.bitsandbytes import parts_of_saved
from hf_axonn.compat.transformers import is_read
from hf_axonn.engine.four_bit import FourBit, four_bit_of, with_shard


PartOf = Callable[[Any], Region]  # of a parameter
Tensors = dict[str, Any]


def is_stored_in_bytes(parameter: Tensor) -> bool:
    """Return whether a parameter of a model that is being read has 4 bits; it may be a copy without our marks."""
    return isinstance(parameter, DTensor) and parameter.dtype == torch.uint8


def loading_hooks(part_of: PartOf, device: torch.device) -> dict[tuple[Any, str], Any]:
    """Return the replacements of Transformers' own quantization, by owner and name.

    Args:
        part_of: the rows and bytes that this rank has of a parameter.
    """
    from transformers.integrations import bitsandbytes

    return {
        (bitsandbytes.Bnb4bitQuantize, "convert"): _method(partial(_quantize, part_of, device)),
        (bitsandbytes.Bnb4bitDeserialize, "convert"): _method(partial(_deserialize, part_of, device)),
    }


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    def convert(self: Any, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return function(input_dict, **kwargs)  # type: ignore[no-any-return]

    return convert


def _quantize(
    part_of: PartOf, device: torch.device, tensors: dict[str, Any], *, model: nn.Module, **_: Any
) -> Tensors:
    """Turn weights in full precision, still in their files, into this rank's bytes of each."""
    from transformers.pytorch_utils import Conv1D

    result = {}
    for name, found in tensors.items():
        weight = found[0] if isinstance(found, list) else found
        module: Any = model.get_submodule(name.rpartition(".")[0])
        bits: FourBit = module._parameters["weight"].four_bit
        if issubclass(module.source_cls, Conv1D):  # which stores [K, N]
            weight = torch.transpose(weight, 0, 1)
        if weight.shape != (bits.rows, bits.cols):
            result[name] = weight  # the loader says that it is of another size
            continue
        rows, own = part_of(module._parameters["weight"])
        cols = slice(*(edge // bits.block_bytes * bits.block for edge in (own.start, own.stop)))
        values = read(weight, (rows, cols), device=device) if isinstance(weight, LazyTensor) else weight[rows, cols]
        result[name] = _as_part(bits.quantize(values), module)
    return result


def _deserialize(
    part_of: PartOf, device: torch.device, tensors: dict[str, Any], *, model: nn.Module, full_layer_name: str, **_: Any
) -> Tensors:
    """Turn the codes of a weight, and what is stored beside them, into this rank's bytes of it."""
    if len(tensors) == 1:
        return tensors
    found = {name: value[0] if isinstance(value, list) else value for name, value in tensors.items()}
    stats = {name: read(each, device=device) if isinstance(each, LazyTensor) else each for name, each in found.items()}
    module: Any = model.get_submodule(full_layer_name.rpartition(".")[0])
    old = module._parameters["weight"]
    codes = stats.pop("weight")
    bits, stored = four_bit_of(
        parts_of_saved(codes, stats), module.out_features, module.in_features, module.compute_dtype
    )
    if bits.block != old.four_bit.block:
        raise ValueError(
            f"{full_layer_name} is stored in blocks of {bits.block} numbers, and not of {old.four_bit.block} as "
            "expected: quantize the model in full precision with BitsAndBytesConfig(load_in_4bit=True)."
        )
    # With as many bytes as the file has for a scale.
    rows, own = part_of(with_shard(old, torch.empty(0, 0, dtype=torch.uint8, device="meta"), bits))
    shard = stored[rows, own].contiguous()
    module._parameters["weight"] = with_shard(old, shard.to("meta"), bits)
    return {"weight": _as_part(shard, module)}


def _as_part(stored: Tensor, module: Any) -> Tensor:
    stored.is_part = True  # type: ignore[attr-defined]  # as hf_loader marks what it has read
    is_read(module)
    return stored
