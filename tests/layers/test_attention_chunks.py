"""Attention in chunks of queries equals that in one piece, makes nothing large and keeps nothing of a chunk."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import LlamaConfig, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import LlamaAttention, eager_attention_forward

from hf_axonn.compat.late_masks import make_late
from hf_axonn.layers import attention_chunks
from hf_axonn.layers.attention_chunks import CausalMask, GivenMask, attend, attend_causally, bytes_of_pair
from tests.helpers.equality import exact


BATCH, HEADS, KV, LENGTH, SIZE = 2, 4, 2, 48, 8
FUNCTIONS = {"eager": eager_attention_forward, "sdpa": sdpa_attention_forward}


def tensors():
    generator = torch.Generator().manual_seed(3)
    shapes = [(BATCH, heads, LENGTH, SIZE) for heads in (HEADS, KV, KV)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


def late_mask(implementation, kind):
    config = LlamaConfig(sliding_window=7)
    config._attn_implementation = implementation
    positions = torch.cat([torch.arange(20), torch.arange(28)])[None] if kind == "packed" else None
    function = (
        masking_utils.create_sliding_window_causal_mask if kind == "window" else masking_utils.create_causal_mask
    )
    embeds = torch.empty((), dtype=torch.float64).expand(BATCH, LENGTH, 1)
    arguments = dict(config=config, inputs_embeds=embeds, attention_mask=None, past_key_values=None)
    return make_late(function, arguments | {"position_ids": positions})


def module_of(implementation):
    config = LlamaConfig(hidden_size=HEADS * SIZE, num_attention_heads=HEADS, num_key_value_heads=KV)
    config._attn_implementation = implementation
    return LlamaAttention(config, 0).train()


def outcome(output, inputs):
    weights = torch.arange(output.numel(), dtype=output.dtype).view_as(output).cos()
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), inputs)]


@pytest.mark.parametrize("start", [0, 12])
@pytest.mark.parametrize(
    ("implementation", "kind"), [(name, kind) for name in FUNCTIONS for kind in ("packed", "window", "causal")]
)
def test_chunks_equal_one_piece_and_are_small(monkeypatch, implementation, kind, start):
    module, inputs = module_of(implementation), tensors()
    if implementation == "sdpa" and kind == "causal":
        mask, call = CausalMask(*inputs), functools.partial(attend_causally, 0.0, SIZE**-0.5)
    else:
        mask = late_mask(implementation, kind)
        function = functools.partial(FUNCTIONS[implementation], module)
        call = functools.partial(lambda function, *each: function(*each, scaling=SIZE**-0.5)[0], function)
    sizes = []

    def measured(query, key, value, here):
        sizes.append(query.shape[2] * key.shape[2])
        with exact():
            return call(query, key, value, here)

    def run():
        query, key, value = inputs
        pair = bytes_of_pair(implementation, query, key, value, mask)
        output = attend(measured, query[:, :, start:40], key, value, mask, start=start, pair_bytes=pair)
        return outcome(output, inputs)

    whole = run()
    assert len(sizes) == 1
    pair = bytes_of_pair(implementation, *inputs, mask)
    monkeypatch.setattr(attention_chunks, "LARGEST", 200 * pair)
    sizes.clear()
    kept = []
    with saved_tensors_hooks(lambda each: kept.append(each.numel()) or each, lambda each: each):
        parts = run()
    assert max(sizes) <= 200 and len(sizes) >= 8 and len(sizes) % 2 == 0, "each chunk again in backward"
    assert all(torch.allclose(one, other, rtol=1e-12, atol=1e-12) for one, other in zip(whole, parts, strict=True))
    assert max(kept) <= inputs[0].numel(), "no scores or masks of chunks"


def test_a_given_mask_is_cut():
    inputs, late = tensors(), late_mask("eager", "packed")
    call = functools.partial(lambda *each: eager_attention_forward(module_of("eager"), *each, scaling=0.3)[0])
    outputs = [
        attend(call, inputs[0][:, :, 10:30], *inputs[1:], mask, start=10, pair_bytes=1)
        for mask in (late, GivenMask(late.whole(), LENGTH))
    ]
    assert torch.allclose(*outputs, rtol=1e-12)


def test_chunks_draw_the_same_dropout_again(monkeypatch):
    module, inputs, mask = module_of("eager"), tensors(), late_mask("eager", "causal")

    def call(*each):
        with exact():
            return eager_attention_forward(module, *each, scaling=1.0, dropout=0.5)[0]

    def run():
        torch.manual_seed(1)
        output = attend(call, *inputs, mask, start=0, pair_bytes=1, random=True)
        torch.randn(3)
        return outcome(output, inputs)

    monkeypatch.setattr(attention_chunks, "LARGEST", LENGTH * LENGTH // 4)
    once = run()
    with torch.no_grad():
        torch.manual_seed(1)
        assert torch.equal(attend(call, *inputs, mask, start=0, pair_bytes=1, random=True), once[0])
    value = inputs[2].detach()
    # The output is linear in the values, so that their gradient shows the mask that backward has drawn.
    weights = torch.arange(once[0].numel(), dtype=torch.float64).view_as(once[0]).cos()
    assert torch.allclose((once[3] * value).sum(), (once[0] * weights).sum())
