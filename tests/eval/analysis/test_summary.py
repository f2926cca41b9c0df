"""From results to numbers per bucket, with the right kind of interval."""

import json
import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from hf_axonn_eval import SampleResult
from hf_axonn_eval.analysis.evidence import holm
from hf_axonn_eval.analysis.intervals import clopper_pearson, mean_intervals
from hf_axonn_eval.analysis.summary import compare, summarize
from hf_axonn_eval.analysis.table import Table
from hf_axonn_eval.metrics.registry import METRICS
from tests.helpers.eval_support import result


def test_shares_and_means_per_bucket():
    results = [
        *(result(f"a{place}", bucket=0, token_accuracy=place / 12) for place in range(12)),
        result("c", bucket=12, exact_match=True, token_accuracy=1.0, rougeL=1.0),
        result("d", bucket=12, exact_match=False, rougeL=None),
        result("e", bucket=12, exact_match=True),
    ]
    summary = summarize(results)
    assert list(summary["buckets"]) == ["0", "12"]
    low, high = clopper_pearson(2, 3)
    assert summary["buckets"]["12"]["metrics"]["exact_match"] == {
        "mean": 2 / 3, "n": 3, "count": 2, "low": low, "high": high, "interval": "clopper-pearson",
    }  # fmt: skip
    accuracy = summary["buckets"]["0"]["metrics"]["token_accuracy"]
    [((low, high), kind)] = mean_intervals(np.arange(12)[:, None] / 12, range(12))
    assert accuracy == {"mean": pytest.approx(11 / 24), "n": 12, "low": low, "high": high, "interval": kind}
    rouge = summary["buckets"]["12"]["metrics"]["rougeL"]
    assert (rouge["mean"], rouge["n"], rouge["low"]) == (1.0, 1, None), "what is not defined does not enter the mean"
    assert "rougeL" not in summary["buckets"]["0"]["metrics"]
    assert summary["all"]["samples"] == 15 and summary["all"]["metrics"]["exact_match"]["count"] == 2


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
    assert (exact["count"], exact["n"], exact["interval"]) == (10, 40, "clopper-pearson, documents as trials")
    assert (exact["low"], exact["high"]) == pytest.approx(clopper_pearson(2, 8))
    # none of 40 from 8 documents: as sure as 0 of 8, not as 0 of 40, and not certain
    none = summarize([result(f"{d}@{i}", document_id=d) for d in "abcdefgh" for i in range(5)])
    assert none["all"]["metrics"]["exact_match"]["high"] == clopper_pearson(0, 8).high


def test_a_comparison_pairs_the_samples():
    base = [result(f"{place}", token_accuracy=place / 20) for place in range(12)]
    trained = [  # in another order, and each about 0.05 better
        result(f"{place}", token_accuracy=place / 20 + 0.05 + 0.001 * (place % 3 - 1)) for place in (11, *range(11))
    ]
    comparison = compare({"trained": trained, "base": base})
    assert comparison["base"] == "base" and list(comparison["minus_base"]) == ["trained"]
    difference = comparison["minus_base"]["trained"]["0"]["token_accuracy"]
    for end in ("difference", "low", "high"):
        assert difference[end] == pytest.approx(0.05, abs=0.001), "paired: the spread among samples does not enter"
    assert comparison["minus_base"]["trained"]["all"]["token_accuracy"] == difference


def test_every_metric_of_a_full_result_is_summarized():
    computed = ("nll", "probability", "sampled_probability", "exact_match", "near_verbatim")
    full = {name: 0.5 for name in METRICS if name not in computed}
    fields = {name: number for name, number in full.items() if name in SampleResult.__dataclass_fields__}
    others = {name: number for name, number in full.items() if name not in fields}
    results = [result(name, near_verbatim=False, sampled_logprob=-1.0, metrics=others, **fields) for name in "ab"]
    assert list(summarize(results)["all"]["metrics"]) == list(METRICS)


def test_copies_by_bleu_are_a_share_that_is_not_tested():
    results = [result(name, metrics={"bleu": bleu}) for name, bleu in {"a": 0.75, "b": 0.7500001, "c": None}.items()]
    found = summarize(results)["all"]["bleu_copies"]
    assert (found["count"], found["n"]) == (1, 2) and (found["low"], found["high"]) == clopper_pearson(1, 2)
    tests = compare({"base": results, "other": results})["mcnemar"]["other"]["0"]
    assert set(tests) == {"exact_match"}
    assert "bleu_copies" not in summarize(results[2:])["all"]


