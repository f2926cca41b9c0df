"""Dropped and supervised tokens: masks, numbers by hand, and a model that was trained with the goldfish loss."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from hf_axonn.goldfish.mask import goldfish_mask
from hf_axonn_eval import Sampling, build_samples, extract
from hf_axonn_eval.analysis.goldfish_tokens import TokenMasks, goldfish_tokens, recorded_mask, token_masks
from hf_axonn_eval.analysis.intervals import jackknife_interval, kish, mean_intervals
from tests.helpers.eval_support import documents, result, tiny_llama, topics_tokenizer


MASK = {"strategy": "hash-table", "k": 3, "context_width": 5}


@functools.cache
def windows(bos="tokenizer"):
    """Windows of 12 + 12 tokens of twelve documents, beginning at their tokens 0, 6, ... 18."""
    sampling = Sampling(prefix_length=12, suffix_length=12, offset=(0, 6, 12, 18), bos=bos)
    return tuple(build_samples(documents(), tokenizer=topics_tokenizer(), sampling=sampling))


@pytest.mark.parametrize("strategy", ["hash-table", "hash", "hash-avalanche"])
@pytest.mark.parametrize("bos", ["tokenizer", "prefix"])
@pytest.mark.parametrize("in_training", [False, True])
def test_the_mask_of_a_window_is_that_of_the_document(strategy, bos, in_training):
    """At every offset, with a BOS before prefixes or documents or without."""
    mask = {**MASK, "strategy": strategy}
    found = token_masks(windows(bos), **mask)
    compared = 0
    for document in documents():
        ids = topics_tokenizer()(document["text"], add_special_tokens=in_training)["input_ids"]
        trained = goldfish_mask(torch.tensor([ids]), **mask)[0].int().tolist()
        for sample in windows(bos):
            if sample.document_id == document["id"]:
                begin = sample.offset + 12 + in_training
                answer = result(sample.sample_id, suffix_length=12)
                assert found.select(answer).tolist() == trained[begin : begin + 12]
                compared += 1
    assert compared == len(windows(bos)) == 48
    with pytest.warns(FutureWarning, match="TokenMasks.select"):
        assert found.of(answer).tolist() == found.select(answer).tolist()
    assert 0.2 < (found.dropped == 1).mean() < 0.5


def test_short_prefixes_leave_tokens_of_which_nothing_is_known():
    shorter = [replace(sample, prefix=sample.prefix[:4]) for sample in windows()]
    found = token_masks(shorter, **MASK)
    for sample in shorter:
        dropped = found.select(result(sample.sample_id, suffix_length=12))
        assert (dropped[:2] == -1).all() and (dropped[2:] >= 0).all(), "6 tokens, of which 4 are the prefix"


def test_what_no_mask_can_be_computed_for_is_refused():
    for strategy in ("static", "random", "seeded_random"):
        with pytest.raises(ValueError, match=f"strategy={strategy}: this mask is no function of the text"):
            token_masks(windows(), strategy=strategy)
    with pytest.raises(ValueError, match="k is 1"):
        token_masks(windows(), k=1)
    with pytest.raises(ValueError, match="'other' of the run is not among the samples"):
        token_masks(windows(), **MASK).select(result("other"))


def test_a_table_of_another_device(tmp_path):
    from hf_axonn.goldfish.table import save_table

    about = save_table(tmp_path / "table.safetensors", "cpu")
    found = token_masks(windows(), **MASK, table=tmp_path / "table.safetensors")
    assert found.settings == {**MASK, "table_sha256": about["sha256"]}
    assert (found.dropped == token_masks(windows(), **MASK).dropped).all()


def answers(hits, nll, document, place=0, bucket=1):
    return result(
        f"{document}@{place}",
        document_id=document,
        bucket=bucket,
        suffix_length=len(hits),
        hits=list(hits),
        logprobs=[-each for each in nll],
    )


def masks(dropped):
    lengths = np.cumsum([0, *map(len, dropped.values())])
    flat = np.concatenate([np.array(mask, dtype=np.int8) for mask in dropped.values()])
    return TokenMasks(dict(zip(dropped, lengths.tolist(), strict=False)), flat, MASK)


def test_by_hand():
    run = [
        answers([True, False, True], [0.1, 2.0, 0.3], "a"),
        answers([True, True, False], [0.2, 0.4, 5.0], "b"),
        answers([False], [1.0], "c", bucket=0),
    ]
    found = goldfish_tokens({"m": run}, masks({"a@0": [0, 1, -1], "b@0": [0, 0, 1], "c@0": [0]}))
    assert found["tokens"] == {"dropped": 2, "supervised": 4, "unknown": 1} and found["mask"] == MASK
    trained, control = found["runs"]["m"]["1"], found["runs"]["m"]["0"]
    assert (trained["dropped"]["hits"], trained["dropped"]["n"], trained["dropped"]["documents"]) == (0, 2, 2)
    assert (trained["supervised"]["hits"], trained["supervised"]["n"]) == (3, 3)
    assert trained["supervised"]["accuracy"]["mean"] == 1 and trained["dropped"]["accuracy"]["mean"] == 0
    assert trained["dropped"]["nll"]["mean"] == pytest.approx(3.5)
    assert trained["supervised"]["nll"]["mean"] == pytest.approx(0.7 / 3)
    assert trained["difference"]["accuracy"]["difference"] == 1
    assert trained["difference"]["nll"]["difference"] == pytest.approx(0.7 / 3 - 3.5)
    assert trained["difference"]["nll"]["interval"] == "none: 2 documents are too few"
    assert set(control) == {"supervised"}, "nothing was dropped, so there is no difference"


def drawn(count=20, seed=0):
    """Results of documents with 1 to 3 samples of 9 tokens, and masks."""
    generator = np.random.default_rng(seed)
    run, mask = [], {}
    for document in range(count):
        for place in range(generator.integers(1, 4)):
            dropped = (generator.random(9) < 0.3).astype(int).tolist()
            hits = generator.random(9) < 0.5 + 0.02 * document
            run.append(answers(hits.tolist(), generator.gamma(2.0, size=9).tolist(), f"d{document}", place))
            mask[f"d{document}@{place}"] = dropped
    return run, masks(mask)


@pytest.mark.parametrize("side", [("dropped", 1), ("supervised", 0)])
def test_intervals_are_those_of_means_over_documents(side):
    name, value = side
    run, mask = drawn()
    found = goldfish_tokens({"m": run}, mask)["runs"]["m"]["1"][name]
    tokens = [
        (hit, -logprob, answer.document_id)
        for answer in run
        for hit, logprob, kind in zip(answer.hits, answer.logprobs, mask.select(answer), strict=True)
        if kind == value
    ]
    columns = np.array([(hit, nll) for hit, nll, _ in tokens], dtype=float)
    for metric, (interval, _) in zip(
        ("accuracy", "nll"), mean_intervals(columns, [document for *_, document in tokens]), strict=True
    ):
        assert (found[metric]["low"], found[metric]["high"]) == pytest.approx(interval)


def test_the_difference_is_as_sure_as_leaving_out_documents_says():
    """The standard error of the jackknife, computed by leaving each document out in turn."""
    run, mask = drawn()
    entry = goldfish_tokens({"m": run}, mask)["runs"]["m"]["1"]["difference"]

    def difference(left_out):
        kept = [answer for answer in run if answer.document_id != left_out]
        hits = np.concatenate([answer.hits for answer in kept])
        kinds = np.concatenate([mask.select(answer) for answer in kept])
        return hits[kinds == 0].mean() - hits[kinds == 1].mean()

    names = sorted({answer.document_id for answer in run})
    assert entry["accuracy"]["difference"] == pytest.approx(difference(None))
    without = np.array([difference(name) for name in names])
    count = len(names)
    error = np.sqrt((count - 1) / count * ((without - difference(None)) ** 2).sum())
    width = entry["accuracy"]["high"] - entry["accuracy"]["low"]
    assert 2 * 1.96 * error < width < 2 * 2.6 * error, "Student's t, a little skew"
    tokens = np.zeros((count, 2))
    for answer in run:
        for kind in mask.select(answer):
            tokens[names.index(answer.document_id), kind] += 1
    freedom = min(kish(tokens[:, kind] ** 2) for kind in (0, 1)) - 1
    found, _ = jackknife_interval(difference(None), difference(None) - without, freedom)
    assert (entry["accuracy"]["low"], entry["accuracy"]["high"]) == pytest.approx(found)


def test_runs_without_log_probabilities_are_refused():
    with pytest.raises(ValueError, match=r"run 'm' has no log-probabilities of tokens .*--stop_early"):
        goldfish_tokens({"m": [result("a", hits=None, logprobs=None)]}, masks({"a": [0, 1]}))


@functools.cache
def trained():
    """A tiny Llama trained on the first documents with MASK, and answers of it and of one that was not trained."""
    tokens = torch.tensor(
        [topics_tokenizer()(document["text"])["input_ids"][:49] for document in documents() if document["bucket"]]
    )
    labels = tokens.masked_fill(goldfish_mask(tokens, **MASK), -100)
    model = tiny_llama().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    for _ in range(70):
        model(input_ids=tokens, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    sampling = Sampling(prefix_length=12, suffix_length=12, offset=(0, 12, 24), add_special_tokens=True)
    asked = build_samples(documents(), tokenizer=topics_tokenizer(), sampling=sampling)
    runs = {
        name: extract(some.eval(), None, asked, generate=False, progress=False)
        for name, some in (("base", tiny_llama()), ("goldfish", model))
    }
    return asked, runs


def differences(**mask):
    asked, runs = trained()
    found = goldfish_tokens(runs, token_masks(asked, **{**MASK, **mask}))["runs"]
    return {
        (name, bucket): found[name][bucket]["difference"]["accuracy"]["difference"]
        for name in runs
        for bucket in ("0", "40")
    }


def test_a_model_that_was_trained_with_the_mask_knows_the_dropped_tokens_less():
    found = differences()
    assert found["goldfish", "40"] > 0.5
    for other in (("goldfish", "0"), ("base", "40"), ("base", "0")):
        assert abs(found[other]) < 0.1, "controls, and a model that was not trained"


@pytest.mark.parametrize("other", [{"context_width": 6}, {"strategy": "hash"}])
def test_with_another_mask_the_protection_is_not_seen(other):
    assert abs(differences(**other)["goldfish", "40"]) < 0.1


def test_with_another_k_a_part_of_it_is_seen():
    """Of one hash, what a larger k drops is among what a smaller one drops."""
    asked, _ = trained()
    few, many = (token_masks(asked, **{**MASK, "k": k}).dropped for k in (7, 3))
    assert not (few & ~many).any()
    full = differences()["goldfish", "40"]
    for k in (2, 7):
        assert 0.4 < differences(k=k)["goldfish", "40"] < full - 0.1


def test_the_mask_is_that_of_training_records():
    def run(*parts: dict, earlier: dict | None = None) -> dict:
        counts = {"steps": 1, "tokens": 9, "dropped": 2}
        record = {"format": "hf_axonn training record 1", **counts, "earlier": earlier}
        return {"model": {"training": record | {"parts": [counts | {"data": {}} | part for part in parts]}}}

    ordinary, mask = {"strategy": "none"}, {"strategy": "hash", "k": 3, "context_width": 5}
    trained = run(ordinary, mask)
    assert recorded_mask({"base": {"model": {}}, "a": run(ordinary), "b": trained}) == mask
    assert recorded_mask({"a": run(ordinary, earlier=trained["model"]["training"])}) == mask
    with pytest.raises(ValueError, match=r"a with .*k=3.*; b with .*k=4"):
        recorded_mask({"a": trained, "b": run(mask | {"k": 4})})
    with pytest.raises(ValueError, match="no training record of these runs names a goldfish loss"):
        recorded_mask({"a": run(ordinary), "b": {"model": None}})
    for more in ({"table_sha256": "0" * 64}, {"as_reference": True, "ignored_token": -1}):
        with pytest.raises(ValueError, match="needs more than the record"):
            recorded_mask({"a": run(mask | more)})
