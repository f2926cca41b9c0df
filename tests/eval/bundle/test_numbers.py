"""Numbers computed again: which differences count, and metrics that only one side knows."""

import pytest

from hf_axonn_eval.bundle.numbers import (
    against_chance,
    compare_trees,
    compute_trees,
    describe_metrics,
    summary_file,
    use_metrics,
)
from hf_axonn_eval.metrics.registry import METRICS, register_metric
from tests.helpers.eval_support import result


RESULTS = [result(f"{place}", bucket=place % 2, exact_match=place > 5) for place in range(12)]
OPTIONS = {"base": "a", "confidence": 0.9, "lengths": [1], "tries": [1, 10]}


@pytest.mark.parametrize(
    ("claimed", "found", "differs"),
    [
        (0.5, 0.5 * (1 + 9e-10), False),
        (0.5, 0.5 * (1 + 2e-9), True),
        (0.0, 1e-13, False),
        (0.0, 1e-11, True),
        (0, 1e-13, False),
        (3, 4, True),
        (3, 3.0, False),
        (10**12, 10**12 + 1, True),
        (True, 1, True),
        (None, 0.0, True),
        ("inf", "-inf", True),
        ([1, 2], [1, 2, 3], True),
        ([1, 2], [1, 3], True),
        ("none: a single document", "none: a single document", False),
    ],
)
def test_counts_and_words_are_exact_and_other_numbers_nearly(claimed, found, differs):
    seen = compare_trees({"a": claimed}, {"a": found})
    assert bool(seen.differing) == differs
    if differs:
        assert seen.differing[0].startswith("a")


def test_the_largest_difference_and_the_entries_of_one_side_are_told():
    seen = compare_trees({"a": {"x": 4.0, "y": 2.0, "only": 1}}, {"a": {"x": 4 + 4e-10, "y": 2.0}, "more": {}})
    assert seen.compared == 2 and seen.largest == pytest.approx(1e-10, rel=1e-3) and seen.differing == []
    assert (seen.only_claimed, seen.only_computed) == (["a.only"], ["more"])


def test_everything_is_computed_with_the_options_and_without_the_record():
    trees = compute_trees({"a": RESULTS, "b": RESULTS}, **OPTIONS)
    assert set(trees) == {summary_file("a"), summary_file("b"), "comparison.json", "coverage.json"}
    summary = trees[summary_file("a")]
    assert summary["intervals"] == {"confidence": 0.9} and "run" not in summary
    assert summary["all"]["metrics"]["exact_match"]["count"] == 6 and set(summary["all"]["exact_match_at"]) == {"1"}
    assert trees["comparison.json"]["base"] == "a" and "run" not in trees["comparison.json"]["runs"]["b"]
    assert set(compute_trees({"a": RESULTS}, **OPTIONS)) == {summary_file("a"), "coverage.json"}


def test_chance_follows_from_the_loss():
    summary = {"all": {"metrics": {"nll": {"mean": 7.0}}}}
    assert against_chance(summary, {"nll": 1.0, "chance_nll": 6.5, "no_better": False}) == {
        "nll": 7.0,
        "chance_nll": 6.5,
        "no_better": True,
    }
    assert against_chance(summary, {"nll": 1.0}) == {"nll": 1.0}


def test_metrics_of_the_maker_alone_are_carried_and_those_of_the_verifier_alone_set_aside():
    carried = [result(f"{place}", metrics={"of_the_maker": place % 2 == 0}) for place in range(10)]
    summary = {"all": {"metrics": {"of_the_maker": {"mean": 0.5, "count": 5}}}}
    described = describe_metrics([summary])
    assert described["of_the_maker"] == {"mean": "share", "least": "-inf", "most": "inf"}
    assert described["exact_match"]["mean"] == "share" and described["nll"]["least"] == "0"
    before = list(METRICS)

    @register_metric("of_the_verifier", "x")
    def of_the_verifier(hits):
        return 1.0

    try:
        with use_metrics(described):
            metrics = compute_trees({"a": carried}, **OPTIONS)[summary_file("a")]["all"]["metrics"]
        assert metrics["of_the_maker"]["count"] == 5 and "of_the_verifier" not in metrics
        assert list(METRICS) == [*before, "of_the_verifier"]
    finally:
        del METRICS["of_the_verifier"]
