"""The further tables of a comparison, from hand-made results."""

from math import log

import pytest

from hf_axonn_eval import compare
from hf_axonn_eval.report import tables
from hf_axonn_eval.report.tables import all_details, changes, discoverability, membership, near_ties, shorter
from tests.helpers.eval_support import result


def results(known: int, **changes):
    """Two controls, and four documents of bucket 3 of which `known` come back."""
    return [
        result(
            f"d{place}",
            bucket=3 if place >= 2 else 0,
            exact_match=2 <= place < 2 + known,
            divergence_point=2 if 2 <= place < 2 + known else 1,
            **{name: give(place, 2 <= place < 2 + known) for name, give in changes.items()},
        )
        for place in range(6)
    ]


def rows(tables) -> dict[tuple[str, str], list[str]]:
    (table,) = tables
    assert all(len(row) == len(table.headings) for row in table.rows)
    return {(row[0], row[1]): row[2:] for row in table.rows}


def test_changes():
    reported = rows(changes(compare({"base": results(1), "trained": results(4)}, resamples=100)))
    # b = 3 gained, c = 0 lost: p = 2 / 2^3
    assert reported == {
        ("0x", "trained"): ["0", "0", "0", "0", "0", "1"],
        ("3x", "trained"): ["3", "0", "1", "3", "0", "0.25"],
        ("all", "trained"): ["3", "0", "1", "3", "0", "0.25"],
    }
    assert changes(compare({"base": results(1)}, resamples=100)) == []


def test_shorter():
    reported = rows(shorter(compare({"base": results(1)}, lengths=[1, 2], resamples=100)))
    assert [cell.split(" [")[0] for cell in reported["3x", "base"]] == ["4 of 4", "1 of 4"]
    assert shorter(compare({"base": results(1)}, resamples=100)) == []


def test_discoverability():
    give = lambda place, known: log(0.1) if known else float("-inf")  # noqa: E731
    found = discoverability(compare({"base": results(3, sampled_logprob=give)}, tries=[7, 1], resamples=100))
    assert [table.title for table in found] == ["(n, 0.5)-discoverable", "(n, 0.9)-discoverable"]
    half, nine = (rows([table]) for table in found)
    assert half["3x", "base"][0] == "7" and nine["3x", "base"][0] == "22"
    columns = [heading for heading in found[0].headings if heading.startswith("n = ")]
    of_seven = half["3x", "base"][1 + columns.index("n = 7")]
    assert of_seven.startswith("3 of 4") or of_seven.startswith("0.750")
    assert half["0x", "base"][0] == "none suffices"


def test_membership():
    scores = lambda place, known: {"loss": float(place), "min_k_plus_plus": -float(place)}  # noqa: E731
    (table,) = membership(compare({"base": results(3, membership=scores)}, resamples=100))
    assert table.headings[2:] == ["score", "members, controls", "AUC", "TPR at 0.1% FPR", "TPR at 1.0% FPR"]
    reported = {(row[0], row[2]): row[3:] for row in table.rows}
    assert reported["3x", "loss"][0] == "4, 2" and reported["3x", "loss"][1].startswith("1.000")
    assert reported["3x", "Min-K%++"][1].startswith("0.000") and ("0x", "loss") not in reported


def test_undecided():
    given = {"near_tie": lambda place, known: place in (2, 5), "margin": lambda place, known: 0.0}
    reported = rows(near_ties(compare({"base": results(2, **given)}, resamples=100)))
    # d2 comes back and d5 does not, and both could be otherwise
    assert reported["3x", "base"] == ["2 of 4", "1 to 3"] and reported["0x", "base"] == ["0 of 2", "0 to 0"]


def test_a_plain_run_has_no_further_tables():
    assert all_details(compare({"base": results(1)}, resamples=100)) == []


@pytest.mark.parametrize("ratio", [0.1, 0.9])
def test_degenerate(ratio):
    given = {"type_token_ratio": lambda place, known: ratio, "zlib_ratio": lambda place, known: 0.9}
    (table,) = all_details(compare({"base": results(2, **given)}, resamples=100))
    assert table.title == "Degenerate suffixes"
    assert {(row[0]): row[2] for row in table.rows}["3x"] == ("4 of 4" if ratio < 0.4 else "0 of 4")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1.0, "1"), (22.0, "22"), (1234.0, "1,234"), (9_999_999.0, "9,999,999"), (1e7, "1.0e+07"),
        (2.5e21, "2.5e+21"), (None, "none suffices"), (float("inf"), "none suffices"),
    ],
)  # fmt: skip
def test_numbers_of_draws_are_told_in_full_up_to_ten_million(number, text):
    assert tables._draws(number) == text


@pytest.mark.parametrize(
    ("entry", "reported", "plain"),
    [
        (None, "-", "-"),
        ({"mean": 0.5125, "low": 0.0, "high": 1.0}, "0.512 [0.00, 1.00]", "0.512"),
        ({"mean": 0.25, "count": 3, "n": 12, "low": 0.09, "high": 0.53}, "3 of 12 [0.09, 0.53]", "3 of 12"),
        ({"mean": 0.25, "low": None, "high": None}, "0.250", "0.250"),
    ],
)
def test_an_estimate_in_words(entry, reported, plain):
    assert tables.estimate_text(entry) == reported and tables.estimate_text(entry, interval=False) == plain


def test_what_is_said_beside_the_tables():
    comparison = compare({"base": results(1), "trained": results(4)}, confidence=0.9, resamples=150, seed=4)
    assert tables.overview(comparison) == "2 models (base, trained), 6 samples of 6 documents, 2 buckets."
    assert tables.overview(compare({"a": results(1)}, resamples=100)).startswith("1 model (a), 6 samples")
    assert "90% intervals" in tables.caption(comparison) and "(150 draws, seed 4)" in tables.caption(comparison)
    assert (tables.bucket_name("12"), tables.bucket_name("all")) == ("12x", "all")
    assert (tables.title("rougeL"), tables.title("of another")) == ("ROUGE-L", "of another")
    assert tables.buckets(comparison) == ["0", "3"]
    headings, body = tables.difference_rows(comparison)
    assert [row[:2] for row in body] == [["0x", "trained"], ["3x", "trained"], ["all", "trained"]]
    cell = body[1][headings.index("verbatim")]
    assert cell.startswith("+0.750 [+") and cell.endswith("]")
    _, plain = tables.difference_rows(comparison, intervals=())
    assert plain[1][headings.index("verbatim")] == "+0.750" and plain[0][headings.index("verbatim")] == "+0.000"


def test_the_sampler_is_told_once_or_by_run():
    def record(sampler, settings=None):
        return {"identity": {"samples_sha256": "x", "sampler": sampler}, "settings": {"sampler": settings}}

    def reported(**records):
        return tables.samplers(compare({name: results(1) for name in records}, records=records, resamples=100))

    assert reported(a=record("top-k 40"), b=record("top-k 40")) == "Sampler: top-k 40."
    assert reported(a=record("top-k 40"), b=record("top-k 5")) == "Samplers: a: top-k 40; b: top-k 5."
    assert reported(a=record("top-k 40"), b=record(None)) == "Sampler: top-k 40."
    assert reported(a=record(None, "top-p 0.9")) == "Sampler: top-p 0.9." and reported(a=record(None)) == ""


def test_a_score_without_an_interval():
    assert tables._value({"value": 0.5, "low": None, "high": None}) == "0.500"
    assert tables._value({"value": 0.5, "low": 0.0, "high": 0.75}) == "0.500 [0.00, 0.75]"
