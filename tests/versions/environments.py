"""With which releases of other libraries this package works: the short suite in an environment for each combination.

    python -m tests.versions.environments               those without a result (`make test-versions`)
    python -m tests.versions.environments oldest        one of ENVIRONMENTS, again; or several
    python -m tests.versions.environments --page        docs/versions.md anew, from the results

pip makes a virtual environment from the ranges of setup.cfg and the releases that ENVIRONMENTS asks for, where
test_capabilities.py runs; then it is removed. What came out is kept in results.json, so that a run that was stopped
goes on. With `--lend` only the releases that are asked for are installed, and everything else, torch too, is lent by
the environment that runs this: that takes seconds in place of gigabytes, but what is lent is not what pip would
choose, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from datetime import date
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from hf_axonn.compat.versions import SWITCH, bounds, requirements, requires
from tests.helpers import ROOT


HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
DOCUMENT = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- made by `make test-versions` -->", "<!-- end -->"

LIBRARIES = ("torch", "transformers", "accelerate", "peft", "trl")
VARIED = LIBRARIES[1:]


def ends(name: str) -> tuple[str, str]:
    """The oldest and the newest minor release of a library that setup.cfg allows."""
    low, high = (part.lstrip("<>=") for part in bounds(requirements(name)[0]).split(","))
    major, minor = high.split(".")
    return low, f"{major}.{int(minor) - 1}"


OLDEST, NEWEST = ({name: ends(name)[end] for name in VARIED} for end in (0, 1))
# Minor releases by name of the environment; others are those of NEWEST, and what pip takes.
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "newest": {},
    "oldest": {"python": "3.11", "torch": "2.11", **OLDEST},
    **{f"transformers {release}": {"transformers": release} for release in ("5.23", "5.22", "5.21", "5.20")},
    **{f"accelerate {release}": {"accelerate": release} for release in ("1.14", "1.13", "1.12")},
    "peft 0.20": {"peft": "0.20"},
    "trl 1.15": {"trl": "1.15"},
    **{f"torch {release}": {"torch": release} for release in ("2.15", "2.14", "2.12", "2.11")},
    **{f"python {release}": {"python": release} for release in ("3.14", "3.13", "3.12")},
    "oldest libraries": OLDEST,
    "oldest transformers and accelerate": {"transformers": OLDEST["transformers"], "accelerate": OLDEST["accelerate"]},
}
TESTS = ("pytest>=8.0", "pytest-timeout>=2.3", "hypothesis>=6.100")
VERSIONS = (
    "import json, platform, sys; from importlib.metadata import version; "
    "print(json.dumps({'python': platform.python_version(), **{name: version(name) for name in sys.argv[1:]}}))"
)


def pins(requested: dict[str, str]) -> list[str]:
    """What pip is asked for, as accelerate==1.12.*."""
    return [f"{name}=={release}.*" for name, release in requested.items() if name != "python"]


def make(folder: Path, requested: dict[str, str] | None, pip_arguments: list[str], *, lend: bool) -> Path:
    """A virtual environment; returns its interpreter.

    Args:
        requested: minor releases by name, or None for the newest releases that pip has, whatever setup.cfg allows.

    Raises:
        FileNotFoundError: there is no such Python.
        subprocess.CalledProcessError: pip cannot install what is asked for.
    """
    named = (requested or {}).get("python")
    base = sys.executable if lend or named is None else shutil.which(f"python{named}")
    if base is None:
        raise FileNotFoundError(f"there is no python{named}")
    packages = list(VARIED if lend else LIBRARIES) if requested is None else pins(NEWEST | requested)
    subprocess.run([base, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pip_arguments]
    if lend:
        # Python does not read .pth files of such a path, so that the editable install there stays inactive.
        purelib = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
        Path(purelib, "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([*install, "--no-deps", "--ignore-installed", *packages], check=True)
        subprocess.run([*install, "--no-deps", "--editable", "."], check=True, cwd=ROOT)
    elif requested is None:
        others = [text for text in requires("hf_axonn") if _belongs(Requirement(text), ("", "data", "eval"))]
        subprocess.run([*install, *packages, *others, *TESTS], check=True)
        subprocess.run([*install, "--no-deps", "--editable", "."], check=True, cwd=ROOT)
    else:
        # Not the extra peft, which holds Transformers back: peft is one of the pins.
        subprocess.run([*install, "--editable", ".[data,trl,eval]", *TESTS, *packages], check=True, cwd=ROOT)
    return python


def _belongs(requirement: Requirement, extras: tuple[str, ...]) -> bool:
    """Return whether a requirement is one of these extras ("" for none), and not a library that the table varies."""
    marker = requirement.marker
    return requirement.name not in LIBRARIES and (
        marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)
    )


def variables() -> dict[str, str]:
    """Environment variables of what runs in one of these environments."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", SWITCH)}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def tried(python: Path, scratch: Path, environment: dict[str, str]) -> dict[str, Any]:
    """What an environment has, and what the suite says in it."""
    ask = [python, "-c", VERSIONS, *LIBRARIES]
    releases = json.loads(subprocess.run(ask, check=True, capture_output=True, env=environment).stdout)
    report, begin = scratch / "report.xml", time.monotonic()
    tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", HERE]
    subprocess.run(tests, cwd=ROOT, env=environment)
    seconds = round(time.monotonic() - begin)
    return {"releases": releases, "seconds": seconds, **outcomes(report)}


