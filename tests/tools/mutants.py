"""What the tests are worth: small random changes to the code, and how many of them a test notices.

    python -m tests.tools.mutants hf_axonn --results runs/mutants-hf_axonn.jsonl
    python -m tests.tools.mutants eval     --results runs/mutants-eval.jsonl --workers 2

cosmic-ray changes one operator, number, comparison or condition at a time. The sample is drawn by a seed from all
such places of a package. Each change is made in a copy of the repository, where the fast tests of the module run:
first the test file of its name, then its folder of tests, and for what a training step runs the equality with one
process. Results are written one by one, and a run that was stopped goes on from there. A change is tried again
when its file was edited since, and one that survived when its tests were. The exit code is 1 if too few are noticed.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
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


LEAST = 0.9  # of the mutants are noticed
SECONDS = 600  # a test that takes longer has noticed something
# Small slips: another operator of arithmetic, another bound, another constant, a condition turned round.
KINDS = re.compile(
    "ReplaceBinaryOperator_(Add|Sub|Mul|Div|FloorDiv|Mod)_(Add|Sub|Mul|Div|FloorDiv)|"
    "ReplaceComparisonOperator_(Lt|LtE|Gt|GtE|Eq|NotEq)_(Lt|LtE|Gt|GtE|Eq|NotEq)|"
    "ReplaceComparisonOperator_(Is_IsNot|IsNot_Is|In_NotIn|NotIn_In)|"
    "ReplaceUnaryOperator_Delete_Not|ReplaceUnaryOperator_USub_UAdd|ReplaceAndWithOr|ReplaceOrWithAnd|AddNot|"
    "ReplaceTrueWithFalse|ReplaceFalseWithTrue|ReplaceBreakWithContinue|ReplaceContinueWithBreak|NumberReplacer"
)
# modules without a folder of tests by their name
OTHER_TESTS = {
    "hf_axonn/plugin.py": ["tests/accelerator/test_plugin.py", "tests/accelerator"],
    "hf_axonn/config.py": ["tests/launch/test_config.py", "tests/launch"],
    "hf_axonn/compat": ["tests/accelerator", "tests/checkpoint", "tests/layers"],
    "eval/__main__.py": ["tests/eval/cli"],
    "eval/__init__.py": ["tests/repository"],
    "hf_axonn/__main__.py": ["tests/cli"],
    "hf_axonn/__init__.py": ["tests/repository"],
}
# what a training step runs: its first test is that a grid equals one process
OF_A_STEP = re.compile("hf_axonn/(parallel|architectures|losses|layers|engine|distributed)/")
EQUALITY = "tests/end_to_end/test_equivalence.py"


def where_tested(module: str) -> list[str]:
    """Where the tests of a module are, the nearest first."""
    for name, tests in OTHER_TESTS.items():
        if module.startswith(name):
            return tests
    path = Path(module)
    folder = Path("tests", *(path.parent.parts if path.parts[0] == "eval" else path.parent.parts[1:]))
    own = folder / f"test_{path.name}"
    while not (ROOT / folder).is_dir():
        folder = folder.parent
    tests = [str(place) for place in (own, folder) if (ROOT / place).exists()]
    return [*tests, EQUALITY] if OF_A_STEP.match(module) else tests


def places(package: str) -> list[tuple[str, str, int]]:
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


def draw(package: str, count: int, seed: int) -> list[tuple[str, str, int]]:
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


def noticed(copy: Path, places: list[str]) -> str | None:
    """Which of these tests fail; None if all pass."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    for place in places:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, place],
            cwd=copy,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # and ranks that it left behind
            except ProcessLookupError:
                pass
            process.wait()
        if code not in (0, 5):  # 5: no fast test there
            return place
    return None


def attempt(copy: Path, mutant: tuple[str, str, int]) -> dict:
    """Make one change in a copy, run the tests, and take the change back."""
    module, operator, occurrence = mutant
    before, after = (ROOT / module).read_text(), mutated(*mutant)
    diff = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] in "+-"]
    (copy / module).write_text(after)
    try:
        by = noticed(copy, where_tested(module))
    finally:
        (copy / module).write_text(before)
    return {"module": module, "operator": operator, "occurrence": occurrence, "noticed_by": by, "change": diff}


def fingerprint(module: str, *, tests: bool) -> str:
    """Of a module, and of its tests where they matter: a test that was added may notice what survived before."""
    files = [ROOT / module]
    for place in where_tested(module) if tests else ():
        files += sorted((ROOT / place).rglob("*.py")) if (ROOT / place).is_dir() else [ROOT / place]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def main(arguments: list[str] | None = None) -> int:
    """Try the mutants of a sample that have no result yet, and say how many of all were noticed."""
    parser = argparse.ArgumentParser(description="How many small random changes to the code do the tests notice?")
    parser.add_argument("package", choices=("hf_axonn", "eval"))
    parser.add_argument("--count", type=int, default=100, help="size of the sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="mutants that are tried at the same time")
    parser.add_argument("--results", type=Path, required=True, help="a file of JSON lines, read and added to")
    options = parser.parse_args(arguments)
    sample = draw(options.package, options.count, options.seed)
    known = {}
    if options.results.exists():
        for line in options.results.read_text().splitlines():
            result = json.loads(line)
            survived = result["noticed_by"] is None
            if (ROOT / result["module"]).exists() and result["fingerprint"] == fingerprint(
                result["module"], tests=survived
            ):
                known[result["module"], result["operator"], result["occurrence"]] = result
    left = [mutant for mutant in sample if mutant not in known]
    print(f"a sample of {len(sample)} mutants, {len(left)} still to be tried", flush=True)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.workers) as pool:
        copies: Queue[Path] = Queue()
        for worker in range(options.workers if left else 0):
            copies.put(copy_of_repository(Path(folder, str(worker))))

        def work(mutant: tuple[str, str, int]) -> dict:
            copy = copies.get()
            try:
                return attempt(copy, mutant)
            finally:
                copies.put(copy)

        for mutant, result in zip(left, pool.map(work, left), strict=True):
            known[mutant] = result
            with options.results.open("a") as file:
                mark = fingerprint(mutant[0], tests=result["noticed_by"] is None)
                print(json.dumps(result | {"fingerprint": mark}), file=file)
            print("noticed" if result["noticed_by"] else "SURVIVED", result["module"], *result["change"], flush=True)
    survivors = [known[mutant] for mutant in sample if known[mutant]["noticed_by"] is None]
    for result in survivors:
        print(f"survived: {result['module']}", *result["change"], sep="\n    ")
    share = 1 - len(survivors) / len(sample)
    print(f"{len(sample) - len(survivors)} of {len(sample)} noticed ({share:.0%}); at least {LEAST:.0%} is asked for")
    return int(share < LEAST)


if __name__ == "__main__":
    sys.exit(main())
