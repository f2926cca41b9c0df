"""Compare in float64: hf_axonn/certificate/float64.py, and the errors of whole models by it."""

from __future__ import annotations

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_axonn.certificate.float64 import Float64, error_floor, is_small_float, not_nan, recompute_in_float64
from hf_axonn.certificate.shards import shard_of


__all__ = [
    "Float64",
    "checkpointed",
    "is_small_float",
    "largest_difference",
    "not_nan",
    "recompute_in_float64",
    "relative_errors",
]


def checkpointed(model: torch.nn.Module, *, reentrant: bool) -> None:
    """Checkpoint the layers of a decoder, which are recomputed in float64."""
    # the newer name since Transformers 5.23
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            for child in layer.children():
                recompute_in_float64(child)


@torch.no_grad()
def relative_errors(ours: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> dict[str, float]:
    """max |difference| / max(max |g|, error_floor) for each name (docs/numerics.md).

    Of a DTensor each rank compares its own shard, without a collective: every rank has to look at its errors.
    """
    assert ours.keys() == truth.keys(), ours.keys() ^ truth.keys()
    floor = error_floor(truth.values()).to(next(iter(truth.values())).device)
    return {
        name: largest_difference(ours[name], value) / float(torch.maximum(value.abs().max(), floor))
        for name, value in truth.items()
    }


def largest_difference(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """max |ours - truth|; of a DTensor where this rank has its shard. 0 where that is empty, infinite for NaN."""
    shard = shard_of("", ours)
    return not_nan((shard.values - shard.within(truth)).abs().max()) if shard.values.numel() else 0.0
