"""What a wrong gradient consists of: by which weights the micro-batches of all positions are in it, and an older one.

A rank's gradient is fitted, by least squares, with the gradients of every micro-batch and with what the rank held in
the step before. The weights tell what was left out, kept, or clipped too early.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_axonn.certificate.compare import piece_errors
from hf_axonn.certificate.float64 import error_floor
from hf_axonn.certificate.pieces import Piece


FITS = 1e-8  # relative; the parameters before a step are those of the run, so this is looser than the bound
ROUNDED = 1e-2  # relative; what rounding to bf16 may leave


@dataclass(frozen=True)
class Share:
    """Of a micro-batch: gradients of the sum of its tokens' losses and that sum, how many are predicted, and how many
    counted."""

    gradient: dict[str, Tensor]
    loss: float
    tokens: int
    counted: int


@dataclass(frozen=True)
class Mixture:
    """Weights of every position's micro-batches in a rank's gradient, 1 where it is right, and of the step before."""

    weights: tuple[tuple[float, ...], ...]
    kept: float

    @property
    def right(self) -> bool:
        """Whether every micro-batch counts once, and nothing else does."""
        return (
            all(abs(weight - 1) <= FITS for weights in self.weights for weight in weights) and abs(self.kept) <= FITS
        )


def mixture_of(pieces: Sequence[Piece], before: Sequence[Piece], shares: Sequence[Sequence[Share]]) -> Mixture | None:
    """What the gradient of a rank consists of; None where it is no sum of what is known.

    Args:
        pieces: what the rank holds of its gradients.
        before: and of those of the step before; nothing in the first one.
        shares: for each position its micro-batches.
    """
    flat = [share for batches in shares for share in batches]
    tokens = max(1, sum(share.counted for share in flat))
    held = {(piece.name, piece.offsets): piece.values for piece in before}
    columns: list[Callable[[Piece], Tensor]] = [_part_of(share, tokens) for share in flat]
    if before:
        columns.append(lambda piece: held.get((piece.name, piece.offsets), torch.zeros_like(piece.values)))
    whole = torch.stack([torch.cat([column(piece).flatten() for piece in pieces]) for column in columns], dim=1)
    truth = torch.cat([piece.values.flatten() for piece in pieces])
    if not bool(truth.isfinite().all()):
        return None
    found = torch.linalg.lstsq(whole, truth.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    off = (whole @ found - truth).split([piece.values.numel() for piece in pieces])
    floor = error_floor([truth])
    for piece, error in zip(pieces, off, strict=True):
        if error.numel() and float(error.abs().max() / torch.maximum(piece.values.abs().max(), floor)) > FITS:
            return None
    weights = iter(found.tolist())
    return Mixture(tuple(tuple(next(weights) for _ in batches) for batches in shares), next(weights, 0.0))


def _part_of(share: Share, tokens: int) -> Callable[[Piece], Tensor]:
    def part(piece: Piece) -> Tensor:
        gradient = share.gradient.get(piece.name)
        return torch.zeros_like(piece.values) if gradient is None else piece.within(gradient) / tokens

    return part


def name_mixtures(found: Sequence[Mixture], shares: Sequence[Sequence[Share]], groups: Sequence[Sequence[int]]) -> str:
    """What is wrong with gradients that consist of these, by ranks.

    Args:
        found: of each rank.
        shares: for each position its micro-batches.
        groups: the ranks of each position.
    """
    texts: dict[str, list[int]] = {}
    for rank, mixture in enumerate(found):
        texts.setdefault(_named(mixture, shares, groups), []).append(rank)
    if len(texts) == 1:
        return f"the gradients {next(iter(texts))}"
    return "; ".join(f"the gradients of rank(s) {_listed(ranks)} {text}" for text, ranks in texts.items())


def _named(mixture: Mixture, shares: Sequence[Sequence[Share]], groups: Sequence[Sequence[int]]) -> str:
    each = [
        (f"micro-batch {index + 1} of rank(s) {_listed(ranks)}", weight)
        for ranks, weights in zip(groups, mixture.weights, strict=True)
        for index, weight in enumerate(weights)
    ]
    wrong = [(name, weight) for name, weight in each if abs(weight - 1) > FITS]
    parts = []
    if abs(mixture.kept) > FITS:
        parts.append(
            f"have those of the step before in them, times {mixture.kept:.6g}: they were not set to zero (zero_grad)"
        )
    if clip := clipped_at(mixture, shares):
        parts.append(f"are clipped at {clip:.4g} on each rank, before they are averaged")
    elif wrong and all(abs(weight) <= FITS for _, weight in wrong):
        parts.append(f"are without {', '.join(name for name, _ in wrong)}")
    elif wrong:
        parts.append("have " + ", ".join(f"{name} times {weight:.6g}" for name, weight in wrong[:4]))
    return " and ".join(parts) or "are right"


def clipped_at(mixture: Mixture, shares: Sequence[Sequence[Share]]) -> float:
    """The norm to which the positions' own gradients were clipped before they were averaged; 0: they were not."""
    tokens = max(1, sum(share.counted for batches in shares for share in batches))
    norms = []
    for batches, weights in zip(shares, mixture.weights, strict=True):
        if not batches or max(weights) - min(weights) > FITS or not 0 < weights[0] <= 1 + FITS:
            return 0.0
        if weights[0] < 1 - FITS:
            summed: dict[str, Tensor] = {}
            for share in batches:
                for name, gradient in share.gradient.items():
                    summed[name] = summed.get(name, 0) + gradient
            norm = float(torch.sqrt(sum((each.square().sum() for each in summed.values()), torch.zeros(()))))
            norms.append(weights[0] * (norm * len(shares) / tokens + 1e-6))  # as torch clips
    if not norms or max(norms) - min(norms) > FITS * max(norms):
        return 0.0
    return norms[0] if len(norms) > 1 or len(shares) > 1 else 0.0


def other_losses(
    losses: Sequence[Sequence[float]], shares: Sequence[Sequence[Share]], groups: Sequence[Sequence[int]]
) -> str:
    """Whose losses are not those of the samples that they saw; nothing where all are, or none.

    Args:
        losses: of each rank those of its micro-batches, each a part of the mean over all positions' tokens.
        shares: for each position its micro-batches.
        groups: the ranks of each position.
    """
    tokens = sum(share.counted for batches in shares for share in batches)
    wrong, right = [], 0
    for ranks, batches in zip(groups, shares, strict=True):
        for rank in ranks:
            off = []
            for index, (loss, share) in enumerate(zip(losses[rank], batches, strict=False)):
                # By how many tokens the rank has divided, where its sum is that of its samples: a whole number
                divided = len(shares) * share.loss / loss if loss else 0.0
                if abs(divided - round(divided)) > FITS * tokens or not 0.5 * tokens <= divided <= 2 * tokens:
                    off.append(str(index + 1))
            right += not off
            wrong += [f"rank {rank} (micro-batch {', '.join(off)})"] if off else []
    if not wrong or not right:
        return ""
    return f"the loss of {', '.join(wrong)} is not that of its samples: the model had other labels, ids or positions"


def only_rounded(ranks: Sequence[Sequence[Piece]], truth: Mapping[str, Tensor]) -> str:
    """Whether gradients are right but for a rounding that is none of float64."""
    errors = [error.size for pieces in ranks for error in piece_errors(pieces, dict(truth), 0, 0)]
    worst = max(errors, default=0.0)
    if not FITS < worst <= ROUNDED:
        return ""
    return f"right to {worst:.0e} only, as if they were rounded on their way (bf16 rounds by 4e-03, fp32 by 6e-08)"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
