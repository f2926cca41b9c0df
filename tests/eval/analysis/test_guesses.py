"""Recall at a number of errors, and how sure a model is of its greedy guesses."""

import json
import random

import pytest
import torch

from hf_axonn_eval import compare, extract, read_run, summarize
from hf_axonn_eval.__main__ import main
from hf_axonn_eval.analysis.guesses import recall_at_errors
from hf_axonn_eval.data.samples import samples_digest, write_about, write_samples
from hf_axonn_eval.report import tables
from tests.helpers.eval_support import LEARNT, samples, topics_tokenizer, trained_llama


def scored(guesses, number, errors):
    """The published loop, for one guess an example: what is right is counted while fewer errors were made."""
    solved, bad = 0, 0
    for _, right in sorted(guesses, key=lambda guess: guess[0]):
        if not right:
            bad += 1
        elif bad < errors:
            solved += 1
    return solved / number


def test_recall_by_hand():
    losses, right = [0.1, 0.2, 0.3, 0.4, 0.5], [True, False, True, False, True]
    assert [recall_at_errors(losses, right, errors) for errors in (1, 2, 3)] == [0.2, 0.4, 0.6]
    assert recall_at_errors(losses[::-1], right[::-1], 2) == 0.4, "the order is that of the losses"
    assert recall_at_errors([1.0, 1.0], [False, True], 1) == 0, "equal ones as they come"
    assert recall_at_errors([3.0], [True]) == 1 and recall_at_errors([3.0], [False]) == 0


def test_recall_is_that_of_the_published_loop():
    rng = random.Random(0)
    for _ in range(200):
        guesses = [(rng.random(), rng.random() < 0.6) for _ in range(rng.randrange(1, 60))]
        errors = rng.randrange(1, 20)
        losses, right = zip(*guesses, strict=True)
        assert recall_at_errors(losses, right, errors) == scored(guesses, len(guesses), errors)


@pytest.mark.parametrize(
    ("losses", "right", "errors"), [([], [], 1), ([1.0], [], 1), ([float("nan")], [True], 1), ([1.0], [True], 0)]
)
def test_what_has_no_recall(losses, right, errors):
    with pytest.raises(ValueError, match="at least one error"):
        recall_at_errors(losses, right, errors)


@pytest.mark.parametrize("options", [{}, {"stop_early": True}, {"batch_size": 1}])
def test_a_guess_is_as_likely_as_the_model_says(options):
    model = trained_llama()
    results = extract(model, topics_tokenizer(), samples(), guesses=True, progress=False, **options)
    for sample, result in zip(samples(), results, strict=True):
        ids = torch.tensor([[*sample.prefix, *result.generated]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(sample.prefix) - 1 : -1]
        chances = logits.log_softmax(-1).gather(1, ids[0, len(sample.prefix) :, None])
        assert result.metric("guess_nll") == pytest.approx(-chances.mean().item(), abs=1e-5)
    summary = summarize(results)["all"]
    losses = [result.metric("guess_nll") for result in results]
    right = [result.exact_match for result in results]
    assert sum(right) >= LEARNT
    assert summary["recall_at_errors"] == {"errors": 100, "recall": sum(right) / len(right), "n": len(right)}
    assert recall_at_errors(losses, right, 1) >= LEARNT / len(right), "what was learnt comes first"


def test_guesses_are_asked_for():
    results = extract(trained_llama(), topics_tokenizer(), samples()[:3], progress=False)
    assert {result.metric("guess_nll") for result in results} == {None}
    assert "recall_at_errors" not in summarize(results)["all"]
    assert tables.guesses(compare({"a": results})) == []
    with pytest.raises(ValueError, match="they need generate=True"):
        extract(trained_llama(), topics_tokenizer(), samples()[:3], generate=False, guesses=True, progress=False)


def test_a_protocol_may_ask_for_them(tmp_path, capsys):
    trained_llama().save_pretrained(tmp_path / "model")
    topics_tokenizer().save_pretrained(tmp_path / "model")
    write_samples(samples(), tmp_path / "s.jsonl")
    about = {"sha256": samples_digest(samples()), "extract": {"generate": True, "guesses": True}}
    write_about(tmp_path / "s.jsonl", about | {"protocol": {"name": "lm-extraction-benchmark"}})
    asked = ["extract", "--model", tmp_path / "model", "--samples", tmp_path / "s.jsonl", "--output", tmp_path / "run"]
    assert main([*map(str, asked)]) == 0
    record, results = read_run(tmp_path / "run")
    assert record["identity"]["guesses"] is True
    lines = {line["line"]: line["state"] for line in record["settings"]["protocol"]["lines"]}
    assert lines["metric"] == "met" and lines["guesses"] == "deviation"
    told = json.loads((tmp_path / "run" / "summary.json").read_text())["all"]["recall_at_errors"]
    [table] = tables.guesses(compare({"mine": results}))
    assert table.title == "Recall at 100 errors" and table.rows == [["mine", f"{told['recall']:.3f}", "12"]]
    assert main([*map(str, asked[:-1]), str(tmp_path / "other"), "--no_generation"]) == 0
    assert json.loads((tmp_path / "other" / "run.json").read_text())["identity"]["guesses"] is None
