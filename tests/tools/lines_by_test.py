"""Lines of the code that each fast test runs, and the processor seconds that it takes.

    python -m pytest -p tests.tools.lines_by_test --lines runs/lines -m "not slow and not gpu"
    python -m tests.tools.lines_by_test runs/lines

A pytest plugin around coverage.py. Lines that a rank or a command runs count for the test that started it. The second
command writes tests/tools/covered.txt: long tests of which others run every branch. They are slow tests then
(tests/conftest.py), which keeps `make test` short. A branch says nothing of values, so tests of what README and docs
promise stay fast (`PROMISES`).
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import ROOT


SETTINGS = Path(__file__).with_suffix(".ini")
COVERED = Path(__file__).with_name("covered.txt")
SHORT = 0.3  # processor seconds of a test that is no burden
PROMISES = re.compile(
    "test_equivalence|test_worst_order|test_packaging|tests/repository|one_process|no_bit|same_bits|bit_for_bit|"
    "bit_by_bit|is_equal|interrupted|kinds_of_attention|chunks_of|another_grid|from_grid_to_grid|unmodified|killed|"
    "in_flight|host_reads|reads_only|opens_only|falls?_as|lies_whole|false_evidence|on_disk|beside_each_other|"
    "what_extract_measures|situations_on|are_apart|are_found|keyed_by|products_on|grid_answers"
)

Branch = tuple[str, int, int]


class Notes:
    """The pytest plugin: coverage.py in each process, whose context is the test that runs.

    Ranks that are forked and commands that are started have this context, too.
    """

    def __init__(self, folder: Path) -> None:
        import coverage

        self._folder = folder
        os.environ["LINES_BY_TEST"] = str(folder)
        self._coverage = coverage.Coverage(config_file=str(SETTINGS), messages=False)
        self._coverage.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Set the context for a test, its fixtures, and the processes that they start."""
        self._coverage.switch_context(item.nodeid)
        self._coverage.config.context = item.nodeid
        os.environ["COVERAGE_PROCESS_CONFIG"] = self._coverage.config.serialize()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Note the processor seconds of a test, without its fixtures, which other tests may share."""
        began = sum(os.times()[:4])
        try:
            return (yield)
        finally:
            with (self._folder / f"seconds-{os.getpid()}.jsonl").open("a") as file:
                print(json.dumps([item.nodeid, round(sum(os.times()[:4]) - began, 3)]), file=file)

    def pytest_unconfigure(self) -> None:
        """Write the lines that this process has run."""
        self._coverage.stop()
        self._coverage.save()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lines", required=True, help="folder for the lines that each test runs")


def pytest_configure(config: pytest.Config) -> None:
    folder = Path(config.getoption("lines")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    config.pluginmanager.register(Notes(folder))


class Lines:
    """Lines and branches that tests run, as `Notes` has written them to a folder.

    Attributes:
        seconds: processor seconds of each test.
    """

    def __init__(self, folder: Path) -> None:
        from coverage import Coverage

        run = Coverage(data_file=str(folder / "combined"), config_file=False, messages=False)
        if (folder / "combined").exists():
            run.load()
        else:
            run.combine([str(file) for file in folder.glob(".coverage.*")], keep=True)
            run.save()
        self._data = run.get_data()
        lines = [line for file in folder.glob("seconds-*.jsonl") for line in file.read_text().splitlines()]
        self.seconds: dict[str, float] = dict(map(json.loads, lines))

    def tests_of(self, module: str, line: int) -> list[str]:
        """Return the tests that run a line of a module, or any line where only its import does; the shortest first."""
        by_line = self._tests_by_line(module)
        tests = by_line.get(line) or {test for each in by_line.values() for test in each}
        return sorted(tests, key=lambda test: (self.seconds.get(test, 0.0), test))

    @functools.cache  # noqa: B019
    def _tests_by_line(self, module: str) -> dict[int, list[str]]:
        found = self._data.contexts_by_lineno(str(ROOT / module))
        return {line: tests for line, each in found.items() if (tests := [test for test in each if test])}

    def branches(self) -> dict[str, set[Branch]]:
        """Return the branches that each test runs."""
        found: dict[str, set[Branch]] = {}
        for test in self.seconds:
            self._data.set_query_context(test)
            found[test] = {(file, *arc) for file in self._data.measured_files() for arc in self._data.arcs(file) or ()}
        return found


def find_covered(branches: dict[str, set[Branch]], seconds: dict[str, float]) -> list[str]:
    """Return the long tests without which every branch is still run; the longest are left out first.

    Of the cases of a function one is left.
    """
    left = collections.Counter(branch for test in branches.values() for branch in test)
    cases = collections.Counter(test.partition("[")[0] for test in branches)
    covered = []
    for test in sorted(branches, key=lambda test: -seconds[test]):
        function, is_case, _ = test.partition("[")
        if seconds[test] < SHORT:
            break
        if PROMISES.search(test) or (is_case and cases[function] == 1):
            continue
        if all(left[branch] > 1 for branch in branches[test]):
            left.subtract(branches[test])
            cases[function] -= 1
            covered.append(test)
    return covered


def main(arguments: list[str] | None = None) -> None:
    """Print the tests that others cover, with their processor seconds, and write their names to the list."""
    parser = argparse.ArgumentParser(description="Which long tests run nothing that other tests do not run?")
    parser.add_argument("lines", type=Path, help="the folder of a run with the plugin")
    options = parser.parse_args(arguments)
    lines = Lines(options.lines)
    covered = find_covered(lines.branches(), lines.seconds)
    for test in covered:
        print(f"{lines.seconds[test]:7.1f}  {test}")
    taken = sum(lines.seconds[test] for test in covered)
    print(f"{len(covered)} of {len(lines.seconds)} tests, {taken:.0f} of {sum(lines.seconds.values()):.0f} seconds")
    COVERED.write_text("".join(f"{test}\n" for test in sorted(covered)))


if __name__ == "__main__":
    main(sys.argv[1:])
