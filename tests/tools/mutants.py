"""What the tests are worth: small random changes to the code, and how many of them a test notices.

    python -m pytest -p tests.tools.lines_by_test --lines runs/lines -m "not slow and not gpu"
    python -m tests.tools.mutants hf_axonn --lines runs/lines --results runs/mutants-hf_axonn.jsonl
    python -m tests.tools.mutants eval     --lines runs/lines --results runs/mutants-eval.jsonl --workers 2

cosmic-ray changes one operator, number, comparison or condition at a time. The sample is drawn by a seed from all
such places of a package. Each change is made in a copy of the repository, where the fast tests run that run its line
(lines_by_test.py): those in the file named after the module, then the shortest, together a minute. Results are written
one by one, and a run that was stopped goes on from there. A change is tried again when its file was edited since, and
one that survived when its tests were. The exit code is 1 if too few are noticed.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

from tests.helpers import ROOT
from tests.tools.lines_by_test import COVERED, Lines


LEAST = 0.9  # of the mutants are noticed
SECONDS = 600  # tests that take longer have noticed something
BUDGET = 60.0  # processor seconds of the tests that are run for a change
MOST = 200  # tests that are run for a change

Mutant = tuple[str, str, int]  # module, operator, which of its places
# Small slips: another operator of arithmetic, another bound, another constant, a condition turned round.
KINDS = re.compile(
    "ReplaceBinaryOperator_(Add|Sub|Mul|Div|FloorDiv|Mod)_(Add|Sub|Mul|Div|FloorDiv)|"
    "ReplaceComparisonOperator_(Lt|LtE|Gt|GtE|Eq|NotEq)_(Lt|LtE|Gt|GtE|Eq|NotEq)|"
    "ReplaceComparisonOperator_(Is_IsNot|IsNot_Is|In_NotIn|NotIn_In)|"
    "ReplaceUnaryOperator_Delete_Not|ReplaceUnaryOperator_USub_UAdd|ReplaceAndWithOr|ReplaceOrWithAnd|AddNot|"
    "ReplaceTrueWithFalse|ReplaceFalseWithTrue|ReplaceBreakWithContinue|ReplaceContinueWithBreak|NumberReplacer"
)


def places(package: str) -> list[Mutant]:
    """Every change that can be made: (module, operator, which of its places)."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    names = [name for name in sorted(operator_names()) if KINDS.fullmatch(name.partition("/")[2])]
    operators = {name: get_operator(name)() for name in names}
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        nodes = list(ast_nodes(get_ast(path.read_text())))
        for name, operator in operators.items():
            count = sum(1 for node in nodes for _ in operator.mutation_positions(node))
            found += [(str(path.relative_to(ROOT)), name, index) for index in range(count)]
    return found


def mutated(module: str, operator: str, occurrence: int) -> str:
    """The text of a module with one change."""
    from cosmic_ray.mutating import MutationVisitor
    from cosmic_ray.plugins import get_operator

    return MutationVisitor.mutate_code((ROOT / module).read_text(), get_operator(operator)(), occurrence)


def draw(package: str, count: int, seed: int) -> list[Mutant]:
    """A sample of changes that Python can still compile; an edit of one module leaves the others' sample as it was."""
    everything = sorted(places(package), key=lambda mutant: hashlib.sha256(f"{seed} {mutant}".encode()).digest())
    found = []
    for mutant in everything:
        if len(found) == count:
            break
        try:
            compile(mutated(*mutant), mutant[0], "exec")
        except SyntaxError:  # such as the / of a signature taken for a division
            continue
        found.append(mutant)
    return found


def copy_of_repository(folder: Path) -> Path:
    """A copy in which the packages that are imported are the copy's own."""
    target = folder / "repository"
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(".*", "runs", "build", "dist", "__pycache__"))
    for name, mapped in (("hf_axonn_eval", "eval"), ("hf_axonn_scripts", "training_scripts")):
        (target / name).symlink_to(mapped, target_is_directory=True)
    return target


