"""Canaries: how far up a secret that was put into the training data ranks among secrets that were not.

A canary is a text with a random part, drawn from a known space of candidates, that was inserted into the training
data. Its *rank* among the candidates is 1 if the model finds it the likeliest of all. With R candidates its exposure
is

    exposure = log2 R - log2 rank

0 bits mean that it is the last one, log2 R that it is the first; a model that has not seen it gives 1 / ln 2 = 1.44
bits on average. Where the space is too large to rank, a skew-normal distribution is fitted to the log-probabilities of
a random part of it, and exposure = -log2 P(X >= canary).

Source: Carlini et al. 2019, arXiv 1802.08232.
"""

from collections.abc import Sequence
from math import copysign, isnan, log, log2, pi, sqrt
from typing import NamedTuple

import numpy as np
from scipy.integrate import simpson
from scipy.stats import kstest, skewnorm


FEWEST_FOR_A_FIT = 100  # candidates for a fit of three parameters
MOST_SKEW = 0.9  # that is fitted; a skew-normal distribution has less than 0.9953
_WIDTH, _POINTS = 14.0, 4001  # of the integral over a tail, in standard deviations; an odd number for Simpson's rule


def rank(canary: float, others: Sequence[float]) -> int:
    """Place of the canary, from 1 on, when it and the others are sorted by log-probability, the likeliest first.

    A tie counts against the canary: it comes after all that are as likely.

    Args:
        canary: log-probability of the inserted secret.
        others: log-probabilities of the candidates that were not inserted.
    Raises:
        ValueError: a log-probability is NaN.
    """
    scores = np.asarray(others, dtype=np.float64)
    if isnan(canary) or np.isnan(scores).any():
        raise ValueError("the log-probability of a canary or candidate is NaN.")
    return 1 + int((scores >= canary).sum())


def exposure(place: int, candidates: int) -> float:
    """Exposure in bits of a canary at `place` among all `candidates`, itself included.

    Raises:
        ValueError: not 1 <= place <= candidates.
    """
    if not 1 <= place <= candidates:
        raise ValueError(f"rank {place} of {candidates} candidates: a rank lies between 1 and their number.")
    return log2(candidates) - log2(place)


class SkewNormal(NamedTuple):
    """A skew-normal distribution that was fitted to log-probabilities, and how well it fits: `p` of the
    Kolmogorov-Smirnov test. A small p says that they are not skew-normal; a large one says nothing of the tail, where
    there are no candidates."""

    location: float
    scale: float
    shape: float
    p: float

    def exposure(self, canary: float) -> float:
        """Exposure in bits of a canary with this log-probability, -log2 P(X >= canary).

        Raises:
            ValueError: the log-probability is not finite.
        """
        if not np.isfinite(canary):
            raise ValueError("the log-probability of a canary is not finite.")
        return -_log_tail((canary - self.location) / self.scale, self.shape) / log(2)


def fit_skew_normal(others: Sequence[float]) -> SkewNormal:
    """Fit the distribution that has the mean, deviation and skewness of these log-probabilities.

    Args:
        others: log-probabilities of at least 100 candidates, drawn at random, that were not inserted.
    Raises:
        ValueError: fewer candidates, all equally likely, a log-probability that is not finite, or a skewness of more
            than 0.9 either way. No skew-normal has more than 0.9953, and close to that a small error of the skewness
            is a large one of the tail: tens of bits (docs/evaluation.md).
    Source: Carlini et al. 2019, section 4.3 (arXiv 1802.08232), the test too; moments: Azzalini 1985.
    """
    scores = np.asarray(others, dtype=np.float64)
    if len(scores) < FEWEST_FOR_A_FIT:
        raise ValueError(
            f"{len(scores)} candidates are too few for a fit; score at least {FEWEST_FOR_A_FIT} or use the rank."
        )
    if not np.isfinite(scores).all():
        raise ValueError("the log-probability of a candidate is not finite.")
    if np.ptp(scores) == 0:
        raise ValueError("all candidates are equally likely: there is no distribution to fit.")
    mean, deviation = scores.mean(), scores.std()
    skew = float((((scores - mean) / deviation) ** 3).mean())
    if abs(skew) > MOST_SKEW:
        raise ValueError(
            f"the log-probabilities of the candidates have a skewness of {skew:.2f}, and a skew-normal distribution "
            f"is fitted up to {MOST_SKEW} only: use the rank among more candidates."
        )
    power = abs(skew) ** (2 / 3)
    delta = copysign(sqrt(pi / 2 * power / (power + (2 - pi / 2) ** (2 / 3))), skew)
    scale = float(deviation / sqrt(1 - 2 * delta**2 / pi))
    location, shape = float(mean - scale * delta * sqrt(2 / pi)), delta / sqrt(1 - delta**2)
    return SkewNormal(location, scale, shape, float(kstest(scores, skewnorm(shape, location, scale).cdf).pvalue))


def approximate_exposure(canary: float, others: Sequence[float]) -> float:
    """Exposure in bits where the candidates are too many to rank: that of a skew-normal fit to some of them.

    It reaches further than the rank among these: a canary that is likelier than all of them has some exposure above
    log2(len(others)), as far as the tail of the fit can be believed.

    Args:
        canary: log-probability of the inserted secret.
        others: log-probabilities of candidates, as for `fit_skew_normal`.
    Raises:
        ValueError: as `fit_skew_normal`, or the log-probability of the canary is not finite.
    """
    return fit_skew_normal(others).exposure(canary)


def _log_tail(start: float, shape: float) -> float:
    """log P(X >= start), X skew-normal, by Simpson's rule: scipy's logsf is -inf where the probability is no float."""
    t, step = np.linspace(start, max(start, 0.0) + _WIDTH, _POINTS, retstep=True)
    logs = skewnorm.logpdf(t, shape)
    peak = float(logs.max())
    return min(0.0, peak + log(simpson(np.exp(logs - peak), dx=float(step))))
