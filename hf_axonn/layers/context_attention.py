"""Attention over rows whose positions are divided over context, in one of two ways.

    q, k, v    [B, heads, L, D], own positions, the heads of this (x, y)
    output     [B, L, heads, D]

heads: heads are divided in place of positions meanwhile.

    attend     [B, heads/context, S, D], whole rows: the model's own attention function, with masks of whole rows

One all-to-all over context on each way. Rank i of context has chunk i of the heads, and chunk i of the positions. Kv
heads that context does not divide are repeated until it does.

keys: queries stay where they are, and k and v of whole rows are gathered.

    attend     each stripe of own queries to the keys before them (attention_chunks.py)

One all-gather over context of k and v, with the kv heads of this (x, y), whatever their number, or of the latents that
they are made of (latent_attention.py); in a sliding window an exchange of the ends of stripes. Rows are dealt in two
stripes a rank (engine/rows.py), so that all ranks have as many pairs of a query and a key.

Source: DeepSpeed Ulysses (arXiv 2309.14509), section 3; Llama 3 (arXiv 2407.21783), section 3.3.2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_axonn.compat.attention import is_stock_sdpa
from hf_axonn.compat.late_masks import LateMask
from hf_axonn.distributed.collectives import all_to_all
from hf_axonn.engine.rows import Rows
from hf_axonn.engine.state import ParallelState
from hf_axonn.layers.attention_chunks import (
    Call,
    CausalMask,
    FlashMask,
    GivenMask,
    Mask,
    attend,
    attend_causally,
    bytes_of_pair,
)
from hf_axonn.layers.base import replaced


class ContextAttention:
    """The way to the attention function of the modules of one model, for `compat.attention.route_attention`.

    Global shapes: q [B, heads, S, D], output [B, S, heads, D]. Local: q [B, heads/(x*y), L, D], output alike.
    Collectives: with heads an all-to-all over context of q, k and v together (one each where their dtypes differ), and
    one of the output; in backward the same ones the other way. With keys an all-gather over context of k and v
    together (or one each), in backward a reduce-scatter; in a sliding window an exchange both ways (`Grid.reach`).

    Args:
        expands: whether k and v come in of whole rows where keys are gathered (`LatentColumnParallel.gather_rows`).

    Raises:
        ValueError: of a call: with heads, those of this rank are not divisible by context; with keys, the attention
            implementation is not known, or keys that should be of whole rows are not; or there is a bias for
            positions, which is not divided.
    """

    def __init__(self, state: ParallelState, *, expands: bool = False) -> None:
        self.state = state
        self.expands = expands

    def __call__(
        self,
        function: Callable,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[Tensor, None]:
        rows = self.state.context.rows
        if rows is None:
            raise RuntimeError(
                f"{type(module).__name__} was called outside of its model: positions of rows are divided where the "
                "model is called, so call the model (or its base model) instead."
            )
        if options.get("position_bias") is not None:
            raise ValueError(f"{type(module).__name__} has a bias for positions, which is not divided over context.")
        # As attention would cast them: what rotation has widened under autocast would travel as twice the bytes.
        query, key, value = (each.to(self.state.compute_dtype(each)) for each in (query, key, value))
        if rows.striped:
            output = _attend_with_keys(
                rows, function, module, query, key, value, attention_mask, options, whole=self.expands
            )
        else:
            output = _attend_with_heads(rows, function, module, query, key, value, attention_mask, options)
        return output, None


def _attend_with_heads(
    rows: Rows,
    function: Callable,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    options: dict[str, Any],
) -> Tensor:
    heads, parts = query.shape[1], rows.parts
    if heads % parts:
        raise ValueError(
            f"{heads} query heads of a rank of (x, y) are not divisible by context = {parts}: use a context that "
            "divides them, less x and y, or context_attention: keys."
        )
    repeats = parts // math.gcd(key.shape[1], parts)
    if repeats > 1:
        key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    query, key, value = _to_heads((query, key, value), rows)
    if options.get("position_ids") is not None:
        options["position_ids"] = rows.position_ids
    first = rows.mesh.index("context") * (heads // parts)
    own = slice(first, first + heads // parts)
    if options.get("s_aux") is not None:
        options["s_aux"] = options["s_aux"][own]
    call = functools.partial(_call, function, module, _take_heads(module, heads, own, repeats), options)
    if isinstance(mask, LateMask):
        output = _attend(call, module, query, key, value, mask, 0, options)
    else:
        output = call(query, key, value, mask)
    return _to_positions(output, rows)


def _attend_with_keys(
    rows: Rows,
    function: Callable,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    options: dict[str, Any],
    *,
    whole: bool,
) -> Tensor:
    if whole and key.shape[2] != rows.length:
        raise ValueError(
            f"{type(module).__name__} attends to {key.shape[2]} keys, and not to those of all {rows.length} positions "
            "that its expand_kv makes of gathered latents: write context_attention: heads, or use x and y."
        )
    masks = _mask_of(rows, module, (query, key, value), mask, options)
    if isinstance(masks, CausalMask) and is_stock_sdpa(function, options):
        call: Call = functools.partial(attend_causally, options.get("dropout") or 0.0, options.get("scaling"))
    else:
        values = _take_heads(module, query.shape[1], slice(None), 1)
        call = functools.partial(_call, function, module, values, options | {"position_ids": None})
    keys = [(0, key, value)] * 2 if whole else _keys_of_stripes(key, value, rows, masks.window)
    stripes = [
        (start, own[:, :, : rows.length - start], seen)
        for start, own, seen in zip(rows.starts, query.split(rows.stripe, dim=2), keys, strict=True)
        if start < rows.length
    ]
    # A rank without queries takes one that counts nowhere: where gradients are reduced all have to be.
    stripes = stripes or [(rows.length - 1, query[:, :, :1], keys[0])]
    outputs = [
        _attend(call, module, own, key, value, masks, start, options, base=base)
        for start, own, (base, key, value) in stripes
    ]
    return _fill(torch.cat(outputs, dim=1), rows.own_length)


def _mask_of(
    rows: Rows, module: nn.Module, tensors: tuple[Tensor, Tensor, Tensor], mask: Any, options: dict[str, Any]
) -> Mask:
    """Return which keys queries see, as it follows from what an attention function is called with for whole rows;
    `tensors`: own queries, keys and values."""
    if isinstance(mask, LateMask):
        return mask
    implementation = _implementation(module)
    if "flash" in implementation:
        # By positions Transformers' function tells documents of one row apart, with a cache as well.
        numbered = rows.documents or (rows.numbered and options.get("position_ids") is not None)
        packed = numbered and mask is None and rows.batch == 1
        if options.get("cu_seq_lens_q") is not None and not (packed and rows.documents):
            raise ValueError(
                "cu_seq_lens_q is of whole rows, and context_attention is keys: give documents by position_ids, one "
                "packed row at a time, without attention_mask and use_cache, or write context_attention: heads."
            )
        return FlashMask(mask, options.get("sliding_window"), rows.document_starts if packed else ())
    if mask is None and implementation in ("eager", "sdpa", "flex_attention"):
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        return CausalMask(*tensors) if causal and implementation == "sdpa" else GivenMask(None, rows.length)
    if isinstance(mask, Tensor) and mask.dim() == 4:
        return GivenMask(mask, rows.length)
    raise ValueError(
        f"{type(module).__name__} attends by {implementation} with a mask of type {type(mask).__name__}, which is not "
        "known for context_attention: keys: use eager, sdpa, flex_attention or flash_attention_2."
    )


def _implementation(module: nn.Module) -> str:
    return getattr(module.config, "_attn_implementation", "eager")


def _call(
    function: Callable,
    module: nn.Module,
    values: dict[str, Any],
    options: dict[str, Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
) -> Tensor:
    """Call an attention function of a module that has other attributes meanwhile, perhaps again in backward."""
    if isinstance(mask, dict):
        cuts = {name: each.to(query.device) if isinstance(each, Tensor) else each for name, each in mask.items()}
        mask, options = None, options | cuts
    with replaced(module.__dict__, values):
        return function(module, query, key, value, mask, **options)[0]


def _attend(
    call: Call,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    start: int,
    options: dict[str, Any],
    *,
    base: int = 0,
) -> Tensor:
    pair_bytes = bytes_of_pair(_implementation(module), query, key, value, mask)
    random = bool(options.get("dropout"))
    return attend(call, query, key, value, mask, start=start, pair_bytes=pair_bytes, base=base, random=random)


def _take_heads(module: nn.Module, heads: int, own: slice, repeats: int) -> dict[str, Any]:
    """Attributes of an attention module for a part of its heads: its parameters as they are there now, of those with a
    row a head the part, and the size of the groups that share a kv head."""
    found = {name: module.__dict__[name] for name in module._parameters if name in module.__dict__}
    values: dict[str, Any] = {
        name: value[own] if isinstance(value, Tensor) and value.dim() and len(value) == heads else value
        for name, value in found.items()
    }
    groups: Any = getattr(module, "num_key_value_groups", None)
    if repeats > 1 and groups is not None:
        values["num_key_value_groups"] = groups // repeats
    return values


def _keys_of_stripes(key: Tensor, value: Tensor, rows: Rows, window: int | None) -> list[tuple[int, Tensor, Tensor]]:
    """[B, kv heads, L, D] each -> for each stripe of this rank the position of the first key, and keys and values
    [B, kv heads, S', D]: those of whole rows, or of the stripe and the window before it."""
    reach = rows.mesh.grid.reach(window, rows.length)

    def gather(own: Tensor) -> list[Tensor]:
        return rows.with_reach(own, reach) if reach else [rows.join(own)] * len(rows.starts)

    key, value = key.transpose(1, 2), value.transpose(1, 2)
    if key.dtype == value.dtype and key.shape[:3] == value.shape[:3]:
        sizes = [key.shape[-1], value.shape[-1]]
        pairs = [each.split(sizes, dim=-1) for each in gather(torch.cat([key, value], dim=-1))]
    else:
        pairs = list(zip(gather(key), gather(value), strict=True))
    bases = [max(0, start - reach) if reach else 0 for start in rows.starts]
    return [(base, *(each.transpose(1, 2) for each in pair)) for base, pair in zip(bases, pairs, strict=True)]


def _to_heads(every: Sequence[Tensor], rows: Rows) -> list[Tensor]:
    """[B, heads, L, D] each -> [B, heads/context, S, D]."""
    parts, group = rows.parts, rows.mesh.group("context")
    blocks = [each.unflatten(1, (parts, -1)).movedim(1, 0) for each in every]
    flat = [block.flatten(1) for block in blocks]
    if len({each.dtype for each in flat}) == 1:
        arrived = all_to_all(torch.cat(flat, dim=1), group).split([each.shape[1] for each in flat], dim=1)
    else:
        arrived = [all_to_all(each, group) for each in flat]
    return [
        got.view(block.shape).movedim(0, 2).flatten(2, 3)[:, :, : rows.length]
        for got, block in zip(arrived, blocks, strict=True)
    ]


def _to_positions(output: Tensor, rows: Rows) -> Tensor:
    """[B, S, heads/context, D] -> [B, L, heads, D]."""
    output = _fill(output, rows.length + rows.filled)
    blocks = output.unflatten(1, (rows.parts, -1)).movedim(1, 0).contiguous()
    return all_to_all(blocks, rows.mesh.group("context")).movedim(0, 2).flatten(2, 3)


def _fill(output: Tensor, length: int) -> Tensor:
    """[B, T, ...] -> [B, length, ...], zeros behind the T positions."""
    missing = length - output.shape[1]
    if not missing:
        return output
    return torch.cat([output, output.new_zeros(len(output), missing, *output.shape[2:])], dim=1)
