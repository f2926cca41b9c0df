"""Weights of the micro-batches of all positions, and of an older gradient, in a gradient that is wrong.

A rank's gradient is fitted, by least squares, with the gradients of every micro-batch and with what the rank held in
the step before. The weights show what was left out, kept, or clipped too early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from hf_axonn.certificate.float64 import error_floor
from hf_axonn.certificate.hypotheses import (
    FITS,
    MicroBatch,
    Positions,
    Ranks,
    Tensors,
    add_up,
    count_tokens,
    largest_error,
)
from hf_axonn.certificate.shards import Shard


ROUNDED = 1e-2  # relative; what rounding to bf16 may leave


@dataclass(frozen=True)
class Mixture:
    """Weights of every position's micro-batches in a rank's gradient, 1 where it is right, and of the step before."""

    weights: tuple[tuple[float, ...], ...]
    kept: float

    @property
    def right(self) -> bool:
        """True if every micro-batch counts once, and nothing else does."""
        return abs(self.kept) <= FITS and all(abs(weight - 1) <= FITS for weight in chain(*self.weights))


def find_mixture(shards: Sequence[Shard], before: Sequence[Shard], positions: Positions) -> Mixture | None:
    """Find the weights in the gradient of a rank; None where it is no sum of what is known.

    Args:
        shards: the parts that the rank holds of its gradients.
        before: those of the step before; empty in the first one.
        positions: the micro-batches of the step.
    """
    tokens = count_tokens(chain(*positions))
    kept = {(shard.name, shard.offsets): shard.values for shard in before}
    columns: list[Callable[[Shard], Tensor]] = [_read_part(batch, tokens) for batch in chain(*positions)]
    if before:
        columns.append(lambda shard: kept.get((shard.name, shard.offsets), torch.zeros_like(shard.values)))
    whole = torch.stack([torch.cat([column(shard).flatten() for shard in shards]) for column in columns], dim=1)
    truth = torch.cat([shard.values.flatten() for shard in shards])
    if not bool(truth.isfinite().all()):
        return None
    solution = torch.linalg.lstsq(whole, truth.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    off = (whole @ solution - truth).split([shard.values.numel() for shard in shards])
    floor = error_floor([truth])
    for shard, error in zip(shards, off, strict=True):
        if error.numel() and float(error.abs().max() / torch.maximum(shard.values.abs().max(), floor)) > FITS:
            return None
    weights = iter(solution.tolist())
    return Mixture(tuple(tuple(next(weights) for _ in batches) for batches in positions), next(weights, 0.0))


def _read_part(batch: MicroBatch, tokens: int) -> Callable[[Shard], Tensor]:
    def read(shard: Shard) -> Tensor:
        gradient = batch.gradients.get(shard.name)
        return torch.zeros_like(shard.values) if gradient is None else shard.within(gradient) / tokens

    return read


def describe_mixtures(mixtures: Sequence[Mixture], positions: Positions, groups: Sequence[Sequence[int]]) -> str:
    """Return how gradients that consist of these are wrong, by ranks.

    Args:
        mixtures: of each rank.
        positions: the micro-batches of the step.
        groups: the ranks of each position.
    """
    texts: dict[str, list[int]] = {}
    for rank, mixture in enumerate(mixtures):
        texts.setdefault(_describe(mixture, positions, groups), []).append(rank)
    if len(texts) == 1:
        return f"the gradients {next(iter(texts))}"
    return "; ".join(f"the gradients of rank(s) {_join(ranks)} {text}" for text, ranks in texts.items())


def _describe(mixture: Mixture, positions: Positions, groups: Sequence[Sequence[int]]) -> str:
    wrong = [
        (f"micro-batch {index + 1} of rank(s) {_join(ranks)}", weight)
        for ranks, weights in zip(groups, mixture.weights, strict=True)
        for index, weight in enumerate(weights)
        if abs(weight - 1) > FITS
    ]
    parts = []
    if abs(mixture.kept) > FITS:
        parts.append(
            f"have those of the step before in them, times {mixture.kept:.6g}: they were not set to zero (zero_grad)"
        )
    if clip := find_clip(mixture, positions):
        parts.append(f"are clipped at {clip:.4g} on each rank, before they are averaged")
    elif wrong and all(abs(weight) <= FITS for _, weight in wrong):
        parts.append(f"are without {', '.join(name for name, _ in wrong)}")
    elif wrong:
        parts.append("have " + ", ".join(f"{name} times {weight:.6g}" for name, weight in wrong[:4]))
    return " and ".join(parts) or "are right"


def find_clip(mixture: Mixture, positions: Positions) -> float:
    """Return the norm to which positions clipped their own gradients before they were averaged; 0: they did not."""
    tokens = count_tokens(chain(*positions))
    norms = []
    for batches, weights in zip(positions, mixture.weights, strict=True):
        if not batches or max(weights) - min(weights) > FITS or not 0 < weights[0] <= 1 + FITS:
            return 0.0
        if weights[0] < 1 - FITS:
            summed = add_up((batch, len(positions) / tokens) for batch in batches)
            norm = float(torch.sqrt(sum((each.square().sum() for each in summed.values()), torch.zeros(()))))
            norms.append(weights[0] * (norm + 1e-6))  # as torch clips
    if not norms or max(norms) - min(norms) > FITS * max(norms):
        return 0.0
    return norms[0] if len(norms) > 1 or len(positions) > 1 else 0.0


def find_other_losses(losses: Sequence[Sequence[float]], positions: Positions, groups: Sequence[Sequence[int]]) -> str:
    """Return whose losses are not those of the samples that they saw; empty where all are, or none.

    Args:
        losses: of each rank those of its micro-batches, each a part of the mean over all positions' tokens.
        positions: the micro-batches of the step.
        groups: the ranks of each position.
    """
    tokens = count_tokens(chain(*positions))
    wrong, right = [], 0
    for ranks, batches in zip(groups, positions, strict=True):
        for rank in ranks:
            off = []
            for index, (loss, batch) in enumerate(zip(losses[rank], batches, strict=False)):
                # By how many tokens the rank has divided, where its sum is that of its samples: a whole number
                divisor = len(positions) * batch.loss / loss if loss else 0.0
                if abs(divisor - round(divisor)) > FITS * tokens or not 0.5 * tokens <= divisor <= 2 * tokens:
                    off.append(str(index + 1))
            right += not off
            wrong += [f"rank {rank} (micro-batch {', '.join(off)})"] if off else []
    if not wrong or not right:
        return ""
    return f"the loss of {', '.join(wrong)} is not that of its samples: the model had other labels, ids or positions"


def describe_rounding(ranks: Ranks, truth: Tensors) -> str:
    """Return how right gradients are where a smaller dtype may have rounded them; empty where none has."""
    worst = largest_error(ranks, truth)
    if not FITS < worst <= ROUNDED:
        return ""
    return f"right to {worst:.0e} only, as if they were rounded on their way (bf16 rounds by 4e-03, fp32 by 6e-08)"


def _join(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
