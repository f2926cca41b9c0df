"""How sure a number is: intervals for shares and means over documents.

Samples of one document are not independent, so what is resampled is documents, not samples.
"""

from collections.abc import Hashable, Sequence
from math import sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """Both ends of a confidence interval."""

    low: float
    high: float


def wilson(successes: int, trials: int, *, confidence: float = 0.95) -> Interval:
    """Wilson's score interval for a share, without continuity correction.

    Unlike successes / trials +- 2 standard errors it is right at 0 of n and n of n, which is where extraction counts
    usually lie.

    Raises:
        ValueError: not 0 <= successes <= trials with trials > 0, or not 0 < confidence < 1.
    Source: Wilson 1927; recommended by Brown, Cai and DasGupta 2001.
    """
    check_confidence(confidence)
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"{successes} of {trials} is not a share.")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = successes / trials
    shrink = 1 + z * z / trials
    middle = (share + z * z / (2 * trials)) / shrink
    half = z * sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / shrink
    # at the two ends the formula gives 0 and 1 up to rounding
    low = 0.0 if successes == 0 else middle - half
    high = 1.0 if successes == trials else middle + half
    return Interval(low, high)


def bootstrap(
    values: Sequence[float],
    documents: Sequence[Hashable],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval | None:
    """Percentile bootstrap interval of the mean of `values`, resampling whole documents.

    Args:
        values: one number a sample.
        documents: the document of each sample.
        confidence: of the interval, between 0 and 1.
        resamples: how many times the documents are drawn.
        seed: the same seed gives the same interval.
    Returns:
        None for a single document: nothing can be said about documents from one of them.
    Raises:
        ValueError: the lengths differ or are 0, fewer than 100 resamples, or not 0 < confidence < 1.
    Source: Efron 1979; resampling clusters: Davison and Hinkley 1997, section 3.8.
    """
    check_confidence(confidence)
    if len(values) != len(documents) or not values:
        raise ValueError(f"{len(values)} values of {len(documents)} documents: as many are needed, and one or more.")
    if resamples < 100:
        raise ValueError(f"{resamples} resamples are too few for an interval; use at least 100.")
    names = {name: index for index, name in enumerate(dict.fromkeys(documents))}
    if len(names) < 2:
        return None
    index = np.array([names[name] for name in documents])
    sums = np.bincount(index, weights=np.asarray(values, dtype=np.float64), minlength=len(names))
    sizes = np.bincount(index, minlength=len(names)).astype(np.float64)

    generator = np.random.default_rng(seed)
    means = np.empty(resamples)
    for draw in range(resamples):  # one draw at a time: all of them at once is resamples * documents numbers
        drawn = generator.integers(len(names), size=len(names))
        means[draw] = sums[drawn].sum() / sizes[drawn].sum()
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(low), float(high))


def check_confidence(confidence: float) -> None:
    """Raise ValueError unless `confidence` is a share between 0 and 1."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence!r}, but it is a share between 0 and 1, such as 0.95.")
