"""A model over a grid with context: a call takes whole rows, computes this rank's positions, and returns whole rows.

    arguments   [B, S, ...] -> [B, L, ...]: ids or embeddings, positions (made where none are given), what else has a
                value a token. Labels stay whole: the loss takes them (losses/vocab_parallel.py)
    masks       described for the whole rows, by the model's own functions, and made where attention needs them
    mixers      on whole rows with a part of the heads or channels (layers/mixer.py), or on gathered rows
    attention   on whole rows with a part of the heads, or own queries on gathered keys (layers/context_attention.py)
    output      logits and hidden states are gathered: [B, S, ...], alike on all ranks of context

Everything else computes for each token by itself. A model is refused where that is not known.

Where images are put into rows, the model around its decoder works on whole rows on every rank: its encoder of images,
the embedding, the merge, positions in several dims (M-RoPE) and masks. Rows are divided where the decoder is called.
What a rank makes of an image that lies among others' positions has no gradient there, so the sums over ranks hold.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_axonn.architectures.divided_rows import (
    gathering_attentions,
    latent_features,
    number_positions,
    runs_along_row,
    takes_positions,
    why_heads_stay,
    why_rows_stay_whole,
)
from hf_axonn.architectures.plan import ShardingPlan
from hf_axonn.compat.attention import alibi_functions, mask_functions, route_attention
from hf_axonn.compat.late_masks import make_late
from hf_axonn.compat.transformers import text_config
from hf_axonn.config import AxonnConfig
from hf_axonn.engine.linears import linear_size
from hf_axonn.engine.rows import Rows
from hf_axonn.layers.base import patch_forward, patch_innermost, replaced, split_hidden_states
from hf_axonn.layers.context_attention import ContextAttention
from hf_axonn.losses.router_aux import RouterLogits
from hf_axonn.parallel.sharded_model import ShardedModel
from hf_axonn.topology.grid import Grid
from hf_axonn.topology.heads import Heads, divide_with_context, latents_travel


# Arguments of which the loss takes its positions, and DeepStack (parallel/images.py).
WHOLE = ("labels", "shift_labels", "visual_pos_masks")
IMAGES = ("image_hidden_states", "video_hidden_states")  # outputs that have no positions
# Arguments of attention and mixers that tell where tokens stand, and which documents they are of.
POSITIONS = ("position_ids", "position_embeddings", "seq_idx")
CUSTOM_MASKS = ("or_mask_function", "and_mask_function", "block_sequence_ids", "encoder_hidden_states")


@dataclass(frozen=True)
class RowsChoice:
    """The way in which attention sees whole rows, for the whole model.

    Attributes:
        keys: whether k and v are gathered; else heads are divided (layers/context_attention.py).
        latents: names of the attentions of which what k and v are made of is gathered (layers/latent_attention.py).
        exchanging: mixers that exchange positions for heads or channels, by the names of their entries, with the
            division of these over (x, y, context); the others gather whole rows.
        reason: a line for the report; empty without context.
    """

    keys: bool = False
    latents: frozenset[str] = frozenset()
    exchanging: Mapping[str, Heads] = field(default_factory=dict)
    reason: str = ""


def choose_rows(
    model: nn.Module, plan: ShardingPlan, config: AxonnConfig, adapted: Collection[nn.Module] = ()
) -> RowsChoice:
    """Decide how attention and mixers see the rows that context divides. No communication; the model is unchanged.

    Args:
        adapted: modules that have adapters, which may get no input where positions are exchanged for heads.
    Raises:
        ValueError: it is not known that the model's rows can be divided (`why_rows_stay_whole`), or heads are
            requested that context does not divide.
    """
    grid, requested = config.grid, config.context_attention
    if grid.context == 1:
        return RowsChoice()
    if reason := why_rows_stay_whole(model, plan):
        raise ValueError(
            f"context={grid.context} divides the positions of rows, which is not possible for {type(model).__name__} "
            f"over the grid {grid}: {reason}. Omit context, and divide long rows over x."
        )
    gathering = gathering_attentions(model, plan)
    full = {name: model.get_submodule(name) for name in plan.full_sequence}
    exchanging = _exchanging_mixers(model, plan, grid, adapted)
    along = [block.entry for block in plan.blocks if block.mixer and block.entry not in exchanging]
    along += [name for name, module in full.items() if runs_along_row(module)]
    exchanged = [name for name, module in full.items() if not why_heads_stay(module)]
    undivided = _undivided_heads(model, plan, grid, gathering, exchanged)
    if undivided and requested == "heads":
        raise ValueError(
            f"context_attention is heads, which is not possible for {type(model).__name__} over the grid {grid}: "
            f"{undivided}. Leave it at auto, which gathers keys and values then, or take another context."
        )
    keys = requested == "keys" or bool(undivided)
    latents = frozenset(_find_latents(model, plan, grid)) if keys else frozenset()
    how = "exchange heads for positions"
    if keys:
        made = f", of which {len(latents)} make them of latents" if latents else ""
        if grid.y > 1 and any(_find_latents(model, plan, replace(grid, y=1))):
            made = ", and not their latents, which are gathered where y is 1"
        how = f"gather keys and values ({undivided or 'as configured'}){made}"
    attentions = sum(1 for block in plan.blocks if block.is_attention) + len(exchanged) - len(gathering)
    parts = [f"{attentions} attentions {how}"] if attentions else []
    if exchanging:
        parts.append(f"{len(exchanging)} mixers exchange heads or channels for positions")
    if gathering:
        parts.append(f"{len(gathering)} attentions gather whole rows ({gathering[0]} ...)")
    if along:
        parts.append(f"{len(along)} modules run on whole rows ({along[0]} ...)")
    reason = f"positions of rows over {grid.context} ranks of context: {', '.join(parts)}"
    return RowsChoice(keys, latents, exchanging, reason)


def _exchanging_mixers(
    model: nn.Module, plan: ShardingPlan, grid: Grid, adapted: Collection[nn.Module]
) -> dict[str, Heads]:
    """Return the mixers that exchange positions for heads or channels: whose code does no more with its input than to
    mask and to project it, without adapters there, and whose heads (x, y, context) divides."""
    here, found = grid.place(0), {}
    for block in plan.blocks:
        if block.mixer is None or not block.mixer.direct or block.mixer.masks is None:
            continue
        if any(model.get_submodule(name) in adapted for name in block.columns):
            continue
        channels = linear_size(model.get_submodule(block.row))[1]
        if heads := divide_with_context(block.query, block.kv, channels, here):
            found[block.entry] = heads
    return found


def _undivided_heads(
    model: nn.Module, plan: ShardingPlan, grid: Grid, gathering: list[str], exchanged: list[str]
) -> str:
    """Return which query heads context does not divide, or nothing.

    Args:
        gathering, exchanged: names of attentions that gather whole rows, and of those on full sequences that do not.
    """
    here = grid.place(0)
    exchanging = [block for block in plan.blocks if block.is_attention and block.entry not in gathering]
    every = {block.query: Heads.divide(block.query, block.kv, here).own_query(here) for block in exchanging}
    if exchanged and (heads := getattr(text_config(model), "num_attention_heads", None)):
        every[heads] = heads  # attention on full sequences, with all heads on each rank
    return next(
        (
            f"{own} of its {heads} heads are on a rank of (x, y), which context does not divide"
            for heads, own in every.items()
            if own % grid.context
        ),
        "",
    )


def _find_latents(model: nn.Module, plan: ShardingPlan, grid: Grid) -> Iterator[str]:
    """Yield the names of the attentions that gather latents and rotary keys where others gather keys and values."""
    here = grid.place(0)
    for block in plan.blocks:
        if not (block.is_attention and block.latent):
            continue
        attention: Any = model.get_submodule(block.entry)
        up, heads = model.get_submodule(block.columns[-1]), Heads.divide(block.query, block.kv, here)
        if features := latent_features(attention, up):
            of_head = linear_size(up)[0] // block.query + attention.qk_rope_head_dim
            if latents_travel(features, of_head * heads.own_kv(here), heads, here):
                yield block.entry


def install_context(state: ShardedModel, model: nn.Module, plan: ShardingPlan, choice: RowsChoice) -> None:
    """Let calls of a model and of its base model compute this rank's positions. No communication.

    Collectives of a call: those of its attention (`ContextAttention`), of its loss, and an all-gather over context of
    each tensor that it returns.
    """
    route = ContextAttention(state)
    for block in plan.blocks:
        if block.entry in choice.latents:
            attention = model.get_submodule(block.entry)
            column: Any = state.sharded_layers[model.get_submodule(block.columns[-1])]
            column.gather_rows(attention)
            route_attention(attention, ContextAttention(state, expands=True))
    along = [block.entry for block in plan.blocks if block.is_attention or block.mixer]
    for name in (*(name for name in along if name not in choice.latents), *plan.full_sequence):
        if not why_heads_stay(module := model.get_submodule(name)):
            route_attention(module, route)
        elif module in state.blocks:
            if name not in choice.exchanging:
                state.blocks[module].gather_rows()
            arguments = list(inspect.signature(module.forward).parameters)
            patch_innermost(module, functools.partial(_with_whole_positions, state, arguments))
        elif runs_along_row(module):
            patch_innermost(module, functools.partial(_along_row, state))
    for module in model.modules():
        if _follows_longest_row(module):
            patch_forward(module, functools.partial(_rotary, state))
    towers = tuple(type(model.get_submodule(tower.decoder).config) for tower in plan.towers if tower.decoder)
    make_mask: Callable = functools.partial(_make_mask, state, towers)
    makers: list[tuple[dict[str, Any], str, Callable]] = [(*place, make_mask) for place in mask_functions(model)]
    makers += [(*place, _make_alibi) for place in alibi_functions(model)]
    assert plan.decoder is not None  # `choose_rows` has seen to that
    decoder = model.get_submodule(plan.decoder)
    around = [model, cast(nn.Module, model.base_model)] if towers else [model]
    for each in dict.fromkeys((*around, decoder)):
        names = list(inspect.signature(each.forward).parameters)
        whole = bool(towers) and each is not decoder
        patch_forward(each, functools.partial(_forward, state, model, names, makers, choice.keys, whole))
    if hasattr(model, "generate"):
        vars(model)["generate"] = functools.partial(_refuse_generate, state.grid)


def _forward(
    state: ShardedModel,
    model: nn.Module,
    names: list[str],
    makers: list[tuple[dict[str, Any], str, Callable]],
    striped: bool,
    whole: bool,
    original: Callable,
    /,
    *args,
    **kwargs,
):
    outer = state.context.rows
    if outer is not None and (outer.divided or whole):  # the base model, inside of the model
        return original(*args, **kwargs)
    given = dict(zip(names, args, strict=False)) | kwargs
    if outer is not None:  # the decoder, in a model that has whole rows
        rows = replace(outer, divided=True)
        with state.context.with_rows(rows):
            return original(**_own_arguments(rows, names, given, makers))
    rows = _rows_of(state, model, given, striped, whole)
    own = _own_arguments(rows, names, given, makers)
    if keep := given.get("logits_to_keep", 0):
        own["logits_to_keep"] = rows.last(keep)
    with state.context.with_rows(rows), _made_of(rows, makers):
        output = original(**own)
    stage = state.context.stage
    if stage is not None and not stage.last:
        return output
    for_itself = torch.is_grad_enabled() and not given.get("output_router_logits")
    if isinstance(output, dict) and "router_logits" in output and (for_itself or stage is not None):
        output["router_logits"] = None  # for the model's own auxiliary loss, which is made: not gathered
    if not keep:
        return _gather(rows, output)
    logits, output["logits"] = rows.gather_last(output["logits"], keep), None
    output = _gather(rows, output)
    output["logits"] = logits
    return output


def _own_arguments(
    rows: Rows, names: list[str], given: dict[str, Any], makers: list[tuple[dict[str, Any], str, Callable]]
) -> dict[str, Any]:
    """Return the arguments of a call without a cache, and for this rank's positions where the code has these."""
    own = given | ({"use_cache": False} if "use_cache" in names else {})
    if not rows.divided:
        return own
    own = {name: value if name in WHOLE else _take(rows, value) for name, value in own.items()}
    if "position_ids" in names:
        positions = given.get("position_ids")
        if positions is None or positions.dim() == 2:
            own["position_ids"] = rows.take(rows.position_ids)
        else:  # [3 or 4, B, S], of time, height and width
            own["position_ids"] = torch.stack([rows.take(each) for each in positions])
    alibi = any(make is _make_alibi for *_, make in makers)
    if rows.attention_mask is None and (rows.filled or alibi):  # for what else reads it: routers' auxiliary loss, too
        own["attention_mask"] = rows.take_mask()
    if "attention_mask" in names and not makers:  # its mixers get the mask itself, and work on whole rows
        own["attention_mask"] = rows.attention_mask
    return own


