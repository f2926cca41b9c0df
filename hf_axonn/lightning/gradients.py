"""Gradients over the grid: left unaveraged before the last pass of a step, and clipped as one model's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_axonn.accelerator.training import clip_to_norm
from hf_axonn.engine.dtensors import local, whole
from hf_axonn.engine.state import parallel_state


@contextlib.contextmanager
def leave_unsynced(*models: nn.Module) -> Iterator[None]:
    """Leave the gradients of passes that begin inside as each rank has them: those before the last of a step."""
    states = [state for model in models if (state := parallel_state(model)) is not None]
    with contextlib.ExitStack() as stack:
        for state in states:
            stack.enter_context(state.context.averaging.no_sync())
        yield


def clip_by_norm(
    optimizer: Optimizer, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale averaged gradients so that the norm of all of them, over all shards, is at most `max_norm`; returns it.

    Raises:
        RuntimeError: the norm is inf or NaN, and that is to be an error; on all ranks.
    Collectives: the reductions of the norm over (y, x, z).
    """
    parameters = _parameters(optimizer)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = whole(torch.nn.utils.get_total_norm(gradients, norm_type))
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {float(norm)}, so they cannot be clipped to "
            f"{max_norm}: with error_if_nonfinite=False this is no error."
        )
    clip_to_norm(parameters, max_norm, norm)
    return norm


@torch.no_grad()
def clip_by_value(optimizer: Optimizer, most: float) -> None:
    """Bound every element of averaged gradients by `most` and its negative. No communication."""
    gradients = [parameter.grad for parameter in _parameters(optimizer) if parameter.grad is not None]
    own: list[Any] = [SimpleNamespace(grad=local(gradient)) for gradient in gradients]
    torch.nn.utils.clip_grad_value_(own, most)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
