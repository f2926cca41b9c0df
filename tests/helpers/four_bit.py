"""Tiny models whose Linears have 4 bits, and the same ones with the dequantized weights in plain Linears."""

from __future__ import annotations

import copy

import torch
from torch import nn

from hf_axonn.engine.linears import is_conv1d, is_linear, linear_size
from tests.helpers.models import tiny_model


# Rows of 2 or 4 whole blocks of 64: they divide over x = 2 and y = 2.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
}


WIDE = {"hidden_size": 256, "head_dim": 32}  # 4 blocks, which divide over x = 4 and y = 4


def quantized_model(
    kind: str = "llama",
    *,
    quant_type: str = "nf4",
    double: bool = False,
    head: bool = False,
    dtype=torch.float64,
    **changes,
):
    """A model in `dtype` but for the Linears of its layers, and its head if asked for, which bitsandbytes has
    quantized from float32."""
    import bitsandbytes as bnb

    sizes = {name: size for name, size in SIZES.items() if kind != "gpt2" or name != "num_key_value_heads"}
    model = tiny_model(kind, dtype=dtype, **sizes | changes)
    for name, module in list(model.named_modules()):
        if is_linear(module) and (head or "lm_head" not in name):
            rows, cols = linear_size(module)
            linear = bnb.nn.Linear4bit(
                cols,
                rows,
                module.bias is not None,
                compute_dtype=dtype,
                compress_statistics=double,
                quant_type=quant_type,
            )
            weight = (module.weight.data.t() if is_conv1d(module) else module.weight.data).float().contiguous()
            linear.weight = bnb.nn.Params4bit(
                weight, False, compress_statistics=double, quant_type=quant_type, module=linear
            )
            linear.bias = module.bias
            model.set_submodule(name, linear.to("cpu"))
    model.is_loaded_in_4bit = True
    return model


def dequantized_model(model: nn.Module) -> nn.Module:
    """A copy of a quantized model with plain Linears that hold what bitsandbytes makes of its weights, in float64."""
    import bitsandbytes as bnb

    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, bnb.nn.Linear4bit):
            linear = nn.Linear(module.in_features, module.out_features, module.bias is not None, dtype=torch.float64)
            numbers = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            linear.weight = nn.Parameter(numbers.double(), requires_grad=False)
            linear.bias = module.bias
            model.set_submodule(name, linear)
    model.is_loaded_in_4bit = False
    return model