def _rows_of(state: ShardedModel, model: nn.Module, given: Mapping[str, Any], striped: bool, whole: bool) -> Rows:
    """Return the rows that a call is given; `whole`: of which the code that runs has all positions.

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
        "encoder_hidden_states": given.get("encoder_hidden_states") is not None,
        "output_attentions": bool(given.get("output_attentions", getattr(config, "output_attentions", False))),
        "return_dict=False of a model with images": whole and given.get("return_dict") is False,
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
    mask = given.get("attention_mask")
    positions = given.get("position_ids") if takes_positions(model) else None
    if positions is not None and (positions.dim() not in (2, 3) or positions.shape[-1] != length):
        raise ValueError(f"position_ids are {list(positions.shape)}, but of rows of {length} they are [B, {length}].")
    if positions is not None and positions.dim() == 3:  # the first of four are those of text
        positions = positions[0] if len(positions) == 4 else None
    if positions is None:
        positions = number_positions(model, tokens, mask)
    return Rows(
        state.grid_mesh,
        batch,
        length,
        positions,
        mask,
        numbered=given.get("position_ids") is not None,
        documents=_separates(model, given),
        striped=striped,
        divided=not whole,
    )


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

    def own(value: Tensor) -> Tensor:
        return rows.take(value.reshape(rows.batch, rows.length, -1)).reshape(*shape[:-1], -1)

    hidden, args, kwargs = split_hidden_states(args, kwargs)
    shape = hidden.shape  # [B, L, H], or [B * L, H]
    hidden = rows.join(hidden.reshape(rows.batch, rows.own_length, -1))
    hidden = hidden if len(shape) == 3 else hidden.flatten(0, 1)
    kwargs = {name: _join(rows, value) for name, value in kwargs.items()}
    output = original(hidden, *(_join(rows, value) for value in args), **kwargs)
    return own(output) if isinstance(output, Tensor) else type(output)((own(output[0]), *output[1:]))


def _with_whole_positions(state: ShardedModel, names: list[str], original: Callable, /, *args, **kwargs):
    """Run attention whose block has gathered whole rows with the positions of whole rows. Collectives: an all-gather
    over context of each of them."""
    rows = state.context.rows
    if rows is None:
        return original(*args, **kwargs)
    given = dict(zip(names, args, strict=False)) | kwargs
    return original(**given | {name: _join(rows, given[name]) for name in POSITIONS if name in given})


def _join(rows: Rows, value: Any) -> Any:
    """Whole rows of an argument that has a value for each of this rank's positions; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(_join(rows, each) for each in value)
    if not (isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == rows.own_length):
        return value
    if value.shape[0] not in (1, rows.batch):
        return value
    return torch.view_as_complex(rows.join(torch.view_as_real(value))) if value.is_complex() else rows.join(value)


