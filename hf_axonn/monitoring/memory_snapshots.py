"""Snapshots of CUDA's allocator, its memory and its history, written on demand or when memory runs out."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType

import torch

from hf_axonn.compat.messages import get_logger
from hf_axonn.compat.torch import record_allocations, when_out_of_memory, write_allocations
from hf_axonn.distributed.collectives import world_rank


logger = get_logger(__name__)


def memory_snapshots(folder: str | Path) -> Callable[[], Path]:
    """Record the last 100,000 allocations on CUDA, each with its stack, and write them on demand.

        hf_axonn.memory_snapshots("snapshots")

    This process, one rank, writes `rank-R-pid-P-N.pickle` for https://pytorch.org/memory_viz when it gets SIGUSR2
    (`kill -USR2 P`; its launcher, which such a signal ends, must not get it), when memory runs out, and when the
    returned function is called. Call it in the main thread, and once.

    Args:
        folder: of the files; on all ranks the same, or not.

    Returns:
        A function that writes a snapshot and returns its path.

    Raises:
        ValueError: there is no CUDA device, or another handler of SIGUSR2.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "memory snapshots are of CUDA's allocator, and this process has no CUDA device: "
            "ProfilerCallback(profile_memory=True) records allocations on CPUs."
        )
    if signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL:
        raise ValueError("SIGUSR2 has a handler already: call memory_snapshots once, before others take the signal.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = count()

    def write(why: str = "asked for") -> Path:
        path = folder / f"rank-{world_rank()}-pid-{os.getpid()}-{next(numbers)}.pickle"
        write_allocations(str(path))
        logger.warning(f"a snapshot of CUDA's memory, {why}: {path}")
        return path

    def write_on_signal(_: int, __: FrameType | None) -> None:
        write()

    record_allocations()
    signal.signal(signal.SIGUSR2, write_on_signal)
    when_out_of_memory(partial(write, "which has run out"))
    return write
