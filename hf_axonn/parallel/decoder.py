"""The model around its blocks: where the residual stream is divided among the ranks, and where it is gathered.

    embedding         [B, S, H] on every rank of (x, y)
    first layer       takes this rank's tokens, [1, T/(x*y), H], or [1, T/x, H/y] in the feature layout
    last layer        turns features into tokens, [1, T/(x*y), H]
    last norm         on this rank's tokens
    between layers    in `residual_dtype`; within a layer in the widest of what is added up, as autocast has it
    decoder's output  gathered, unless the loss will take it as it is (training with labels)

Decoding, one token at a time without gradients, replicates the residual stream.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_axonn.architectures.plan import ShardingPlan
from hf_axonn.compat.transformers import checkpoints_in_forward, wrap_checkpointing
from hf_axonn.distributed.collectives import gather_replicated
from hf_axonn.engine.activation_layouts import Tokens, features_to_tokens, gather_tokens, take_tokens
from hf_axonn.engine.context import FirstRun
from hf_axonn.engine.gradient_sync import watch_backward
from hf_axonn.layers.base import patch_forward, split_hidden_states
from hf_axonn.layers.vocabulary import warn_of_own_means
from hf_axonn.losses.router_aux import full_router_logits
from hf_axonn.losses.vocab_parallel import ShardedCausalLMLoss
from hf_axonn.parallel.generation import install_generate
from hf_axonn.parallel.sharded_model import ShardedModel


def install_decoder(state: ShardedModel, model: nn.Module, plan: ShardingPlan) -> None:
    """Divide the residual stream at the first decoder layer and gather it at the decoder's end, or at the last layer's
    where something other than a norm follows."""
    layers = state.layers
    for layer in layers:
        last = plan.ends and layer is layers[-1]
        end = None if not last else "tokens" if plan.final is not None else "full"
        first = plan.begins and layer is layers[0]
        patch_forward(layer, functools.partial(_layer, state, plan, inspect.signature(layer.forward), first, end))
    for name in plan.full_sequence:
        state.install(
            model.get_submodule(name),
            functools.partial(patch_forward, forward=functools.partial(_full_sequence, state)),
        )
    decoder = model.get_submodule(plan.decoder)
    patch_forward(decoder, functools.partial(_decoder, state, decoder, plan.final is None))
    state.refuse_copies(decoder, *layers)


def _layer(
    state: ShardedModel,
    plan: ShardingPlan,
    signature: inspect.Signature,
    first: bool,
    end: str | None,
    original: Callable,
    /,
    *args,
    **kwargs,
):
    """Run a decoder layer: the first takes this rank's tokens, the last returns `tokens` or gathers `full` ones.

    Raises:
        RuntimeError: hidden states leave it in another shape: its code has combined them with values of all tokens.
    """
    hidden, args, kwargs = split_hidden_states(args, kwargs)
    if first:
        came, hidden = hidden, state.as_residual(hidden)
        tokens = state.tokens_of(hidden)
        if plan.borrows and not torch.is_grad_enabled():
            # The decoder may drop tokens between layers where nobody asks for their logits.
            tokens = replace(tokens, sharded=False, features=0)
        state.context.enter_layers(tokens, hidden=came)
        if tokens.sharded:
            hidden = take_tokens(hidden, tokens, state.grid_mesh)
    tokens, mesh = state.context.tokens, state.grid_mesh
    args = (hidden, *args)
    if plan.per_token and tokens.sharded:
        given = signature.bind(*args, **kwargs)
        values = {name: given.arguments[name] for name in plan.per_token if given.arguments.get(name) is not None}
        given.arguments |= {name: take_tokens(value, tokens, mesh) for name, value in values.items()}
        args, kwargs = given.args, given.kwargs
    output = original(*args, **kwargs)
    if state.residual_dtype is not None:
        output = _map_first(output, state.as_residual)
    if tokens.sharded:
        _map_first(output, functools.partial(_check_shape, hidden.shape))
    if end == "full" and tokens.sharded:
        return _map_first(output, lambda hidden: gather_tokens(hidden, tokens, mesh))
    if end == "tokens" and tokens.sharded and tokens.features:
        return _map_first(output, lambda hidden: features_to_tokens(hidden, tokens.features, mesh))
    return output


def _check_shape(shape: torch.Size, hidden: Tensor) -> Tensor:
    if hidden.shape != shape:
        raise RuntimeError(
            f"a decoder layer got hidden states {list(shape)}, this rank's tokens, and returned {list(hidden.shape)}: "
            "it has combined them with an argument that has values for all tokens, which is not supported."
        )
    return hidden


def _map_first(output, function: Callable):
    """Apply `function` to a module's output, or to the first of several."""
    if isinstance(output, Tensor):
        return function(output)
    return type(output)((function(output[0]), *output[1:]))


