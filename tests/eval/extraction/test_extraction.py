"""Extraction end to end in one process, on a model that knows by heart what it was taught and nothing else."""

import copy
import dataclasses
import functools
import json
import math
from importlib.metadata import version

import pytest
import torch

from hf_axonn_eval import Sample, extract, read_run, samples_digest
from hf_axonn_eval.data.tokenizer_identity import tokenizer_identity
from hf_axonn_eval.extraction import batching as batches
from hf_axonn_eval.extraction import scoring
from hf_axonn_eval.metrics import text as metrics
from tests.helpers.eval_support import (
    LEARNT,
    PREFIX,
    SUFFIX,
    samples,
    tiny_gpt2,
    tiny_llama,
    topics_tokenizer,
    trained_llama,
)


def sample(prefix, suffix) -> Sample:
    name = f"{len(prefix)}+{len(suffix)}"
    return Sample(sample_id=name, document_id=name, bucket=0, offset=0, prefix=tuple(prefix), suffix=tuple(suffix))


def plain_generate(model, asked: Sample) -> list[int]:
    """What the definition says: `generate` with nothing in its way, one sample at a time."""
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([asked.prefix])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=len(asked.suffix),
        pad_token_id=0,
    )
    return output[0, len(asked.prefix) :].tolist()


def test_what_was_learnt_is_extracted_and_nothing_else():
    results = extract(trained_llama(), topics_tokenizer(), samples(), progress=False)
    assert [result.exact_match for result in results] == [sample.bucket == 40 for sample in samples()]
    assert sum(result.exact_match for result in results) == LEARNT


def test_an_untrained_model_gives_nothing_back():
    results = extract(tiny_llama(), topics_tokenizer(), samples(), progress=False)
    assert not any(result.exact_match or result.near_verbatim for result in results)
    vocabulary = len(topics_tokenizer())
    for result in results:
        assert -result.logprob / result.suffix_length == pytest.approx(math.log(vocabulary), rel=0.1)


@pytest.mark.parametrize("make", [tiny_llama, trained_llama, tiny_gpt2])
def test_one_pass_and_the_rest_decoded_equals_generate(make):
    model = make()
    uneven = [
        *samples()[:9],
        sample(range(5, 9), range(9, 16)),
        sample(range(50, 70), range(70, 100)),
    ]
    results = extract(model, topics_tokenizer(), uneven, batch_size=4, progress=False)
    for asked, result in zip(uneven, results, strict=True):
        expected = plain_generate(model, asked)
        assert result.generated == expected
        assert result.exact_match == (expected == list(asked.suffix))
        assert result.divergence_point == metrics.first_miss(
            [mine == true for mine, true in zip(expected, asked.suffix, strict=True)]
        )
        assert result.edit_distance == metrics.edit_distance(expected, asked.suffix)
        text = topics_tokenizer().decode(expected)
        assert result.generated_text == text
        assert result.rougeL == metrics.rouge(text, topics_tokenizer().decode(list(asked.suffix)))["rougeL"]


def test_samples_that_are_extracted_cost_no_decoding():
    model, fed = trained_llama(), []
    forward = model.forward

    def counted(input_ids, **options):
        fed.append(tuple(input_ids.shape))
        return forward(input_ids=input_ids, **options)

    model.forward = functools.wraps(forward)(counted)
    learnt = [sample for sample in samples() if sample.bucket]
    extract(model, topics_tokenizer(), learnt, progress=False)
    assert fed == [(LEARNT, PREFIX + SUFFIX - 1)]
    half = learnt[0].suffix[:6] + tuple((token + 1) % 800 for token in learnt[0].suffix[6:])
    fed.clear()
    [result] = extract(model, topics_tokenizer(), [dataclasses.replace(learnt[0], suffix=half)], progress=False)
    # six right tokens and the first wrong choice are known and computed; for the five that are left one pass each
    assert fed == [(1, PREFIX + SUFFIX - 1)] + [(1, 1)] * 5
    assert result.generated == list(learnt[0].suffix) and result.divergence_point == 6


