"""Checks that the positions of a model's rows can be divided among ranks, as context does; and numbers them.

Each token has to be computed by itself but in attention, whose heads are divided meanwhile
(layers/context_attention.py), or which gathers whole rows. No communication, no change to the model.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from hf_axonn.architectures.plan import PER_TOKEN, ShardingPlan, is_per_token
from hf_axonn.architectures.trials import expands_by_position
from hf_axonn.compat.attention import (
    EXPAND,
    count_by_embeddings,
    counts_positions,
    expands_latents,
    finds_attention_function,
    mask_functions,
    numbers_positions,
    uses_alibi,
)
from hf_axonn.compat.peft import wrapped_modules
from hf_axonn.compat.transformers import has_causal_lm_loss
from hf_axonn.engine.linears import is_linear, linear_size


MIXES = {  # types whose code reads along the row, or fails on pads, where nothing else shows it
    "blt": "its patches of bytes reach across ranks",
    "gemma3n_text": "the zeros that may fill up rows have no gradient where it divides by their magnitude",
    "doge": "its attention mask is computed from values of whole rows",
}
# Types whose forward counts positions in its code: whether it then numbers the tokens that its mask keeps, or all.
COUNTS_MASK = {"opt": True, "biogpt": False}


def why_rows_stay_whole(model: nn.Module, plan: ShardingPlan) -> str:
    """Return why context cannot divide the positions of a model's rows, or nothing where it is known that it can."""
    if plan.decoder is None or not has_causal_lm_loss(model):
        return "it is no causal language model whose layers are known" + (f" ({plan.reason})" if plan.reason else "")
    attends = plan.full_sequence or any(block.is_attention for block in plan.blocks)
    if attends and not (takes_positions(model) or uses_alibi(model)):
        return "its forward takes no position_ids, and would number the positions of each rank from 0"
    if attends and not mask_functions(model):
        return "it does not make its attention masks by the functions of transformers.masking_utils"
    config: Any = model.config
    if reason := MIXES.get(config.model_type):
        return reason
    if getattr(config, "ple_layer_ids", None):
        return "its n-grams of ids reach across ranks"
    if getattr(config, "z_loss_coefficient", 0):
        return "its z_loss is a mean over logits, which a rank would take of its own: set z_loss_coefficient to 0"
    if counts_positions(model) and config.model_type not in COUNTS_MASK:
        return "it counts positions from its tokens or its attention mask"
    for block in plan.blocks:
        attention = model.get_submodule(block.entry)
        if block.is_attention and block.latent and (reason := why_heads_stay(attention)):
            return f"its attention makes latents and {reason} ({block.entry}, a {type(attention).__name__})"
    return ""


def gathering_attentions(model: nn.Module, plan: ShardingPlan) -> list[str]:
    """Return the names of the attention blocks that gather whole rows, as their heads stay."""
    attentions = [block.entry for block in plan.blocks if block.is_attention]
    return [name for name in attentions if why_heads_stay(model.get_submodule(name))]


def runs_along_row(module: nn.Module) -> bool:
    """Return whether a module that gets the full sequence needs whole rows: not attention whose heads are exchanged,
    and not an MLP, as shared experts are, which computes each token by itself."""
    by_token = type(module).__name__.endswith("MLP") and all(map(is_per_token, module.children()))
    return not by_token and bool(why_heads_stay(module))


def takes_positions(model: nn.Module) -> bool:
    """Return whether a model's forward takes position_ids."""
    return "position_ids" in inspect.signature(model.forward).parameters


def number_positions(model: nn.Module, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Number the positions of whole rows as a model does that is given none.

    Args:
        tokens: ids [B, S], or embeddings [B, S, H].
    Returns:
        [1 or B, S]: from 0 on, or as the model counts them from its ids or its mask.
    """
    config: Any = model.config
    if attention_mask is not None and COUNTS_MASK.get(config.model_type):
        return attention_mask.cumsum(dim=1) * attention_mask - 1
    counted = count_by_embeddings(model, tokens) if takes_positions(model) else None
    return torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0) if counted is None else counted


def latent_features(attention: Any, up: nn.Module) -> int:
    """Return the features of a position's latent and rotary key, of which attention makes its keys and values.

    Args:
        up: the Linear that makes them of latents.
    Returns:
        0 where it is not known that each position's are made of its own, and in a sliding window, of which few keys
        and values are needed.
    """
    if not expands_latents(attention) or getattr(attention, "sliding_window", None):
        return 0
    rotary: int = attention.qk_rope_head_dim
    alone = expands_by_position(getattr(attention, EXPAND), attention, up, rotary)
    return linear_size(up)[1] + rotary if alone else 0


def why_heads_stay(attention: nn.Module) -> str:
    """Return why a module's heads cannot be exchanged for positions, or nothing."""
    if not finds_attention_function(attention):
        return "does not take its attention function from ALL_ATTENTION_FUNCTIONS"
    if numbers_positions(attention):
        return "numbers positions by itself"
    if "prev_topk_indices" in inspect.signature(attention.forward).parameters:
        return "may be given the keys that another layer has chosen of whole rows"
    innermost = {wrapper: inner for _, wrapper, inner in wrapped_modules(attention)}  # adapters add to each token
    for name, child in attention.named_children():
        child = innermost.get(child, child)
        if not (is_linear(child) or PER_TOKEN.search(type(child).__name__)):
            return f"has a part, {name}, that may read along the row"
    return ""
