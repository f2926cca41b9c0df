"""The model around its blocks: where the residual stream is divided among the ranks, and where it is whole again.

    embedding         [B, S, H] on every rank of (x, y)
    first layer       takes this rank's tokens, [1, T/(x*y), H]
    ... layers, last norm ...
    decoder's output  whole again, unless the loss will take it as it is (training with labels)

One token at a time without gradients (decoding) the residual stream stays whole: there is nothing to divide.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hf_axonn.collectives import gather_replicated
from hf_axonn.layouts import Tokens, gather_tokens, take_tokens
from hf_axonn.loss import ShardedCausalLMLoss
from hf_axonn.plans import Plan
from hf_axonn.state import ModelState
from hf_axonn.styles import wrap_forward


def install_decoder(state: ModelState, model: nn.Module, plan: Plan) -> None:
    """Divide the residual stream at the first decoder layer and gather it at the decoder's end."""
    layers = [model.get_submodule(name) for name in plan.layers]
    for layer in layers:
        wrap_forward(layer, functools.partial(_layer, state, layer, layer is layers[0]))
    wrap_forward(model.get_submodule(plan.decoder), functools.partial(_decoder, state))


def _layer(
    state: ModelState, layer: nn.Module, first: bool, original: Callable, hidden_states: Tensor, *args, **kwargs
):
    if first:
        batch, seq = hidden_states.shape[:2]
        state.tokens = Tokens(batch, seq, sharded=torch.is_grad_enabled() or seq > 1)
        if state.tokens.sharded:
            hidden_states = take_tokens(hidden_states, state.tokens, state.mesh)
    if layer.training and getattr(layer, "gradient_checkpointing", False):
        _keep_tokens_for_recomputation(state, layer)
    return original(hidden_states, *args, **kwargs)


def _keep_tokens_for_recomputation(state: ModelState, layer: nn.Module) -> None:
    """A checkpointed layer runs again in backward, when another batch may have passed: give it back its own."""
    checkpoint = layer._gradient_checkpointing_func
    if getattr(checkpoint, "keeps_tokens", False):
        return

    def with_tokens(function: Callable, *args, **kwargs):
        tokens = state.tokens

        def again(*inner_args, **inner_kwargs):
            with state.passing(tokens):
                return function(*inner_args, **inner_kwargs)

        return checkpoint(again, *args, **kwargs)

    with_tokens.keeps_tokens = True
    layer._gradient_checkpointing_func = with_tokens


def _decoder(state: ModelState, original: Callable, *args, **kwargs):
    output = original(*args, **kwargs)
    if isinstance(output, dict) and output.get("attentions") is not None:
        output["attentions"] = tuple(_all_heads(state, weights) for weights in output["attentions"])
    tokens = state.tokens
    if tokens is None or not tokens.sharded:
        state.tokens = None
        return output

    def whole(hidden: Tensor) -> Tensor:
        return gather_tokens(hidden, tokens, state.mesh)

    if isinstance(output, dict):
        if not state.defer_head:
            output["last_hidden_state"] = whole(output["last_hidden_state"])
        if output.get("hidden_states") is not None:  # the first is what came out of the embedding
            first, *others = output["hidden_states"]
            output["hidden_states"] = (first, *map(whole, others))
    elif any(isinstance(value, tuple) for value in output):
        raise ValueError("output_hidden_states and output_attentions of a parallelized model need return_dict=True.")
    else:
        output = (output[0] if state.defer_head else whole(output[0]), *output[1:])
    if not state.defer_head:
        state.tokens = None
    return output


def _all_heads(state: ModelState, weights: Tensor) -> Tensor:
    """Attention weights [B, own heads, S, S] -> [B, heads, S, S]. All-gather over the axes that divide the heads."""
    if not state.attention_axes:
        return weights
    blocks = gather_replicated(weights, state.mesh.group(*state.attention_axes))
    return blocks.movedim(0, 1).flatten(1, 2)


def install_causal_lm(state: ModelState, model: nn.Module) -> None:
    """Mark where a pass of the whole model begins, and decide whether its head is left to the loss."""
    signature = inspect.signature(model.forward)

    def forward(original: Callable, *args, **kwargs):
        state.begin_forward()
        state.in_forward = True
        given = signature.bind_partial(*args, **kwargs).arguments
        logits_to_keep = given.get("logits_to_keep", 0)
        state.defer_head = (
            model.training
            and torch.is_grad_enabled()
            and given.get("labels") is not None
            and state.has_head
            and isinstance(logits_to_keep, int)
            and logits_to_keep == 0
            and isinstance(getattr(model, "loss_function", None), ShardedCausalLMLoss)
        )
        try:
            return original(*args, **kwargs)
        finally:
            state.tokens, state.defer_head, state.in_forward = None, False, False

    wrap_forward(model, forward)
    base = getattr(model, getattr(model, "base_model_prefix", None) or "", None)
    if isinstance(base, nn.Module) and base is not model:
        wrap_forward(base, functools.partial(_base_model, state))
    if state.mesh.size("z") > 1 and hasattr(model, "generate"):
        model.generate = functools.partial(_generate, model.generate)


def _base_model(state: ModelState, original: Callable, *args, **kwargs):
    """The model without its head, which may also be called on its own."""
    if not state.in_forward:
        state.begin_forward()
    return original(*args, **kwargs)


def _generate(original: Callable, *args, **kwargs):
    """Every forward gathers weights over z, so all ranks go on until the longest row of all is done."""
    if kwargs.get("use_cache") is False:
        # Transformers then lengthens the mask of a rank that is done, but not its tokens, and fails.
        raise ValueError("generate(use_cache=False) is not supported on a grid with z > 1: leave use_cache away.")
    kwargs.setdefault("synced_gpus", True)
    return original(*args, **kwargs)
