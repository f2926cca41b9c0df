"""Do one step of a study: here, or as one task of many on a cluster.

`do_step` looks whether the step is done and whether those before it are, holds the step's lock, starts its program
(program.py) and writes its stamp. A batch script starts the program itself, between `begin` and `end`.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import yaml
from filelock import SoftFileLock, Timeout

from hf_axonn_scripts.demo.pipeline import Stamps, call, launch
from hf_axonn_scripts.study.recipe.definition import MACHINE, Recipe
from hf_axonn_scripts.study.recipe.planning import ORDER, grid_of, predict_step
from hf_axonn_scripts.study.recipe.steps import Step, base_of, steps_of


PROGRAM = ("-m", "hf_axonn_scripts.study.running.program")


class NotReady(ValueError):
    """A step cannot be done yet: steps before it are not, or someone else does it."""


@contextlib.contextmanager
def hold_lock(file: Path, what: str) -> Iterator[None]:
    """Hold a lock for as long as the block lasts; take it over from a holder on this machine that is gone.

    Raises:
        NotReady: another process holds it; the message names it.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = SoftFileLock(file, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        content = file.read_text(encoding="utf-8").split() if file.exists() else []
        if len(content) < 2:
            raise NotReady(f"{what} is at work already: if nobody is, remove {file}") from None
        message = f"{what} is at work already, process {content[0]} on {content[1]}"
        # On this machine the lock of a process that is gone has been taken over.
        there = "" if content[1] == socket.gethostname() else f": if it is gone, remove {file}"
        raise NotReady(message + there) from None
    try:
        yield
    finally:
        lock.release()


def hold_step(stamps: Stamps, name: str) -> contextlib.AbstractContextManager[None]:
    """Hold the lock of a step, as `hold_lock`."""
    return hold_lock(stamps.folder / f"{name}.lock", f"the step {name}")


def find_unfinished(step: Step, steps: Mapping[str, Step], stamps: Stamps) -> list[str]:
    """Return the names of the steps before one that are not done."""
    return [name for name in step.after if not is_done(steps[name], stamps)]


def find_lacking(step: Step, steps: Mapping[str, Step], stamps: Stamps) -> list[str]:
    """Return the names of the steps that keep one from being done: those before it, unless it can do without them."""
    missing = find_unfinished(step, steps, stamps)
    found = [steps[name].kind for name in step.after if name not in missing]
    return [] if step.partial and "train" in found else missing


def is_done(step: Step, stamps: Stamps) -> bool:
    """Return whether a step has been done with its present settings, and its files are there."""
    return stamps.stamp_of(step.name, step.key, step.outputs) is not None


def do_step(recipe: Recipe, output: Path, name: str) -> bool:
    """Do a step unless it is done.

    Returns:
        Whether there was anything to do.
    Raises:
        NotReady: steps before it are not done, or another process does it.
        SystemExit: its program failed.
        ValueError: it ended without one of its outputs.
    """
    steps = {step.name: step for step in steps_of(recipe, output)}
    step, stamps = steps[name], Stamps(output.resolve())
    with hold_step(stamps, name):
        if not begin(step, steps, stamps):
            return False
        start = time.perf_counter()
        try:
            act(recipe, output.resolve(), step)
            end(step, steps, stamps, seconds=time.perf_counter() - start)
        except (SystemExit, ValueError) as error:
            fail(step, stamps, str(error))
            raise
    return True


def begin(step: Step, steps: Mapping[str, Step], stamps: Stamps) -> bool:
    """Mark a step as begun; what an interrupted attempt left stays if its settings are the same.

    Returns:
        False if the step is done.
    Raises:
        NotReady: steps before it are not done.
    """
    if is_done(step, stamps):
        return False
    if missing := find_lacking(step, steps, stamps):
        are = "is" if len(missing) == 1 else "are"
        raise NotReady(f"the step {step.name} needs {', '.join(missing)}, which {are} not done")
    failure_of(step, stamps).unlink(missing_ok=True)
    stamps.begin(step.name, step.outputs, keep=True, began=_now())
    return True


def end(step: Step, steps: Mapping[str, Step], stamps: Stamps, *, seconds: float | None = None) -> None:
    """Write the stamp of a step that has come to its end.

    Args:
        step, steps: the step, and all of the study by name.
        stamps: of the study.
        seconds: that it took; None: the time since `begin`.
    Raises:
        ValueError: one of its outputs is not there.
    """
    if seconds is None:
        mark = stamps.begun(step.name)
        if mark is None:
            raise ValueError(f"the step {step.name} has not begun")
        seconds = (datetime.now(UTC) - datetime.fromisoformat(mark["began"])).total_seconds()
    missing = find_unfinished(step, steps, stamps)
    # A step that left something out has another key than the whole one, so that it is done again.
    key = f"without {', '.join(missing)}" if missing else step.key
    stamps.end(
        step.name,
        key,
        step.outputs,
        seconds=round(seconds, 1),
        settings=step.settings,
        processes=step.processes,
        grid=None if step.grid is None else dict(step.grid),
        ended=_now(),
        **made_with(),
    )


def fail(step: Step, stamps: Stamps, why: str) -> None:
    """Leave a note that a step failed, for `--status`; the next attempt removes it."""
    failure_of(step, stamps).write_text(f"{_now()} {why}\n", encoding="utf-8")


def failure_of(step: Step, stamps: Stamps) -> Path:
    """Return the place of the note about a failed step."""
    return stamps.folder / f"{step.name}.failed"


def made_with() -> dict[str, str | None]:
    """Return version and commit of hf_axonn, for stamps; results do not depend on them.

    An installed copy has no commit, even if it lies inside of another repository.
    """
    from importlib.metadata import version

    here, commit = Path(__file__).resolve(), None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        for words in (["ls-files", "--error-unmatch", here.name], ["describe", "--always", "--dirty", "--exclude=*"]):
            git = ["git", "-C", str(here.parent), *words]
            done = subprocess.run(git, capture_output=True, text=True, timeout=30, check=True)
        commit = done.stdout.strip()
    return {"hf_axonn": version("hf_axonn"), "commit": commit}


def program_of(recipe: Recipe, output: Path, step: Step) -> list[str]:
    """Return the words after `python` or `accelerate launch` that do the work of a step."""
    return [*PROGRAM, str(recipe.path.resolve()), str(output.resolve()), step.name]


def act(recipe: Recipe, output: Path, step: Step) -> None:
    """Do the work of a step: a launch, or a process of its own, whose output also goes to its log.

    Raises:
        SystemExit: the program failed.
    """
    words, log = program_of(recipe, output, step), output / "logs" / f"{step.name}.log"
    variables = environment(recipe, processes=step.processes)
    if not step.launched:
        call([sys.executable, *words], log=log, append=True, environment=variables)
        return
    end_left_over(step.name, words)
    launch(write_launch_file(recipe, output, step), words, log=log, append=True, environment=variables)


def end_left_over(name: str, words: list[str]) -> None:
    """End ranks of a step that an earlier launch left when it was killed: they have a session of their own.

    The caller holds the step's lock, so that nobody else has started them.
    """
    found = [process for process in psutil.process_iter(["cmdline"]) if _has(process.info["cmdline"] or [], words)]
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    if found:
        psutil.wait_procs(found, timeout=30)
        print(f"ended {len(found)} processes that an earlier launch of {name} had left", flush=True)


def environment(recipe: Recipe, *, processes: int) -> dict[str, str]:
    """Return variables for the programs of steps, without those that the user has set."""
    variables = {"TOKENIZERS_PARALLELISM": "false"}
    if recipe.machine == MACHINE:
        variables["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // processes))
    if all(base_of(model, Path("there")).startswith("there") for model in recipe.models):
        variables["HF_HUB_OFFLINE"] = "1"  # nothing comes from the hub, so that nobody waits for it
    return {name: value for name, value in variables.items() if name not in os.environ}


def write_launch_file(recipe: Recipe, output: Path, step: Step) -> Path:
    """Write the file that `accelerate launch` reads for a step, and return its path."""
    grid, section = step.grid, {}
    if grid is None:
        model = recipe.model(step.model)
        grid = grid_of(recipe, model).as_dict()
        if recipe.machine != MACHINE and (order := predict_step(recipe, model).order) != ORDER:
            section["order"] = list(order)
    training = recipe.base_training if step.kind == "base" else recipe.training
    # The planner's machines are planned with products in bf16.
    usual = "no" if recipe.machine == MACHINE else "bf16"
    precision = next((name for name in ("bf16", "fp16") if training.get(name)), usual)
    parts = [str(step.processes), *(f"{axis}{size}" for axis, size in grid.items() if size > 1)]
    parts += ["".join(section.get("order", "")), precision if precision != "no" else ""]
    content: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU"}
    content |= {"num_machines": 1, "use_cpu": recipe.machine == MACHINE, "num_processes": step.processes}
    content |= {"mixed_precision": precision, "axonn_config": {"grid": dict(grid), **section}}
    file = output / "grids" / f"{'_'.join(part for part in parts if part)}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(content, sort_keys=False)
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        part = file.with_name(f"{file.name}.{os.getpid()}")
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    return file


def _has(command: list[str], words: list[str]) -> bool:
    """Return whether words follow each other in a command line."""
    return any(command[at : at + len(words)] == words for at in range(len(command) - len(words) + 1))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
