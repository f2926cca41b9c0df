"""Attention over rows whose positions are divided over context: heads are divided in place of positions meanwhile.

    q, k, v    [B, heads, L, D], own positions, the heads of this (x, y)
    attend     [B, heads/context, S, D], whole rows: the model's own attention function, with masks of whole rows
    output     [B, L, heads, D] again

One all-to-all over context on each way. Rank i of context has chunk i of the heads, and chunk i of the positions. Kv
heads that context does not divide are repeated until it does.

Source: DeepSpeed Ulysses (arXiv 2309.14509), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_axonn.distributed.collectives import all_to_all
from hf_axonn.engine.rows import Rows
from hf_axonn.engine.state import ParallelState
from hf_axonn.layers.base import replaced


class ContextAttention:
    """The way to the attention function of the modules of one model, for `compat.attention.route_attention`.

    Global shapes: q [B, heads, S, D], output [B, S, heads, D]. Local: q [B, heads/(x*y), L, D], output alike.
    Collectives: an all-to-all over context of q, k and v together (one each where their dtypes differ), and one of the
    output; in backward the same ones the other way.

    Raises:
        ValueError: of a call: the heads of this rank are not divisible by context, or there is a bias for positions,
            which is not divided.
    """

    def __init__(self, state: ParallelState) -> None:
        self.state = state

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
        heads, parts = query.shape[1], rows.parts
        if heads % parts:
            raise ValueError(
                f"{heads} query heads of a rank of (x, y) are not divisible by context = {parts}: use a context that "
                "divides them, or less x and y."
            )
        # As attention would cast them: what rotation has widened under autocast would travel as twice the bytes.
        query, key, value = (each.to(self.state.compute_dtype(each)) for each in (query, key, value))
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
        with replaced(module.__dict__, _take_heads(module, heads, own, repeats)):
            output, _ = function(module, query, key, value, attention_mask, **options)
        return _to_positions(output, rows), None


def _take_heads(module: nn.Module, heads: int, own: slice, repeats: int) -> dict[str, Any]:
    """Attributes of an attention module for a part of its heads: parameters with a row a head, and the size of the
    groups that share a kv head."""
    values: dict[str, Any] = {
        name: value[own]
        for name in module._parameters
        if isinstance(value := module.__dict__.get(name), Tensor) and value.dim() and len(value) == heads
    }
    groups: Any = getattr(module, "num_key_value_groups", None)
    if repeats > 1 and groups is not None:
        values["num_key_value_groups"] = groups // repeats
    return values


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
    if rows.filled:
        output = torch.cat([output, output.new_zeros(len(output), rows.filled, *output.shape[2:])], dim=1)
    blocks = output.unflatten(1, (rows.parts, -1)).movedim(1, 0).contiguous()
    return all_to_all(blocks, rows.mesh.group("context")).movedim(0, 2).flatten(2, 3)