def outcomes(report: Path) -> dict[str, Any]:
    """Of a JUnit report: how many tests passed, and the first line of what each other one says."""
    passed, failed = 0, {}
    for case in ElementTree.parse(report).iter("testcase"):
        problems = [child for child in case if child.tag in ("failure", "error", "skipped")]
        if problems:
            failed[case.get("name", "")] = (problems[0].get("message") or problems[0].tag).partition("\n")[0][:200]
        else:
            passed += 1
    return {"passed": passed, "failed": failed}


def read() -> dict[str, dict[str, Any]]:
    """The results so far, by environment."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def table(results: dict[str, dict[str, Any]]) -> str:
    """A row for each environment."""
    columns = ["environment", "Python", *LIBRARIES, "result"]
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    for name, requested in ENVIRONMENTS.items():
        result = results.get(name)
        if result is None:
            shown = [(NEWEST | requested).get(library, "") for library in ("python", *LIBRARIES)]
            said = "not run"
        else:
            shown = [result["releases"][library] for library in ("python", *LIBRARIES)]
            total = result["passed"] + len(result["failed"])
            said = f"{result['passed']} of {total} tests pass, in {result['seconds']} s"
            said += "".join(f"; {test}: {line}" for test, line in result["failed"].items()).replace("|", "/")
            said += f" ({'lent' if result['lent'] else 'fresh'}, {result['date']})"
        lines.append(f"| {' | '.join([name, *shown, said])} |")
    return "\n".join(lines)


def written(text: str, results: dict[str, dict[str, Any]]) -> str:
    """The text of docs/versions.md with the table of these results.

    Raises:
        ValueError: the text has no place for it.
    """
    before, found, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (found and end):
        raise ValueError(f"{DOCUMENT.name} has no lines {BEGIN} and {END}: put them where the table belongs.")
    return f"{before}{BEGIN}\n{table(results)}\n{END}{after}"


def write_page() -> None:
    """docs/versions.md with the results that are kept."""
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8"), read()), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Try environments, keep what comes out, and write the page. 1 if a test failed or something was not installed."""
    parser = argparse.ArgumentParser(description="Run the short suite with other releases of other libraries.")
    parser.add_argument("names", nargs="*", metavar="ENVIRONMENT", help=f"of {', '.join(ENVIRONMENTS)}")
    parser.add_argument("--lend", action="store_true", help="install only what is asked for, and lend the rest")
    parser.add_argument("--check", action="store_true", help="keep no result: only the exit code says how it went")
    parser.add_argument("--page", action="store_true", help="only write docs/versions.md")
    parser.add_argument(
        "--pip", action="append", default=[], metavar="ARGUMENT", help="for pip, as an index; repeatable"
    )
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in ENVIRONMENTS]:
        parser.error(f"there is no environment {unknown[0]}: choose of {', '.join(ENVIRONMENTS)}")
    results, wrong = read(), False
    left = [] if options.page else options.names or [name for name in ENVIRONMENTS if name not in results]
    for name in left:
        print(f"== {name}", flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            try:
                python = make(Path(scratch, "venv"), ENVIRONMENTS[name], options.pip, lend=options.lend)
            except (FileNotFoundError, subprocess.CalledProcessError) as problem:
                print(f"not run: {problem}", flush=True)
                wrong = True
                continue
            result = tried(python, Path(scratch), variables())
        wrong |= bool(result["failed"])
        if options.check:
            continue
        # Another run may have added to it.
        results = read() | {name: {**result, "lent": options.lend, "date": date.today().isoformat()}}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        write_page()
    if not options.check:
        write_page()
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
