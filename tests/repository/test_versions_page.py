"""docs/versions.md has the results of `make test-versions`, and they bear out the ranges of setup.cfg."""

import xml.etree.ElementTree as ElementTree

import pytest
from packaging.specifiers import SpecifierSet

from hf_axonn.compat.versions import bounds, requirements
from tests.benchmarks.architectures.survey_table import DIVIDED_ROWS, VERDICTS, Row, markdown, read_verdicts
from tests.helpers import ROOT
from tests.versions.environments import (
    DOCUMENT,
    ENVIRONMENTS,
    LIBRARIES,
    VARIED,
    ends,
    outcomes,
    pins,
    read,
    table,
    written,
)
from tests.versions.newest import ORDER, describe_releases, describe_suite, describe_survey


RESULTS = read()


def test_the_page_is_that_of_the_results():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == written(text, RESULTS), "run  python -m tests.versions.environments --page"
    assert len(ENVIRONMENTS) <= 20 and RESULTS.keys() <= ENVIRONMENTS.keys()
    with pytest.raises(ValueError, match="no lines <!-- made by `make test-versions` -->"):
        written("# Releases\n", RESULTS)


@pytest.mark.parametrize("library", VARIED)
def test_both_ends_of_a_range_have_passed(library):
    passed = [result["releases"][library] for result in RESULTS.values() if not result["failed"]]
    for end in ends(library):
        assert any(SpecifierSet(f"=={end}.*").contains(release) for release in passed), (library, end)


def test_nothing_in_the_ranges_has_failed():
    for name, result in RESULTS.items():
        assert result["passed"] and not result["failed"], name
        for library in LIBRARIES:
            assert SpecifierSet(bounds(requirements(library)[0])).contains(result["releases"][library]), (
                name,
                library,
            )


def test_what_did_not_pass_is_told_with_its_reason(tmp_path):
    suite = ElementTree.fromstring(
        "<testsuites><testsuite><testcase name='one'/><testcase name='two'><failure message='a &lt; b&#10;more'/>"
        "</testcase><testcase name='three'><skipped/></testcase></testsuite></testsuites>"
    )
    ElementTree.ElementTree(suite).write(tmp_path / "report.xml")
    found = outcomes(tmp_path / "report.xml")
    assert found == {"passed": 1, "failed": {"two": "a < b", "three": "skipped"}}
    releases = {"python": "3.11.7"} | dict.fromkeys(LIBRARIES, "9.9.9")
    row = table({"newest": {**found, "releases": releases, "seconds": 7, "lent": True, "date": "2026-11-24"}})
    assert "| 1 of 3 tests pass, in 7 s; two: a < b; three: skipped (lent, 2026-11-24) |" in row
    assert "| oldest | 3.11 | 2.11 |" in row and "not run |" in row


def test_pip_is_asked_for_minor_releases():
    assert pins({"python": "3.11", "trl": "1.15"}) == ["trl==1.15.*"]


def test_the_newest_releases_are_described_with_what_broke():
    releases = dict.fromkeys(LIBRARIES, "999.0")
    releases["torch"] = bounds(requirements("torch")[0]).split(",")[0].lstrip(">=")
    inside, *outside = describe_releases(releases)
    assert inside.startswith(f"torch {releases['torch']}: in >=") and len(outside) == len(VARIED)
    assert all("999.0: outside of >=" in line for line in outside)
    failed = {"test_these_releases_are_in_the_ranges": "it says so already", "test_load": "KeyError: 'x'"}
    assert describe_suite({"passed": 3, "failed": failed}) == ["broke: test_load: KeyError: 'x'"]


def test_model_types_that_broke_changed_or_are_new_are_lines_of_their_own():
    before = {name: ("planned", "") for name in ("same", "fell", "failed", "gone")} | {"rose": ("planned in part", "")}
    now = {
        "same": ("planned", "other words"),
        "fell": ("Linear by Linear", "no attention"),
        "failed": ("wrong", "x2: loss 1e-3"),
        "rose": ("planned", ""),
        "fresh": ("planned in part", ""),
        "wrong": ("wrong", "x2: KeyError"),
    }
    assert describe_survey(before, now) == [
        "broke: failed: planned -> wrong; x2: loss 1e-3",
        "broke: fell: planned -> Linear by Linear; no attention",
        "changed: fresh: not there -> planned in part",
        "changed: gone: planned -> not there",
        "changed: rose: planned in part -> planned",
        "broke: wrong: not there -> wrong; x2: KeyError",
    ]


def test_verdicts_are_read_from_the_page_of_the_survey(tmp_path):
    rows = [Row("one", how="2 layers"), Row("two", impossible="a KeyError"), Row("three", failures={"x2": "a hang"})]
    rows[0].planned = True
    (tmp_path / "survey.md").write_text(
        markdown(rows, ["x2"], 1e-10, 60.0) + f"\n{DIVIDED_ROWS}| reason | 3 | one |\n"
    )
    verdicts = read_verdicts(tmp_path / "survey.md")
    assert {name: verdict for name, (verdict, _) in verdicts.items()} == {
        "one": "planned",
        "two": "not possible",
        "three": "wrong",
    }
    assert verdicts["three"][1] == "x2: a hang"
    assert (
        {verdict for verdict, _ in read_verdicts(ROOT / "docs" / "architectures.md").values()}
        <= set(ORDER)
        == set(VERDICTS)
    )
