"""The right interval for each number of a group."""

import numpy as np
import pytest

from hf_axonn_eval.analysis.estimates import differences, estimates, group, membership
from hf_axonn_eval.analysis.intervals import bootstrap, share_intervals, wilson, wilson_of_difference
from hf_axonn_eval.analysis.table import Table
from tests.helpers.eval_support import result


OPTIONS = {"confidence": 0.9, "resamples": 300, "seed": 2}


def test_the_kind_of_interval_follows_the_documents():
    shares = {
        "alone": np.array([1, np.nan, 0, np.nan, 1, np.nan]),
        "several": np.array([1, 0, 0, 0, 1, 1.0]),
        "none": np.zeros(6),
        "every": np.ones(6),
        "missing": np.full(6, np.nan),
    }
    means = {"length": np.array([1, 2, 3, 4, 5, 6.0]), "of one": np.array([1, 2, *[np.nan] * 4])}
    documents = list("aabbcc")
    found = estimates(shares, means, documents, OPTIONS)
    assert list(found) == ["alone", "several", "none", "every", "length", "of one"]
    kinds = {name: entry["interval"] for name, entry in found.items()}
    assert kinds == {
        "alone": "wilson", "several": "bootstrap, at least wilson", "none": "wilson", "every": "wilson",
        "length": "bootstrap", "of one": "none: a single document",
    }  # fmt: skip
    ends = {name: (entry["low"], entry["high"]) for name, entry in found.items()}
    assert ends["alone"] == wilson(2, 3, confidence=0.9)
    assert (ends["none"], ends["every"]) == (wilson(0, 3, confidence=0.9), wilson(3, 3, confidence=0.9))
    assert ends["length"] == pytest.approx(bootstrap(means["length"], documents, **OPTIONS))
    [several] = share_intervals(shares["several"][:, None], documents, **OPTIONS)
    assert ends["several"] == pytest.approx(several.interval)
    assert ends["of one"] == (None, None)
    assert found["several"]["count"] == 3 and "count" not in found["length"]


def table(documents: str, exact: list[bool], near: list[bool | None]) -> Table:
    answers = zip(documents, exact, near, strict=True)
    return Table.of(
        result(f"{name}{place}", document_id=name, exact_match=yes, near_verbatim=also, divergence_point=2 * yes)
        for place, (name, yes, also) in enumerate(answers)
    )


def test_the_kind_of_interval_of_a_difference_follows_the_documents():
    yes, no = True, False
    one_each = differences(
        table("abcd", [yes, yes, no, no], [yes, None, None, None]), table("abcd", [no] * 4, [no] * 4), OPTIONS
    )
    assert one_each["exact_match"] == {
        "difference": 0.5, "n": 4, "interval": "wilson",
        **wilson_of_difference(0, 2, 0, 2, confidence=0.9)._asdict(),
    }  # fmt: skip
    assert one_each["near_verbatim"]["n"] == 1 and one_each["divergence_point"]["interval"] == "bootstrap"
    base = table("aabb", [no, yes, no, yes], [no] * 4)
    several = differences(table("aabb", [yes, yes, no, yes], [yes] * 4), base, OPTIONS)
    assert several["exact_match"]["interval"] == "bootstrap, at least wilson"
    low, high = wilson(2, 2, confidence=0.9)
    assert several["near_verbatim"] == {"difference": 1, "low": low, "high": high, "n": 4, "interval": "wilson"}
    nothing = differences(base, base, OPTIONS)["exact_match"]
    assert (nothing["low"], nothing["high"]) == (low - 1, 1 - low), "two documents that did not change"
    less = differences(base, table("aabb", [no, yes, no, yes], [yes] * 4), OPTIONS)["near_verbatim"]
    assert (less["difference"], less["low"], less["high"]) == (-1, -1, -low)


def test_a_very_large_attack_is_bootstrapped_with_fewer_draws(monkeypatch):
    monkeypatch.setattr("hf_axonn_eval.analysis.estimates._LARGEST_ATTACK", 2500)
    table = Table.of([result(str(i), bucket=i % 2, membership={"loss": float(i * i % 7)}) for i in range(10)])
    assert membership(table, table.buckets == 1, {**OPTIONS, "resamples": 1000})["loss"]["resamples"] == 250
    assert membership(table, table.buckets == 1, OPTIONS)["loss"]["resamples"] == 250
    assert membership(table, table.buckets == 1, {**OPTIONS, "resamples": 150})["loss"]["resamples"] == 150
    assert membership(table, table.buckets == 5, OPTIONS) == {}


def test_an_attack_is_never_bootstrapped_with_fewer_than_200_draws(monkeypatch):
    table = Table.of([result(str(i), bucket=i % 2, membership={"loss": float(i * i % 7)}) for i in range(10)])
    found = membership(table, table.buckets == 1, {**OPTIONS, "resamples": 1000})
    assert found["loss"]["resamples"] == 1000, "few samples: as many as were asked for"
    monkeypatch.setattr("hf_axonn_eval.analysis.estimates._LARGEST_ATTACK", 10)
    assert membership(table, table.buckets == 1, {**OPTIONS, "resamples": 1000})["loss"]["resamples"] == 200
    assert membership(table, table.buckets == 1, {**OPTIONS, "resamples": 199})["loss"]["resamples"] == 199


def test_a_sample_without_a_score_is_on_neither_side():
    table = Table.of(
        [result(str(i), bucket=i % 2, membership={"loss": float(i)} if i < 6 else {"zlib": 1.0}) for i in range(8)]
    )
    found = membership(table, table.buckets == 1, OPTIONS)
    assert {name: (entry["members"], entry["controls"]) for name, entry in found.items()} == {
        "loss": (3, 3), "zlib": (1, 1),
    }  # fmt: skip


def test_what_a_group_says_of_its_samples():
    table = Table.of(
        [
            result("a", document_id="d", suffix_length=3, divergence_point=3, exact_match=True, near_tie=True),
            result("b", document_id="d", suffix_length=3, divergence_point=2, near_tie=False),
            result("c", suffix_length=2, divergence_point=2, exact_match=True),
        ]
    )
    found = group(table, OPTIONS, lengths=[2, 3, 4], tries=[1])
    assert (found["samples"], found["documents"]) == (3, 2)
    assert {at: (entry["count"], entry["n"]) for at, entry in found["exact_match_at"].items()} == {
        "2": (3, 3), "3": (1, 2),
    }  # fmt: skip
    assert found["metrics"]["divergence_point"]["mean"] == pytest.approx(7 / 3)
    assert found["undecided"] == {"count": 1, "n": 2, "exact_match_at_least": 0, "exact_match_at_most": 1}
    assert "discoverability" not in found and "degenerate" not in found


def test_half_of_the_samples_need_so_many_draws():
    """Of an even number the upper one of the two in the middle; none suffices where more than half cannot be drawn."""
    for logprobs, median in (
        ([0.5, 0.1], 7),
        ([0.5, 0.1, 0.01], 7),
        ([0.5, 0.1, 0.01, 0.0], 69),
        ([0.5, 0.0], None),
        ([0.5, 0.1, 0.0], 7),
    ):
        results = [
            result(str(place), sampled_logprob=np.log(chance) if chance else -np.inf)
            for place, chance in enumerate(logprobs)
        ]
        found = group(Table.of(results), OPTIONS, lengths=[], tries=[7])["discoverability"]["0.5"]
        assert found["median_n"] == median
        assert found["tries"]["7"]["count"] == sum(chance >= 0.1 for chance in logprobs)
