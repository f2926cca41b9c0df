"""How sure a number is: intervals for shares and means over documents.

Samples of one document are not independent, so what is resampled is documents, not samples. Shares of samples, and
differences of two shares:

- One sample a document: Wilson's.
- All samples agree: Wilson's, with a document as one trial; resampling equal answers would find no spread.
- Else: a bootstrap over documents, and no narrower than Wilson's for as many independent samples. Samples of one
  document can only tell less than independent ones; where a bootstrap of few documents says otherwise, it errs.
"""

from collections.abc import Hashable, Iterator, Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr, ndtri, stdtrit
from scipy.stats import binomtest


WILSON, HULL, BOOTSTRAP = "wilson", "bootstrap, at least wilson", "bootstrap"
_NUMBERS_AT_ONCE = 1_000_000  # draws of a bootstrap are made in chunks of about as many numbers
NONE = "none: a single document"


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
    # scipy has it as a method of a test, which takes a hundred times as long; curves need thousands
    z = float(ndtri(0.5 + confidence / 2))
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
    """Bootstrap interval of the mean of `values`, resampling documents with all of their samples; see `interval_of`.

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
    if len(values) != len(documents) or not len(values):
        raise ValueError(f"{len(values)} values of {len(documents)} documents: as many are needed, and one or more.")
    column = np.asarray(values, dtype=np.float64)[:, None]
    return bootstrap_columns(column, documents, confidence=confidence, resamples=resamples, seed=seed)[0]


def bootstrap_columns(
    values: np.ndarray,
    documents: Sequence[Hashable],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> list[Interval | None]:
    """`bootstrap` of several numbers a sample at once: columns that come from the same documents share the draws.

    Args:
        values: [samples, columns]; NaN where a sample does not have the number.
        documents: the document of each sample.
        confidence: of the intervals.
        resamples: how many times the documents are drawn.
        seed: the same seed gives the same intervals.
    Returns:
        An interval a column; None where a column has numbers from fewer than two documents.
    Raises:
        ValueError: as `bootstrap`.
    """
    check_confidence(confidence)
    if resamples < 100:
        raise ValueError(f"{resamples} resamples are too few for an interval; use at least 100.")
    index, count = numbered(documents)
    sums, sizes = np.zeros((count, values.shape[1])), np.zeros((count, values.shape[1]))
    for column in range(values.shape[1]):
        has = ~np.isnan(values[:, column])
        sums[:, column] = np.bincount(index[has], weights=values[has, column], minlength=count)
        sizes[:, column] = np.bincount(index[has], minlength=count)
    alike: dict[bytes, list[int]] = {}
    for column in range(values.shape[1]):
        alike.setdefault(np.packbits(sizes[:, column] > 0).tobytes(), []).append(column)
    intervals: list[Interval | None] = [None] * values.shape[1]
    for columns in alike.values():
        having = sizes[:, columns[0]] > 0  # a document without the number cannot be drawn for it
        if having.sum() < 2:
            continue
        of_documents = sums[having][:, columns], sizes[having][:, columns]
        means = [
            weights @ of_documents[0] / (weights @ of_documents[1])
            for weights in resampled_documents(int(having.sum()), resamples, seed=seed)
        ]
        for column, drawn in zip(columns, np.concatenate(means).T, strict=True):
            intervals[column] = interval_of(drawn, confidence, int(having.sum()))
    return intervals


def numbered(documents: Sequence[Hashable]) -> tuple[np.ndarray, int]:
    """Documents as numbers from 0 on, in the order in which they come, and how many there are."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(documents))}
    return np.fromiter((numbers[name] for name in documents), dtype=np.int64, count=len(documents)), len(numbers)


