"""Tests that run for a mutant, and long tests that others make unnecessary."""

from types import SimpleNamespace

from tests.helpers import ROOT
from tests.tools.lines_by_test import COVERED, find_covered
from tests.tools.mutants import BUDGET, choose_tests, first_difference


def test_long_tests_are_left_out_where_others_run_their_branches():
    one, two = ("a.py", 1, 2), ("a.py", 2, 3)
    branches = {"longest": {one}, "equals_one_process": {one}, "apart": {two}, "long": {one, two}, "short": {one}}
    seconds = {"longest": 9.0, "equals_one_process": 8.0, "apart": 7.0, "long": 6.0, "short": 0.2}
    assert find_covered(branches, seconds) == ["longest", "apart"]  # then nothing else runs the second branch
    cases = {f"longest[{place}]": {one} for place in range(3)}
    assert find_covered(branches | cases, seconds | dict.fromkeys(cases, 5.0)) == [
        *("longest", "apart", "longest[0]", "longest[1]")
    ]


def test_tests_of_the_modules_own_file_run_first_and_a_minute_of_them():
    seconds = {"tests/b/test_other.py::a": 1.0, "tests/a/test_grid.py::b": 2.0, "tests/b/test_other.py::c": BUDGET}
    lines = SimpleNamespace(seconds=seconds, tests_of=lambda module, line: sorted(seconds, key=seconds.get))
    assert choose_tests(lines, "hf_axonn/topology/grid.py", 3) == [
        "tests/a/test_grid.py::b",
        "tests/b/test_other.py::a",
    ]
    seconds["tests/a/test_grid.py::b"] = 2 * BUDGET
    assert choose_tests(lines, "hf_axonn/topology/grid.py", 3) == ["tests/a/test_grid.py::b"]
    lines.tests_of = lambda module, line: []
    assert choose_tests(lines, "hf_axonn/topology/grid.py", 3) == []


def test_the_first_line_that_differs():
    assert first_difference("a\nb\nc\n", "a\nB\nc\n") == 2


def test_the_list_of_covered_tests_is_sorted_and_of_files_that_are_there():
    tests = COVERED.read_text().splitlines()
    assert tests == sorted(set(tests))
    assert all((ROOT / test.partition("::")[0]).exists() for test in tests)