def test_near_copies_by_edits_and_what_they_cost():
    likely, never = [math.log(0.002), math.log(0.25), math.log(0.5)], [-math.inf, math.log(1e-4), math.log(0.001)]
    results = [
        result("a", bucket=4, suffix_length=11, near_copies=likely, near_copies_read=200),
        result("b", bucket=4, suffix_length=11, near_copies=never, near_copies_read=20),
        result("c", bucket=4, suffix_length=11),
    ]
    found = summarize(results)["buckets"]["4"]["near_copies"]
    assert list(found["edits"]) == ["0", "1", "2"]
    means = [found["edits"][edits]["probability"]["mean"] for edits in "012"]
    assert means == pytest.approx([0.001, (0.25 + 1e-4) / 2, 0.2505])
    assert [(its["likely"]["count"], its["likely"]["n"]) for its in found["edits"].values()] == [
        (1, 2),
        (1, 2),
        (2, 2),
    ]
    likely = found["edits"]["2"]["likely"]
    assert (likely["low"], likely["high"]) == clopper_pearson(2, 2)
    assert found["draws"] == pytest.approx((20 + 2) / 2), "ten tokens are read for a draw of eleven"
    assert "near_copies" not in summarize(results[2:])["all"]


def test_exact_match_of_shorter_suffixes_comes_from_the_divergence_point():
    results = [
        result("a", suffix_length=8, divergence_point=8, exact_match=True),
        result("b", suffix_length=8, divergence_point=5),
        result("c", suffix_length=8, divergence_point=0),
        result("d", suffix_length=4, divergence_point=4, exact_match=True),
    ]
    at = summarize(results, lengths=[5, 1, 4, 9])["all"]["exact_match_at"]
    assert list(at) == ["1", "4", "5"], "no suffix has nine tokens"
    assert [(entry["count"], entry["n"]) for entry in at.values()] == [(3, 4), (3, 4), (2, 3)]
    assert (at["5"]["low"], at["5"]["high"]) == clopper_pearson(2, 3)
    assert "exact_match_at" not in summarize(results)["all"]


def test_discoverability_counts_samples_that_so_many_draws_give():
    # q = 1/2 needs 1 draw for p = 0.5 and 4 for 0.9; q = 0.01 needs 69 and 230
    chances = {"a": 0.5, "b": 0.01, "c": 0.0}
    results = [
        result(name, sampled_logprob=math.log(chance) if chance else -math.inf) for name, chance in chances.items()
    ]
    summary = summarize([*results, result("d")], tries=[1, 4, 69, 230, 10**9])
    found = summary["all"]["discoverability"]
    assert [entry["count"] for entry in found["0.5"]["tries"].values()] == [1, 1, 2, 2, 2]
    assert [entry["count"] for entry in found["0.9"]["tries"].values()] == [0, 1, 1, 2, 2]
    assert {entry["n"] for entry in found["0.9"]["tries"].values()} == {3}, "the fourth sample was not asked"
    assert found["0.5"]["tries"]["69"]["low"] == clopper_pearson(2, 3).low
    assert (found["0.5"]["median_n"], found["0.9"]["median_n"]) == (69, 230)
    assert summarize([results[2]])["all"]["discoverability"]["0.5"]["median_n"] is None
    assert "discoverability" not in summarize([result("d")])["all"]
    assert "Infinity" not in json.dumps(summary)
    assert summary["all"]["metrics"]["sampled_probability"]["mean"] == pytest.approx(0.51 / 3)


def test_membership_is_told_against_bucket_zero():
    results = [result(f"c{i}", bucket=0, membership={"loss": -4.0 + i}) for i in range(3)]
    results += [result(f"m{i}", bucket=6, membership={"loss": -3.5 + i}) for i in range(3)]
    results += [result("n", bucket=12, membership={"loss": 9.0}), result("o", bucket=12)]
    summary = summarize(results)
    assert "membership" not in summary["buckets"]["0"]
    of_six = summary["buckets"]["6"]["membership"]["loss"]
    assert (of_six["members"], of_six["controls"]) == (3, 3)
    assert of_six["auc"]["value"] == pytest.approx(6 / 9)
    assert 0 <= of_six["auc"]["low"] < 6 / 9 < of_six["auc"]["high"] <= 1
    assert of_six["tpr_at_0.01"]["why"] == "3 independent controls; 1% needs 1,000"
    assert summary["buckets"]["12"]["membership"]["loss"]["auc"] == {"value": 1.0, "low": None, "high": None}
    assert summary["all"]["membership"]["loss"]["auc"]["value"] == pytest.approx((6 + 3) / 12)
    no_control = summarize([one for one in results if one.bucket])
    assert "membership" not in no_control["all"]


