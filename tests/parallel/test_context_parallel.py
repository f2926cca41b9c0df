"""Rows whose positions are divided over context: equal to one process, whatever the rows are and whoever asks."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from transformers.models.qwen3_moe import modeling_qwen3_moe

from hf_axonn import parallelize
from hf_axonn.distributed.collectives import observe
from hf_axonn.topology.grid import Grid
from tests.end_to_end.test_equivalence import SITUATIONS
from tests.helpers.equality import Case, compare, too_large
from tests.helpers.float64 import checkpointed
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import refused, run_ranks
from tests.layers.test_moe import moe


pytestmark = pytest.mark.usefixtures("device")

BOUND = 1e-10
TWO = [Grid(z=2, context=2)]
FOUR = [Grid(z=4, context=4), Grid(z=4, context=2), Grid(z=2, x=2, context=2), Grid(z=2, y=2, context=2)]
GEMMA = dict(query_pre_attn_scalar=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"])
MAMBA = dict(mamba_n_heads=4, mamba_d_head=24, mamba_n_groups=2, attn_layer_indices=[1])  # states along the row
LONG_ROPE = dict(
    original_max_position_embeddings=8,  # which the row exceeds and this rank's positions may not
    rope_parameters={
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1],
        "long_factor": [2.0, 3.5],
    },
)


def errors(cases, grids):
    """List the numbers that are not those of one process, of each case on each grid, all in one launch."""
    with_truth = [(each, each.truth()) for each in cases]
    table = run_ranks(compare, grids[0].size, with_truth, grids, timeout=560)[0]
    assert len(table) == len(cases) * len(grids)
    return too_large(table, BOUND)


def of_model(name, make=tiny_model, *, steps=1, **changes):
    """A case of rows that neither 2 nor 4 divides, some of them padded."""
    return Case(name, functools.partial(make, name, **changes), [tiny_batch(4, 9)], steps=steps)


def checkpointed_case(case):
    return dataclasses.replace(case, before=functools.partial(checkpointed, reentrant=False))


FAMILIES = [
    of_model("mistral"),
    of_model("gemma2", attention="eager", attn_logit_softcapping=20.0, final_logit_softcapping=15.0, **GEMMA),
    of_model("gemma3_text", **GEMMA),
    of_model("phi3", **LONG_ROPE),
    # Sinks, one a head; the auxiliary loss of routers, in which what fills up a row must not count.
    checkpointed_case(of_model("gpt_oss", moe)),
    of_model("qwen3_moe", moe),
    of_model("bamba", **MAMBA),
    of_model("deepseek_v3", moe),  # values narrower than keys, one latent for all heads
]
# What a grid with context refuses, and a head count that 2 does not divide.
NOT_HERE = ("attention weights", "smollm2")
HERE = [case for case in SITUATIONS if not any(word in case.name for word in NOT_HERE)]
QUICK = {
    "num_items_in_batch",
    "left padding",
    "sliding window, eager",
    "packed rows",
    "reentrant checkpointing, two shapes",
    "inputs_embeds",
    "loss of one's own",
    "loss on the base model",
    "loss in eval mode",
}


def test_situations_on_two_ranks():
    quick = [case for case in HERE if case.name in QUICK]
    assert len(quick) == len(QUICK)
    assert not errors(quick, TWO)


def test_kinds_of_attention_on_two_ranks():
    assert not errors(FAMILIES, TWO)


def test_context_beside_each_other_axis():
    assert not errors([of_model("llama")], FOUR)


@pytest.mark.slow
@pytest.mark.parametrize("grid", FOUR, ids=str)
def test_every_situation(grid):
    assert not errors(HERE, [grid])


@pytest.mark.slow
def test_kinds_of_attention_beside_each_other_axis():
    assert not errors(FAMILIES, FOUR[1:])  # kv heads of gemma and mistral are repeated on some


def own_auxiliary_loss(model, batch, dp_size):
    """A loss of one's own on router logits, beside one by the function of the model's file."""
    output = model(**batch, output_router_logits=True)
    probabilities = torch.stack(tuple(output.router_logits)).softmax(-1)
    assert probabilities.shape[1] == batch["input_ids"].numel()
    switch = modeling_qwen3_moe.load_balancing_loss_func(output.router_logits, 4, 2, batch["attention_mask"])
    return output.loss + 0.7 * switch + (probabilities.mean(dim=1) ** 3).sum()


def test_router_logits_are_whole_where_a_call_asks_for_them():
    case = of_model("qwen3_moe", moe, output_router_logits=False)
    case = dataclasses.replace(case, loss_of=own_auxiliary_loss)
    assert not errors([case], TWO)


def hidden_routers():
    model, _ = parallelize(moe("qwen3_moe"), TWO[0])
    return model.train()(**tiny_batch(2, 9)).router_logits


def test_router_logits_of_the_config_alone_are_not_gathered_in_training():
    assert run_ranks(hidden_routers, 2) == [None, None]


def refusals():
    """Return the messages to calls that a model over context does not take."""
    model, _ = parallelize(tiny_model("llama"), TWO[0])
    batch = {"input_ids": tiny_batch(2, 9)["input_ids"]}
    calls = {
        "use_cache=True": dict(use_cache=True),
        "logits_to_keep": dict(logits_to_keep=torch.tensor([1])),
        "output_attentions": dict(output_attentions=True),
        "position_ids are": dict(position_ids=torch.zeros(2, 4, dtype=torch.long)),
    }
    messages = {name: refused(model, **batch, **more) for name, more in calls.items()}
    return messages | {"generate": refused(model.generate, **batch)}


def test_what_divided_rows_do_not_have_is_refused_by_name():
    for messages in run_ranks(refusals, 2):
        for name, message in messages.items():
            assert message.startswith(name if name != "generate" else "generate is not supported"), message


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("bart", {}, "takes no position_ids"),
        ("rwkv", {}, "no causal language model whose layers are known (no block plan for rwkv models"),
        ("bamba", MAMBA | dict(z_loss_coefficient=0.1), "z_loss"),
        ("openai-gpt", {}, "does not make its attention masks by the functions"),
    ],
)
def test_models_that_cannot_be_divided_are_refused_with_the_reason(kind, changes, reason):
    def make():
        return refused(parallelize, tiny_model(kind, attention="eager", **changes), TWO[0])

    assert reason in make()


def traffic_of(grid):
    """Collectives of a step by kind and group size."""
    model, _ = parallelize(tiny_model("llama").train(), grid)
    found = []
    with observe(lambda kind, payload, group: found.append((kind, payload, group.size()))):
        model(**tiny_batch(2, 8)).loss.backward()
    return found


def test_a_layer_exchanges_its_heads_twice_each_way():
    """Two layers of two rows, 4 positions a rank: q 12, k and v 6 heads of 4 features, and 12 heads back."""
    for found in run_ranks(traffic_of, 2, TWO[0]):
        sizes = [payload for kind, payload, _ in found if kind == "all_to_all"]
        there, back = 2 * 4 * (12 + 6 + 6) * 4 * 8, 2 * 4 * 12 * 4 * 8
        assert sizes == [there, back] * 2 + [back, there] * 2


def saved_bytes(grid, length):
    """Bytes that autograd keeps of one row between the passes, gathered weights and parameters among them.

    4 kv heads, which context divides; those that it does not divide are repeated, and kept so.
    """
    model, _ = parallelize(tiny_model("llama", max_position_embeddings=512, num_key_value_heads=4).train(), grid)
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    ids = torch.arange(length).remainder(100)[None] + 3
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    found = sum(storage.nbytes() for storage in kept.values())
    loss.backward()
    return found


def bytes_a_position(grids):
    """Return the bytes that one more position of a row costs a rank, by grid: weights, which stay, are left out."""
    return [(saved_bytes(grid, 256) - saved_bytes(grid, 128)) / 128 for grid in grids]


@pytest.mark.parametrize(("z", "sizes"), [(2, [2]), pytest.param(4, [2, 4], marks=pytest.mark.slow)], ids=["2", "4"])
def test_activations_of_a_row_fall_as_one_over_context(z, sizes):
    grids = [Grid(z=z, context=context) for context in (1, *sizes)]
    for whole, *parts in run_ranks(bytes_a_position, z, grids):
        assert whole > 1000
        # 10% is the goal; bytes are counted, so that the bound is for what a rank keeps of whole rows beside its own.
        assert parts == pytest.approx([whole / context for context in sizes], rel=0.1)
