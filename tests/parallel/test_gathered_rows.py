"""Attention that cannot exchange its heads gathers whole rows over context, and models that number positions by
themselves are given those of whole rows: equal to one process."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from hf_axonn import Grid, parallelize
from tests.helpers.adapting import Adapted, adapt
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks
from tests.layers.test_moe import moe
from tests.parallel.test_context_parallel import FOUR, TWO, checkpointed_case, errors, of_model


pytestmark = pytest.mark.usefixtures("device")

FALCON = dict(num_attention_heads=12, multi_query=True, bias=True)
BERT = dict(
    is_decoder=True, attention="eager", pad_token_id=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
)
LLAMA4 = dict(  # scales that differ from position to position
    no_rope_layers=[1, 0], floor_scale=3, attention_chunk_size=4, attn_temperature_tuning=True
)


def padded_left(case):
    """The same case with its padding, and two more tokens of it in one row, at the other end."""
    batch = {name: value.flip(1) for name, value in case.batches[0].items()}
    batch["attention_mask"][2, :2], batch["labels"][2, :2] = 0, -100
    return dataclasses.replace(case, name=f"{case.name}, padded left", batches=[batch])


def unpadded(case):
    """The same case without an attention mask, and with ids that are padding to those who count them."""
    batch = {name: value for name, value in case.batches[0].items() if name != "attention_mask"}
    batch["input_ids"][1, 3:5] = 1
    return dataclasses.replace(case, name=f"{case.name}, without a mask", batches=[batch])


def embedded(case):
    """The same case with embeddings in place of ids."""
    batch = dict(case.batches[0])
    hidden = torch.randn(*batch.pop("input_ids").shape, 48, generator=torch.Generator().manual_seed(1))
    batch["inputs_embeds"] = hidden.to(batch["labels"].device, torch.float64)
    return dataclasses.replace(case, name=f"{case.name}, embeddings", batches=[batch])


GATHERED = {
    "falcon": of_model("falcon", alibi=False, steps=3, **FALCON),
    "gptj": of_model("gptj", attention="eager", rotary_dim=4),
    "gpt_neo": of_model(
        "gpt_neo", attention="eager", attention_types=[[["global", "local"], 1]], num_layers=2, window_size=4
    ),
    "llama4_text": of_model("llama4_text", moe, **LLAMA4),
    "bloom": of_model("bloom", attention="eager"),
    "mpt": of_model("mpt", attention="eager", max_seq_len=64),
}
ALIBI = dataclasses.replace(of_model("falcon", alibi=True, **FALCON), name="falcon with ALiBi")  # not over x
COUNTING = {
    "opt": of_model("opt", ffn_dim=40, word_embed_proj_dim=48, dropout=0.0, steps=2),
    "biogpt": of_model("biogpt", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "roberta": of_model("roberta", **BERT),
    "xlm-roberta-xl": of_model("xlm-roberta-xl", **BERT),
}
FEW = [
    GATHERED["falcon"],
    ALIBI,
    checkpointed_case(GATHERED["gptj"]),
    unpadded(GATHERED["bloom"]),
    padded_left(COUNTING["opt"]),
    unpadded(COUNTING["roberta"]),
]
MORE = [
    *(change(case) for case in (*GATHERED.values(), ALIBI) for change in (padded_left, unpadded)),
    *(change(case) for case in COUNTING.values() for change in (padded_left, unpadded)),
    *(checkpointed_case(case) for case in GATHERED.values()),
    embedded(COUNTING["roberta"]),
    embedded(GATHERED["bloom"]),
]


def test_some_on_two_ranks():
    assert not errors(FEW, TWO)


def test_heads_are_divided_beside_context():
    assert not errors([GATHERED["falcon"], GATHERED["gptj"]], [Grid(z=2, x=2, context=2)])


@pytest.mark.slow
def test_padding_masks_checkpoints_and_embeddings():
    assert not errors(MORE, TWO)


@pytest.mark.slow
@pytest.mark.parametrize("grid", FOUR, ids=str)
def test_every_kind_beside_each_other_axis(grid):
    assert not errors([*GATHERED.values(), *COUNTING.values()], [grid])


def adapted(kind, **options):
    case = GATHERED[kind]
    return Adapted(
        f"{kind} {options}", base=case.make, batches=case.batches, adapter=functools.partial(adapt, **options)
    )


@pytest.mark.slow
@pytest.mark.parametrize("grid", [TWO[0], FOUR[2], FOUR[3]], ids=str)
def test_adapters_of_what_gathers(grid):
    """The row layer's adapter takes this rank's positions, as the layer does."""
    assert not errors([adapted("gptj"), adapted("falcon", use_dora=True)], [grid])


def report():
    lines = []
    for kind in ("falcon", "llama"):
        _, found = parallelize(tiny_model(kind), TWO[0])
        lines.append(str(found))
    return lines


def test_the_report_says_who_gathers():
    for falcon, llama in run_ranks(report, 2):
        assert "context: 2 attentions gather whole rows (transformer.h.0.self_attention ...)" in falcon
        assert "2 attentions exchange heads for positions" in llama and "gather" not in llama


def what_differs():
    """Count the logits that change with one token of a row, by position, in Falcon: later ones of the row alone."""
    model, _ = parallelize(tiny_model("falcon", **FALCON).eval(), TWO[0])
    ids = tiny_batch(2, 9)["input_ids"]
    other = ids.clone()
    other[0, 5] += 1
    with torch.no_grad():
        before, after = (model(input_ids=each).logits for each in (ids, other))
    return (before != after).any(dim=-1).nonzero().tolist()


def test_a_token_is_seen_by_later_ones_of_its_row():
    for changed in run_ranks(what_differs, 2):
        assert changed == [[0, position] for position in range(5, 9)]
