"""Confidence intervals: for shares and means over documents, and for their differences.

Samples of one document are not independent, so documents are what is counted. Four rules, all closed forms:

    share                 Clopper and Pearson's; several samples a document: with Kish's effective number of documents
                          as trials, as if all samples of a document agreed
    difference of shares  of the shares that were gained and lost, joined by MOVER
    mean, its difference  Student's t over documents, corrected for skewness, as far as that correction reaches
    of few documents      none: shares of a single one, differences of shares of fewer than FEWEST_DOCUMENTS, means and
                          their differences of fewer than FEWEST_OF_MEAN

docs/results/coverage.md says how often each holds the truth: tests/benchmarks/eval/coverage.py.
"""

from collections.abc import Hashable, Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np
from scipy.special import betaincinv, stdtrit
from scipy.stats import binomtest


EXACT, BY_DOCUMENT = "clopper-pearson", "clopper-pearson, documents as trials"
GAINED_AND_LOST = "mover of clopper-pearson"
MEAN = "student's t over documents"
FEWEST_DOCUMENTS = 8  # of a difference of shares; of fewer it holds the truth less often than it says
FEWEST_OF_MEAN = 12  # likewise, where means of skewed documents have no interval
SKEWED = "none: a few documents decide the mean"


class Interval(NamedTuple):
    """Both ends of a confidence interval."""

    low: float
    high: float


def clopper_pearson(successes: float, trials: float, *, confidence: float = 0.95) -> Interval:
    """Compute Clopper and Pearson's exact interval for a share.

    It holds at least `confidence` of the time for every share and number of trials. Wilson's, which is narrower, holds
    84% where about one of the trials is a yes. Whole numbers are not needed: an effective number of trials is none.

    Raises:
        ValueError: not 0 <= successes <= trials with trials > 0, or not 0 < confidence < 1.
    Source: Clopper and Pearson 1934; effective numbers of trials: Korn and Graubard 1998.
    """
    check_confidence(confidence)
    if trials <= 0 or not 0 <= successes <= trials:
        raise ValueError(f"{successes} of {trials} is not a share.")
    tail = (1 - confidence) / 2
    failures = trials - successes
    low = float(betaincinv(successes, failures + 1, tail)) if successes > 0 else 0.0
    high = float(betaincinv(successes + 1, failures, 1 - tail)) if failures > 0 else 1.0
    return Interval(low, high)


def kish(sizes: np.ndarray) -> float:
    """Compute Kish's effective number of documents: (sum m)^2 / sum m^2 for `sizes` m of samples; n if all are equal.

    A share of samples is as uncertain as one of so many independent answers, if all samples of a document agree.
    Source: Kish 1965, Survey Sampling.
    """
    return float(sizes.sum()) ** 2 / float((sizes.astype(np.float64) ** 2).sum())


class Found(NamedTuple):
    """An interval, None where nothing can be said, and of which kind it is."""

    interval: Interval | None
    kind: str


def share_intervals(answers: np.ndarray, documents: Sequence[Hashable], *, confidence: float = 0.95) -> list[Found]:
    """Compute intervals of the shares of yes.

    Args:
        answers: [samples, columns] 1 or 0, NaN where a sample was not asked; a column has one answer at least.
        documents: the document of each sample.
        confidence: of the intervals.
    Returns:
        One a column; none for several samples of a single document.
    Raises:
        ValueError: not 0 < confidence < 1.
    """
    check_confidence(confidence)
    index, count = number_documents(documents)
    found = []
    for column in answers.T:
        sums, sizes = _by_document(column, index, count)
        kind = EXACT if sizes.max() == 1 else BY_DOCUMENT
        if kind == BY_DOCUMENT and len(sizes) == 1:
            found.append(_too_few(1))
            continue
        trials = kish(sizes)
        yes = min(trials, float(sums.sum() / sizes.sum()) * trials)
        if kind == EXACT:
            yes = round(yes)  # n times k / n is not always k
        found.append(Found(clopper_pearson(yes, trials, confidence=confidence), kind))
    return found


