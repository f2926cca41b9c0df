"""The further tables of a comparison, from hand-made results."""

from dataclasses import replace
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
    members, controls = changes(compare({"base": results(1), "trained": results(4)}))
    reported = rows([members])
    # b = 3 gained, c = 0 lost: p = 2 / 2^3
    assert reported == {
        ("3x", "trained"): ["3", "0", "1", "3, 0", "0.25", "0.25"],
    }
    assert rows([controls]) == {("0x", "trained"): ["0", "0", "0", "0, 0", "1", "1"]}
    assert (members.folded, controls.folded) == (False, True), "p = 1 in every row says nothing"
    assert "tests of what was seen, 1 (" in members.note and "tests of controls, 1 (" in controls.note
    assert changes(compare({"base": results(1)})) == []


def test_shorter():
    reported = rows(shorter(compare({"base": results(1)}, lengths=[1, 2])))
    assert [cell.split(" [")[0] for cell in reported["3x", "base"]] == ["4 of 4", "1 of 4"]
    assert shorter(compare({"base": results(1)})) == []


def test_discoverability():
    give = lambda place, known: log(0.1) if known else float("-inf")  # noqa: E731
    found = discoverability(compare({"base": results(3, sampled_logprob=give)}, tries=[7, 1]))
    assert [table.title for table in found] == ["(n, 0.5)-discoverable", "(n, 0.9)-discoverable"]
    half, nine = (rows([table]) for table in found)
    assert half["3x", "base"][0] == "7" and nine["3x", "base"][0] == "22"
    columns = [heading for heading in found[0].headings if heading.startswith("n = ")]
    of_seven = half["3x", "base"][1 + columns.index("n = 7")]
    assert of_seven.startswith("3 of 4") or of_seven.startswith("0.750")
    assert half["0x", "base"][0] == "none suffices"


def test_near_copies_and_what_they_cost():
    found = {
        "near_verbatim": True, "metrics": {"bleu": 0.9, "lccs": 0.5},
        "near_copies": [log(0.0005), log(0.25)], "near_copies_read": 12,
    }  # fmt: skip
    runs = {"base": [result("a")], "run": [result("a", **found)]}
    decoded, mean, likely = tables.near_copies(compare(runs))
    assert [row[:2] for row in decoded.rows] == [["0x", "run"], ["all", "run"]]
    assert [cell.partition(" [")[0] for cell in decoded.rows[0][2:]] == ["0 of 1", "1 of 1", "1 of 1", "0.500"]
    assert mean.headings[2:] == ["k = 0", "k = 1", "tokens read, in draws"]
    assert mean.rows[0][2:] == ["0.001", "0.250", "12.0"] and "temperature 1 from all" in mean.note
    assert [cell.partition(" [")[0] for cell in likely.rows[0][2:]] == ["0 of 1", "1 of 1", "12.0"]
    assert tables.near_copies(compare({"base": runs["base"]})) == []
    fewer = [replace(one, near_copies=one.near_copies[:1]) for one in runs["run"]]
    _, mean, _ = tables.near_copies(compare({"base": fewer, "run": runs["run"]}))
    assert mean.headings[2:4] == ["k = 0", "k = 1"], "also what the first run was not asked"


def test_what_was_left_out():
    counts = {"documents": 1200, "too_short": 3, "of_these_empty": 1, "duplicate_samples": 4, "not_round_trip": 2}
    counts["x"] = 7  # of a later version
    record = {"identity": {"samples_sha256": "x"}, "settings": {"left_out": counts}}
    _, table = all_details(compare({"base": results(1)}, records={"base": record}))
    assert table.title == "Left out when the samples were made" and dict(table.rows) == {
        "documents in all": "1,200",
        "documents that are too short": "3",
        "of these, documents without a token": "1",
        "documents that are too long": "0",
        "documents beyond --max_documents of their bucket": "0",
        "samples with the tokens of an earlier one": "4",
        "of these, samples of another bucket than the earlier one": "0",
        "documents on the list of samples --drop": "0",
        "samples whose suffix has too few different tokens": "0",
        "windows whose characters give too few tokens": "0",
        "documents with the tokens of an earlier one (not left out)": "0",
        "documents whose tokens decode to another text (not left out)": "2",
        "x": "7",
    }


