"""From results to numbers per bucket, with the right kind of interval."""

import math

import pytest
from eval_support import result

from hf_axonn_eval.stats import bootstrap, wilson
from hf_axonn_eval.summary import METRICS, compare, summarize


def test_shares_and_means_per_bucket():
    results = [
        result("a", bucket=0, token_accuracy=0.25),
        result("b", bucket=0, token_accuracy=0.75),
        result("c", bucket=12, exact_match=True, token_accuracy=1.0, rougeL=1.0),
        result("d", bucket=12, exact_match=False, rougeL=None),
        result("e", bucket=12, exact_match=True),
    ]
    summary = summarize(results)
    assert list(summary["buckets"]) == ["0", "12"]
    low, high = wilson(2, 3)
    assert summary["buckets"]["12"]["metrics"]["exact_match"] == {
        "mean": 2 / 3, "n": 3, "count": 2, "low": low, "high": high, "interval": "wilson",
    }  # fmt: skip
    accuracy = summary["buckets"]["0"]["metrics"]["token_accuracy"]
    low, high = bootstrap([0.25, 0.75], ["a", "b"])
    assert (accuracy["mean"], accuracy["low"], accuracy["high"], accuracy["interval"]) == (0.5, low, high, "bootstrap")
    rouge = summary["buckets"]["12"]["metrics"]["rougeL"]
    assert (rouge["mean"], rouge["n"], rouge["low"]) == (1.0, 1, None), "what is not defined does not enter the mean"
    assert "rougeL" not in summary["buckets"]["0"]["metrics"]
    assert summary["all"]["samples"] == 5 and summary["all"]["metrics"]["exact_match"]["count"] == 2


def test_loss_and_probability_come_from_the_log_probability():
    metrics = summarize([result("a", logprob=math.log(0.25)), result("b", logprob=math.log(0.75))])["all"]["metrics"]
    assert metrics["probability"]["mean"] == pytest.approx(0.5)
    assert metrics["nll"]["mean"] == pytest.approx(-(math.log(0.25) + math.log(0.75)) / 4)  # two tokens each


def test_several_samples_of_a_document_are_not_independent():
    results = [
        result(f"{document}@{offset}", document_id=document, offset=offset, exact_match=document in "ab")
        for document in "abcdefgh"
        for offset in range(5)
    ]
    exact = summarize(results)["all"]["metrics"]["exact_match"]
    assert (exact["count"], exact["n"], exact["interval"]) == (10, 40, "bootstrap")
    by_samples = wilson(10, 40)
    assert exact["high"] - exact["low"] > 1.5 * (by_samples.high - by_samples.low)
    # none of 40 from 8 documents: as sure as 0 of 8, not as 0 of 40, and not certain
    none = summarize([result(f"{d}@{i}", document_id=d) for d in "abcdefgh" for i in range(5)])
    assert none["all"]["metrics"]["exact_match"]["high"] == wilson(0, 8).high


def test_a_comparison_pairs_the_samples():
    base = [result(name, token_accuracy=accuracy) for name, accuracy in zip("abcd", (0.1, 0.5, 0.9, 0.3), strict=True)]
    # in another order, and each 0.05 better
    trained = [
        result(name, token_accuracy=accuracy) for name, accuracy in zip("dcba", (0.35, 0.95, 0.55, 0.15), strict=True)
    ]
    comparison = compare({"trained": trained, "base": base})
    assert comparison["base"] == "base" and list(comparison["minus_base"]) == ["trained"]
    difference = comparison["minus_base"]["trained"]["0"]["token_accuracy"]
    for end in ("difference", "low", "high"):
        assert difference[end] == pytest.approx(0.05), "paired: the spread among samples does not enter"
    assert comparison["minus_base"]["trained"]["all"]["token_accuracy"] == difference


def test_every_metric_of_a_full_result_is_summarized():
    full = {name: 0.5 for name in METRICS if name not in ("nll", "probability", "exact_match", "near_verbatim")}
    results = [result(name, near_verbatim=False, **full) for name in "ab"]
    assert list(summarize(results)["all"]["metrics"]) == list(METRICS)


@pytest.mark.parametrize(
    ("runs", "options", "message"),
    [
        ({}, {}, "no runs"),
        ({"one": [result("a")]}, {"base": "two"}, "'two' is not among the runs one"),
        ({"one": [result("a")], "two": [result("a"), result("b")]}, {}, "2 samples and run 'one' 1, of which 1 are"),
        (
            {"one": [result("a")], "two": [result("a")]},
            {"records": {name: {"identity": {"samples_sha256": name}} for name in ("one", "two")}},
            "different samples, though with the same ids",
        ),
        ({"one": []}, {}, "no results"),
    ],
)
def test_what_cannot_be_compared_is_named(runs, options, message):
    with pytest.raises(ValueError, match=message):
        compare(runs, **options)
