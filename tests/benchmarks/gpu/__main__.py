"""Everything that is to be tested and measured on GPUs, what tells most first, in calls that go on where they stopped.

    python -m tests.benchmarks.gpu --minutes 9              as much as nine minutes hold; the same command goes on
    python -m tests.benchmarks.gpu --parts lora,packing     some parts
    python -m tests.benchmarks.gpu --size smoke             tiny sizes, also on CPUs: does it run?

Results lie in --folder, and where the variable OUT names a folder also there: gpu.json, gpu.md and logs.tar.gz,
written after every job. What they hold for the same command and kind of machine is not done again. docs/gpu.md has the
rest.

Exit code 0: every job is done or left out with its reason, and nothing is wrong; 1: something is wrong, and the page
says what; 2: no GPU, or wrong arguments; 3: nothing is wrong so far, and jobs are open.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.gpu.jobs import FAILED, OPEN, STOPPED, Outcome, Results
from tests.benchmarks.gpu.page import overview, page, record, section
from tests.benchmarks.gpu.parts import make_parts
from tests.benchmarks.gpu.settings import SIZES, Machine, choose
from tests.helpers import ROOT, devices
from tests.helpers.launching import run


NO_GPU = 'make gpu needs a GPU, and torch sees none here: make gpu ARGS="--size smoke" runs everything, tiny, on CPUs.'
MARGIN = 10  # seconds of --minutes that are kept for ending a job and writing


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


def exit_code(outcomes: list[Outcome], *, losses_agree: bool) -> int:
    """Return the exit code of a call, by the outcomes of its parts."""
    states = {outcome.state for outcome in outcomes}
    if states & {FAILED, STOPPED} or not losses_agree:
        return 1
    return 3 if OPEN in states else 0


def main(arguments: list[str] | None = None, began: float | None = None) -> int:
    """Run the command line; returns the exit code. `began`: by the monotonic clock, now if None."""
    began = time.monotonic() if began is None else began
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", help="names with commas between them (all)")
    parser.add_argument("--size", choices=SIZES, default="full", help="full, or smoke: tiny, also on CPUs (full)")
    parser.add_argument("--minutes", type=float, help="that this call may take (only the limits of the parts)")
    parser.add_argument("--sequence", type=int, help="tokens of a row in training (by the model)")
    parser.add_argument("--folder", type=Path, default=Path("runs/gpu"), help="of results so far (runs/gpu)")
    arguments = sys.argv[1:] if arguments is None else arguments
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
    folder = f"{options.size}-{re.sub(r'[^A-Za-z0-9]+', '-', machine.title)}"
    results = Results(options.folder.resolve() / folder, settings)
    parts = make_parts(settings)
    names = [part.name for part in parts]
    wanted = options.parts.split(",") if options.parts else names
    if unknown := set(wanted) - set(names):
        parser.error(f"--parts: {', '.join(sorted(unknown))}: there are {', '.join(names)}.")

    end = began + 60 * options.minutes - MARGIN if options.minutes else float("inf")
    out = Path(os.environ["OUT"]) if os.environ.get("OUT") else None
    outcomes = {part.name: results.look_at(part) for part in parts}

    def save() -> dict[str, Any]:
        found = record(settings, parts, outcomes)
        results.save(found, page(found), out)
        return found

    found = save()
    # What failed in an earlier call may fail again, or hang: it comes after all that is open.
    wrong = {(name, each.name) for name in names for each in outcomes[name] if each.state in (FAILED, STOPPED)}
    for again in (False, True):
        for part in (part for part in parts if part.name in wanted):
            some = [job for job in part.jobs() if ((part.name, job.name) in wrong) == again]
            for outcome in results.run(replace(part, jobs=lambda some=some: iter(some)), end):
                old = outcomes[part.name]
                outcomes[part.name] = [outcome if other.name == outcome.name else other for other in old]
                found = save()  # what follows may be killed with the machine
                print(f"{part.name}, {outcome.name}: {outcome.state}, {outcome.seconds:.0f} s", flush=True)
            if some:
                print(f"\n{section(found, part.name)}\n", flush=True)
    code = exit_code([outcome for name in wanted for outcome in outcomes[name]], losses_agree=found["losses_agree"])
    command = shlex.join(["python", "-m", "tests.benchmarks.gpu", *arguments])
    verdict = {0: "Everything is done.", 1: f"Something is wrong. Again: {command}", 3: f"To go on: {command}"}
    print(f"{overview(found)}\n\n{results.folder / 'gpu.md'}\n{verdict[code]}")
    return code


if __name__ == "__main__":
    sys.exit(main(began=time.monotonic() - (time.time() - psutil.Process().create_time())))
