"""Find what breaks with the newest releases that pip has of other libraries, whatever setup.cfg allows.

    python -m tests.versions.newest               a fresh environment, torch of gigabytes too (`make test-newest`)
    python -m tests.versions.newest --lend        torch and everything else are lent by the environment that runs this
    python -m tests.versions.newest --grids x2    the survey on one grid

The suite of test_capabilities.py runs with AXONN_CHECK_VERSIONS=0, then the survey of model types, whose verdicts are
compared with docs/architectures.md. Each capability and each model type that broke is a line. What passes here may be
added to the ranges of setup.cfg, after which `make test-versions` has to pass, too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hf_axonn.compat.versions import SWITCH, bounds, requirements
from tests.benchmarks.architectures.survey_table import read_verdicts
from tests.helpers import ROOT
from tests.versions.environments import LIBRARIES, make, tried, variables


# Verdicts from the best to the worst.
ORDER = ("planned", "planned in part", "Linear by Linear", "not possible", "wrong")
IN_RANGES = "test_these_releases_are_in_the_ranges"  # says what the first lines say already


def describe_releases(releases: dict[str, str]) -> list[str]:
    """Return a line for each library: its release, and the range of setup.cfg that has it or not."""
    lines = []
    for name in LIBRARIES:
        requirement = requirements(name)[0]
        inside = requirement.specifier.contains(releases[name], prereleases=True)
        lines.append(f"{name} {releases[name]}: {'in' if inside else 'outside of'} {bounds(requirement)}")
    return lines


def describe_suite(result: dict[str, Any]) -> list[str]:
    """Return a line for each capability that broke, with the first line of what its test says."""
    return [f"broke: {name}: {line}" for name, line in result["failed"].items() if name != IN_RANGES]


def describe_survey(before: dict[str, tuple[str, str]], now: dict[str, tuple[str, str]]) -> list[str]:
    """Return a line for each model type that is new, gone or has another verdict, "broke: ..." where that is worse.

    Args:
        before, now: (verdict, note) by model type.
    """
    lines = []
    for name in sorted(before | now):
        (old, _), (verdict, note) = before.get(name, ("not there", "")), now.get(name, ("not there", ""))
        if old == verdict:
            continue
        # A type that was not there has to be right, no more.
        fell = verdict == "wrong" or (old in ORDER and verdict in ORDER and ORDER.index(verdict) > ORDER.index(old))
        lines.append(f"{'broke' if fell else 'changed'}: {name}: {old} -> {verdict}{note and f'; {note}'}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Make the environment, run suite and survey in it, and print what broke; 1 if something did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lend", action="store_true", help="install transformers, accelerate, peft and trl alone")
    parser.add_argument("--grids", default="x2,z2", help="grids of the survey, separated by commas (x2,z2)")
    parser.add_argument("--types", help="model types of the survey, separated by commas (all)")
    parser.add_argument("--pip", action="append", default=[], metavar="ARGUMENT", help="for pip; repeatable")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        python = make(Path(scratch, "venv"), None, options.pip, lend=options.lend)
        environment = variables() | {SWITCH: "0"}
        result = tried(python, Path(scratch), environment)
        table = Path(scratch, "survey.md")
        survey = [python, "-m", "tests.benchmarks.architectures.survey", "--grids", options.grids, "--out", table]
        if options.types:
            survey += ["--types", options.types]
        subprocess.run(survey, cwd=ROOT, env=environment)
        if not table.exists():
            print("broke: the survey itself, which ended without its table: see above")
            return 1
        now = read_verdicts(table)
    before = read_verdicts(ROOT / "docs" / "architectures.md")
    if options.types:
        before = {name: row for name, row in before.items() if name in options.types.split(",")}
    lines = [*describe_suite(result), *describe_survey(before, now)]
    broke = sum(line.startswith("broke: ") for line in lines)
    print(f"== the newest releases that pip has{', torch and others lent' if options.lend else ''}")
    print("\n".join([*describe_releases(result["releases"]), *lines]))
    capabilities = result["passed"] + len(result["failed"]) - (IN_RANGES in result["failed"])
    print(
        f"{broke} broke, of {capabilities} capabilities and {len(now)} model types on {options.grids}"
        f" ({sum(verdict == 'wrong' for verdict, _ in now.values())} wrong)"
    )
    return int(broke > 0)


if __name__ == "__main__":
    sys.exit(main())
