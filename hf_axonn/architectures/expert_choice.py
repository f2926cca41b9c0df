"""The way in which tokens and experts of a model meet: by gathers of weights, or by tokens that travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import nn

from hf_axonn.compat.transformers import text_config
from hf_axonn.layers.moe import expert_weights, is_called_sorted, is_experts
from hf_axonn.topology.experts import bytes_sent, why_not_move
from hf_axonn.topology.grid import Grid
from hf_axonn.topology.weight_kind import WeightKind


@dataclass(frozen=True)
class ExpertChoice:
    """The way in which tokens and experts meet.

    Attributes:
        kind: of the experts' weights, EXPERTS (`gather`) or WHOLE_EXPERTS (`move`).
        reason: why, in a line; empty for a model without experts.
    """

    kind: WeightKind
    reason: str = ""

    @property
    def moves(self) -> bool:
        """Return whether tokens travel to their experts."""
        return self.kind == WeightKind.WHOLE_EXPERTS


def choose_experts(model: nn.Module, grid: Grid, *, requested: str) -> ExpertChoice:
    """Decide between `gather` and `move` for all layers of a model. No communication; the model is unchanged.

    Args:
        requested: auto, gather or move (topology/experts.py).
    Raises:
        ValueError: `move` is requested and not possible; the message has the numbers.
    """
    layers = [module for module in model.modules() if is_experts(module)]
    if not layers:
        return ExpertChoice(WeightKind.EXPERTS)
    ranks = grid.z * grid.x * grid.y
    every = next((type(layer).__name__ for layer in layers if is_called_sorted(layer)), None)
    problem = f"{every} sends every token to every expert" if every else why_not_move(_numbers(layers), grid)
    if requested == "move" and problem:
        raise ValueError(
            f"experts is move, but tokens cannot travel to the experts of this model: {problem}. Leave experts at "
            "auto, which gathers their weights for such a model and grid."
        )
    if problem or requested == "gather":
        return ExpertChoice(WeightKind.EXPERTS, f"experts gathered over z: {problem or 'as configured'}")
    most, travels = _traffic(model, layers, grid)
    return ExpertChoice(
        WeightKind.WHOLE_EXPERTS,
        f"experts whole on one of {ranks} ranks (z, x, y), to which tokens travel: a token to at most {most}{travels}",
    )


def _numbers(layers: list[nn.Module]) -> list[int]:
    """Return the number of experts of each layer."""
    return [cast(int, layer.num_experts) for layer in layers]


def _traffic(model: nn.Module, layers: list[nn.Module], grid: Grid) -> tuple[int, str]:
    """Return to how many ranks a token travels at most and, for the report, in how many bytes if that is known, beside
    those of `gather`."""
    config = text_config(model) if hasattr(model, "config") else None
    chosen, ranks = getattr(config, "num_experts_per_tok", None), grid.z * grid.x * grid.y
    most, hidden = min(chosen or ranks, ranks), getattr(config, "hidden_size", None)
    if not hidden:
        return most, ""
    text = f", {most * hidden * 2:,} bytes each way in bfloat16"
    if not chosen:
        return most, text
    weights = [
        (cast(int, layer.num_experts), [layer.get_parameter(name).shape[1:] for name in expert_weights(layer)])
        for layer in layers
    ]
    sent = bytes_sent(weights, chosen, hidden, grid)
    tokens = sent.fewer_by_gather()
    if tokens is None:
        return most, f"{text}; gather never sends fewer bytes"
    return most, (
        f"{text}; from {tokens:,} tokens of a rank and micro-batch on gather sends fewer bytes "
        f"({sent.weights / 2**20:,.1f} MiB for weights), so compare experts: gather"
    )
