"""The statement of coverage: its figures are those of the studies, and it names the intervals that there are."""

import re

from hf_axonn_eval import summarize
from hf_axonn_eval.analysis.intervals import BY_DOCUMENT, EXACT, FEWEST_OF_MEAN, GAINED_AND_LOST, MEAN
from hf_axonn_eval.bundle.coverage import STUDIED, STUDIES, statement
from tests.helpers import ROOT
from tests.helpers.eval_support import result


def test_the_figures_are_those_of_the_pages():
    page = (ROOT / "docs" / "results" / "coverage.md").read_text(encoding="utf-8")
    assert f"Intervals of {STUDIED:.0%}" in page
    rows = dict(re.findall(r"^\| (\w[\w ]*) \| (\d+ \| [\d.]+) \|", page.partition("## ")[0], re.MULTILINE))
    kinds = {EXACT: "share", BY_DOCUMENT: "share", GAINED_AND_LOST: "difference of shares", MEAN: "mean"}
    for kind, name in kinds.items():
        assert rows[name] == f"{STUDIES[kind]['cases']} | {STUDIES[kind]['lowest']:.3f}", name
    page = (ROOT / "docs" / "results" / "coverage_attack.md").read_text(encoding="utf-8")
    assert re.search(r"\| ours \| ([\d.]+) \|.*of (\d+) \|", page).groups() == (
        f"{STUDIES['auc']['lowest']:.3f}",
        str(STUDIES["auc"]["cases"]),
    )
    assert f"Lowest coverage: {STUDIES['tpr']['lowest']:.3f}." in page
    assert set(STUDIES) == {*kinds, "auc", "tpr"} and f"{FEWEST_OF_MEAN} documents" in STUDIES[MEAN]["range"]


def test_intervals_are_counted_by_kind_and_withheld_ones_by_reason():
    results = [result(f"{place}", bucket=place % 2, membership={"loss": float(place)}) for place in range(20)]
    told = statement(summarize(results, confidence=0.9), confidence=0.9)
    assert (told["confidence"], told["studied"]) == (0.9, 0.95)
    exact = told["intervals"][EXACT]
    assert exact["number"] == 3 and exact["page"] == "docs/results/coverage.md"  # exact_match of 0, 1 and all
    assert told["intervals"]["auc"]["number"] == 2  # of bucket 1 and of all
    assert told["withheld"]["none: 10 independent controls; 1% needs 1,000"] == 2
    one = statement(summarize([result("a", document_id="x"), result("b", document_id="x")]), confidence=0.95)
    assert one["intervals"] == {} and one["withheld"].keys() == {"none: a single document"}


def test_a_kind_that_was_not_studied_says_so():
    told = statement({"a": {"interval": "of tomorrow", "low": 0, "high": 1}}, confidence=0.95)
    assert told["intervals"] == {"of tomorrow": {"number": 1, "page": None}}
