"""Ranks that are killed in the middle of a save, at a chosen file operation or after a chosen time."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from hf_axonn.checkpoint import shard_files


# What changes a disk, as the code under test calls it.
OPERATIONS = [(os, name) for name in ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir")]
OPERATIONS += [(shutil, "rmtree"), (shard_files, "_put")]


def die_at(point: int) -> list[int]:
    """Let this process kill itself before its `point`-th file operation from now on; returns a list with the count."""
    count = [0]

    def counted(original: Callable) -> Callable:
        def operation(*args, **kwargs):
            if count[0] == point:
                os.kill(os.getpid(), signal.SIGKILL)
            count[0] += 1
            return original(*args, **kwargs)

        return operation

    for owner, name in OPERATIONS:
        setattr(owner, name, counted(getattr(owner, name)))
    return count


def _rank(rank: int, world: int, folder: str, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    function(*args)
    os._exit(0)


def run_to_the_end(function: Callable, world: int, *args, timeout: float = 60) -> list[int]:
    """Run ranks until all have ended, or one has been killed: then the others are, as a launcher would do it.

    Returns the exit codes as they were when the first rank was killed; that of a rank still at work is 0.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, world, folder, function, args)) for rank in range(world)]
        for process in ranks:
            process.start()
        end = time.monotonic() + timeout
        try:
            while any(process.is_alive() for process in ranks) and time.monotonic() < end:
                if any(process.exitcode not in (None, 0) for process in ranks):
                    break
                time.sleep(0.005)
            assert time.monotonic() < end, "the ranks hang"
            return [process.exitcode or 0 for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.join()


def values_of(directory: Path) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint, whole, after a check of every byte."""
    from hf_axonn.checkpoint.manifest import check_complete
    from hf_axonn.checkpoint.shard_files import ShardReader

    manifest = check_complete(directory)
    reader = ShardReader(directory, manifest.model, manifest.grid)
    return {name: reader.read(name) for name in manifest.model}
