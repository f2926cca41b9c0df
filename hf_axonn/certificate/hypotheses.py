"""Hypotheses about gradients: those that the ranks would have, averaged in one way or another, times any number.

Each is a sum of the gradients of a step's micro-batches with known weights. They are tried in the order of WEIGHTS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from torch import Tensor

from hf_axonn.certificate.compare import shard_errors
from hf_axonn.certificate.shards import Shard


FITS = 1e-8  # relative; the parameters before a step are those of the run, so this is looser than the bound
TOKENS = "the mean over the tokens of a step"
RANK_MEANS = "the mean over the ranks of their means over tokens"
BATCH_MEANS = "the mean over micro-batches of their means over tokens"
OWN = "the share of a rank's own samples alone: nothing is averaged over the ranks"
UNKNOWN = "the gradients are no multiple of an average that is known"
MOST_LISTED = 3

Tensors = Mapping[str, Tensor]
Ranks = Sequence[Sequence[Shard]]  # the gradients of each rank
Distance = Callable[[Ranks, Tensors], float]


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch, computed in float64 on one process.

    Args:
        gradients: of the sum of its tokens' losses.
        loss: that sum.
        tokens: labels that are predicted.
        counted: labels that the run counts.
        inputs: of the model.
    """

    gradients: dict[str, Tensor]
    loss: float
    tokens: int
    counted: int
    inputs: Tensors = field(default_factory=dict)


Positions = Sequence[Sequence[MicroBatch]]  # the micro-batches of each data-parallel position


def count_tokens(batches: Iterable[MicroBatch]) -> int:
    """Return by how many tokens a run divides the losses of micro-batches, at least 1."""
    return max(1, sum(batch.counted for batch in batches))


# The weight of a micro-batch of one position (own), of all those that there are.
WEIGHTS: dict[str, Callable[[MicroBatch, Sequence[MicroBatch], Positions], float]] = {
    TOKENS: lambda batch, own, positions: 1 / count_tokens(chain(*positions)),
    RANK_MEANS: lambda batch, own, positions: 1 / (count_tokens(own) * len(positions)),
    BATCH_MEANS: lambda batch, own, positions: 1 / (max(1, batch.tokens) * sum(map(len, positions))),
}


def weigh(positions: Positions, mean: str) -> list[list[tuple[MicroBatch, float]]]:
    """Return the micro-batches of each position, with their weights in a mean (a key of WEIGHTS)."""
    return [[(batch, WEIGHTS[mean](batch, own, positions)) for batch in own] for own in positions]


def add_up(weighted: Iterable[tuple[MicroBatch, float]]) -> dict[str, Tensor]:
    """Return the sum of the gradients of micro-batches, each times its weight."""
    total: dict[str, Tensor] = {}
    for batch, weight in weighted:
        for name, gradient in batch.gradients.items():
            total[name] = total[name] + gradient * weight if name in total else gradient * weight
    return total


def average(positions: Positions, mean: str) -> dict[str, Tensor]:
    """Return the gradients of a mean (a key of WEIGHTS)."""
    return add_up(chain(*weigh(positions, mean)))


@dataclass(frozen=True)
class Fit:
    """A hypothesis, by which number gradients are a multiple of it, and how far they are from that multiple."""

    name: str
    ratio: float
    left: float

    def is_scaled(self, limit: float = FITS) -> bool:
        """Return whether the multiple is not 1."""
        return not close(self.ratio, 1, limit)

    def describe(self, expected: str, factors: Mapping[str, int], limit: float = FITS) -> str:
        """Return how gradients differ from the mean that is expected; empty: they do not."""
        if self.name == OWN:
            return f"gradients are {OWN} (times {name_factor(self.ratio, factors, limit)})"
        if self.is_scaled(limit):
            return f"gradients are {self.name} times {name_factor(self.ratio, factors, limit)}"
        return f"gradients are {self.name}, not {expected}" if self.name != expected else ""


def fit_multiple(name: str, ranks: Ranks, truth: Tensors, distance: Distance) -> Fit:
    """Fit gradients with a multiple of others, by least squares."""
    above = below = 0.0
    for shard in chain(*ranks):
        if (part := _find_part(shard, truth)) is not None:
            above += float((shard.values.double() * part).sum())
            below += float((part * part).sum())
    if not below:
        return Fit(name, math.nan, math.inf)
    ratio = above / below
    return Fit(name, ratio, distance(ranks, {key: values * ratio for key, values in truth.items()}))


