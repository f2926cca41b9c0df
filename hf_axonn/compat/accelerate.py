"""Private names of accelerate, and of torch's schedulers, that its wrappers of ours need.

Checked with accelerate 1.12 to 1.15, torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch


if TYPE_CHECKING:
    from accelerate.optimizer import AcceleratedOptimizer


def is_over(scheduler: torch.optim.lr_scheduler.LRScheduler) -> bool:
    """Return whether a schedule of a given length, such as OneCycleLR, has no step left."""
    total = getattr(scheduler, "total_steps", None)
    return total is not None and scheduler._step_count > total


def prepared_models(accelerator) -> list[torch.nn.Module]:
    """The models that `prepare` was given, in its order."""
    return accelerator._models


def prepared_optimizers(accelerator) -> list[AcceleratedOptimizer]:
    """The optimizers that `prepare` was given, in accelerate's wrappers."""
    return accelerator._optimizers


def prepared_schedulers(accelerator) -> list:
    """The schedulers that `prepare` was given, in accelerate's wrappers."""
    return accelerator._schedulers


def prepared_loaders(accelerator) -> list[torch.utils.data.DataLoader]:
    """The data loaders that `prepare` was given, in accelerate's wrappers."""
    return accelerator._dataloaders


def registered_objects(accelerator) -> list:
    """Return the objects that `register_for_checkpointing` was given."""
    return accelerator._custom_objects


def state_hooks(accelerator, *, saving: bool) -> list:
    """Return the hooks of `register_save_state_pre_hook`, or of `register_load_state_pre_hook`."""
    hooks = accelerator._save_model_state_pre_hook if saving else accelerator._load_model_state_pre_hook
    return list(hooks.values())


def without_autocast(model: torch.nn.Module) -> None:
    """Give a prepared model the forward back that it had before `prepare` put autocast around it."""
    original = vars(model).pop("_original_forward", None)
    if original is not None:
        model.forward = original


def is_prepared(candidate: object) -> bool:
    """Return whether `prepare` has made this object."""
    return getattr(candidate, "_is_accelerate_prepared", False)


def epoch_being_read() -> tuple[int, int] | None:
    """Return the id of the prepared data loader that is being read, and its epoch; None outside of them."""
    state = sys.modules.get("accelerate.state")
    if state is None or not state.GradientState._shared_state:
        return None
    loader = state.GradientState().active_dataloader
    return None if loader is None else (id(loader), getattr(loader, "iteration", 0))


def parallelism_in_use() -> tuple[Any, Any]:
    """The ParallelismConfig of this process and its device; None before an Accelerator was made."""
    state = sys.modules.get("accelerate.state")
    shared = state.AcceleratorState._shared_state if state is not None else {}
    return shared.get("parallelism_config"), shared.get("device")


def check_arguments(check: Callable[[Any, dict[str, Any]], None]) -> None:
    """Have `check(accelerator, arguments)` look at each Accelerator of this process that is made from now on, once it
    is made: what it does not use of its arguments is gone then.

    One that names no parallelism is given that of the first: accelerate 1.12 fails without.
    """
    from accelerate import Accelerator

    original = Accelerator.__init__
    if hasattr(original, "checks_arguments"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        config, _ = parallelism_in_use()
        if config is not None and "parallelism_config" not in given:
            kwargs["parallelism_config"] = config
        original(self, *args, **kwargs)
        check(self, given)

    __init__.checks_arguments = True  # type: ignore[attr-defined]
    Accelerator.__init__ = __init__


def keep_place(loader: Any) -> None:
    """Let a stateful loader of this rank's own batches say how many were read: accelerate 1.12 takes off one for each
    other process, which is right of its dispatcher alone."""
    from accelerate.data_loader import DataLoaderShard

    if isinstance(loader, DataLoaderShard):
        vars(loader)["adjust_state_dict_for_prefetch"] = lambda: None


def ranks_sharing_samples() -> int:
    """Return how many ranks have the same samples, by Accelerate's parallelism_config: its own tensor, context and
    sequence parallelism, or a grid's pipe, x and y."""
    config = parallelism_in_use()[0]
    return 1 if config is None else int(config.non_data_parallel_size)


def forget_state() -> None:
    """Forget what accelerate knew of the process that this one was forked from: that it was alone."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def allow_sharding_on_cpus() -> None:
    """Let the next `Accelerator` of this process shard and divide models on CPUs, where it knows only
    DistributedDataParallel. Its state says then that the processes are those of GPUs, while devices and process group
    stay as they are."""
    from accelerate import DistributedType, PartialState

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


@contextlib.contextmanager
def count_as(processes: int) -> Iterator[None]:
    """Let this process count as several for wrappers of accelerate inside: a scheduler moves as often on."""
    from accelerate.state import AcceleratorState, PartialState

    states = [PartialState._shared_state, AcceleratorState._shared_state]
    before = [state["num_processes"] for state in states]
    for state in states:
        state["num_processes"] = processes
    try:
        yield
    finally:
        for state, number in zip(states, before, strict=True):
            state["num_processes"] = number
