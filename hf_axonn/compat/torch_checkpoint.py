"""Refuses calls of torch.distributed.checkpoint that go wrong on a grid. Private names of torch, checked with 2.13."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch import nn


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


def refuse_whole_states(has_stages: Callable[[nn.Module], bool]) -> None:
    """Let `full_state_dict` of this process raise ValueError for a model of which a rank has some stages. Once.

    torch would return those of rank 0 as if they were all, and wait for ever where rank 0 gives a state to others.
    """
    from torch.distributed.checkpoint import state_dict

    stock = state_dict._verify_options
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def _verify_options(model: nn.Module, *args: Any, options: Any = None, **others: Any) -> Any:
        if options is not None and options.full_state_dict and has_stages(model):
            raise ValueError(
                "full_state_dict is not possible over pipe, where a rank has the parameters of its own stages: omit "
                "it and save by torch.distributed.checkpoint.save, or call model.save_pretrained on every rank."
            )
        return stock(model, *args, options=options, **others)

    setattr(state_dict, "_verify_options", _verify_options)  # noqa: B010