def _full_sequence(state: ShardedModel, original: Callable, /, *args, **kwargs):
    """A module that needs the full sequence: tokens are gathered over (x, y) for it, every rank does all of its work
    (but for its Linears), and takes its own tokens of the first result."""
    tokens, mesh = state.context.tokens, state.grid_mesh
    if tokens is None or not tokens.sharded:
        return original(*args, **kwargs)
    shape = split_hidden_states(args, kwargs)[0].shape

    def full(value):
        if not (isinstance(value, Tensor) and value.shape == shape):
            return value
        return gather_tokens(value.reshape(1, -1, shape[-1]), tokens, mesh)

    with state.context.with_tokens(None):
        output = original(*map(full, args), **{name: full(value) for name, value in kwargs.items()})
    return _map_first(output, lambda hidden: take_tokens(hidden, tokens, mesh).view(*shape[:-1], -1))


def install_recomputation(state: ShardedModel, model: nn.Module) -> None:
    """Let every layer that can be checkpointed run again as it ran at first."""

    def forward(checkpointed: list[nn.Module], original: Callable, /, *args, **kwargs):
        for layer in checkpointed:
            if layer.training and layer.gradient_checkpointing:
                _keep_for_recomputation(state, layer)
        return original(*args, **kwargs)

    own = (layer for layer in model.modules() if hasattr(layer, "gradient_checkpointing"))
    layers = [layer for layer in own if not isinstance(layer, PreTrainedModel)]
    if checkpoints_in_forward():
        for layer in layers:
            patch_forward(layer, functools.partial(forward, [layer]))
    elif layers:  # their checkpoints are made before their forwards begin
        for module in dict.fromkeys((model, getattr(model, "base_model", model))):
            patch_forward(module, functools.partial(forward, layers))


def _keep_for_recomputation(state: ShardedModel, layer: nn.Module) -> None:
    """Let the checkpoints of a layer be a `PassKeeper`."""

    def wrap(checkpoint: Callable) -> Callable:
        return checkpoint if isinstance(checkpoint, PassKeeper) else PassKeeper(state, layer, checkpoint)

    wrap_checkpointing(layer, wrap)


class PassKeeper:
    """A checkpoint function of a layer that runs again in backward, when another batch may have passed: its tokens
    and the seed of its dropout are put back, and what it found out (`PassContext.once`) is there.

    With a checkpoint in its forward what then runs is the forward of its class without what was put around it, so its
    own parameters are put back, too, and what it computes while tokens travel to experts of its own.
    """

    def __init__(self, state: ShardedModel, layer: nn.Module, checkpoint: Callable) -> None:
        self.state, self.layer, self.checkpoint = state, layer, checkpoint

    def __call__(self, function: Callable, *args, **kwargs):
        region = self.state.regions.get(self.layer)
        if region is not None and isinstance(function, functools.partial) and function.func is region.plain:
            function = functools.partial(region.run, *function.args[1:], **function.keywords)  # without the layer
        context = self.state.context
        again, first_run, calls = context.snapshot(), FirstRun(), itertools.count()

        def run(*inner_args, **inner_kwargs):
            if next(calls) == 0:  # all is in its place, and dropout counts on after the layer
                with context.with_first_run(first_run):
                    return function(*inner_args, **inner_kwargs)
            first_run.begin_again()
            ahead = self.state.ahead.get(self.layer) if checkpoints_in_forward() else None
            forward = function if ahead is None else functools.partial(ahead.run, function)
            with again(), context.with_first_run(first_run), self._plain_parameters():
                return forward(*inner_args, **inner_kwargs)

        return self.checkpoint(run, *args, **kwargs)

    @contextlib.contextmanager
    def _plain_parameters(self) -> Iterator[None]:
        """Put plain tensors in the place of the layer's parameters inside, where nothing around its forward does."""
        layers, readings = self.state.sharded_layers, self.state.readings
        readers = [layers.get(self.layer), *(reading for reading in readings if reading.module is self.layer)]
        with contextlib.ExitStack() as stack:
            for reader in readers if checkpoints_in_forward() else ():
                if hasattr(reader, "plain_parameters"):
                    stack.enter_context(reader.plain_parameters())
            yield


