"""Compare in float64: Transformers casts to float32 inside (norms, softmax, loss), this makes float64 of that.

Both sides of a comparison run under `Float64()`. Nothing here may change what is computed otherwise.
"""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode


_CASTS = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}
_CONVERSIONS = {torch.Tensor.to, torch.Tensor.type}
_CHANGED = _CASTS | _CONVERSIONS


class Float64(TorchFunctionMode):
    """Every explicit cast of a float64 tensor to a smaller float type leaves it as it is."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not kwargs and func not in _CHANGED:
            return func(*args)
        kwargs = dict(kwargs or {})
        if func in _CASTS and args[0].dtype == torch.float64:
            return args[0]
        if func in _CONVERSIONS and args[0].dtype == torch.float64:
            args = tuple(torch.float64 if is_small_float(arg) else arg for arg in args)
            if is_small_float(kwargs.get("dtype")):
                kwargs["dtype"] = torch.float64
        elif is_small_float(kwargs.get("dtype")) and any(_is_float64(arg) for arg in args):
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def recompute_in_float64(module: torch.nn.Module) -> None:
    """Let a checkpointed module enter the mode by itself: autograd leaves it, and recomputes in backward."""
    forward = module.forward

    def with_mode(*args, **kwargs):
        with Float64():
            return forward(*args, **kwargs)

    module.forward = with_mode


def checkpointed(model: torch.nn.Module, *, reentrant: bool) -> None:
    """Checkpoint the layers of a decoder, which are recomputed in float64."""
    # the newer name since Transformers 5.23
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    for layer in model.model.layers:
        for child in layer.children():
            recompute_in_float64(child)


def is_small_float(value: object) -> bool:
    # not for a tensor, which torch would try to compare with a dtype
    return isinstance(value, torch.dtype) and value in (torch.float32, torch.float16, torch.bfloat16)


def _is_float64(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float64


@torch.no_grad()
def relative_errors(ours: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> dict[str, float]:
    """max |difference| / max(max |g|, 1e-3 * |all g| / sqrt(number of parameters)) for each name (docs/numerics.md).

    Some gradients are zero by mathematics (a key bias), so each is measured against a floor that all of them set.
    Of a DTensor each rank compares its own shard, without a collective: every rank has to look at its errors.
    """
    assert ours.keys() == truth.keys(), ours.keys() ^ truth.keys()
    total = torch.sqrt(sum((value.double() ** 2).sum() for value in truth.values()))
    floor = 1e-3 * total / sum(value.numel() for value in truth.values()) ** 0.5
    floor = floor.clamp(min=torch.finfo(floor.dtype).tiny)  # where all are zero
    return {
        name: largest_difference(ours[name], value) / float(torch.maximum(value.abs().max(), floor))
        for name, value in truth.items()
    }


def largest_difference(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """max |ours - truth|; of a DTensor where this rank has its shard. 0 where that is empty, infinite for NaN."""
    if isinstance(ours, DTensor):
        assert ours.shape == truth.shape
        (chunk,) = ours.__create_chunk_list__()  # as torch's own checkpoints find it
        for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            truth = truth.narrow(dim, start, size)
        ours = ours.to_local()
        assert ours.shape == truth.shape
    return not_nan((ours - truth).abs().max()) if ours.numel() else 0.0


def not_nan(error: torch.Tensor) -> float:
    """An error; infinite in place of NaN, which `max` would pass over."""
    return float("inf") if math.isnan(error) else float(error)
