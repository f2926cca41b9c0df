"""Private names of Lightning that the strategies for it (hf_axonn/lightning) need.

Checked with lightning 2.6. Importing this file imports no Lightning.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn


def subprocess_launcher(strategy: Any, *, of_trainer: bool) -> Any:
    """Return what starts the script again for each further rank of this node, for Lightning's Trainer or Fabric."""
    package = "pytorch" if of_trainer else "fabric"
    module = import_module(f"lightning.{package}.strategies.launchers.subprocess_script")
    return module._SubprocessScriptLauncher(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)


def tell_rank(rank: int) -> None:
    """Set the rank by which Lightning decides who prints."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only  # one object for all of its packages

    vars(rank_zero_only)["rank"] = rank


def start_process_group(environment: Any, device: torch.device, backend: str | None, timeout: Any) -> None:
    """Initialize torch.distributed with the ranks of a cluster environment, if nobody has."""
    from lightning.fabric.utilities.distributed import (
        _get_default_process_group_backend_for_device,
        _init_dist_connection,
    )

    backend = backend or _get_default_process_group_backend_for_device(device)
    # Bound to its device by GridMesh, which also works where one GPU has several ranks (gloo).
    _init_dist_connection(environment, backend, timeout=timeout)


def reduce_tensor(value: Tensor, group: Any, operation: Any) -> Tensor:
    """Reduce in place, with Lightning's names of operations. A barrier and an all-reduce over the group."""
    from lightning.fabric.utilities.distributed import _sync_ddp

    return _sync_ddp(value, group=group, reduce_op=operation)


def gather_tensor(value: Tensor, group: Any, *, with_gradients: bool) -> Tensor:
    """[size of the group, *shape of value], as Lightning gathers. An all-gather over the group."""
    from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available

    return _all_gather_ddp_if_available(value, group=group, sync_grads=with_gradients)


def finish_closure(precision: Any, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Call the hooks and the clipping of a precision plugin of the Trainer between backward and step."""
    precision._after_closure(module, optimizer)


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` was called on a module, or on the whole LightningModule."""
    return getattr(module, "_compiler_ctx", None) is not None or hasattr(module, "_orig_mod")


def sync_control() -> type:
    """Return the class of a Fabric strategy's `_backward_sync_control`."""
    from lightning.fabric.strategies.strategy import _BackwardSyncControl

    return _BackwardSyncControl
