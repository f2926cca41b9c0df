"""Run a function on several gloo ranks: started by fork (importing transformers again would cost seconds a rank),
meeting through a file (no port to race for), with a time limit, the first failure of any rank raised here."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _run(rank: int, world: int, folder: str, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
        function(*args)
        dist.barrier()
    except BaseException:
        with open(f"{folder}/failed-{rank}", "w") as file:
            file.write(traceback.format_exc())
        os._exit(1)  # not through clean-up: the other ranks may be waiting in a collective
    os._exit(0)


def run_ranks(function: Callable, world: int, *args, timeout: float = 240) -> None:
    """Call `function(*args)` on each of `world` ranks.

    Raises:
        AssertionError: a rank failed (with its traceback) or the time was up; all ranks are ended then.
    """
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_run, args=(rank, world, folder, function, args)) for rank in range(world)]
        for process in ranks:
            process.start()
        end = time.monotonic() + timeout
        try:
            while any(process.is_alive() for process in ranks):
                failed = [rank for rank, process in enumerate(ranks) if process.exitcode not in (None, 0)]
                if failed or time.monotonic() > end:
                    break
                time.sleep(0.02)
        finally:
            late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
            if late:
                time.sleep(0.5)  # another rank may be writing the real cause
            for process in ranks:
                process.kill()
                process.join()
        messages = []
        for rank, process in enumerate(ranks):
            path = f"{folder}/failed-{rank}"
            if os.path.exists(path):
                with open(path) as file:
                    messages.append(f"rank {rank}:\n{file.read()}")
            elif process.exitcode != 0:
                messages.append(f"rank {rank} ended with {process.exitcode}" + (" (stopped)" if rank in late else ""))
        assert not messages, "\n".join(sorted(messages, key=lambda text: "stopped" in text))