def difference_interval(
    after: np.ndarray, before: np.ndarray, documents: Sequence[Hashable], *, confidence: float = 0.95
) -> Found:
    """Compute the interval of the difference of two shares of the same samples.

    Args:
        after: [samples] bool.
        before: [samples] bool, what is subtracted.
        documents: the document of each sample.
        confidence: of the interval.
    Raises:
        ValueError: not 0 < confidence < 1.
    """
    sizes = np.bincount(number_documents(documents)[0])
    if len(sizes) < FEWEST_DOCUMENTS:
        return _too_few(len(sizes))
    trials = kish(sizes)
    gained, lost = (float(which.mean()) * trials for which in (after & ~before, before & ~after))
    return Found(paired_difference(gained, lost, trials, confidence=confidence), GAINED_AND_LOST)


def paired_difference(gained: float, lost: float, trials: float, *, confidence: float = 0.95) -> Interval:
    """Compute the interval of (gained - lost) / trials, the difference of two shares of the same trials.

    With g and l the shares gained and lost, each between the ends of its exact interval, and r = -sqrt(g l /
    ((1 - g)(1 - l))), their correlation as shares of one multinomial,

        from  g - l - sqrt(a^2 - 2 r a d + d^2)    a, b = from g down and up to the ends of its interval
        to    g - l + sqrt(b^2 - 2 r b c + c^2)    c, d = the same of l

    It has a width where no trial, or every trial, changed.

    Args:
        gained: trials that are yes after and no before; need not be a whole number.
        lost: no after and yes before.
        trials: all of them.
        confidence: of the interval.
    Raises:
        ValueError: a negative number, more than there are trials, or not 0 < confidence < 1.
    Source: Zou and Donner 2008, Statistics in Medicine 27, 1693-1702 (MOVER); Zou, Huang and Zhang 2009,
        Computational Statistics and Data Analysis 53, 1080-1085.
    """
    if trials <= 0 or min(gained, lost) < 0 or gained + lost > trials * (1 + 1e-12):
        raise ValueError(f"{gained} gained and {lost} lost of {trials} are not counts of the same trials.")
    more, less = gained / trials, lost / trials
    of_gained, of_lost = (clopper_pearson(each, trials, confidence=confidence) for each in (gained, lost))
    rest = (1 - more) * (1 - less)
    r = -min(1.0, sqrt(more * less / rest)) if more * less > 0 else 0.0

    def distance(one: float, other: float) -> float:
        return sqrt(one * one - 2 * r * one * other + other * other)

    low = more - less - distance(more - of_gained.low, of_lost.high - less)
    high = more - less + distance(of_gained.high - more, less - of_lost.low)
    return Interval(max(-1.0, low), min(1.0, high))


def mean_intervals(values: np.ndarray, documents: Sequence[Hashable], *, confidence: float = 0.95) -> list[Found]:
    """Compute intervals of means over samples, or of mean differences of pairs of them.

    With k documents, S_i and m_i the sum and the number of the samples of document i, M all of them and x the mean,
    the values

        z_i = k (S_i - x m_i) / (M - m_i)

    are, up to a constant, what leaving a document out changes (the jackknife). s^2 = (k - 1) / k^2 sum z_i^2 is their
    variance, g their skewness. Student's t is taken at the degrees of freedom that k documents of unequal sizes leave,
    (sum m^2)^2 / sum m^4 - 1 (Satterthwaite), and bent by Hall's transformation: x - h(t) s / sqrt(k) to
    x - h(-t) s / sqrt(k), with a = g / sqrt(k) and h(t) = 3 / a ((1 + a (t - a / 6))^(1/3) - 1).

    h is an expansion for small a. Where 1 + a (t - a / 6) is not positive at both t and -t it is none, and its end
    would lie five to nine standard errors away, often beyond what the values can be: one document or two decide the
    mean. There is no interval then. Of many documents that is about k < 4 g^2: the sample contradicts the range in
    which these intervals were studied, k of 5 times the square of the true skewness (docs/results/coverage.md).

    Args:
        values: [samples, columns]; NaN where a sample does not have the number; a column has one at least.
        documents: the document of each sample.
        confidence: of the intervals.
    Returns:
        One a column; none where fewer than FEWEST_OF_MEAN documents have the number, all have the same, the degrees
        of freedom are below 2, or the skewness is beyond the correction.
    Raises:
        ValueError: not 0 < confidence < 1.
    Source: Hall 1992, Journal of the Royal Statistical Society B 54, 221-228; jackknife of a ratio: Cochran 1977,
        Sampling Techniques, section 6.17.
    """
    check_confidence(confidence)
    index, count = number_documents(documents)
    return [_mean_interval(*_by_document(column, index, count), confidence) for column in values.T]