def test_without_generation_there_is_no_rouge_but_everything_else():
    with_it = extract(trained_llama(), topics_tokenizer(), samples(), progress=False)
    without = extract(trained_llama(), None, samples(), generate=False, progress=False)
    for one, other in zip(with_it, without, strict=True):
        assert other.generated is other.rougeL is other.edit_distance is other.near_verbatim is None
        for name in ("exact_match", "token_accuracy", "divergence_point", "extraction_strength", "hits"):
            assert getattr(one, name) == getattr(other, name)
        assert other.logprob == pytest.approx(one.logprob, rel=1e-5)


def test_without_a_tokenizer_there_is_no_rouge():
    [result] = extract(tiny_llama(), None, samples()[:1], progress=False)
    assert result.rouge1 is result.generated_text is None
    assert result.edit_distance is not None


def test_a_peft_model_is_measured_with_its_adapter():
    from peft import LoraConfig, get_peft_model

    plain = extract(trained_llama(), topics_tokenizer(), samples(), progress=False)
    adapted = get_peft_model(trained_llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    config = adapted.generation_config
    assert extract(adapted, topics_tokenizer(), samples(), progress=False) == plain  # LoRA begins at zero
    assert adapted.generation_config is config
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    changed = extract(adapted, topics_tokenizer(), samples(), progress=False)
    assert sum(result.exact_match for result in changed) < LEARNT


def test_the_mode_of_the_model_is_kept_and_dropout_is_off():
    model = tiny_gpt2().train()  # GPT-2 has dropout 0.1
    first = extract(model, topics_tokenizer(), samples()[:2], progress=False)
    assert model.training
    assert extract(model, topics_tokenizer(), samples()[:2], progress=False) == first


class Stopped(Exception):
    """Stands for whatever ends a run."""


def test_a_stopped_run_goes_on_where_it_was(tmp_path, monkeypatch):
    options = {"output": tmp_path / "run", "model_record": {"fingerprint": "a"}, "batch_size": 2, "progress": False}
    unbroken = extract(trained_llama(), topics_tokenizer(), samples(), **{**options, "output": tmp_path / "unbroken"})
    score, scored = scoring.score_suffixes, []
    monkeypatch.setattr(batches, "MOST_TOGETHER", 3)

    def stop_after_three(model, batch, **options):
        if len(scored) == 3:
            raise Stopped
        scored.append([sample.sample_id for sample in batch])
        return score(model, batch, **options)

    monkeypatch.setattr(scoring, "score_suffixes", stop_after_three)
    with pytest.raises(Stopped):
        extract(trained_llama(), topics_tokenizer(), samples(), **options)
    assert len((tmp_path / "run" / "results.jsonl").read_text().splitlines()) == 6
    assert not (tmp_path / "run" / "summary.json").exists()

    first = sum(scored, [])
    scored.clear()

    def note(model, batch, **options):
        scored.append([sample.sample_id for sample in batch])
        return score(model, batch, **options)

    monkeypatch.setattr(scoring, "score_suffixes", note)
    assert extract(trained_llama(), topics_tokenizer(), samples(), **options) == unbroken
    assert sorted(first + sum(scored, [])) == sorted(sample.sample_id for sample in samples())
    scored.clear()
    assert extract(trained_llama(), topics_tokenizer(), samples(), **options) == unbroken
    assert scored == []
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "unbroken")]
    assert summaries[0]["buckets"] == summaries[1]["buckets"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_record": {"fingerprint": "b"}}, "model_fingerprint was 'a' and is 'b'"),
        ({"generate": False}, "generate was True and is False"),
        ({"samples": 3}, "samples was 2 and is 3"),
        ({"dtype": torch.float64}, "dtype was 'float32' and is 'float64'"),
        ({"attention": "eager"}, "attn_implementation was 'sdpa' and is 'eager'"),
        ({"added": ["new"]}, "tokenizer_sha256 was '[0-9a-f]{64}' and is '[0-9a-f]{64}'"),
        ({"tokenizer": None}, "tokenizer_sha256 was '[0-9a-f]{64}' and is None"),
    ],
)
def test_a_run_does_not_go_on_as_another(tmp_path, change, message):
    options = {"output": tmp_path, "model_record": {"fingerprint": "a"}, "progress": False}
    extract(tiny_llama(), topics_tokenizer(), samples()[:2], **options)
    before = (tmp_path / "results.jsonl").read_bytes()
    asked = samples()[: change.pop("samples", 2)]
    model = tiny_llama().to(change.pop("dtype", torch.float32))
    model.set_attn_implementation(change.pop("attention", "sdpa"))
    tokenizer = change.pop("tokenizer", copy.deepcopy(topics_tokenizer()))
    if "added" in change:
        tokenizer.add_tokens(change.pop("added"))
    with pytest.raises(ValueError, match=message):
        extract(model, tokenizer, asked, **{**options, **change})
    assert (tmp_path / "results.jsonl").read_bytes() == before