@contextlib.contextmanager
def _made_of(rows: Rows, makers: list[tuple[dict[str, Any], str, Callable]]) -> Iterator[None]:
    """Let the model's code inside describe its attention masks, and make its ALiBi, for whole rows."""
    with contextlib.ExitStack() as stack:
        for names, name, make in makers:
            stack.enter_context(replaced(names, {name: functools.partial(make, rows, names[name])}))
        yield


def _make_mask(state: ShardedModel, towers: tuple[type, ...], _: Rows, function: Callable, *args, **kwargs):
    signature = inspect.signature(function)
    given = signature.bind(*args, **kwargs).arguments
    if isinstance(given.get("config"), towers):  # attention in an encoder of images
        return function(*args, **kwargs)
    rows = state.context.rows
    assert rows is not None  # functions are replaced for a pass of rows
    custom = next((name for name in CUSTOM_MASKS if given.get(name) is not None), None)
    if custom and rows.divided:
        raise ValueError(f"an attention mask with {custom} cannot be made of rows that are divided over context.")
    embeds = next(name for name in ("inputs_embeds", "input_embeds") if name in given)
    given[embeds] = given[embeds].new_empty(()).expand(rows.batch, rows.length, 1)  # read for its shape
    given["attention_mask"] = rows.attention_mask
    if given.get("position_ids") is not None:  # by which this model parts documents
        given["position_ids"] = rows.position_ids if rows.documents else None
    return make_late(function, given)


def _make_alibi(rows: Rows, function: Callable, attention_mask: Tensor, *args, **kwargs):
    whole = rows.attention_mask
    whole = attention_mask.new_ones(rows.batch, rows.length) if whole is None else whole
    return function(whole.to(attention_mask.device), *args, **kwargs)


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
            if name not in IMAGES:
                output[name] = _gather(rows, value) if name != "router_logits" else _gather_routers(rows, value)
        return output
    if isinstance(output, tuple | list):
        return type(output)(_gather(rows, each) for each in output)
    return output


def _gather_routers(rows: Rows, logits: Any) -> RouterLogits | None:
    """Router logits [B * L, experts] of each layer -> [B * S, experts], from which an auxiliary loss can be made as of
    the model's own."""
    if not logits:
        return None
    whole = (rows.gather(each.reshape(rows.batch, rows.own_length, -1)).flatten(0, 1) for each in logits)
    return RouterLogits(whole, getattr(logits, "router_loss", None))


def _refuse_generate(grid: Grid, *_: Any, **__: Any) -> None:
    raise ValueError(
        f"generate is not supported where the positions of a row are divided ({grid}): load the model, or its "
        "checkpoint, on a grid without context."
    )