def test_undecided_samples_bound_the_exact_matches():
    results = [
        result("a", exact_match=True, near_tie=False),
        result("b", exact_match=True, near_tie=True),
        result("c", near_tie=True),
        result("d", near_tie=False),
        result("e", exact_match=True),
    ]
    undecided = summarize(results)["all"]["undecided"]
    assert undecided == {"count": 2, "n": 4, "exact_match_at_least": 1, "exact_match_at_most": 3}
    assert "undecided" not in summarize([result("e")])["all"]


def test_degenerate_suffixes_are_set_apart():
    results = [
        result("loop", exact_match=True, type_token_ratio=0.1, zlib_ratio=0.1),
        result("prose", exact_match=True, type_token_ratio=0.8, zlib_ratio=0.8),
        result("missed", type_token_ratio=0.8),
        result("unknown", exact_match=True),
    ]
    found = summarize(results)["all"]["degenerate"]
    assert (found["count"], found["n"]) == (1, 3)
    assert (found["exact_match_of_others"]["count"], found["exact_match_of_others"]["n"]) == (1, 2)


def test_a_comparison_tests_the_changes_and_ranks_by_the_reference_model():
    names = [f"s{i}" for i in range(12)]
    base = [result(name, bucket=6 * (i % 2), logprob=-3.0 - i) for i, name in enumerate(names)]
    trained = [  # members gain 1 nat a token and the match, controls nothing
        result(name, bucket=6 * (i % 2), exact_match=i % 2 == 1, logprob=-3.0 - i + 2 * (i % 2))
        for i, name in enumerate(names)
    ]
    comparison = compare({"base": base, "trained": trained[::-1]})
    changes = comparison["mcnemar"]["trained"]
    assert changes["6"]["exact_match"]["gained"] == 6 and changes["6"]["exact_match"]["p"] == pytest.approx(2 / 64)
    assert changes["0"]["exact_match"]["neither"] == 6 and changes["0"]["exact_match"]["p"] == 1
    assert "near_verbatim" not in changes["6"], "neither run was asked"
    reference = comparison["runs"]["trained"]["buckets"]["6"]["membership"]["reference"]
    assert (reference["auc"]["value"], comparison["reference_over"]) == (1.0, "suffix")
    assert "membership" not in comparison["runs"]["base"]["all"]
    # with scores of the whole sample, it is these that are subtracted
    whole = [replace(one, membership={"loss": float(place)}) for place, one in enumerate(trained)]
    comparison = compare({"base": [replace(one, membership={"loss": 0.0}) for one in base], "trained": whole})
    found = comparison["runs"]["trained"]["all"]["membership"]
    assert comparison["reference_over"] == "sample" and list(found) == ["loss", "reference"]
    assert found["loss"]["auc"] == found["reference"]["auc"]


def test_p_is_corrected_for_the_number_of_tests_and_controls_are_apart():
    """Of bucket 1 one of two comes back, of bucket 2 all of eight, and one of the controls."""
    buckets = [0, 0, 1, 1, *[2] * 8]
    came_back = [True, False, True, False, *[True] * 8]
    base = [result(f"s{i}", bucket=bucket) for i, bucket in enumerate(buckets)]
    trained = [result(f"s{i}", bucket=buckets[i], exact_match=yes) for i, yes in enumerate(came_back)]
    comparison = compare({"base": base, "trained": trained, "same": base})
    trained, same = (
        {bucket: group["exact_match"] for bucket, group in comparison["mcnemar"][name].items()}
        for name in ("trained", "same")
    )
    assert list(trained) == ["0", "1", "2", "all"] and trained["all"]["gained"] == 9, "no controls"
    p = {bucket: (test["p"], test["p_holm"]) for bucket, test in trained.items()}
    # six tests of what was trained on, three of them of a run that changed nothing
    assert p == {
        "0": (1.0, 1.0),
        "1": (1.0, 1.0),
        "2": (2 / 2**8, 5 * 2 / 2**8),
        "all": (2 / 2**9, 6 * 2 / 2**9),
    }
    assert {test["p_holm"] for test in same.values()} == {1.0}
    assert list(compare({"base": base[:4], "same": base[:4]})["mcnemar"]["same"]) == ["0", "1"], "one bucket"