def test_membership():
    scores = lambda place, known: {"loss": float(place), "min_k_plus_plus": -float(place)}  # noqa: E731
    (table,) = membership(compare({"base": results(3, membership=scores)}))
    assert table.headings[2:] == ["score", "members, controls", "AUC", "TPR at 0.1% FPR", "TPR at 1.0% FPR"]
    reported = {(row[0], row[2]): row[3:] for row in table.rows}
    assert reported["3x", "loss"][0] == "4, 2" and reported["3x", "loss"][1].startswith("1.000")
    assert reported["3x", "Min-K%++"][1].startswith("0.000") and ("0x", "loss") not in reported
    assert reported["3x", "loss"][2:] == [
        "2 independent controls; 0.1% needs 10,000", "2 independent controls; 1% needs 1,000",
    ]  # fmt: skip


def test_a_rate_that_is_given_has_the_interval_of_what_it_achieves():
    comparison = compare({"base": results(3, membership=lambda place, known: {"loss": float(place)})})
    attack = comparison["runs"]["base"]["buckets"]["3"]["membership"]["loss"]
    false = {"count": 10, "value": 0.01, "low": 0.0048, "high": 0.0183}
    attack["tpr_at_0.01"] = {"value": 0.25, "low": 0.1, "high": 0.5, "false_positive_rate": false}
    (table,) = membership(comparison)
    assert [row[-1] for row in table.rows if row[0] == "3x"] == ["0.250 [0.10, 0.50], FPR 1.00% [0.48%, 1.83%]"]
    assert "10 / FPR independent controls" in table.note
    attack["tpr_at_0.01"] |= {"low": None, "high": None}
    (table,) = membership(comparison)
    assert [row[-1] for row in table.rows if row[0] == "3x"] == ["0.250, FPR 1.00% [0.48%, 1.83%]"]


def test_undecided():
    given = {"near_tie": lambda place, known: place in (2, 5), "margin": lambda place, known: 0.0}
    reported = rows(near_ties(compare({"base": results(2, **given)})))
    # d2 comes back and d5 does not, and both could be otherwise
    assert reported["3x", "base"] == ["2 of 4", "1 to 3"] and reported["0x", "base"] == ["0 of 2", "0 to 0"]


def test_a_plain_run_has_no_further_tables():
    assert all_details(compare({"base": results(1)})) == []


@pytest.mark.parametrize("ratio", [0.1, 0.9])
def test_degenerate(ratio):
    given = {"type_token_ratio": lambda place, known: ratio, "zlib_ratio": lambda place, known: 0.9}
    (table,) = all_details(compare({"base": results(2, **given)}))
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
    comparison = compare({"base": results(1), "trained": results(4)}, confidence=0.9)
    assert "90% intervals" in tables.caption(comparison)
    assert (tables.bucket_name("12"), tables.bucket_name("all")) == ("12x", "all")
    assert (tables.title("rougeL"), tables.title("of another")) == ("ROUGE-L", "of another")
    assert tables.buckets(comparison) == ["0", "3"]
    headings, body = tables.difference_rows(comparison)
    assert [row[:2] for row in body] == [["0x", "trained"], ["3x", "trained"], ["all", "trained"]]
    cell = body[1][headings.index("verbatim")]
    assert cell == "+0.750", "of four documents there is no interval"
    _, plain = tables.difference_rows(comparison, intervals=())
    assert plain[1][headings.index("verbatim")] == "+0.750" and plain[0][headings.index("verbatim")] == "+0.000"


def test_the_sampler_is_told_once_or_by_run():
    def record(sampler, settings=None):
        return {"identity": {"samples_sha256": "x", "sampler": sampler}, "settings": {"sampler": settings}}

    def reported(**records):
        return tables.samplers(compare({name: results(1) for name in records}, records=records))

    assert reported(a=record("top-k 40"), b=record("top-k 40")) == "Sampler: top-k 40."
    assert reported(a=record("top-k 40"), b=record("top-k 5")) == "Samplers: a: top-k 40; b: top-k 5."
    assert reported(a=record("top-k 40"), b=record(None)) == "Sampler: top-k 40."
    assert reported(a=record(None, "top-p 0.9")) == "Sampler: top-p 0.9." and reported(a=record(None)) == ""


def test_a_score_without_an_interval():
    assert tables._value({"value": 0.5, "low": None, "high": None}) == "0.500"
    assert tables._value({"value": 0.5, "low": 0.0, "high": 0.75}) == "0.500 [0.00, 0.75]"
