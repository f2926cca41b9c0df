"""Samples of another tokenizer: a model that knows all of them would read as one that knows none."""

import json
import logging
import math
from pydoc_data.topics import topics

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_axonn_eval import SampleFile, build_samples, extract, read_samples, write_samples
from hf_axonn_eval.data.samples import about_file, read_about, write_about
from hf_axonn_eval.data.tokenizer_identity import tokenizer_identity
from tests.helpers.eval_support import (
    LEARNT,
    PREFIX,
    SUFFIX,
    documents,
    samples,
    tiny_llama,
    topics_tokenizer,
    trained_llama,
)
from tests.helpers.ranks import run_ranks


OPTIONS = {"progress": False, "generate": False}


@pytest.fixture(scope="module")
def smaller() -> PreTrainedTokenizerFast:
    """A tokenizer whose ids are all in the model's vocabulary: nothing but their meaning is wrong."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator([topics[name] for name in sorted(topics)][20:40], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def written(path, tokenizer) -> SampleFile:
    """A file of samples of the learnt documents, with its about file."""
    known = [document for document in documents() if document["bucket"]]
    asked = build_samples(known, tokenizer=tokenizer, prefix_length=PREFIX, suffix_length=SUFFIX)
    digest = write_samples(asked, path)
    write_about(path, {"sha256": digest, "tokenizer": tokenizer_identity(tokenizer)})
    return SampleFile(path)


def test_samples_of_another_tokenizer_are_refused(smaller, tmp_path):
    same = written(tmp_path / "same.jsonl", topics_tokenizer())
    options = {"output": tmp_path / "run", "model_record": {"fingerprint": "a"}, **OPTIONS}
    found = extract(trained_llama(), topics_tokenizer(), same, **options)
    assert sum(result.exact_match for result in found) == LEARNT
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["tokenizer"] == {**tokenizer_identity(topics_tokenizer()), "checked": True}

    other = written(tmp_path / "other.jsonl", smaller)
    for more in ({}, {"output": tmp_path / "refused", "model_record": {"fingerprint": "a"}}):
        with pytest.raises(ValueError, match=r"another tokenizer than the model's.* \(400 tokens.* \(800 tokens"):
            extract(trained_llama(), topics_tokenizer(), other, **OPTIONS, **more)
    assert not (tmp_path / "refused").exists()


def test_what_is_not_known_is_not_checked_and_said(smaller, tmp_path):
    path = tmp_path / "samples.jsonl"
    written(path, smaller)
    options = {"model_record": {"fingerprint": "a"}, **OPTIONS}
    identity = tokenizer_identity(topics_tokenizer())

    def checked(name, tokenizer, asked) -> dict:
        extract(trained_llama(), tokenizer, asked, output=tmp_path / name, **options)
        return json.loads((tmp_path / name / "run.json").read_text())["tokenizer"]

    assert checked("list", topics_tokenizer(), read_samples(path)) == {**identity, "checked": False}
    unknown = {"path": None, "size": None, "sha256": None, "checked": False}
    assert checked("no tokenizer", None, SampleFile(path)) == unknown
    write_about(path, {**read_about(path), "tokenizer": "a path, as earlier versions wrote it"})
    assert checked("earlier", topics_tokenizer(), SampleFile(path)) == {**identity, "checked": False}
    about_file(path).unlink()
    assert checked("no about file", topics_tokenizer(), SampleFile(path)) == {**identity, "checked": False}


def test_ids_beyond_the_tokenizer_are_refused_without_an_about_file(smaller):
    with pytest.raises(ValueError, match=r"token id \d+, but the ids of the tokenizer .* end at 399"):
        extract(trained_llama(), smaller, samples(), **OPTIONS)


def test_a_damaged_identity_is_named(tmp_path):
    same = written(tmp_path / "samples.jsonl", topics_tokenizer())
    about = read_about(same.path)
    for tokenizer in ({}, {"sha256": 7}, {"sha256": "no hex"}):
        write_about(same.path, {**about, "tokenizer": tokenizer})
        with pytest.raises(ValueError, match="about.json is damaged"):
            extract(tiny_llama(), topics_tokenizer(), same, **OPTIONS)


def ask(path: str) -> str:
    with pytest.raises(ValueError) as refused:
        extract(trained_llama(), topics_tokenizer(), SampleFile(path), **OPTIONS)
    return str(refused.value)


def test_every_rank_refuses(smaller, tmp_path):
    written(tmp_path / "samples.jsonl", smaller)
    first, second = run_ranks(ask, 2, str(tmp_path / "samples.jsonl"))
    assert first == second and "another tokenizer" in first


def guessing(bias: float):
    """A model that gives all tokens the same logit but the first, which is not asked for: it has `bias` more."""
    model = tiny_llama()
    model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(800))
    with torch.no_grad():
        model.lm_head.bias[0] = bias
    return model


def test_a_loss_no_better_than_chance_is_warned_of(tmp_path, caplog):
    asked = samples()[:3]
    assert all(0 not in sample.suffix for sample in asked)

    def chance(name, model, **more) -> tuple[dict | None, list[str]]:
        caplog.clear()
        options = {"output": tmp_path / name, "model_record": {"fingerprint": "a"}, **OPTIONS, **more}
        extract(model, topics_tokenizer(), asked, **options)
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        return summary["chance"], [record.getMessage() for record in caplog.records]

    # on the safe side of what rounding does to the logarithm of 800
    for bias, worse in ((1.0, True), (-1.0, False)):
        loss = math.log(799 + math.exp(bias))
        found, told = chance(f"{bias}", guessing(bias))
        assert found == {"nll": pytest.approx(loss, abs=1e-5), "chance_nll": math.log(800), "no_better": worse}
        assert len(told) == worse
    found, told = chance("wrong", guessing(40.0))
    assert found["no_better"] and told == [
        f"the mean loss of the suffixes is {found['nll']:.2f} nats a token, no better than chance: 6.68, the "
        "logarithm of the vocabulary of 800. That nothing is extracted says nothing then. Either the samples are of "
        "another tokenizer, or the model is not trained, or its weights were wrongly loaded."
    ]
    assert chance("early", guessing(40.0), stop_early=True) == (None, [])
    assert chance("trained", trained_llama())[1] == []
    caplog.clear()
    extract(guessing(40.0), topics_tokenizer(), asked, **OPTIONS)
    assert [record.levelno for record in caplog.records] == [logging.WARNING], "without an output directory, too"


def ask_for_chance(path: str) -> int:
    warned = []
    logging.getLogger("hf_axonn_eval.extraction.run").addFilter(lambda record: warned.append(record) or True)
    extract(guessing(40.0), topics_tokenizer(), samples()[:3], **OPTIONS)
    return len(warned)


def test_one_rank_warns():
    assert run_ranks(ask_for_chance, 2, "") == [1, 0]
