"""A model over a grid with context: a call takes whole rows, computes this rank's positions, and returns whole rows.

    arguments   [B, S, ...] -> [B, L, ...]: ids or embeddings, positions (made where none are given), what else has a
                value a token. Labels stay whole: the loss takes them (losses/vocab_parallel.py)
    masks       made of the whole rows, by the model's own functions
    attention   on whole rows with a part of the heads (layers/context_attention.py)
    output      logits and hidden states are gathered: [B, S, ...], alike on all ranks of context

Everything else computes for each token by itself. A model is refused where that is not known.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_axonn.architectures.divided_rows import why_heads_stay, why_rows_stay_whole
from hf_axonn.architectures.plan import ShardingPlan
from hf_axonn.compat.attention import mask_functions, route_attention
from hf_axonn.compat.transformers import text_config
from hf_axonn.engine.rows import Rows
from hf_axonn.layers.base import patch_forward, patch_innermost, replaced, split_hidden_states
from hf_axonn.layers.context_attention import ContextAttention
from hf_axonn.parallel.sharded_model import ShardedModel
from hf_axonn.topology.grid import Grid
from hf_axonn.topology.heads import Heads


WHOLE = ("labels", "shift_labels")  # arguments that the loss takes its positions of
CUSTOM_MASKS = ("or_mask_function", "and_mask_function", "block_sequence_ids", "encoder_hidden_states")


def check_context(model: nn.Module, plan: ShardingPlan, grid: Grid) -> None:
    """Refuse a model of which it is not known that its rows can be divided. No communication.

    Raises:
        ValueError: it is one of those of `why_rows_stay_whole`, or has heads that context does not divide.
    """
    if reason := _why_not(model, plan, grid):
        raise ValueError(
            f"context={grid.context} divides the positions of rows, which is not possible for {type(model).__name__} "
            f"over the grid {grid}: {reason}. Omit context, and divide long rows over x."
        )


def _why_not(model: nn.Module, plan: ShardingPlan, grid: Grid) -> str:
    if reason := why_rows_stay_whole(model, plan):
        return reason
    here = grid.place(0)
    for block in plan.blocks:
        if block.query and (heads := Heads.divide(block.query, block.kv, here).own_query(here)) % grid.context:
            return f"{heads} of its {block.query} heads are on a rank of (x, y), which context does not divide"
    return ""


def describe_rows(model: nn.Module, plan: ShardingPlan, grid: Grid) -> str:
    """Return a line for the report; empty without context."""
    if grid.context == 1:
        return ""
    along = [name for name in plan.full_sequence if why_heads_stay(model.get_submodule(name))]
    attention = sum(1 for block in plan.blocks if block.query) + len(plan.full_sequence) - len(along)
    text = (
        f"positions of rows over {grid.context} ranks of context: {attention} attentions exchange heads for positions"
    )
    return f"{text}, {len(along)} modules run on whole rows ({along[0]} ...)" if along else text


def install_context(state: ShardedModel, model: nn.Module, plan: ShardingPlan) -> None:
    """Let calls of a model and of its base model compute this rank's positions. No communication.

    Collectives of a call: those of its attention (`ContextAttention`), of its loss, and an all-gather over context of
    each tensor that it returns.
    """
    route = ContextAttention(state)
    for name in (*(block.entry for block in plan.blocks if block.query), *plan.full_sequence):
        if not why_heads_stay(module := model.get_submodule(name)):
            route_attention(module, route)
        else:
            patch_innermost(module, functools.partial(_along_row, state))
    for module in model.modules():
        if _follows_longest_row(module):
            patch_forward(module, functools.partial(_rotary, state))
    masks = mask_functions(model)
    assert plan.decoder is not None  # `check_context` has seen to that
    for each in dict.fromkeys((model, model.get_submodule(plan.decoder))):
        names = list(inspect.signature(each.forward).parameters)
        patch_forward(each, functools.partial(_forward, state, model, names, masks))
    if hasattr(model, "generate"):
        vars(model)["generate"] = functools.partial(_refuse_generate, state.grid)


def _forward(
    state: ShardedModel,
    model: nn.Module,
    names: list[str],
    masks: list[tuple[dict[str, Any], str]],
    original: Callable,
    /,
    *args,
    **kwargs,
):
    if state.context.rows is not None:  # the base model, inside of the model
        return original(*args, **kwargs)
    given = dict(zip(names, args, strict=False)) | kwargs
    rows = _rows_of(state, model, given)
    own = {name: value if name in WHOLE else _take(rows, value) for name, value in given.items()}
    own["position_ids"] = rows.take(rows.position_ids)
    if keep := given.get("logits_to_keep", 0):
        own["logits_to_keep"] = rows.last(keep)
    if "use_cache" in names:
        own["use_cache"] = False
    if rows.filled and rows.attention_mask is None:  # for what else reads it, as the auxiliary loss of routers
        own["attention_mask"] = rows.take(torch.ones_like(rows.position_ids).expand(rows.batch, -1))
    with state.context.with_rows(rows), _masks_of(rows, masks):
        output = original(**own)
    stage = state.context.stage
    if stage is not None and not stage.last:
        return output
    if not keep:
        return _gather(rows, output)
    logits, output["logits"] = rows.gather_last(output["logits"], keep), None
    output = _gather(rows, output)
    output["logits"] = logits
    return output


def _rows_of(state: ShardedModel, model: nn.Module, given: Mapping[str, Any]) -> Rows:
    """Return the rows that a call is given.

    Raises:
        ValueError: it asks for something that is not there for divided rows.
    """
    config = text_config(model)
    keep = given.get("logits_to_keep", 0)
    alone = given.get("labels") is None and given.get("return_dict") is not False
    unsupported = {
        "past_key_values": given.get("past_key_values") is not None,
        "use_cache=True": bool(given.get("use_cache")),
        "logits_to_keep with labels, of given places or in a tuple": not isinstance(keep, int) or (keep and not alone),
        "output_attentions": bool(given.get("output_attentions", getattr(config, "output_attentions", False))),
    }
    if refused := next((name for name, given_here in unsupported.items() if given_here), None):
        raise ValueError(
            f"{refused} is not supported where the positions of a row are divided ({state.grid}): omit it, or load "
            "the model or its checkpoint on a grid without context."
        )
    tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    if not isinstance(tokens, Tensor):
        raise ValueError("a model over a grid with context is called with input_ids or inputs_embeds.")
    batch, length = tokens.shape[:2]
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if positions is None:
        positions = torch.arange(length, device=tokens.device).unsqueeze(0)
    elif positions.dim() != 2 or positions.shape[1] != length:
        raise ValueError(f"position_ids are {list(positions.shape)}, but of rows of {length} they are [B, {length}].")
    return Rows(state.mesh, batch, length, positions, mask, documents=_separates(model, given))


def _separates(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """Return whether the model's own masks would part documents by the positions of a call: not with a cache."""
    if given.get("position_ids") is None or given.get("attention_mask") is not None:
        return False
    if given.get("use_cache") is not None or not getattr(text_config(model), "use_cache", False):
        return True  # use_cache=True has been refused
    return any(module.training and getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _take(rows: Rows, value: Any) -> Any:
    """This rank's positions of an argument that has a value for each token; anything else as it is."""
    if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == rows.length:
        if value.shape[0] in (1, rows.batch):
            return rows.take(value)
    return value


def _along_row(state: ShardedModel, original: Callable, /, *args, **kwargs):
    """Run a module that reads along the row on whole rows, on every rank of context, and take this rank's positions.

    Collectives: an all-gather over context of each argument with a value a token; backward: its reduce-scatter.
    """
    rows = state.context.rows
    if rows is None:
        return original(*args, **kwargs)

    def whole(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(whole, value))
        divided = isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == rows.own_length
        return rows.join(value) if divided and value.shape[0] in (1, rows.batch) else value

    def own(value: Tensor) -> Tensor:
        return rows.take(value.reshape(rows.batch, rows.length, -1)).reshape(*shape[:-1], -1)

    hidden, args, kwargs = split_hidden_states(args, kwargs)
    shape = hidden.shape  # [B, L, H], or [B * L, H]
    hidden = rows.join(hidden.reshape(rows.batch, rows.own_length, -1))
    hidden = hidden if len(shape) == 3 else hidden.flatten(0, 1)
    output = original(hidden, *map(whole, args), **{name: whole(value) for name, value in kwargs.items()})
    return own(output) if isinstance(output, Tensor) else type(output)((own(output[0]), *output[1:]))


@contextlib.contextmanager
def _masks_of(rows: Rows, masks: list[tuple[dict[str, Any], str]]) -> Iterator[None]:
    """Let the model's code inside make its attention masks of whole rows."""
    with contextlib.ExitStack() as stack:
        for names, name in masks:
            stack.enter_context(replaced(names, {name: functools.partial(_make_mask, rows, names[name])}))
        yield


def _make_mask(rows: Rows, function: Callable, *args, **kwargs):
    signature = inspect.signature(function)
    given = signature.bind(*args, **kwargs).arguments
    if custom := next((name for name in CUSTOM_MASKS if given.get(name) is not None), None):
        raise ValueError(f"an attention mask with {custom} cannot be made of rows that are divided over context.")
    embeds = next(name for name in ("inputs_embeds", "input_embeds") if name in given)
    given[embeds] = given[embeds].new_empty(()).expand(rows.batch, rows.length, 1)  # read for its shape
    given["attention_mask"] = rows.attention_mask
    if "position_ids" in signature.parameters:
        given["position_ids"] = rows.position_ids if rows.documents else None
    return function(**given)


def _follows_longest_row(module: nn.Module) -> bool:
    """Return whether the angles of a rotary embedding depend on the largest position of a batch."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return not {"dynamic", "longrope"}.isdisjoint(kinds)


def _rotary(state: ShardedModel, original: Callable, hidden: Tensor, position_ids: Tensor, *args, **kwargs):
    """Let a rotary embedding see the largest position of the whole rows: one column more, which is left out again."""
    rows = state.context.rows
    if rows is None:
        return original(hidden, position_ids, *args, **kwargs)
    largest = rows.position_ids.max().expand(len(position_ids), 1)
    angles = original(hidden, torch.cat([position_ids, largest], dim=1), *args, **kwargs)
    return tuple(each[:, :-1] for each in angles)


def _gather(rows: Rows, output: Any) -> Any:
    """Whole rows of what a model returns: of tensors [B, L, ...], and of router logits [B * L, experts]."""
    if isinstance(output, Tensor):
        return rows.gather(output) if output.dim() >= 2 and rows.is_own(output) else output
    if isinstance(output, dict):
        for name, value in output.items():
            output[name] = _gather(rows, value) if name != "router_logits" else _whole_routers(rows, value)
        return output
    if isinstance(output, tuple | list):
        return type(output)(_gather(rows, each) for each in output)
    return output


def _whole_routers(rows: Rows, logits: Any) -> tuple[Tensor, ...] | None:
    """Router logits [B * L, experts] of each layer -> [B * S, experts]; None in training, where the auxiliary loss has
    been made of them and gathering all would cost more than the layer."""
    if not logits or torch.is_grad_enabled():
        return None
    return tuple(rows.gather(each.view(rows.batch, rows.own_length, -1)).flatten(0, 1) for each in logits)


def _refuse_generate(grid: Grid, *_: Any, **__: Any) -> None:
    raise ValueError(
        f"generate is not supported where the positions of a row are divided ({grid}): load the model, or its "
        "checkpoint, on a grid without context."
    )
