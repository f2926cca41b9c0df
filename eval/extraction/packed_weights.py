"""Packed copies of the weights of a model (compat/packed_weights.py), as long as it is only evaluated."""

import contextlib
import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from hf_axonn import parallel_state
from hf_axonn.compat.packed_weights import PackedWeights


_SHARE = 0.25  # of the memory that is free, which copies of the weights may take


@contextlib.contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
    """Let the Linear layers of a model multiply by packed copies of their weights, or of their shards on a grid, from
    their seventh call on.

    It is for Linear layers in float32 or bfloat16 on a CPU, and without autograd. Others, quantized ones among them,
    and those whose weights are gathered for each pass anew, stay as they are; so does a model that is compiled, and
    weights whose copies would take more than a quarter of the free memory. Weights must not change inside.
    """
    if _is_compiled(model):
        yield
        return
    packed, linears, parallel = PackedWeights(_room()), _plain_linears(model), parallel_state(model)
    for linear in linears:
        vars(linear)["forward"] = _forward(linear, packed)
    try:
        with parallel.context.packing(packed) if parallel is not None else contextlib.nullcontext():
            yield
    finally:
        for linear in linears:
            del vars(linear)["forward"]


def _is_compiled(model: nn.Module) -> bool:
    modules = (getattr(module, "_compiled_call_impl", None) for module in model.modules())
    parallel = parallel_state(model)
    regions = parallel is not None and parallel.compile_options is not None
    return hasattr(model, "_orig_mod") or regions or any(modules)


def _plain_linears(model: nn.Module) -> list[nn.Linear]:
    # Hooks that bring a weight from elsewhere for the time of a pass put a forward of their own into the module.
    linears = (each for each in model.modules() if type(each) is nn.Linear and "forward" not in vars(each))
    return [linear for linear in linears if type(linear.weight) is nn.Parameter]


def _room() -> float:
    """Return the bytes that copies may take in this process; processes of a machine share its memory."""
    import psutil

    return _SHARE * psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _forward(linear: nn.Linear, packed: PackedWeights) -> Callable[[Tensor], Tensor]:
    weight = linear.weight

    def forward(rows: Tensor) -> Tensor:
        own = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or rows.dtype != weight.dtype
        products = None if own or not rows.numel() else packed.products(id(weight), lambda: [weight])
        return nn.Linear.forward(linear, rows) if products is None else products[0](rows, linear.bias)

    return forward
