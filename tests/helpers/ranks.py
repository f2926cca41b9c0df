"""Run a function on several ranks, and grids to run it on.

Ranks are started by fork (importing transformers again would cost seconds a rank), meet through a file (no port to
race for), have a time limit, and the first failure of any rank is raised in the test. On GPUs a server forks them: in
a process where torch has found GPUs, the first backward pass starts threads of autograd, and forks of it cannot go
backward.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import itertools
import os
import pickle
import re
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import dill
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM

from hf_axonn.architectures.plan import plan_for
from hf_axonn.architectures.weight_kinds import weight_kinds
from hf_axonn.compat.accelerate import forget_state
from hf_axonn.compat.versions import check_versions
from hf_axonn.distributed.consistency import gather_texts, versions
from hf_axonn.distributed.mesh import GridMesh
from hf_axonn.topology.grid import Grid, GridPosition
from tests.helpers import devices
from tests.helpers.models import tiny_config


CALL = "call"  # the file of the function that a server's ranks call, and of its arguments


def all_grids(size: int) -> list[Grid]:
    """Every grid of `size` ranks."""
    sizes = itertools.product(range(1, size + 1), repeat=4)
    return [Grid(data=d, z=z, y=y, x=x) for d, z, y, x in sizes if d * z * y * x == size]


def fake_mesh(grid: Grid, rank: int) -> GridMesh:
    """What `GridMesh` knows without processes: sizes, coordinates and indices, but no groups."""
    mesh = GridMesh.__new__(GridMesh)
    GridPosition.__init__(mesh, grid, grid.coordinates(rank))
    mesh.rank, mesh.device_type = rank, "cpu"
    return mesh


@functools.cache
def _read_once() -> None:
    """Read before the first ranks are forked what each of them would for its first model: versions and sources."""
    versions()
    check_versions()
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    weight_kinds(model, plan_for(model))


def _run(rank: int, world: int, folder: str, function: Callable, args: tuple) -> None:
    crashed = open(f"{folder}/crashed-{rank}", "w")  # where a rank that a signal ends says what it was doing
    faulthandler.disable()  # pytest's, whose handlers Lightning's Trainer takes away, and which would not be set again
    faulthandler.enable(crashed)
    torch.set_num_threads(1)
    gc.freeze()  # what the test had made is not collected again by every Trainer of every rank
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    # Gloo's set-up does not wait for all ranks: one that ends its group at once would be an error in another's set-up.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    # accelerate asks for these two, though the process group is there already.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    forget_state()  # a test may have used accelerate in the process that this one is forked from
    try:
        device = devices.take_device(rank)
        dist.init_process_group(
            devices.in_use().backend(world),
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world,
            device_id=device if devices.in_use().backend(world) == "nccl" else None,
        )
        if device.type != "cpu":
            function, args = devices.moved((function, args), device)
        result = function(*args)
        dist.barrier()
        with open(f"{folder}/result-{rank}", "wb") as file:
            pickle.dump(devices.moved(result, torch.device("cpu")), file)
    except BaseException:
        with open(f"{folder}/failed-{rank}", "w") as file:
            file.write(traceback.format_exc())
        os._exit(1)  # not through clean-up: the other ranks may be waiting in a collective
    os._exit(0)


def _run_stored(rank: int, world: int, folder: str, used: devices.Devices) -> None:
    with devices.used(used), open(f"{folder}/{CALL}", "rb") as file:
        _run(rank, world, folder, *dill.load(file))


def run_ranks(function: Callable, world: int, *args, timeout: float = 240) -> list[Any]:
    """Call `function(*args)` on each of `world` ranks; returns what each of them returned.

    Ranks compute on CPUs, or in a test with the fixture `device` on what it chose; the test is skipped where there
    are too few GPUs.

    Raises:
        AssertionError: a rank failed (with its traceback) or the time was up; all ranks are ended then.
    """
    if reason := devices.in_use().skip_reason(world):
        pytest.skip(reason)
    with tempfile.TemporaryDirectory() as folder:
        if devices.in_use().kind == "cpu":
            _read_once()
            context, target, work = mp.get_context("fork"), _run, (function, args)
        else:
            context, target, work = mp.get_context("forkserver"), _run_stored, (devices.in_use(),)
            context.set_forkserver_preload(["tests.helpers.ranks"])
            with open(f"{folder}/{CALL}", "wb") as file:
                dill.dump((function, args), file)
        ranks = [context.Process(target=target, args=(rank, world, folder, *work)) for rank in range(world)]
        for process in ranks:
            process.start()
        end = time.monotonic() + timeout
        try:
            while running := [process.sentinel for process in ranks if process.is_alive()]:
                if any(process.exitcode for process in ranks) or time.monotonic() > end:
                    break
                wait(running, timeout=1)  # not for longer: a child of a rank that died may keep its sentinel open
        finally:
            late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
            if late:
                time.sleep(0.5)  # another rank may be writing the real cause
            for process in ranks:
                process.kill()
                process.join()
        messages = []
        for rank, process in enumerate(ranks):
            if failed := _read(f"{folder}/failed-{rank}"):
                messages.append(f"rank {rank}:\n{failed}")
            elif process.exitcode != 0:
                stopped = " (stopped)" if rank in late else ""
                crashed = _rank_frames(_read(f"{folder}/crashed-{rank}"))
                messages.append(f"rank {rank} ended with {process.exitcode}{stopped}\n{crashed}".rstrip())
        # A rank that a signal ended is the cause of what others say, and those that were stopped here know the least.
        assert not messages, "\n".join(sorted(messages, key=lambda text: "(stopped)" in text or -("Fatal" in text)))
        results = []
        for rank in range(world):
            with open(f"{folder}/result-{rank}", "rb") as file:
                results.append(pickle.load(file))
        return results


def _rank_frames(crashed: str) -> str:
    """What the handler of faults wrote, without the frames below the rank's own, which are pytest's."""
    stacks = crashed.partition("Extension modules")[0]
    return re.sub(r'(\n  File "[^"]*ranks\.py", line \d+ in _run)(?:\n  File .*)+', r"\1", stacks)


def _read(path: str) -> str:
    if not os.path.exists(path):
        return ""
    with open(path) as file:
        return file.read()


def refused(function, *args, **kwargs) -> str:
    """The message of a ValueError, which every rank must raise."""
    with pytest.raises(ValueError) as error:
        function(*args, **kwargs)
    messages = gather_texts(str(error.value), "cpu")
    assert len(set(messages)) == 1, messages
    return messages[0]