def test_what_may_change_when_a_run_goes_on_is_noted(tmp_path):
    options = {"output": tmp_path, "model_record": {"fingerprint": "a"}, "progress": False}
    precision = torch.get_float32_matmul_precision()
    extract(tiny_llama(), topics_tokenizer(), samples()[:3], batch_size=2, **options)
    file = tmp_path / "results.jsonl"
    file.write_text(file.read_text().splitlines(keepends=True)[0])
    try:
        torch.set_float32_matmul_precision("high")
        extract(tiny_llama(), topics_tokenizer(), samples()[:3], batch_size=1, **options)
    finally:
        torch.set_float32_matmul_precision(precision)
    record = read_run(tmp_path)[0]
    parts = record["parts"]
    assert [part["index"] for part in parts] == [0, 1]
    assert [part["settings"]["batch_size"] for part in parts] == [2, 1]
    assert [part["precision"]["float32_matmul"] for part in parts] == [precision, "high"]
    for name in ("started", "command", "processes", "grid", "device", "versions"):
        assert parts[0][name] == record[name] and name in parts[1], name
    assert json.loads((tmp_path / "summary.json").read_text())["run"] == record


def test_the_summary_says_how_to_repeat_the_run(tmp_path):
    options = {
        "model_record": {"fingerprint": "a", "path": "here"},
        "batch_size": 5,
        "confidence": 0.9,
        "progress": False,
    }
    extract(tiny_llama(), topics_tokenizer(), samples(), output=tmp_path, **options)
    summary = json.loads((tmp_path / "summary.json").read_text())
    run = summary["run"]
    assert run["identity"] == {
        "samples": len(samples()),
        "samples_sha256": samples_digest(samples()),
        "model_fingerprint": "a",
        "base_fingerprint": None,
        "dtype": "float32",
        "attn_implementation": "sdpa",
        "tokenizer_sha256": tokenizer_identity(topics_tokenizer())["sha256"],
        "generate": True,
        "stop_early": None,
        "sampler": None,
        "membership": None,
        "guesses": None,
        "near_copies": None,
        "recite": None,
    }
    assert run["tokenizer"] == {**tokenizer_identity(topics_tokenizer()), "checked": False}
    assert run == json.loads((tmp_path / "run.json").read_text())
    assert run["model"]["path"] == "here" and run["settings"]["batch_size"] == 5
    assert run["settings"]["batches"] == {"rows": 5, "number": 3, "in_a_unit": 3}
    assert run["settings"]["near_tie_below"] == 1e-4 and run["settings"]["confidence"] == 0.9
    assert run["versions"]["torch"] == version("torch") and "transformers" in run["versions"]
    assert summary["intervals"]["confidence"] == 0.9


@pytest.mark.parametrize(
    ("asked", "options", "message"),
    [
        (samples()[:0], {}, "no samples"),
        (samples()[:1] * 2, {}, "2 samples have only 1 different"),
        (samples()[:1], {"batch_size": 0}, "batch_size is 0"),
        (samples()[:1], {"confidence": 95}, "confidence is 95"),
        (samples()[:1], {"output": "somewhere"}, "needs model_record"),
        ([sample([1], [9999])], {}, "token id 9999, but the model's vocabulary has 800"),
        ([sample([1] * 60, [1] * 5)], {}, "65 tokens, but the model's window is 64"),
    ],
)
def test_wrong_input_is_named_before_anything_is_measured(asked, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        extract(tiny_llama(), topics_tokenizer(), asked, **options)
    assert list(tmp_path.iterdir()) == []
