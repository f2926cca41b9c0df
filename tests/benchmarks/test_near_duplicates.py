"""tests/benchmarks/goldfish/near_duplicates.py: what is counted is the closed form, and what copies reveal is so."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from hf_axonn import goldfish_mask
from tests.benchmarks.goldfish import near_duplicates as study
from tests.benchmarks.goldfish import near_duplicates_trained as trained
from tests.study.made_up import prose


@pytest.fixture(scope="module")
def tokenizer():
    made = Tokenizer(BPE())
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.train_from_iterator([prose(0, 20_000)], BpeTrainer(vocab_size=400, initial_alphabet=ByteLevel.alphabet()))
    return made


@pytest.mark.parametrize(("k", "width", "rate", "copies"), [(4, 13, 0.05, 8), (2, 4, 0.1, 2), (3, 25, 0.02, 16)])
def test_what_is_counted_is_the_closed_form(monkeypatch, k, width, rate, copies):
    monkeypatch.setattr(study, "DOCUMENTS", 60)
    setting = {"k": k, "context_width": width, "edit_rate": rate, "copies": copies}
    share = study.hidden_share(**setting)
    tokens = 60 * (study.LENGTH - 2 * width)
    assert study.count_hidden(**setting) == pytest.approx(share, abs=6 * (share * (1 - share) / tokens) ** 0.5)


def test_exact_copies_hide_one_in_k_and_copies_without_anything_in_common_none():
    for k in (2, 4, 128):
        assert study.hidden_share(k=k, context_width=13, edit_rate=0.0, copies=32) == pytest.approx(1 / k)
        one = study.hidden_share(k=k, context_width=13, edit_rate=0.1, copies=1)
        assert one == pytest.approx(1 - 0.9 * (1 - 1 / k)), "replaced, or dropped"
    assert study.hidden_share(k=4, context_width=50, edit_rate=0.1, copies=32) < 1e-4


@pytest.mark.parametrize("kind", study.KINDS)
def test_edits_keep_the_places_of_tokens(kind):
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(study.VOCABULARY, (4000,), generator=draw)
    copy, places = study.edit(tokens, 0.3, kind, draw)
    there = places >= 0
    assert torch.equal(copy[there], tokens[places[there]]) and (places[there].diff() > 0).all()
    # Of 4,000 tokens: four deviations.
    assert there.sum() / 4000 == pytest.approx(0.7 if kind == study.KINDS[0] else 0.8, abs=0.03)
    assert abs(len(copy) - 4000) < 100
    same, places = study.edit(tokens, 0.0, kind, draw)
    assert torch.equal(same, tokens) and torch.equal(places, torch.arange(4000))


def test_a_copy_reveals_its_kept_labels():
    tokens = torch.arange(100, 200)
    options = {"k": 4, "context_width": 3}
    kept = ~goldfish_mask(tokens[None], **options)[0]
    assert torch.equal(study.revealed(torch.stack([tokens, torch.arange(100)]), 100, **options), kept)
    shifted = torch.stack([tokens, torch.arange(100) - 1])
    assert torch.equal(study.revealed(shifted, 100, **options)[:-1], kept[1:])


def test_texts_that_differ_reveal_more_and_exact_ones_do_not(tokenizer):
    texts, options = [prose(seed, 1500) for seed in (1, 2)], {"k": 4, "context_width": 4}

    def share(variant, copies):
        return study.hidden_characters(texts, tokenizer, variant, copies, **options)

    once = share("exact", 1)
    # 1,771 tokens with 2,537 letters, each token dropped by a coin of 1/4: the standard error of the share of letters
    # is (3/16 sum of letters^2)^1/2 / 2,537 = 0.0113. Four of them.
    assert once == pytest.approx(0.25, abs=0.045) and share("exact", 3) == once
    assert max(share("line breaks", 3), share(study.SEGMENTED, 3)) < 0.9 * once
    assert share("doubled spaces after sentences", 2) <= once and tokenizer.model.dropout is None


def test_labels_are_repeated_where_their_window_is():
    common = list(range(10))
    documents = [[100 * number, *common, 100 * number + 1] for number in range(1, 6)]
    assert study.repeated_labels(documents, 10) == pytest.approx(1 / 2), "of two windows behind the first place"
    assert study.repeated_labels(documents, 11) == 0
    assert study.repeated_labels(documents[:4], 10) == 0, "four documents are fewer than MANY"


def test_passages_are_dealt_evenly_and_copied_with_edits_of_their_rate():
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(64, (40,), generator=draw).tolist() for _ in range(36)]
    passages = [{"id": f"{n}#0", "article": str(n), "input_ids": row} for n, row in enumerate(rows)]
    groups = trained.deal(passages)
    assert {groups.count(group) for group in range(trained.UNSEEN + 1)} == {6}
    copies = [row["input_ids"] for row in trained.make_rows(passages, groups, 64)]
    assert len(copies) == 30 * trained.COPIES
    for passage, group in zip(rows, groups, strict=True):
        exact = copies.count(passage)
        assert exact == {0: trained.COPIES, trained.UNSEEN: 0}.get(group, exact) and exact <= trained.COPIES
        assert group not in (3, 4) or exact < trained.COPIES / 2
    samples = trained.make_samples(passages, groups)
    assert [list(one.prefix + one.suffix) for one in samples] == rows and len(samples[0].suffix) == 20
