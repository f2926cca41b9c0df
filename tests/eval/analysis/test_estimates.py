"""The right interval for each number of a group."""

import numpy as np
import pytest

from hf_axonn_eval.analysis.estimates import differences, estimates, group, membership
from hf_axonn_eval.analysis.intervals import clopper_pearson, mean_intervals, paired_difference, share_intervals
from hf_axonn_eval.analysis.table import Table
from tests.helpers.eval_support import result


OPTIONS = {"confidence": 0.9}


def test_the_kind_of_interval_follows_the_documents():
    nan = np.nan
    shares = {
        "alone": np.array([1, nan] * 12),
        "several": np.where(np.arange(24) < 5, 1.0, 0.0),
        "none": np.zeros(24),
        "missing": np.full(24, nan),
    }
    means = {"length": np.arange(24.0), "of few": np.array([1.0, 2, 4, *[nan] * 21])}
    documents = np.repeat(range(12), 2).tolist()
    found = estimates(shares, means, documents, OPTIONS)
    assert list(found) == ["alone", "several", "none", "length", "of few"]
    kinds = {name: entry["interval"] for name, entry in found.items()}
    assert kinds == {
        "alone": "clopper-pearson", "several": "clopper-pearson, documents as trials",
        "none": "clopper-pearson, documents as trials",
        "length": "student's t over documents", "of few": "none: 2 documents are too few",
    }  # fmt: skip
    ends = {name: (entry["low"], entry["high"]) for name, entry in found.items()}
    assert ends["alone"] == clopper_pearson(12, 12, confidence=0.9)
    assert ends["none"] == clopper_pearson(0, 12, confidence=0.9)
    [length] = mean_intervals(means["length"][:, None], documents, **OPTIONS)
    assert ends["length"] == length.interval
    [several] = share_intervals(shares["several"][:, None], documents, **OPTIONS)
    assert ends["several"] == several.interval
    assert ends["of few"] == (None, None)
    assert found["several"]["count"] == 5 and "count" not in found["length"]


def table(documents: str, exact: list[bool], near: list[bool | None]) -> Table:
    answers = zip(documents, exact, near, strict=True)
    return Table.read(
        result(f"{name}{place}", document_id=name, exact_match=yes, near_verbatim=also, divergence_point=2 * yes)
        for place, (name, yes, also) in enumerate(answers)
    )


def test_the_kind_of_interval_of_a_difference_follows_the_documents():
    half, none, every = [True, False] * 6, [False] * 12, [True] * 12
    once = "abcdefghijkl"
    one_each = differences(table(once, half, [True, *[None] * 11]), table(once, none, none), OPTIONS)
    assert one_each["exact_match"] == {
        "difference": 0.5, "n": 12, "interval": "mover of clopper-pearson",
        **paired_difference(6, 0, 12, confidence=0.9)._asdict(),
    }  # fmt: skip
    assert one_each["near_verbatim"]["n"] == 1 and one_each["near_verbatim"]["low"] is None
    assert one_each["divergence_point"]["interval"] == "student's t over documents"
    twice = once * 2
    base = table(twice, half + half, none + none)
    several = differences(table(twice, every + every, every + every), base, OPTIONS)
    assert several["near_verbatim"] == {
        "difference": 1, "n": 24, "interval": "mover of clopper-pearson",
        **paired_difference(12, 0, 12, confidence=0.9)._asdict(),
    }  # fmt: skip
    nothing = differences(base, base, OPTIONS)
    ends = paired_difference(0, 0, 12, confidence=0.9)
    assert (nothing["exact_match"]["low"], nothing["exact_match"]["high"]) == ends, "twelve documents did not change"
    assert nothing["divergence_point"]["interval"] == "none: all documents have the same"
    less = differences(base, table(twice, half + half, every + every), OPTIONS)["near_verbatim"]
    assert (less["difference"], less["low"]) == (-1, -1) and less["high"] == -several["near_verbatim"]["low"]
    few = differences(table("abcd", half[:4], half[:4]), table("abcd", none[:4], none[:4]), OPTIONS)
    assert {entry["interval"] for entry in few.values()} == {"none: 4 documents are too few"}


def test_an_interval_ends_where_values_do():
    documents = [f"d{place}" for place in range(12)]
    wide = {"confidence": 0.9999}
    found = Table.read(
        [result(name, token_accuracy=place % 2, logprob=-4.0 * (place % 2)) for place, name in enumerate(documents)]
    )
    numbers = group(found, wide, lengths=[], tries=[1])["metrics"]
    [(plain, _)] = mean_intervals(found.columns["token_accuracy"][:, None], documents, **wide)
    assert plain.low < 0 and plain.high > 1
    assert (numbers["token_accuracy"]["low"], numbers["token_accuracy"]["high"]) == (0, 1)
    assert numbers["nll"]["low"] == 0 and numbers["nll"]["high"] > 2
    opposite = Table.read([result(name, token_accuracy=1 - place % 2) for place, name in enumerate(documents)])
    ends = differences(found, opposite, wide)["token_accuracy"]
    assert (ends["low"], ends["high"]) == (-1, 1)


def test_an_attack_has_the_confidence_of_the_options():
    scored = Table.read([result(str(i), bucket=i % 2, membership={"loss": float(i * i % 7)}) for i in range(10)])
    plain, wide = (
        membership(scored, scored.buckets == 1, {"confidence": each})["loss"]["auc"] for each in (0.9, 0.99)
    )
    assert wide["low"] < plain["low"] < plain["value"] == wide["value"] < plain["high"] < wide["high"]
    assert membership(scored, scored.buckets == 5, OPTIONS) == {}


def test_a_sample_without_a_score_is_on_neither_side():
    table = Table.read(
        [result(str(i), bucket=i % 2, membership={"loss": float(i)} if i < 6 else {"zlib": 1.0}) for i in range(8)]
    )
    found = membership(table, table.buckets == 1, OPTIONS)
    assert {name: (entry["members"], entry["controls"]) for name, entry in found.items()} == {
        "loss": (3, 3), "zlib": (1, 1),
    }  # fmt: skip


def test_what_a_group_says_of_its_samples():
    table = Table.read(
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
    """Half of an even number need no more than the lower one of the two in the middle; no number of draws suffices
    where more than half cannot be drawn."""
    for logprobs, median in (
        ([0.5, 0.1], 1),
        ([0.5, 0.1, 0.01], 7),
        ([0.5, 0.1, 0.01, 0.0], 7),
        ([0.5, 0.0], 1),
        ([0.5, 0.1, 0.0], 7),
        ([0.5, 0.0, 0.0], None),
    ):
        results = [
            result(str(place), sampled_logprob=np.log(chance) if chance else -np.inf)
            for place, chance in enumerate(logprobs)
        ]
        found = group(Table.read(results), OPTIONS, lengths=[], tries=[7])["discoverability"]["0.5"]
        assert found["median_n"] == median
        assert found["tries"]["7"]["count"] == sum(chance >= 0.1 for chance in logprobs)
