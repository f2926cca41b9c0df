"""Means, differences and slopes over articles, each with an interval.

Every article gives passages to every bucket, and every model and seed is asked the same ones. So articles are what is
independent, and what is compared has articles in common. Each number here is a weighted sum of the means of cells (a
gain is the mean of one bucket minus that of bucket 0; a slope has a weight for each model), and the jackknife leaves
an article out of all of its cells at once: what articles have in common cancels, as in a bootstrap that draws articles
with all their passages. For weighted sums both have the same variance; the jackknife needs no draws, and its interval
is corrected for skewness (`hf_axonn_eval.analysis.intervals.jackknife_interval`).

These intervals speak of other articles, with these models and seeds. `over_sizes` of a slope speaks of other sizes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import numpy as np
from scipy.special import stdtrit

from hf_axonn_eval.analysis.estimates import ends
from hf_axonn_eval.analysis.intervals import Found, Interval, jackknife_interval, kish


CONFIDENCE = 0.95
FEWEST_SIZES = 3  # for a line with a residual
ROUNDING = 1e-12
OVER_SIZES = "student's t over sizes"
LINE = "least squares over sizes, jackknife over articles"


@dataclass(frozen=True)
class Cell:
    """Passages of a model, a loss and a bucket, by article.

    Args:
        sums: [articles] of the values of the article's passages.
        sizes: [articles] their number; 0 where the cell has none of an article.
    """

    sums: np.ndarray
    sizes: np.ndarray

    @classmethod
    def from_passages(cls, values: np.ndarray, articles: np.ndarray, count: int) -> "Cell":
        """Return the cell of some passages.

        Args:
            values: [passages]; NaN where a passage does not have the number.
            articles: [passages] number of the article.
            count: articles of the study.
        """
        has = ~np.isnan(values)
        sums = np.bincount(articles[has], weights=values[has], minlength=count)
        return cls(sums, np.bincount(articles[has], minlength=count).astype(np.float64))

    def __len__(self) -> int:
        return int(self.sizes.sum())

    @property
    def mean(self) -> float:
        """Mean over passages."""
        return float(self.sums.sum() / self.sizes.sum())

    @property
    def changes(self) -> np.ndarray:
        """[articles] amount by which the mean is less without each."""
        others = self.sizes.sum() - self.sizes
        return (self.sums - self.mean * self.sizes) / np.where(others > 0, others, inf)


Terms = Sequence[tuple[float, Cell]]  # weights and cells; none of them empty


def total(terms: Terms) -> float:
    """Return the weighted sum of the means."""
    return float(sum(weight * cell.mean for weight, cell in terms))


def estimate(terms: Terms, *, confidence: float = CONFIDENCE) -> dict[str, Any]:
    """Return the weighted sum with its interval.

    Returns:
        `mean`, `low`, `high`, `interval` (its kind, or why there is none), and the numbers of `articles` and
        `passages` that enter.
    """
    changes = sum((weight * cell.changes for weight, cell in terms), np.zeros(len(terms[0][1].sizes)))
    found = _interval(total(terms), changes, terms, confidence)
    return {"mean": total(terms), **ends(found), **_counts(terms)}


def ratio(above: Terms, below: Terms) -> dict[str, Any]:
    """Divide one weighted sum by another, with an interval; both lose the same article in the jackknife.

    Returns:
        The same as `estimate`; without a mean where the interval of the divisor holds 0, as the quotient may then be
        anything.
    """
    of_below = estimate(below)
    if of_below["low"] is None or of_below["low"] <= 0 <= of_below["high"]:
        why = "none: what it is divided by may be 0"
        return {"mean": None, "low": None, "high": None, "interval": why, **_counts([*above, *below])}
    mean = total(above) / total(below)
    without = [
        total(terms) - sum((weight * cell.changes for weight, cell in terms), np.zeros(len(terms[0][1].sizes)))
        for terms in (above, below)
    ]
    changes = mean - without[0] / without[1]
    found = _interval(mean, changes, [*above, *below], CONFIDENCE)
    return {"mean": mean, **ends(found), **_counts([*above, *below])}


def line(places: Sequence[float], terms: Sequence[Terms], names: Sequence[str]) -> dict[str, Any]:
    """Fit the straight line through several numbers by least squares, all with the same weight.

    Args:
        places: x of each number; at least two are different.
        terms: the number of each place.
        names: of the places.
    Returns:
        `slope`, an estimate over articles; `over_sizes`, `low` and `high` of the slope by Student's t over the places,
        which holds if the residuals are like independent normal errors, None for fewer than FEWEST_SIZES places;
        `residuals`, by name an estimate of the number minus the line, with intervals that hold all together
        (Bonferroni); `r_squared`, None where all numbers are equal; `places`, how many.
    Raises:
        ValueError: fewer than two different places.
    """
    x = np.array(places, dtype=np.float64)
    if len(set(places)) < 2:
        raise ValueError(f"a line needs two places, not {len(set(places))}")
    off = x - x.mean()
    weights = off / (off**2).sum()
    slope = estimate(
        [(weight * w, cell) for weight, some in zip(weights.tolist(), terms, strict=True) for w, cell in some]
    )
    y = np.array([total(some) for some in terms])
    misses = y - y.mean() - slope["mean"] * off
    residuals: dict[str, Any] = {}
    for place, name in enumerate(names):
        share = (np.arange(len(x)) == place) - 1 / len(x) - off[place] * weights
        share[np.abs(share) < ROUNDING] = 0  # two places are on their line, but for rounding
        of_all = zip(share.tolist(), terms, strict=True)
        parts = [(part * w, cell) for part, some in of_all for w, cell in some]
        residuals[name] = estimate(parts, confidence=1 - (1 - CONFIDENCE) / len(x))
    spread = float(((y - y.mean()) ** 2).sum())
    return {
        "slope": {**slope, "interval": LINE if slope["low"] is not None else slope["interval"]},
        "over_sizes": _over_sizes(slope["mean"], misses, off),
        "residuals": residuals,
        "r_squared": 1 - float((misses**2).sum()) / spread if spread > 1e-18 else None,
        "places": len(x),
    }


def _over_sizes(slope: float, misses: np.ndarray, off: np.ndarray) -> dict[str, Any]:
    freedom = len(misses) - 2
    if len(misses) < FEWEST_SIZES:
        return ends(Found(None, f"none: {len(misses)} sizes are too few"))
    error = sqrt(float((misses**2).sum()) / freedom / float((off**2).sum()))
    reach = float(stdtrit(freedom, 0.5 + CONFIDENCE / 2)) * error
    return ends(Found(Interval(slope - reach, slope + reach), OVER_SIZES))


def _interval(mean: float, changes: np.ndarray, terms: Terms, confidence: float) -> Found:
    there = np.sum([cell.sizes for _, cell in terms], axis=0) > 0
    freedom = min(kish(cell.sizes[cell.sizes > 0] ** 2) for _, cell in terms) - 1
    found = jackknife_interval(mean, changes[there], freedom, confidence=confidence)
    scale = max((abs(weight) * float(np.abs(cell.sums).max()) for weight, cell in terms), default=0.0)
    # a sum of equal parts with weights that cancel differs from 0 by rounding alone
    if found.interval is not None and float(np.abs(changes).max()) <= ROUNDING * scale:
        return Found(None, "none: all articles have the same")
    return found


def _counts(terms: Terms) -> Mapping[str, int]:
    sizes = [cell.sizes for _, cell in terms]
    return {"articles": int((np.sum(sizes, axis=0) > 0).sum()), "passages": max(len(cell) for _, cell in terms)}
