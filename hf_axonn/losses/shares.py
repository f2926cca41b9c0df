"""The loss of a model that is given `num_items_in_batch`: a share, and terms that are none.

With the number of items (kept labels) of a step on all ranks a loss function returns this rank's sum divided by it.
Such shares add up to the loss of one process, so Trainer multiplies what the model returns by R, the number of ranks
with different rows (data * z / context), and the mean over ranks, which gradients and logs take, is the sum. But
models return more than that:

    loss = share                                                       most
    loss = share + weight * auxiliary loss of routers                  mixtures of experts
    loss = share + weight * mean of squared log-sum-exp of logits      Bamba
    loss = mean over rows                                              classifiers: their function knows of no items

A mean would count R times, in gradients as in evaluation, and does so in Transformers without a grid. So in such a
call the share is multiplied by R where it is made, and the loss divided by it where the model returns.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hf_axonn.distributed.mesh import ROWS
from hf_axonn.engine.state import ParallelState
from hf_axonn.layers.base import patch_forward
from hf_axonn.losses.causal_lm import CausalLMLoss


def install_shares(state: ParallelState, model: nn.Module) -> None:
    """Make whatever a model returns as its loss for `num_items_in_batch` a share. No communication."""
    if state.grid_mesh.size(*ROWS) > 1:
        patch_forward(model, functools.partial(_forward, state, model, inspect.signature(model.forward)))


def _forward(
    state: ParallelState, model: nn.Module, signature: inspect.Signature, original: Callable, /, *args, **kwargs
):
    if kwargs.get("num_items_in_batch") is None or not state.context.items_of_all:
        return original(*args, **kwargs)
    samples = state.grid_mesh.size(*ROWS)
    with state.context.multiplied_shares(samples), _calls_of_loss(model, samples) as calls:
        output = original(*args, **kwargs)
    if not (calls() or _is_of_transformers(model)):
        return output  # of a forward that may have read the number itself
    if isinstance(output, dict) and isinstance(output.get("loss"), Tensor):
        output["loss"] = output["loss"] / samples
    elif isinstance(output, tuple) and signature.bind_partial(*args, **kwargs).arguments.get("labels") is not None:
        output = (output[0] / samples, *output[1:])
    return output


@contextmanager
def _calls_of_loss(model: nn.Module, samples: int) -> Iterator[Callable[[], int]]:
    """Multiply shares that the model's loss function returns inside by `samples`; yields how many calls it has
    had. Ours multiplies by itself (`share_factor`)."""
    own: Any = getattr(model, "loss_function", None)
    if isinstance(own, CausalLMLoss):
        before = own.calls
        yield lambda: own.calls - before
        return
    if own is None or isinstance(own, nn.Module):
        yield lambda: 0
        return
    calls = 0

    @functools.wraps(own)
    def function(*args, **kwargs):
        nonlocal calls
        calls += 1
        value = own(*args, **kwargs)
        return value if kwargs.get("num_items_in_batch") is None else value * samples

    model.loss_function = function
    try:
        yield lambda: calls
    finally:
        model.loss_function = own


def _is_of_transformers(model: nn.Module) -> bool:
    """Return whether Transformers wrote a model's forward: there only loss functions read the number of items."""
    return inspect.unwrap(type(model).forward).__module__.partition(".")[0] == "transformers"