def resampled_documents(
    count: int, resamples: int, *, seed: int | Sequence[int], width: int | None = None
) -> Iterator[np.ndarray]:
    """How often each of `count` documents is drawn, for all draws of a bootstrap, some draws at a time.

    Args:
        count: documents, as many as are drawn with replacement in each draw.
        resamples: number of draws.
        seed: of the draws.
        width: numbers that the caller keeps for one draw, if more than `count`; it bounds how many come at a time.
    Returns:
        Arrays [some draws, count] of whole numbers as float64.
    """
    generator = np.random.default_rng(seed)
    at_once = max(1, _NUMBERS_AT_ONCE // max(count, width or 0))
    for start in range(0, resamples, at_once):
        some = min(at_once, resamples - start)
        drawn = generator.integers(count, size=(some, count))
        yield np.stack([np.bincount(row, minlength=count) for row in drawn]).astype(np.float64)


def interval_of(drawn: np.ndarray, confidence: float, count: int) -> Interval:
    """The expanded percentile interval of what the draws gave.

    Draws from n documents spread less than the documents do, by sqrt((n - 1) / n), and percentiles are as if that
    spread were known, as a normal quantile is beside Student's. So both tails are cut further out: at
    Phi(-sqrt(n / (n - 1)) t), t the quantile of Student's distribution with n - 1 degrees of freedom.

    Args:
        drawn: the statistic of each draw.
        confidence: of the interval.
        count: n, at least 2.
    Source: Hesterberg 2015, What Teachers Should Know About the Bootstrap, arXiv 1411.5279.
    """
    tail = ndtr(-sqrt(count / (count - 1)) * stdtrit(count - 1, 0.5 + confidence / 2))
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Interval(float(low), float(high))


def sign_test(gained: int, lost: int) -> float:
    """Two-sided exact p of `gained` against `lost` changes, if either way were as likely: McNemar's exact test.

    min(1, 2 * P(X <= min(gained, lost))), X binomial with gained + lost trials and chance 1/2.

    Raises:
        ValueError: a negative number.
    Source: McNemar 1947; Fagerland, Lydersen and Laake 2013 for the exact form.
    """
    if gained < 0 or lost < 0:
        raise ValueError(f"{gained} gained and {lost} lost are not both counts.")
    return float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


def mcnemar(
    after: Sequence[bool] | np.ndarray,
    before: Sequence[bool] | np.ndarray,
    documents: Sequence[Hashable] | None = None,
) -> dict[str, float | int]:
    """McNemar's exact test of two models on the same samples, a document as one trial.

    Samples of one document change together. So each document counts once: as gained if more of its samples went from
    no to yes than from yes to no, as lost if fewer, and not at all if as many. If the models did not differ, swapping
    them within a document would change nothing, and gained and lost were equally likely whatever the samples of a
    document have in common; so the sign test over documents is exact. With one sample a document it is McNemar's.

    Args:
        after: yes or no of each sample by the model in question.
        before: likewise by the model that it is compared with.
        documents: the document of each sample; by default each sample is its own.
    Returns:
        Samples that `gained`, `lost`, are yes in `both` and in `neither`; `documents_gained`, `documents_lost`; `p`.
    Raises:
        ValueError: the lengths differ or are 0.
    """
    yes, was = np.asarray(after, dtype=bool), np.asarray(before, dtype=bool)
    documents = range(len(after)) if documents is None else documents
    if not len(after) == len(before) == len(documents) or not len(after):
        raise ValueError(
            f"{len(after)} and {len(before)} answers of {len(documents)} documents: as many are needed, one or more."
        )
    index, count = numbered(documents)
    net = np.bincount(index, weights=yes.astype(int) - was.astype(int), minlength=count)
    documents_gained, documents_lost = int((net > 0).sum()), int((net < 0).sum())
    return {
        "gained": int((yes & ~was).sum()),
        "lost": int((was & ~yes).sum()),
        "both": int((yes & was).sum()),
        "neither": int((~yes & ~was).sum()),
        "documents_gained": documents_gained,
        "documents_lost": documents_lost,
        "p": sign_test(documents_gained, documents_lost),
    }


def check_confidence(confidence: float) -> None:
    """Raise ValueError unless `confidence` is a share between 0 and 1."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence!r}, but it is a share between 0 and 1, such as 0.95.")


class Found(NamedTuple):
    """An interval, None where nothing can be said, and of which kind it is."""

    interval: Interval | None
    kind: str


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
        drawing: `resamples` and `seed` of the bootstrap, as `bootstrap` takes them.
    Raises:
        ValueError: as `bootstrap`.
    """
    index, _ = numbered(documents)
    found: list[Found] = []
    left: list[tuple[int, Interval]] = []  # columns that need a bootstrap, and what is the least width for each
    for place, column in enumerate(answers.T):
        asked = ~np.isnan(column)
        yes, trials, distinct = int(np.nansum(column)), int(asked.sum()), len(np.unique(index[asked]))
        if distinct == trials:
            found.append(Found(wilson(yes, trials, confidence=confidence), WILSON))
        elif yes in (0, trials):
            found.append(Found(wilson(distinct if yes else 0, distinct, confidence=confidence), WILSON))
        else:
            left.append((place, wilson(yes, trials, confidence=confidence)))
            found.append(Found(None, HULL))
    columns = answers[:, [place for place, _ in left]]
    drawn = bootstrap_columns(columns, documents, confidence=confidence, **drawing) if left else []
    for (place, independent), interval in zip(left, drawn, strict=True):
        found[place] = _hull(independent, interval)
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
        ValueError: as `bootstrap`.
    """
    change = after.astype(np.float64) - before
    distinct = numbered(documents)[1]
    counts = (after & before, after & ~before, before & ~after, ~after & ~before)
    ends = wilson_of_difference(*(int(some.sum()) for some in counts), confidence=confidence)
    if distinct == len(change):
        return Found(ends, WILSON)
    if (change == change[0]).all():
        least = wilson(distinct, distinct, confidence=confidence).low
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
