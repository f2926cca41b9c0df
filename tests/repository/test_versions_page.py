"""docs/versions.md has the results of `make test-versions`, and they bear out the ranges of setup.cfg."""

import xml.etree.ElementTree as ElementTree

import pytest
from packaging.specifiers import SpecifierSet

from hf_axonn.compat.versions import bounds, requirements
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
