"""The further tables of a comparison, from hand-made results."""

from math import log

import pytest

from hf_axonn_eval import compare
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
    told = rows(changes(compare({"base": results(1), "trained": results(4)}, resamples=100)))
    # b = 3 gained, c = 0 lost: p = 2 / 2^3
    assert told == {
        ("0x", "trained"): ["0", "0", "0", "0", "0", "1"],
        ("3x", "trained"): ["3", "0", "1", "3", "0", "0.25"],
        ("all", "trained"): ["3", "0", "1", "3", "0", "0.25"],
    }
    assert changes(compare({"base": results(1)}, resamples=100)) == []


def test_shorter():
    told = rows(shorter(compare({"base": results(1)}, lengths=[1, 2], resamples=100)))
    assert [cell.split(" [")[0] for cell in told["3x", "base"]] == ["4 of 4", "1 of 4"]
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
    told = {(row[0], row[2]): row[3:] for row in table.rows}
    assert told["3x", "loss"][0] == "4, 2" and told["3x", "loss"][1].startswith("1.000")
    assert told["3x", "Min-K%++"][1].startswith("0.000") and ("0x", "loss") not in told


def test_undecided():
    given = {"near_tie": lambda place, known: place in (2, 5), "margin": lambda place, known: 0.0}
    told = rows(near_ties(compare({"base": results(2, **given)}, resamples=100)))
    # d2 comes back and d5 does not, and both could be otherwise
    assert told["3x", "base"] == ["2 of 4", "1 to 3"] and told["0x", "base"] == ["0 of 2", "0 to 0"]


def test_a_plain_run_has_no_further_tables():
    assert all_details(compare({"base": results(1)}, resamples=100)) == []


@pytest.mark.parametrize("ratio", [0.1, 0.9])
def test_degenerate(ratio):
    given = {"type_token_ratio": lambda place, known: ratio, "zlib_ratio": lambda place, known: 0.9}
    (table,) = all_details(compare({"base": results(2, **given)}, resamples=100))
    assert table.title == "Degenerate suffixes"
    assert {(row[0]): row[2] for row in table.rows}["3x"] == ("4 of 4" if ratio < 0.4 else "0 of 4")