def _decoder(state: ShardedModel, decoder: nn.Module, ended: bool, original: Callable, /, *args, **kwargs):
    """Run the decoder, whose first layer takes this rank's tokens, and return what it has for all tokens.

    Raises:
        ValueError: it leaves out layers at random, the first among them; or states are requested in a tuple.
    """
    if decoder.training and (drop := getattr(decoder, "layerdrop", 0)):
        raise ValueError(
            f"layerdrop is {drop}: layers that are left out at random, perhaps the first one, which divides tokens, "
            f"are not supported over the grid {state.grid}: set layerdrop (decoder_layerdrop) of the config to 0."
        )
    output = original(*args, **kwargs)
    for name in ("attentions", "cross_attentions") if isinstance(output, dict) else ():
        if output.get(name) is not None:
            output[name] = _all_heads(state, output[name])
    tokens, stage = state.context.tokens, state.context.stage
    if stage is not None and not stage.last and isinstance(output, dict):
        _gather_routers(state, output, stage.tokens)
    if tokens is None or not tokens.sharded:
        state.context.leave_layers()
        return output

    def full(hidden: Tensor) -> Tensor:
        return gather_tokens(hidden, tokens, state.grid_mesh)

    leave = state.context.defer_head and not ended  # to the loss, which takes this rank's tokens
    last = (lambda hidden: hidden) if leave or ended else full
    if isinstance(output, dict):
        output["last_hidden_state"] = last(output["last_hidden_state"])
        if output.get("hidden_states") is not None:
            ends = [state.context.lone, *([output["last_hidden_state"]] if ended else [])]
            states = output["hidden_states"]
            output["hidden_states"] = tuple(each if _is_whole(each, tokens, ends) else full(each) for each in states)
        _gather_routers(state, output, tokens)
    elif any(isinstance(value, tuple) for value in output):
        raise ValueError(
            "output_hidden_states, output_attentions and output_router_logits, of a call or of the config, need "
            "return_dict=True in a parallelized model."
        )
    else:
        output = (last(output[0]), *output[1:])
    if not leave:
        state.context.leave_layers()
    return output


def _is_whole(hidden: Tensor | None, tokens: Tokens, ends: Sequence[Tensor | None]) -> bool:
    """Return whether hidden states are those of all tokens, as what comes out of the embedding, or were not requested:
    `output_hidden_states` may name some. Of a single token, whose part has the same shape, `ends` are whole: what came
    to the layers, and what left them so."""
    if hidden is None:
        return True
    if tokens.count == 1:  # a checkpoint may hold another tensor over the same storage
        return any(end is not None and hidden.data_ptr() == end.data_ptr() for end in ends)
    leading = hidden.shape[-3:-1] if tokens.copies_first else hidden.shape[:2]
    return leading == (tokens.batch, tokens.seq) and hidden.shape[-1] == (tokens.features or hidden.shape[-1])


def _gather_routers(state: ShardedModel, output: dict, tokens: Tokens | None) -> None:
    """Let the router logits of an output be those of all tokens. Collectives: those of `full_router_logits`."""
    if tokens is not None and tokens.sharded and output.get("router_logits") is not None:
        output["router_logits"] = tuple(
            full_router_logits(logits, tokens, state.grid_mesh) for logits in output["router_logits"]
        )


def _all_heads(state: ShardedModel, every: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Attention weights [B, own heads, S, S] of each attention -> [B, heads, S, S]. All-gather over the axes that
    divide the heads."""
    axes = state.attention_axes
    if len(set(axes)) < 2:  # of all attentions alike, of which some may hand on no weights
        axes = (axes[:1] or [()]) * len(every)
    return tuple(_heads_of(state, weights, over) for weights, over in zip(every, axes, strict=True))


def _heads_of(state: ShardedModel, weights: Tensor, axes: tuple[str, ...]) -> Tensor:
    if not axes:
        return weights
    blocks = gather_replicated(weights, state.grid_mesh.group(*axes))
    return blocks.unflatten(2, (state.attention_rounds, -1)).movedim(0, 2).flatten(1, 3)


def install_causal_lm(state: ShardedModel, model: nn.Module) -> None:
    """Mark where a pass of the whole model begins, and decide whether its head is left to the loss."""
    state.plan_gathers({module: name for name, module in model.named_modules()})
    signature = inspect.signature(model.forward)

    def forward(original: Callable, *args, **kwargs):
        given = signature.bind_partial(*args, **kwargs).arguments
        logits_to_keep = given.get("logits_to_keep", 0)
        loss = getattr(model, "loss_function", None)
        defer_head = (
            isinstance(loss, ShardedCausalLMLoss)
            and (loss.takes_logits or (model.training and torch.is_grad_enabled()))
            and given.get("labels") is not None
            and state.has_head
            and isinstance(logits_to_keep, int)
            and logits_to_keep == 0
        )
        try:
            state.context.begin_forward(state.weights, whole_model=True, defer_head=defer_head)
            output = original(*args, **kwargs)
        finally:
            state.context.end_forward()
        if state.context.stage is None:
            if model.training and given.get("labels") is None and isinstance(loss, ShardedCausalLMLoss):
                warn_of_own_means(state)
            watch_backward(model, state, output)
        return output

    patch_forward(model, forward)
    base = getattr(model, getattr(model, "base_model_prefix", None) or "", None)
    if isinstance(base, nn.Module) and base is not model:
        patch_forward(base, functools.partial(_base_model, state, model))
    install_generate(state, model)


def _base_model(state: ShardedModel, model: nn.Module, original: Callable, /, *args, **kwargs):
    """The model without its head, which may also be called on its own."""
    if state.context.in_forward:
        return original(*args, **kwargs)
    state.context.begin_forward(state.weights)
    output = original(*args, **kwargs)
    watch_backward(model, state, output)
    return output
