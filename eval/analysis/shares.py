"""Intervals for shares of samples, of which several may be from one document, and for the difference of two shares.

- One sample a document: Wilson's.
- All samples agree: Wilson's, with a document as one trial; resampling equal answers would find no spread.
- Else: a bootstrap over documents, and no narrower than Wilson's for as many independent samples. Samples of one
  document can only tell less than independent ones; where a bootstrap of few documents says otherwise, it errs.
"""

from collections.abc import Hashable, Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np

from hf_axonn_eval.analysis.intervals import Interval, bootstrap_columns, numbered, wilson


class Found(NamedTuple):
    """An interval, None where nothing can be said, and of which kind it is."""

    interval: Interval | None
    kind: str


WILSON, HULL, BOOTSTRAP = "wilson", "bootstrap, at least wilson", "bootstrap"
NONE = "none: a single document"


def share_intervals(
    answers: np.ndarray,
    documents: Sequence[Hashable],
    *,
    confidence: float = 0.95,
    **drawing: int,
) -> list[Found]:
    """Intervals of the shares of yes.

    Args:
        answers: [samples, columns] 1 or 0, NaN where a sample was not asked; a column has one answer at least.
        documents: the document of each sample.
        confidence: of the intervals.
        drawing: `resamples` and `seed` of the bootstrap, as `stats.bootstrap` takes them.
    Raises:
        ValueError: as `stats.bootstrap`.
    """
    index, _ = numbered(documents)
    found: list[Found] = []
    left = []
    for place, column in enumerate(answers.T):
        asked = ~np.isnan(column)
        yes, trials, apart = int(np.nansum(column)), int(asked.sum()), len(np.unique(index[asked]))
        if apart == trials:
            found.append(Found(wilson(yes, trials, confidence=confidence), WILSON))
        elif yes in (0, trials):
            found.append(Found(wilson(apart if yes else 0, apart, confidence=confidence), WILSON))
        else:
            found.append(Found(wilson(yes, trials, confidence=confidence), HULL))
            left.append(place)
    drawn = bootstrap_columns(answers[:, left], documents, confidence=confidence, **drawing) if left else []
    for place, interval in zip(left, drawn, strict=True):
        found[place] = _hull(found[place].interval, interval)
    return found


def difference_interval(
    after: np.ndarray,
    before: np.ndarray,
    documents: Sequence[Hashable],
    *,
    confidence: float = 0.95,
    **drawing: int,
) -> Found:
    """Interval of the difference of two shares of the same samples.

    Args:
        after: [samples] bool.
        before: [samples] bool, what is subtracted.
        documents: the document of each sample.
        confidence: of the interval.
        drawing: as of `share_intervals`.
    Raises:
        ValueError: as `stats.bootstrap`.
    """
    change = after.astype(np.float64) - before
    apart = numbered(documents)[1]
    counts = (after & before, after & ~before, before & ~after, ~after & ~before)
    ends = wilson_of_difference(*(int(some.sum()) for some in counts), confidence=confidence)
    if apart == len(change):
        return Found(ends, WILSON)
    if (change == change[0]).all():
        least = wilson(apart, apart, confidence=confidence).low
        alike = {0: Interval(least - 1, 1 - least), 1: Interval(least, 1.0), -1: Interval(-1.0, -least)}
        return Found(alike[int(change[0])], WILSON)
    return _hull(ends, bootstrap_columns(change[:, None], documents, confidence=confidence, **drawing)[0])


def wilson_of_difference(both: int, gained: int, lost: int, neither: int, *, confidence: float = 0.95) -> Interval:
    """Interval for the difference of two shares of the same trials, out of Wilson's intervals of the two.

    Unlike the mean of the paired differences +- 2 standard errors, and unlike their bootstrap, it has a width where no
    trial, or every trial, changed.

    Args:
        both: trials that are yes after and before.
        gained: yes after, no before.
        lost: no after, yes before.
        neither: no after and before.
        confidence: of the interval.
    Raises:
        ValueError: a negative number, no trials, or not 0 < confidence < 1.
    Source: Newcombe 1998, Statistics in Medicine 17, 2635-2650, method 10.
    """
    trials = both + gained + lost + neither
    if min(both, gained, lost, neither) < 0:
        raise ValueError(f"{both} both, {gained} gained, {lost} lost and {neither} neither are not all counts.")
    after, before = (
        wilson(both + gained, trials, confidence=confidence),
        wilson(both + lost, trials, confidence=confidence),
    )
    share_after, share_before = (both + gained) / trials, (both + lost) / trials
    # how the two shares go together: Pearson's phi, less a correction for continuity where it is above 0
    spread = sqrt((both + gained) * (lost + neither) * (both + lost) * (gained + neither))
    joint = both * neither - gained * lost
    phi = 0.0 if not spread else (joint if joint < 0 else max(joint - trials / 2, 0)) / spread
    ends = []
    for mine, other in (
        (share_after - after.low, before.high - share_before),
        (after.high - share_after, share_before - before.low),
    ):
        ends.append(sqrt(max(0.0, mine * mine - 2 * phi * mine * other + other * other)))
    difference = (gained - lost) / trials
    return Interval(max(-1.0, difference - ends[0]), min(1.0, difference + ends[1]))


def _hull(independent: Interval, drawn: Interval | None) -> Found:
    if drawn is None:
        return Found(None, NONE)
    return Found(Interval(min(independent.low, drawn.low), max(independent.high, drawn.high)), HULL)
