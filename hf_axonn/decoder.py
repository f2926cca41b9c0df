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
from typing import Any

import torch
from torch import Tensor, nn

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
    tokens = state.tokens
    if tokens is None or not tokens.sharded:
        state.tokens = None
        return output
    local_shape = (1, tokens.padded(state.mesh) // state.mesh.size("x", "y"))

    def whole(value: Any) -> Any:
        if isinstance(value, Tensor):
            local = value.dim() == 3 and value.shape[:2] == local_shape and local_shape != (tokens.batch, tokens.seq)
            return gather_tokens(value, tokens, state.mesh) if local else value
        return tuple(whole(item) for item in value) if type(value) is tuple else value

    if isinstance(output, dict):
        last = output["last_hidden_state"]
        if not state.defer_head:
            output["last_hidden_state"] = gather_tokens(last, tokens, state.mesh)
        if output.get("hidden_states") is not None:
            output["hidden_states"] = whole(output["hidden_states"])
    else:
        first = output[0] if state.defer_head else gather_tokens(output[0], tokens, state.mesh)
        output = (first, *(whole(value) for value in output[1:]))
    if not state.defer_head:
        state.tokens = None
    return output


def install_causal_lm(state: ModelState, model: nn.Module) -> None:
    """Mark where a pass of the whole model begins, and decide whether its head is left to the loss."""
    signature = inspect.signature(model.forward)

    def forward(original: Callable, *args, **kwargs):
        state.begin_forward()
        given = signature.bind_partial(*args, **kwargs).arguments
        logits_to_keep = given.get("logits_to_keep", 0)
        state.defer_head = (
            model.training
            and torch.is_grad_enabled()
            and given.get("labels") is not None
            and isinstance(logits_to_keep, int)
            and logits_to_keep == 0
            and isinstance(getattr(model, "loss_function", None), ShardedCausalLMLoss)
        )
        try:
            return original(*args, **kwargs)
        finally:
            state.tokens, state.defer_head = None, False

    wrap_forward(model, forward)
    if state.mesh.size("z") > 1 and hasattr(model, "generate"):
        model.generate = functools.partial(_generate, model.generate)


def _generate(original: Callable, *args, **kwargs):
    """Every forward gathers weights over z, so all ranks go on until the longest row of all is done."""
    kwargs.setdefault("synced_gpus", True)
    return original(*args, **kwargs)
