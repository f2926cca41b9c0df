"""Masks that are made late are parts of those that Transformers' functions make of whole rows."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import LlamaConfig, masking_utils

from hf_axonn.compat.late_masks import LateMask, make_late


LENGTH, WINDOW = 13, 5
UNCOMPILED = {"_compile": False}
RANGES = ((0, 13), (0, 4), (4, 9), (9, 13), (12, 13))
FUNCTIONS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")


def arguments(implementation: str, kind: str) -> dict:
    """Arguments of a call for two rows: alone, padded on the left of one and the right of the other, or packed."""
    config = LlamaConfig(sliding_window=WINDOW, attention_chunk_size=WINDOW)
    config._attn_implementation = implementation
    mask, positions = None, torch.arange(LENGTH)[None]
    if kind == "padded":
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        mask[0, :3], mask[1, -4:] = 0, 0
    if kind == "packed":
        positions = torch.cat([torch.arange(6), torch.arange(7)]).expand(2, -1)
    embeds = torch.empty(()).expand(2, LENGTH, 1)
    rest = dict(attention_mask=mask, past_key_values=None, position_ids=positions)
    return dict(config=config, inputs_embeds=embeds, **rest)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_range_is_that_part_of_the_whole_mask(implementation, name):
    function = getattr(masking_utils, name)
    for kind in ("alone", "padded", "packed"):
        given = arguments(implementation, kind)
        whole, late = function(**given), make_late(function, given)
        if whole is None:
            assert late is None
            continue
        assert isinstance(late, LateMask)
        hidden = torch.finfo(whole.dtype).min if implementation == "eager" else False
        for start, stop in RANGES:
            first, last = late.keys(start, stop)
            assert torch.equal(late.between(start, stop, first, last), whole[:, :, start:stop, first:last]), kind
            assert (first, last) != (0, LENGTH) or stop == LENGTH or (implementation, kind) == ("eager", "padded")
            assert (whole[:, :, start:stop, :first] == hidden).all() and (
                whole[:, :, start:stop, last:] == hidden
            ).all()


def test_a_window_needs_its_own_keys_alone():
    given = arguments("sdpa", "alone")
    assert make_late(masking_utils.create_sliding_window_causal_mask, given).keys(9, 11) == (5, 11)
    assert make_late(masking_utils.create_causal_mask, given) is None, "sdpa needs no mask"


def test_tokens_of_a_block_see_those_behind_them():
    given = arguments("sdpa", "padded") | {
        "block_sequence_ids": torch.tensor([[-1] * 3 + [0] * 6 + [-1] * (LENGTH - 9)] * 2)
    }
    whole, late = masking_utils.create_causal_mask(**given), make_late(masking_utils.create_causal_mask, given)
    assert whole[0, 0, 4, 8] and late.window is None
    first, last = late.keys(4, 6)
    assert torch.equal(late.between(4, 6, first, last), whole[:, :, 4:6, first:last]) and (first, last) == (0, LENGTH)


def test_what_is_no_causal_mask_is_made():
    given = arguments("sdpa", "padded")
    given.pop("past_key_values"), given.pop("position_ids")
    assert isinstance(make_late(masking_utils.create_bidirectional_mask, given), torch.Tensor)
    padding = make_late(masking_utils.create_causal_mask, arguments("flash_attention_2", "padded"))
    assert padding.shape == (2, LENGTH)
    assert masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is masking_utils.sdpa_mask, "the table is as before"


def test_code_that_uses_a_mask_gets_the_whole_one():
    given = arguments("eager", "packed")
    late = make_late(masking_utils.create_causal_mask, given)
    whole = masking_utils.create_causal_mask(**given)
    scores = torch.randn(2, 3, LENGTH, LENGTH)
    uses = [
        lambda mask: scores + mask,
        lambda mask: mask + scores,
        lambda mask: mask[:, :, 2:],
        lambda mask: mask == 0,
        lambda mask: torch.where(mask < 0, scores, 0.0),
        lambda mask: torch.softmax(scores + mask.to(torch.float32), dim=-1),
        lambda mask: torch.nn.functional.scaled_dot_product_attention(scores, scores, scores, attn_mask=mask),
        lambda mask: torch.tensor(mask.shape),
    ]
    assert all(torch.equal(use(late), use(whole)) for use in uses)
    assert late.whole() is late.whole(), "it is made once"
    assert late in {late} and not any(late is other for other, _ in itertools.product([whole], uses))


@pytest.mark.parametrize("kind", ["alone", "padded", "packed"])
def test_a_block_mask_of_a_range_sees_what_the_whole_mask_sees(monkeypatch, kind):
    monkeypatch.setattr(masking_utils, "create_block_mask", lambda **given: create_block_mask(**given | UNCOMPILED))
    for name in FUNCTIONS[:2]:
        function = getattr(masking_utils, name)
        whole = function(**arguments("eager", kind)) == 0
        late = make_late(function, arguments("flex_attention", kind))
        for start, stop in RANGES:
            first, last = late.keys(start, stop)
            mask = late.between(start, stop, first, last)
            assert mask.shape[-2:] == (stop - start, last - first)
            row, query, key = (torch.arange(size) for size in (2, stop - start, last - first))
            seen = mask.mask_mod(row[:, None, None], torch.tensor(0), query[:, None], key)
            assert torch.equal(seen.expand(2, -1, -1), whole[:, 0, start:stop, first:last]), (name, start)