def _mean_interval(sums: np.ndarray, sizes: np.ndarray, confidence: float) -> Found:
    count, samples = len(sizes), sizes.sum()
    if count < FEWEST_OF_MEAN:
        return _too_few(count)
    mean = float(sums.sum() / samples)
    changes = (sums - mean * sizes) / (samples - sizes)
    return jackknife_interval(mean, changes, kish(sizes**2) - 1, confidence=confidence)


def jackknife_interval(estimate: float, changes: np.ndarray, freedom: float, *, confidence: float = 0.95) -> Found:
    """Compute Student's t over documents, corrected for skewness; `mean_intervals` has the formula.

    Args:
        estimate: from all documents.
        changes: [documents] by how much the estimate is less without each of them.
        freedom: degrees of freedom that documents of unequal sizes leave.
        confidence: of the interval.
    Returns:
        None for fewer than FEWEST_OF_MEAN documents, where none changes the estimate, for fewer than 2 degrees of
        freedom, or where the skewness is beyond the correction.
    """
    count = len(changes)
    if count < FEWEST_OF_MEAN:
        return _too_few(count)
    if freedom < 2:
        return Found(None, "none: few documents have nearly all samples")
    z = count * changes
    largest = float(np.abs(z).max())
    z = z / (largest or 1.0)  # powers of probabilities near 1e-150 would be 0
    moment = float((z**2).mean())
    if sqrt(moment) * largest <= 1e-12 * abs(estimate):  # equal up to rounding
        return Found(None, "none: all documents have the same")
    error = sqrt(moment * (count - 1)) / count * largest
    bend = float((z**3).mean()) / moment**1.5 / sqrt(count)
    quantile = float(stdtrit(freedom, 0.5 + confidence / 2))
    if abs(bend) * (quantile + abs(bend) / 6) >= 1:
        return Found(None, SKEWED)

    def bent(t: float) -> float:
        return t if abs(bend) < 1e-6 else 3 / bend * (float(np.cbrt(1 + bend * (t - bend / 6))) - 1)

    return Found(Interval(estimate - bent(quantile) * error, estimate - bent(-quantile) * error), MEAN)


def _by_document(column: np.ndarray, index: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return sums and numbers of the values of the documents that have any."""
    has = ~np.isnan(column)
    sizes = np.bincount(index[has], minlength=count).astype(np.float64)
    sums = np.bincount(index[has], weights=column[has], minlength=count)
    return sums[sizes > 0], sizes[sizes > 0]


def _too_few(documents: int) -> Found:
    return Found(None, "none: a single document" if documents == 1 else f"none: {documents} documents are too few")


def number_documents(documents: Sequence[Hashable]) -> tuple[np.ndarray, int]:
    """Number documents from 0 on, in the order in which they come; also return how many there are."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(documents))}
    return np.fromiter((numbers[name] for name in documents), dtype=np.int64, count=len(documents)), len(numbers)


def sign_test(gained: int, lost: int) -> float:
    """Compute the two-sided exact p of `gained` against `lost` changes, if either were as likely: McNemar's test.

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
    """Run McNemar's exact test of two models on the same samples, a document as one trial.

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
    index, count = number_documents(documents)
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