def choose_tests(lines: Lines, module: str, line: int) -> list[str]:
    """Return the tests of a line that are run: those of the file of the module's name first, then the shortest."""
    name, slow = f"test_{Path(module).stem}.py::", set(COVERED.read_text().splitlines())
    tests = [test for test in lines.tests_of(module, line) if test not in slow]
    tests.sort(key=lambda test: name not in test)  # stable: the shortest first
    ends = itertools.accumulate(lines.seconds.get(test, 0.0) for test in tests)
    return [test for test, end in zip(tests, ends, strict=True) if end <= BUDGET][:MOST] or tests[:1]


def run_tests(copy: Path, tests: list[str]) -> bool:
    """Return whether one of these tests fails."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=copy,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(timeout=SECONDS) not in (0, 5)  # 5: none of them is there
    except subprocess.TimeoutExpired:
        return True
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # and ranks that it left behind
        except ProcessLookupError:
            pass
        process.wait()


def attempt(copy: Path, mutant: Mutant, lines: Lines) -> dict:
    """Make one change in a copy, run the tests, and take the change back."""
    module, operator, occurrence = mutant
    before, after = (ROOT / module).read_text(), mutated(*mutant)
    diff = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] in "+-"]
    tests = choose_tests(lines, module, first_difference(before, after))
    (copy / module).write_text(after)
    try:
        is_noticed = bool(tests) and run_tests(copy, tests)
    finally:
        (copy / module).write_text(before)
    return {
        "module": module,
        "operator": operator,
        "occurrence": occurrence,
        "noticed": is_noticed,
        "tests": tests,
        "change": diff,
        "fingerprint": fingerprint(module, [] if is_noticed else tests),
    }


def first_difference(before: str, after: str) -> int:
    """Return the number of the first line that differs, from 1."""
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    return next(number for number, (old, new) in enumerate(pairs, 1) if old != new)


def fingerprint(module: str, tests: list[str]) -> str:
    """Return a digest of a module and of the files of these tests."""
    files = [module, *sorted({test.partition("::")[0] for test in tests})]
    texts = [(ROOT / file).read_bytes() if (ROOT / file).exists() else b"" for file in files]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16]


def main(arguments: list[str] | None = None) -> int:
    """Try the mutants of a sample that have no result yet, and say how many of all were noticed."""
    parser = argparse.ArgumentParser(description="How many small random changes to the code do the tests notice?")
    parser.add_argument("package", choices=("hf_axonn", "eval"))
    parser.add_argument("--count", type=int, default=100, help="size of the sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", type=Path, required=True, help="the folder of lines_by_test.py")
    parser.add_argument("--workers", type=int, default=1, help="mutants that are tried at the same time")
    parser.add_argument("--results", type=Path, required=True, help="a file of JSON lines, read and added to")
    options = parser.parse_args(arguments)
    lines = Lines(options.lines)
    sample = draw(options.package, options.count, options.seed)
    known = {}
    if options.results.exists():
        for result in map(json.loads, options.results.read_text().splitlines()):
            if result["fingerprint"] == fingerprint(result["module"], [] if result["noticed"] else result["tests"]):
                known[result["module"], result["operator"], result["occurrence"]] = result
    left = [mutant for mutant in sample if mutant not in known]
    print(f"a sample of {len(sample)} mutants, {len(left)} still to be tried", flush=True)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.workers) as pool:
        copies: Queue[Path] = Queue()
        for worker in range(options.workers if left else 0):
            copies.put(copy_of_repository(Path(folder, str(worker))))

        def work(mutant: Mutant) -> dict:
            copy = copies.get()
            try:
                return attempt(copy, mutant, lines)
            finally:
                copies.put(copy)

        for mutant, result in zip(left, pool.map(work, left), strict=True):
            known[mutant] = result
            with options.results.open("a") as file:
                print(json.dumps(result), file=file)
            print("noticed" if result["noticed"] else "SURVIVED", result["module"], *result["change"], flush=True)
    survivors = [known[mutant] for mutant in sample if not known[mutant]["noticed"]]
    for result in survivors:
        print(f"survived: {result['module']}, {len(result['tests'])} tests", *result["change"], sep="\n    ")
    share = 1 - len(survivors) / len(sample)
    print(f"{len(sample) - len(survivors)} of {len(sample)} noticed ({share:.0%}); at least {LEAST:.0%} is asked for")
    return int(share < LEAST)


if __name__ == "__main__":
    sys.exit(main())
