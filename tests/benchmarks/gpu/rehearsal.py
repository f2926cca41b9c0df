"""Rehearses the first hour on a machine with GPUs: the machine is made here, and gets the kit and the first commands.

    python -m tests.benchmarks.gpu.rehearsal            `make rehearsal` is the same

The machine is a virtual environment with the releases of machine.txt that nobody can write to, in namespaces without a
network, git and make, and with HOME, every cache and every temporary file in an empty folder. There the kit is
installed, `python -m tests.benchmarks.gpu --size smoke` runs, and the tests that `make test-gpu` selects, on CPUs.

Exit code 0: all of it ran and nothing failed; 1: something failed, and the last lines say what; 2: wrong arguments, or
the machine cannot be made here.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hf_axonn.kit.make import find_interpreter, read_python_version
from tests.helpers import ROOT


HERE = Path(__file__).parent
MIB = 2**20
LIMIT_MIB = 64  # of the files that are brought: kit and clone
OUT_FILES, OUT_MIB, OUT_DEPTH = 8, 16, 2  # that the smoke run may leave in $OUT
CACHES = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME", "MPLCONFIGDIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
TOOLS, LACKING = ("/usr/bin", "/bin", "/usr/sbin", "/sbin"), ("git", "make")
# In namespaces of its own: no network but loopback, and the machine read-only.
ENTER = """set -e
ip link set lo up
mount --bind "$MACHINE" "$MACHINE"
mount -o remount,bind,ro "$MACHINE"
exec "$@"
"""
STEPS = {
    "smoke": ("-m", "tests.benchmarks.gpu", "--size", "smoke"),
    "tests": ("-m", "pytest", "-q", "-m", "on_device and not slow and not gpu", "-n", "2", "--dist", "loadfile"),
}
JOB = re.compile(r"^([\w-]+), .+: ")  # a line of tests.benchmarks.gpu when a job has ended


@dataclass
class Step:
    """A command that ran on the machine: its exit code, seconds, those of its parts, and its last lines."""

    name: str
    code: int
    seconds: float
    parts: dict[str, float] = field(default_factory=dict)
    last: list[str] = field(default_factory=list)


def make_machine(folder: Path, have: Path, interpreter: str, arguments: Sequence[str]) -> Path:
    """Make the virtual environment of a machine, unless it is there. Returns its interpreter.

    Raises:
        subprocess.CalledProcessError: a release cannot be installed.
    """
    python, stamp = folder / "bin" / "python3", folder / "made"
    content = f"{interpreter}\n{have.read_text()}"
    if not (stamp.is_file() and stamp.read_text() == content):
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([interpreter, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", *arguments]
        subprocess.run([*pip, "--requirement", have], check=True)
        stamp.write_text(content)
    return python


def copy_clone(folder: Path) -> None:
    """Copy the files that git tracks, as they are in the working tree, without git's own."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def measure(folder: Path) -> float:
    """Return the MiB of all files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / MIB


class Machine:
    """The machine: runs commands in namespaces of their own, in the folder of the clone.

    Args:
        environment: the folder of its virtual environment.
        place: an empty folder for the clone, HOME, the caches and $OUT.
    """

    def __init__(self, environment: Path, place: Path) -> None:
        self.clone, self.out, self.logs = place / "clone", place / "out", place / "logs"
        self.variables = {name: str(place / name.lower()) for name in CACHES}
        tools = place / "bin"
        for folder in (self.clone, self.out, self.logs, tools, *map(Path, self.variables.values())):
            folder.mkdir()
        for tool in (path for folder in TOOLS for path in Path(folder).glob("*")):
            if tool.name not in LACKING and not (tools / tool.name).is_symlink():
                (tools / tool.name).symlink_to(tool)
        self.variables |= {
            "PATH": f"{environment / 'bin'}:{tools}",
            "MACHINE": str(environment),
            "OUT": str(self.out),
            "PYTHONUNBUFFERED": "1",
        }
        if "OMP_NUM_THREADS" in os.environ:  # where others use the processor as well
            self.variables["OMP_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"]

    def run(self, name: str, *command: str) -> Step:
        """Run a command, print what it prints and keep its log."""
        print(f"== {name}", flush=True)
        enter = ["unshare", "--map-root-user", "--net", "--mount", "bash", "-c", ENTER, "bash", *command]
        begin = before = time.monotonic()
        step, lines = Step(name, 0, 0.0), []
        with subprocess.Popen(
            enter, cwd=self.clone, env=self.variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line.rstrip())
                if ended := JOB.match(line):
                    now = time.monotonic()
                    step.parts[ended[1]] = step.parts.get(ended[1], 0.0) + now - before
                    before = now
        step.code, step.seconds, step.last = process.returncode, time.monotonic() - begin, lines[-5:]
        (self.logs / f"{name}.log").write_text("\n".join(lines) + "\n")
        return step


def check_out(out: Path) -> list[str]:
    """Return what is wrong with the files that a run left in $OUT."""
    files = [path for path in out.rglob("*") if path.is_file()]
    wrong = [f"$OUT has {len(files)} files, at most {OUT_FILES} come back"] if len(files) > OUT_FILES else []
    for path in files:
        name, mib = path.relative_to(out), path.stat().st_size / MIB
        if mib > OUT_MIB or len(name.parts) > OUT_DEPTH + 1:
            wrong.append(f"$OUT/{name} does not come back: {mib:.1f} MiB, {len(name.parts) - 1} folders deep")
    return wrong


def make_table(steps: Sequence[Step]) -> str:
    """Return the time of every step and of its parts."""
    lines = ["| step | s | |", "| --- | --: | --- |"]
    for step in steps:
        lines.append(f"| {step.name} | {step.seconds:.0f} | {'failed' if step.code else 'done'} |")
        lines += [f"| {step.name}, {part} | {seconds:.0f} | |" for part, seconds in step.parts.items()]
    return "\n".join(lines)


def run_there(folder: Path, names: Sequence[str], steps: list[Step]) -> list[str]:
    """Bring clone and kit to the machine and run the steps of these names there, which are added to `steps`.

    Returns:
        What is wrong with the files that were brought or that come back.
    """
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as scratch:
        machine, site = Machine(folder / "machine", Path(scratch)), str(Path(scratch, "site"))
        copy_clone(machine.clone)
        clone, kit = measure(machine.clone), measure(folder / "kit")
        print(f"kit {kit:.1f} MiB, clone {clone:.1f} MiB")
        shutil.copytree(folder / "kit", machine.clone / "build" / "kit")
        steps.append(machine.run("install", "bash", "build/kit/install.sh", site))
        machine.variables["PYTHONPATH"] = site
        if not steps[-1].code:
            steps += [machine.run(name, "python3", *STEPS[name]) for name in names]
        shutil.rmtree(folder / "logs", ignore_errors=True)
        shutil.copytree(machine.logs, folder / "logs")
        wrong = [] if kit + clone <= LIMIT_MIB else [f"kit and clone are {kit + clone:.1f} MiB, above {LIMIT_MIB}"]
        return [*wrong, *check_out(machine.out)]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.gpu.rehearsal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--have", type=Path, default=HERE / "machine.txt", help="`pip list --format=freeze` of it")
    parser.add_argument("--python", default="3.12", help="its version of Python (3.12)")
    parser.add_argument("--interpreter", metavar="PYTHON", help="of that version, on this machine; makes it")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "rehearsal", help="of machine, kit and logs")
    parser.add_argument("--steps", default=",".join(STEPS), help=f"to run, after the installation ({','.join(STEPS)})")
    parser.add_argument(
        "--pip", action="append", default=[], metavar="ARGUMENT", help="for pip, as --pip=--index-url=URL; repeatable"
    )
    options = parser.parse_args(arguments)
    names = options.steps.split(",")
    if unknown := set(names) - set(STEPS):
        parser.error(f"--steps: {', '.join(sorted(unknown))}: there are {', '.join(STEPS)}.")
    interpreter = options.interpreter or find_interpreter(options.python)
    if interpreter is None or read_python_version(interpreter) != options.python:
        parser.error(f"there is no Python {options.python} here: give --interpreter")
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    try:
        python = make_machine(folder / "machine", options.have.resolve(), interpreter, options.pip)
    except subprocess.CalledProcessError as problem:
        parser.error(f"the machine cannot be made: {problem}")
    steps = [Step("the machine", 0, time.monotonic() - begin)]
    kit, begin = folder / "kit", time.monotonic()
    words = ["--have", options.have, "--python", options.python, "--extras", "test-gpu", "--output", kit]
    words += ["--interpreter", python, *(f"--pip={argument}" for argument in options.pip)]
    made = subprocess.run([sys.executable, "-m", "hf_axonn", "kit", *words], cwd=ROOT)
    steps.append(Step("the kit", made.returncode, time.monotonic() - begin))
    wrong: list[str] = []
    if not made.returncode:
        wrong = run_there(folder, names, steps)
    print("\n" + make_table(steps))
    for step in steps:
        if step.code:
            wrong += [f"{step.name} ended with code {step.code}", *(f"  {line}" for line in step.last)]
    print("\n".join(wrong) or "nothing failed")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
