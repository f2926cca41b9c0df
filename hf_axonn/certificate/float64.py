"""Compare in float64: Transformers casts to float32 inside (norms, softmax, loss), this makes float64 of that.

Both sides of a comparison run under `Float64()`. Nothing here may change what is computed otherwise.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode


NOISE = 1e-12  # of the root mean square of all gradients: below it they are rounding
_CASTS = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}
_CONVERSIONS = {torch.Tensor.to, torch.Tensor.type}
_CHANGED = _CASTS | _CONVERSIONS


class Float64(TorchFunctionMode):
    """Every explicit cast of a float64 tensor to a smaller float type leaves it as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and func not in _CHANGED:
            return func(*args)
        kwargs = dict(kwargs or {})
        if func in _CASTS and args[0].dtype == torch.float64:
            return args[0]
        if func in _CONVERSIONS and args[0].dtype == torch.float64:
            args = tuple(torch.float64 if is_small_float(arg) else arg for arg in args)
            if is_small_float(kwargs.get("dtype")):
                kwargs["dtype"] = torch.float64
        elif is_small_float(kwargs.get("dtype")) and any(
            isinstance(arg, torch.Tensor) and arg.dtype == torch.float64 for arg in args
        ):
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def recompute_in_float64(module: nn.Module) -> None:
    """Let a checkpointed module enter the mode by itself: autograd leaves it, and recomputes in backward."""
    forward = module.forward

    def with_mode(*args: Any, **kwargs: Any) -> Any:
        with Float64():
            return forward(*args, **kwargs)

    module.forward = with_mode


def recompute_exactly(model: nn.Module) -> None:
    """`recompute_in_float64` for what a model's checkpointed layers consist of."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer) and getattr(layer, "gradient_checkpointing", False):
            for child in layer.children():
                recompute_in_float64(child)


@contextlib.contextmanager
def without_noise(exact: bool = True) -> Iterator[None]:
    """Let every optimizer inside take gradients that are nothing but rounding for zero.

    Adafactor and others divide a gradient by its size, so they make full steps of rounding, as of a key bias, whose
    gradient is zero by mathematics. Both sides of a comparison are rid of it, each rank by what it holds.
    """
    if not exact:
        yield
        return
    handle = register_optimizer_step_pre_hook(_zero_noise)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def _zero_noise(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    held = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in held if grad is not None]
    numbers = sum(grad.numel() for grad in local)
    squares = sum(float(grad.double().square().sum()) for grad in local)
    least = NOISE * math.sqrt(squares / max(1, numbers))
    for grad in local:
        grad.masked_fill_(grad.abs() < least, 0)


class ExactLogProbs:
    """Log probabilities in the dtype of the input, in place of TRL's kernel, whose sums are float32."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        _chunk: int,
        softcap: float | None = None,
        scale: float = 1.0,
        _outputs: object = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return log probabilities of `targets` [N], entropies, log(sum of squared probabilities), means of logits,
        and whether the target is the likeliest token."""
        logits = nn.functional.linear(hidden, weight, bias) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits / temperature
        every = logits.log_softmax(-1)
        chosen = every.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        entropy, squares = -(every.exp() * every).sum(-1), (2 * every).logsumexp(-1).detach()
        return chosen, entropy, squares, logits.mean(-1).detach(), logits.argmax(-1) == targets


def is_small_float(value: object) -> bool:
    """Return whether it is a float dtype below float64; False for a tensor, which torch would compare with a dtype."""
    return isinstance(value, torch.dtype) and value in (torch.float32, torch.float16, torch.bfloat16)


def error_floor(truth: Iterable[Tensor]) -> Tensor:
    """Return 1e-3 * the root mean square of all numbers: the least that an error is measured against.

    Some gradients are zero by mathematics (a key bias), so each is measured against a floor that all of them set
    (docs/numerics.md).
    """
    values = list(truth)
    total = torch.sqrt(sum(((value.double() ** 2).sum() for value in values), torch.zeros((), dtype=torch.float64)))
    floor: Tensor = 1e-3 * total / sum(value.numel() for value in values) ** 0.5
    return floor.clamp(min=torch.finfo(floor.dtype).tiny)  # where all are zero


def not_nan(error: Tensor) -> float:
    """Return an error; infinite in place of NaN, which `max` would pass over."""
    return float("inf") if math.isnan(error) else float(error)
