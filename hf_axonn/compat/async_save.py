"""torch.distributed.checkpoint's `async_save` beside training. A private name of torch, checked with torch 2.13."""

from __future__ import annotations

import functools
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist


def refuse_saves_by_threads_on_default_group() -> None:
    """Let `async_save` of this process raise ValueError where its thread would use the default process group. Once.

    A process that saves (`AsyncCheckpointerType.PROCESS`) makes a group of its own.
    """
    from torch.distributed.checkpoint._async_thread_executor import _ThreadBasedAsyncCheckpointExecutor as Executor

    stock = Executor.execute_save
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def execute_save(executor: Executor, *args: Any, **options: Any) -> Future:
        group, alone = options.get("process_group"), options.get("no_dist")
        if group in (None, dist.group.WORLD) and not alone and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                "async_save on the default process group sends messages from a second thread while training sends its "
                "own there: a rank would end or wait for ever. Make a group once on every rank, group = "
                'torch.distributed.new_group(backend="gloo"), and pass process_group=group.'
            )
        return stock(executor, *args, **options)

    setattr(Executor, "execute_save", execute_save)  # noqa: B010
