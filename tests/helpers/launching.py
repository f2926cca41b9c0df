"""Start scripts as a user does, by `accelerate launch --config`, and see what they leave behind."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from hf_axonn import Grid


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
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    with open(log, "w") as file:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)], env=environment, cwd=folder, stdout=file, stderr=subprocess.STDOUT
        )
    # torchrun starts each rank in a session of its own, so the family is looked at while it is there.
    family: dict[int, psutil.Process] = {}
    end = time.monotonic() + timeout
    try:
        while process.poll() is None and time.monotonic() < end:
            family.update((its.pid, its) for its in psutil.Process(process.pid).children(recursive=True))
            with contextlib.suppress(subprocess.TimeoutExpired):  # every look reads all of /proc
                process.wait(0.5)
        psutil.wait_procs(family.values(), timeout=linger)
        left = [its.pid for its in family.values() if its.is_running() and its.status() != psutil.STATUS_ZOMBIE]
    finally:
        for its in family.values():
            if its.is_running():
                its.kill()
        process.kill()
        process.wait()
    return Ended(process.returncode, log.read_text(), left)


def assert_quiet(ended: Ended) -> None:
    """It did what it should, and nothing complained at its end."""
    assert ended.code == 0 and not ended.left, ended.output[-6000:]
    complaint = re.search("hf_axonn: the run ends|Traceback|Fatal Python error|terminate called|Aborted", ended.output)
    assert not complaint, ended.output[-6000:]
