"""Start scripts as a user does, by `accelerate launch --config`, and see what they leave behind.

`forked` is for those of which the start is not what is tested: each fresh process imports libraries for seconds.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from hf_axonn import Grid, notebook_launcher
from hf_axonn.compat.accelerate import forget_state


TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]


@dataclass(frozen=True)
class Ended:
    """A launch that is over: its exit code, what all processes printed, and processes that were still there."""

    code: int
    output: str
    left: list[int]


def launch_file(folder: Path, grid: Grid) -> Path:
    """What `accelerate config` and the key axonn_config make of a grid, on CPUs."""
    path = folder / f"{grid}.yaml"
    settings = dict(compute_environment="LOCAL_MACHINE", distributed_type="MULTI_GPU", num_machines=1, use_cpu=True)
    settings.update(num_processes=grid.size, mixed_precision="no", axonn_config={"grid": grid.as_dict()})
    path.write_text(yaml.safe_dump(settings))
    return path


def launch(folder: Path, grid: Grid, *command: object, timeout: float = 240) -> Ended:
    """A script with its arguments, in `folder`, by `accelerate launch`."""
    stock = ["-m", "accelerate.commands.launch", "--config", launch_file(folder, grid)]
    return run(folder, *stock, *command, timeout=timeout)


def run(folder: Path, *command: object, timeout: float = 240, linger: float = 0) -> Ended:
    """Python with these arguments, in `folder`. What is left of its processes, also after `timeout`, is killed.

    `linger`: seconds that they may take to end after it.
    """
    log = folder / "log"
    with open(log, "w") as file:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            env={**os.environ, **_environment(folder)},
            cwd=folder,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,  # not a session of its own: who kills this process's session ends it too
        )

    def wait(seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)

    try:
        left = _left(process.pid, process.poll, wait, timeout, linger)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Ended(process.returncode, log.read_text(errors="replace"), left)


def forked(folder: Path, grid: Grid | None, *command: object, timeout: float = 240, linger: float = 0) -> Ended:
    """A script or `-m` a module with its arguments, in `folder`, where what these tests import is imported already.

    In a fork of this process; with a grid in one for each of its ranks, by our `notebook_launcher`.
    """
    log = folder / "log"
    process = multiprocessing.get_context("fork").Process(
        target=_fork, args=(folder, log, grid, [str(word) for word in command])
    )
    process.start()
    try:
        left = _left(process.pid, lambda: process.exitcode, process.join, timeout, linger)
    finally:
        process.kill()
        process.join()
    return Ended(process.exitcode, log.read_text(), left)


def _fork(folder: Path, log: Path, grid: Grid | None, command: list[str]) -> None:
    gc.freeze()  # what the tests before have made is not collected again by every Trainer of every rank
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.chdir(folder)
    os.environ.update(_environment(folder))
    module = command[0] == "-m"
    sys.argv = command[module:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    forget_state()  # a test may have used accelerate in the process that this one is forked from
    begin = runpy.run_module if module else runpy.run_path
    if grid is None:
        begin(sys.argv[0], run_name="__main__")
    else:
        notebook_launcher(_begin, (begin, sys.argv[0]), grid=grid, use_cpu=True)


def _begin(begin: Callable, what: str) -> None:
    try:
        begin(what, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


def forget(*packages: str) -> None:
    """In a fork: these will be imported anew, and nothing of ours waits for an import yet."""
    for name in [*sys.modules]:
        if any(f"{name}.".startswith(f"{package}.") for package in packages):
            del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("hf_axonn")]
    importlib.invalidate_caches()


def _environment(folder: Path) -> dict[str, str]:
    return {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}


def _left(
    launcher: int, poll: Callable[[], int | None], wait: Callable[[float], object], timeout: float, linger: float
) -> list[int]:
    """Wait for the end of a launcher, and say which processes it has left, which are killed."""
    # torchrun starts each rank in a session of its own, so the family is looked at while it is there.
    family: dict[int, psutil.Process] = {}
    end = time.monotonic() + timeout
    try:
        while poll() is None and time.monotonic() < end:
            family.update((its.pid, its) for its in psutil.Process(launcher).children(recursive=True))
            wait(0.5)  # every look reads all of /proc
        psutil.wait_procs(family.values(), timeout=linger)
        return [its.pid for its in family.values() if its.is_running() and its.status() != psutil.STATUS_ZOMBIE]
    finally:
        for its in family.values():
            if its.is_running():
                its.kill()


def assert_quiet(ended: Ended) -> None:
    """It did what it should, and nothing complained at its end."""
    assert ended.code == 0 and not ended.left, ended.output[-6000:]
    complaint = re.search("hf_axonn: the run ends|Traceback|Fatal Python error|terminate called|Aborted", ended.output)
    assert not complaint, ended.output[-6000:]
