"""Dropout masks: different where ranks own different things, the same where they repeat work, the same again later."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, OPTConfig, ProphetNetConfig

from hf_axonn import Grid, parallelize, sync_gradients
from hf_axonn.layers.dropout import keyed_random, mix
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks


pytestmark = pytest.mark.usefixtures("device")


def gathered(value: torch.Tensor) -> list[torch.Tensor]:
    every = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(every, value)
    return every


def assert_recomputed_alike(model, batch, *, reentrant: bool = False, all_used: bool = True) -> None:
    """Recomputed layers must draw what they drew: then both ways give the same gradients."""
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.zero_grad()
        torch.manual_seed(4)
        model(**batch).loss.backward()
        sync_gradients(model)
        used = [its.grad for its in model.parameters() if all_used or its.grad is not None]
        grads.append([gradient.full_tensor() for gradient in used])
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=1e-5, atol=1e-6)


def test_mix_depends_on_every_value_and_their_order():
    values = {mix(1, 2), mix(2, 1), mix(1, 2, 0), mix(12), mix(1), mix(-1)}
    assert len(values) == 6 and all(0 <= value < 2**63 for value in values)


def test_masks_are_keyed_by_owner():
    run_ranks(_keyed, 4)


def _keyed() -> None:
    grid = Grid(z=2, y=2)
    model, _ = parallelize(tiny_model("llama"), grid)
    state = model.axonn
    for axes, alike in (((), "y"), (("x",), "y"), (("y",), None), (("x", "y"), None)):
        torch.manual_seed(1)
        with keyed_random(state, axes):
            mine = torch.rand(8)
            with keyed_random(state, ()):
                nested = torch.rand(8)
            assert not torch.equal(mine, nested)
        after = torch.rand(3)
        draws = gathered(mine)
        for rank in range(4):
            for other in range(rank):
                same = alike is not None and grid.coordinates(rank)["z"] == grid.coordinates(other)["z"]
                assert torch.equal(draws[rank], draws[other]) == same, (axes, rank, other)
        # Nested along no axis: alike on y whatever the outer one was keyed by.
        inner = gathered(nested)
        assert torch.equal(inner[0], inner[1]) and not torch.equal(inner[0], inner[2])
        assert all(torch.equal(after, value) for value in gathered(after))  # in step again
        torch.manual_seed(1)
        with keyed_random(state, axes):
            assert torch.equal(mine, torch.rand(8))
        with keyed_random(state, axes):
            assert not torch.equal(mine, torch.rand(8))


def test_a_model_with_dropout_trains_alike_on_repeating_ranks():
    run_ranks(_model, 4)


def _model() -> None:
    # 9 heads on x = 2: every rank computes attention on all heads, so its masks must agree on all of them.
    for kind, grid, repeats in (("smollm2", Grid(x=4), True), ("llama", Grid(y=2, x=2), False)):
        model, _ = parallelize(tiny_model(kind, attention_dropout=0.5, dtype=torch.float32, attention="eager"), grid)
        model.train()
        batch = tiny_batch(2, 8)
        masks = []
        attention = model.model.layers[0].self_attn
        probe = attention.o_proj.register_forward_pre_hook(
            lambda module, args, masks=masks: masks.append(args[0].detach().clone())
        )
        torch.manual_seed(3)
        first = model(**batch).loss
        again = masks.pop()
        torch.manual_seed(3)
        assert torch.equal(first, model(**batch).loss)  # the same seed, the same bits
        assert torch.equal(again, masks.pop())
        assert not torch.equal(first, model(**batch).loss)
        probe.remove()
        copies = gathered(again)
        assert all(torch.equal(copies[0], value) for value in copies) == repeats
        assert_recomputed_alike(model, batch)


def test_ranks_of_context_drop_alike_where_they_repeat_whole_rows_alone():
    run_ranks(_context, 4)


def _context() -> None:
    """BigBird's attention runs on whole rows, GPT-2's exchanges heads; the rest of both has this rank's positions."""
    grid = Grid(z=4, context=2)
    sizes = dict(vocab_size=131, hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=20)
    big_bird = AutoConfig.for_model("big_bird", **sizes, is_decoder=True, hidden_dropout_prob=0.5)
    big_bird.attention_type = "original_full"
    gpt2 = AutoConfig.for_model("gpt2", **sizes, resid_pdrop=0.5, attn_pdrop=0.5)
    for config, repeating in ((big_bird, ".attention."), (gpt2, None)):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
        model, _ = parallelize(model, grid)
        dropped = {}

        def note(name, dropped, _module, _args, output):
            dropped[name] = output == 0

        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Dropout):
                module.register_forward_hook(functools.partial(note, name, dropped))
        torch.manual_seed(3)
        model(**tiny_batch(4, 8))
        repeats = [name for name in dropped if repeating and repeating in name]
        assert len(dropped) >= 2 and bool(repeats) == bool(repeating)
        rank = dist.get_rank()
        for name, mask in dropped.items():
            masks = gathered(mask.float())
            for other in range(4):
                same = other == rank or (other // 2 == rank // 2 and name in repeats)
                assert torch.equal(masks[rank], masks[other]) == same, (config.model_type, name, rank, other)


def test_recomputed_layers_draw_what_they_drew_inside_of_other_dropouts():
    run_ranks(_nested, 2)


def _nested() -> None:
    """In attention, the layer around it and the decoder: OPT, which is cut by blocks, ProphetNet Linear by Linear."""
    sizes = dict(hidden_size=24, vocab_size=131, dropout=0.3, attention_dropout=0.4)
    opt = OPTConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, ffn_dim=20, word_embed_proj_dim=24)
    other = ProphetNetConfig(
        **sizes, num_decoder_layers=2, num_decoder_attention_heads=4, decoder_ffn_dim=20, ngram=2, is_decoder=True
    )
    for config, reentrant in ((opt, False), (opt, True), (other, False)):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
        model, _ = parallelize(model, Grid(x=2))
        assert_recomputed_alike(model, tiny_batch(2, 8), reentrant=reentrant, all_used=False)


def test_routers_draw_noise_as_their_tokens_are_owned():
    run_ranks(_jitter, 4)


def _jitter() -> None:
    """Each rank routes tokens of its own, so no two draw alike; a recomputed layer draws what it drew."""
    options = dict(router_jitter_noise=0.3, experts_implementation="eager", dtype=torch.float32)
    model, _ = parallelize(tiny_model("mixtral", **options).train(), Grid(y=2, x=2))
    batch, seen = tiny_batch(2, 8), []
    block = model.model.layers[0].mlp
    enter = block.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
    leave = block.gate.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
    torch.manual_seed(3)
    model(**batch)
    enter.remove()
    leave.remove()
    noise = seen[1] / seen[0].view(seen[1].shape)
    assert noise.min() < 0.8 and noise.max() > 1.2
    draws = gathered(noise)
    assert not any(torch.allclose(draws[rank], draws[other]) for rank in range(4) for other in range(rank))
    assert_recomputed_alike(model, batch)


def test_evaluation_draws_nothing():
    run_ranks(_evaluation, 2)


def _evaluation() -> None:
    model, _ = parallelize(tiny_model("llama", attention_dropout=0.5), Grid(x=2))
    before = torch.get_rng_state()
    with torch.no_grad():
        model.eval()(input_ids=torch.ones(1, 4, dtype=torch.long))
    assert torch.equal(before, torch.get_rng_state())