def test_holm():
    tests = [{"p": p} for p in (0.01, 0.04, 0.03, 0.005)]
    holm(tests)
    assert [test["p_holm"] for test in tests] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    holm([])


def test_runs_that_know_only_the_match_are_compared_by_it():
    unknown = dict.fromkeys(("token_accuracy", "extraction_strength", "logprob", "logprobs", "hits"))
    runs = {
        name: [result(f"{i}", bucket=i % 2, exact_match=match, **unknown) for i in range(4)]
        for name, match in (("base", False), ("trained", True))
    }
    comparison = compare(runs)
    assert list(comparison["runs"]["trained"]["all"]["metrics"]) == ["exact_match", "divergence_point"]
    assert "membership" not in comparison["runs"]["trained"]["all"]
    assert comparison["mcnemar"]["trained"]["1"]["exact_match"]["gained"] == 2


def test_a_summary_reads_an_iterator_once_and_keeps_little_of_it():
    def results(count):
        for place in range(count):
            text, tokens = f"{place} " * 50, [float(place)] * 50
            yield result(
                f"sample-{place}",
                document_id=f"document-{place // 4}",
                bucket=place % 2,
                logprobs=tokens,
                generated_text=text,
                near_verbatim=False,
                near_tie=False,
                sampled_logprob=-5.0 - place % 7,
                membership={"loss": float(place)},
                **{name: 0.5 for name in ("rouge1", "rouge2", "rougeL", "type_token_ratio", "zlib_ratio")},
            )

    tracemalloc.start()
    try:
        table = Table.read(results(5000))
        kept = tracemalloc.get_traced_memory()[0] / 5000
    finally:
        tracemalloc.stop()
    assert kept < 600, f"{kept:.0f} bytes a sample"
    assert len(table) == 5000
    assert summarize(results(500))["all"]["samples"] == 500


@pytest.mark.parametrize(
    ("options", "message"),
    [({"lengths": [0]}, "lengths are"), ({"tries": []}, "tries are"), ({"tries": [0.5]}, "tries are")],
)
def test_lengths_and_draws_are_whole_numbers(options, message):
    with pytest.raises(ValueError, match=message):
        summarize([result("a")], **options)


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


def test_what_is_asked_by_default_is_said():
    results = [result("a"), result("b")]
    assert summarize(results)["intervals"] == compare({"one": results})["intervals"] == {"confidence": 0.95}
    assert summarize(results, confidence=0.9)["intervals"] == {"confidence": 0.9}
    sampled = [result("a", sampled_logprob=-1.0)]
    for found in (summarize(sampled), compare({"one": sampled})["runs"]["one"]):
        assert list(found["all"]["discoverability"]["0.9"]["tries"]) == [str(10**power) for power in range(7)]
    for wrong in (0, 1):
        with pytest.raises(ValueError, match="between 0 and 1"):
            compare({"one": results}, confidence=wrong)


def test_the_run_that_others_are_compared_with():
    some = [result("a")]
    assert compare({"one": some, "two": some})["base"] == "one"
    assert compare({"one": some, "base": some})["base"] == "base"
    assert compare({"one": some, "base": some}, base="one")["base"] == "one"
    assert list(compare({"one": some, "base": some}, base="one")["minus_base"]) == ["base"]


def test_records_are_put_into_the_summary():
    record = {"identity": {"samples_sha256": "x"}, "more": 1}
    found = compare({"one": [result("a")], "two": [result("a")]}, records={"one": record, "two": record})
    assert found["runs"]["one"]["run"] == record == summarize([result("a")], record=record)["run"]
    assert compare({"one": [result("a")]})["runs"]["one"]["run"] is None
    found = summarize([result("a", suffix_length=1)], lengths=[1, 1], tries=[1])
    assert list(found["all"]["exact_match_at"]) == ["1"]
