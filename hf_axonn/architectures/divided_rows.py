"""Checks that the positions of a model's rows can be divided among ranks, as context does.

Each token has to be computed by itself but in attention, whose heads are divided meanwhile
(layers/context_attention.py). No communication, no change to the model.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from hf_axonn.architectures.plan import PER_TOKEN, ShardingPlan
from hf_axonn.compat.attention import counts_positions, finds_attention_function, mask_functions, numbers_positions
from hf_axonn.compat.peft import wrapped_modules
from hf_axonn.compat.transformers import has_causal_lm_loss
from hf_axonn.engine.linears import is_linear


MIXES = {  # types whose code reads along the row where nothing of the above shows it
    "blt": "its patches of bytes reach across ranks",
    "doge": "its attention mask is computed from values of whole rows",
}


def why_rows_stay_whole(model: nn.Module, plan: ShardingPlan) -> str:
    """Return why context cannot divide the positions of a model's rows, or nothing where it is known that it can."""
    if plan.decoder is None or not has_causal_lm_loss(model):
        return "it is no causal language model whose layers are known" + (f" ({plan.reason})" if plan.reason else "")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "its forward takes no position_ids, and would number the positions of each rank from 0"
    if not mask_functions(model):
        return "it does not make its attention masks by the functions of transformers.masking_utils"
    config: Any = model.config
    if reason := MIXES.get(config.model_type):
        return reason
    if getattr(config, "z_loss_coefficient", 0):
        return "its z_loss is a mean over logits, which a rank would take of its own: set z_loss_coefficient to 0"
    if counts_positions(model):
        return "it counts positions from its tokens or its attention mask"
    for block in plan.blocks:
        attention = model.get_submodule(block.entry)
        if block.query and (reason := why_heads_stay(attention)):
            return f"{block.entry}, a {type(attention).__name__}, {reason}"
    return ""


def why_heads_stay(attention: nn.Module) -> str:
    """Return why a module's heads cannot be exchanged for positions, or nothing."""
    if not finds_attention_function(attention):
        return "does not take its attention function from ALL_ATTENTION_FUNCTIONS"
    if numbers_positions(attention):
        return "numbers positions by itself"
    innermost = {wrapper: inner for _, wrapper, inner in wrapped_modules(attention)}  # adapters add to each token
    for name, child in attention.named_children():
        child = innermost.get(child, child)
        if not (is_linear(child) or PER_TOKEN.search(type(child).__name__)):
            return f"has a part, {name}, that may read along the row"
    return ""
