"""Everything that is to be measured on GPUs, in parts of less than ten minutes that go on where they stopped.

    python -m tests.benchmarks.gpu                          all parts; `make gpu` is the same
    python -m tests.benchmarks.gpu --parts links,tuning     some of them
    python -m tests.benchmarks.gpu --size smoke             tiny sizes, also on CPUs: does it run?

Results lie in --folder, each with its log; what is there for the same command and machine is not measured again. One
page and one JSON file are made of all of them after every job: OUTPUT.md and OUTPUT.json. docs/gpu.md tells the rest.

Exit code 0: every job is done or left out with its reason, no test failed and losses agree; 1: something is wrong or
not begun, and the page says what; 2: no GPU, or wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.jobs import DONE, LEFT_OUT, Outcome, Part, Results
from tests.benchmarks.gpu.page import page, record
from tests.benchmarks.gpu.parts import make_parts
from tests.benchmarks.gpu.settings import SIZES, Machine, Settings, choose
from tests.helpers import ROOT, devices
from tests.helpers.launching import run


NO_GPU = 'make gpu needs a GPU, and torch sees none here: make gpu ARGS="--size smoke" runs everything, tiny, on CPUs.'


def find_machine() -> Machine:
    """What there is to run on, asked by a process of its own.

    Raises:
        RuntimeError: that process failed; the message is what it printed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "machine.json"
        ended = run(Path(scratch), "-m", "tests.benchmarks.gpu.work", "machine", "--result", result, timeout=120)
        if ended.code:
            raise RuntimeError(f"the machine cannot be looked at:\n{ended.output}")
        return Machine(**json.loads(result.read_text()))


def complete(outcomes: list[Outcome]) -> bool:
    """Whether nothing of a part is left to do."""
    return all(outcome.state in (DONE, LEFT_OUT) for outcome in outcomes)


def write(output: Path, settings: Settings, parts: list[Part], outcomes: dict[str, list[Outcome]]) -> dict[str, Any]:
    """Write the page and the JSON file; returns what is in them."""
    found = record(settings, parts, outcomes)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    output.with_suffix(".md").write_text(page(found), encoding="utf-8")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", help="names with commas between them (all)")
    parser.add_argument("--size", choices=SIZES, default="full", help="full, or smoke: tiny, also on CPUs (full)")
    parser.add_argument("--sequence", type=int, help="tokens of a row in training (by the model)")
    parser.add_argument("--folder", type=Path, default=Path("runs/gpu"), help="of results so far (runs/gpu)")
    parser.add_argument(
        "--output", type=Path, help="page and JSON, without ending (docs/results/gpu; of smoke in its folder)"
    )
    options = parser.parse_args(arguments)
    # Jobs run in folders of their own.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    machine = find_machine()
    if options.size == "full" and not machine.count:
        print(NO_GPU, file=sys.stderr)
        return 2
    try:
        settings = choose(options.size, machine, options.sequence)
    except ValueError as error:
        parser.error(str(error))
    os.environ[devices.CHOICE] = machine.kind
    results = Results(options.folder.resolve() / options.size, settings)
    output = options.output or (results.folder / "page" if settings.smoke else ROOT / "docs" / "results" / "gpu")
    parts = make_parts(settings, results)
    names = [part.name for part in parts]
    wanted = options.parts.split(",") if options.parts else names
    if unknown := set(wanted) - set(names):
        parser.error(f"--parts: {', '.join(sorted(unknown))}: there are {', '.join(names)}.")

    outcomes = {part.name: results.look_at(part) for part in parts}
    found = write(output, settings, parts, outcomes)
    for part in parts:
        if part.name not in wanted:
            continue
        ended: dict[str, Outcome] = {}
        for outcome in results.run(part):
            ended[outcome.name] = outcome
            outcomes[part.name] = [ended.get(other.name, other) for other in results.look_at(part)]
            took = f", {outcome.seconds:.0f} s" if outcome.seconds else ""
            print(f"{part.name}, {outcome.name}: {outcome.state}{took}", file=sys.stderr, flush=True)
            found = write(output, settings, parts, outcomes)  # what follows may be killed with the machine
    print(output.with_suffix(".md"))
    return 0 if found["losses_agree"] and all(complete(outcomes[name]) for name in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
