"""Weights on a CPU in the layout of its kernels, as long as a model is only evaluated.

A decoding step multiplies few rows by every weight. torch's own product then spends most of its time on bringing the
weight into the order in which it is read, in every step anew. Here that is done once.
"""

import contextlib
import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from hf_axonn.compat.torch import can_be_packed, packed_product


_SHARE = 0.25  # of the memory that is free, which copies of the weights may take
_CALLS = 6  # with torch's own product: a copy costs what it saves in about as many decoding steps


@contextlib.contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
    """Let the Linear layers of a model multiply by packed copies of their weights, from their seventh call on.

    It is for plain Linear layers in float32 or bfloat16 on a CPU, and without autograd or autocast. Others, sharded
    and quantized ones among them, stay as they are, and so does a model that is compiled or whose copies would take
    more than a quarter of the free memory. Sums are added in another order than torch's. Weights must not change
    inside.
    """
    linears = _plain_linears(model)
    weights = {id(linear.weight): _Weight(linear.weight) for linear in linears}
    if not _have_room(sum(weight.plain.nbytes for weight in weights.values())):
        linears = []
    for linear in linears:
        vars(linear)["forward"] = _forward(linear, weights[id(linear.weight)])
    try:
        yield
    finally:
        for linear in linears:
            del vars(linear)["forward"]


class _Weight:
    """A weight, and from the seventh call on the product with its copy."""

    def __init__(self, plain: Tensor) -> None:
        self.plain = plain
        self._calls = 0
        self._product: Callable[[Tensor, Tensor | None], Tensor] | None = None

    def product(self) -> Callable[[Tensor, Tensor | None], Tensor] | None:
        self._calls += 1
        if self._calls > _CALLS and self._product is None:
            self._product = packed_product(self.plain)
        return self._product


def _plain_linears(model: nn.Module) -> list[nn.Linear]:
    modules = list(model.modules())
    if hasattr(model, "_orig_mod") or any(getattr(module, "_compiled_call_impl", None) for module in modules):
        return []
    # Hooks that bring a weight from elsewhere for the time of a pass put a forward of their own into the module.
    linears = (module for module in modules if type(module) is nn.Linear and "forward" not in vars(module))
    return [linear for linear in linears if type(linear.weight) is nn.Parameter and can_be_packed(linear.weight)]


def _have_room(needed: int) -> bool:
    import psutil

    return needed <= _SHARE * psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _forward(linear: nn.Linear, weight: _Weight) -> Callable[[Tensor], Tensor]:
    def forward(rows: Tensor) -> Tensor:
        own = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or rows.dtype != linear.weight.dtype
        product = None if own or not rows.numel() else weight.product()
        return nn.Linear.forward(linear, rows) if product is None else product(rows, linear.bias)

    return forward