def _find_part(shard: Shard, truth: Tensors) -> Tensor | None:
    whole = truth.get(shard.name)
    return None if whole is None or tuple(whole.shape) != shard.shape else shard.within(whole)


def find_fit(
    ranks: Ranks,
    positions: Positions,
    groups: Sequence[Sequence[int]],
    *,
    expected: str,
    distance: Distance,
    limit: float = FITS,
) -> Fit | None:
    """Find the hypothesis that leaves least; of those that leave no more than FITS, the first one.

    Args:
        ranks: their gradients.
        positions, groups: the micro-batches of the step, and the ranks, of each position.
        expected: the mean that is tried first.
        distance, limit: a measure of what a fit leaves, and how much that may be; None: all leave more.
    """
    means = sorted(WEIGHTS, key=lambda mean: mean != expected)
    fits = [fit_multiple(mean, ranks, average(positions, mean), distance) for mean in means]
    if len(positions) > 1:
        truths = zip(groups, map(add_up, weigh(positions, TOKENS)), strict=True)
        alone = [fit_multiple(OWN, [ranks[rank]], truth, distance) for group, truth in truths for rank in group]
        fits.append(max(alone, key=lambda fit: fit.left))
    best = min(fits, key=lambda fit: max(fit.left, FITS))
    return best if best.left <= limit else None


def largest_error(ranks: Ranks, truth: Tensors) -> float:
    """Return the largest error of any part, in float64; gradients that `truth` does not have are zeros there."""
    zeros = {shard.name: shard.values.new_zeros(shard.shape) for shard in chain(*ranks) if shard.name not in truth}
    errors = [error.size for shards in ranks for error in shard_errors(shards, {**zeros, **truth}, 0, 0)]
    return max(errors, default=math.inf)


def length_of_difference(ranks: Ranks, truth: Tensors) -> float:
    """Return the length of the difference of all gradients over that of `truth`: the distance of rounded gradients."""
    off = length = 0.0
    for shard in chain(*ranks):
        if (part := _find_part(shard, truth)) is not None:
            off += float((shard.values.double() - part).square().sum())
            length += float(part.square().sum())
    return math.sqrt(off / length) if length else math.inf


def list_wrong(
    wrong: Sequence[tuple[int, str, float]],
    ranks: Ranks,
    truth: Tensors,
    factors: Mapping[str, int],
    distance: Distance,
) -> str:
    """Return which gradients differ where others are right (`wrong`: rank, name, and what a fit of it may leave)."""
    if not wrong or len(wrong) >= sum(map(len, ranks)):
        return UNKNOWN
    listed: dict[str, list[str]] = {}
    for rank, name, limit in wrong:
        shards = [shard for shard in ranks[rank] if shard.name == name]
        if any(bool(shard.values.any()) for shard in shards):
            fit = fit_multiple(name, [shards], truth, distance)
            text = f"times {name_factor(fit.ratio, factors, limit)}" if fit.left <= limit else "other values"
        else:
            text = "missing"
        listed.setdefault(f"{name} {text}", []).append(str(rank))
    texts = [f"{text} on rank(s) {', '.join(where)}" for text, where in listed.items()]
    more = f" and {len(texts) - MOST_LISTED} more" if len(texts) > MOST_LISTED else ""
    return f"of the gradients, these are not {TOKENS}: {'; '.join(texts[:MOST_LISTED])}{more}"


def close(value: float, other: float, limit: float = FITS) -> bool:
    """Return whether two numbers are the same but for rounding."""
    return abs(value - other) <= limit * max(abs(value), abs(other))


def name_factor(ratio: float, factors: Mapping[str, int], limit: float = FITS) -> str:
    """Return a factor as text, with the names of what it may be: 2 is the number of ranks, 1/2 one over it."""
    names = {f"the number of {name}": value for name, value in factors.items() if value > 1}
    known = [name for name, value in names.items() if close(ratio, value, limit)]
    known += [f"1 / {name}" for name, value in names.items() if close(ratio, 1 / value, limit)]
    return f"{ratio:.{6 if limit <= FITS else 3}g}" + (f" ({' = '.join(known)})" if known else "")
