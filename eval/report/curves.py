"""Numbers along a line: by prefix length, by length of match, by probability, by number of draws.

Each is a share of samples, with an interval by the rules of analysis/intervals.py.
"""

from collections.abc import Callable, Sequence
from math import floor, inf, log

import numpy as np

from hf_axonn_eval.analysis.intervals import share_intervals
from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.metrics.discoverability import CHANCES, n_needed
from hf_axonn_eval.metrics.registry import value
from hf_axonn_eval.report.charts import Point


BINS = 25
LEAST = -50.0  # decimal logarithm of the smallest probability that is separated from smaller ones
WIDTH = -LEAST / BINS


def survival(results: Sequence[SampleResult], **options) -> list[Point]:
    """Compute for each length L the share of suffixes whose first L tokens come back: divergence_point >= L.

    Only suffixes of at least L tokens enter, so that at each L the share is the exact match of suffixes cut to L.

    Args:
        results: of one run, at least one.
        **options: `confidence` of the intervals.
    """
    longest = max(result.suffix_length for result in results)
    answers = np.full((len(results), longest), np.nan)
    for row, result in zip(answers, results, strict=True):
        row[: result.suffix_length] = 0
        row[: result.divergence_point] = 1
    return _points(range(1, longest + 1), answers, results, options)


def by_prefix_length(results: Sequence[SampleResult], **options) -> list[Point]:
    """Compute the exact match for each prefix length among the samples; arguments as of `survival`."""
    lengths = sorted({result.prefix_length for result in results})
    column = {length: place for place, length in enumerate(lengths)}
    answers = np.full((len(results), len(lengths)), np.nan)
    for row, result in zip(answers, results, strict=True):
        row[column[result.prefix_length]] = result.exact_match
    return _points(lengths, answers, results, options)


def by_offset(results: Sequence[SampleResult], **options) -> dict[tuple[int, int], Point]:
    """Compute the exact match for each offset and prefix length among the samples; arguments as of `survival`.

    Returns:
        By (offset, prefix length), as far as such samples were asked; the place of a point is the offset.
    """
    pairs = sorted({(result.offset, result.prefix_length) for result in results})
    column = {pair: place for place, pair in enumerate(pairs)}
    answers = np.full((len(results), len(pairs)), np.nan)
    for row, result in zip(answers, results, strict=True):
        row[column[result.offset, result.prefix_length]] = result.exact_match
    points = _points([offset for offset, _ in pairs], answers, results, options)
    return dict(zip(pairs, points, strict=True))


def draws(results: Sequence[SampleResult], **options) -> dict[float, list[Point]]:
    """Compute by p of CHANCES the share of samples that n draws of the stated sampler give back with probability p.

    The curves go from n = 1 to a million. Samples without `sampled_logprob` do not enter; without any there is no
    curve. Arguments as of `survival`.
    """
    return _by_draws(results, lambda result: result.sampled_logprob, options)


def draws_at_most(results: Sequence[SampleResult], **options) -> dict[float, list[Point]]:
    """Compute the same as `draws`, of the upper bound by ranks: no sampling gives a larger share."""

    def bound(result: SampleResult) -> float | None:
        bits = value(result, "rank_bits")
        return None if bits is None else -bits * log(2)

    return _by_draws(results, bound, options)


def _by_draws(
    results: Sequence[SampleResult], logprob_of: Callable[[SampleResult], float | None], options: dict
) -> dict[float, list[Point]]:
    logprobs = [(result, logprob_of(result)) for result in results]
    known = [(result, logprob) for result, logprob in logprobs if logprob is not None]
    if not known:
        return {}
    results = [result for result, _ in known]
    numbers = [round(10 ** (place / 4)) for place in range(25)]
    curves = {}
    for p in CHANCES:
        needed = [n_needed(logprob, p) for _, logprob in known]
        answers = np.less_equal.outer(needed, numbers).astype(np.float64)
        curves[p] = _points(numbers, answers, results, options)
    return curves


def probabilities(results: Sequence[SampleResult]) -> list[Point]:
    """Compute a histogram of the decimal logarithm of the suffix probability: shares of samples in BINS bins.

    The probability is that of the stated sampler where there is one, else that of one draw from the full
    distribution; samples without either do not enter. Below 10^LEAST, and never: the first bin. The place of a bin is
    its middle.
    """
    found = [decimal_logarithm(result) for result in results]
    logarithms = [min(max(logarithm, LEAST), 0.0) for logarithm in found if logarithm is not None]
    if not logarithms:
        return []
    counts, edges = np.histogram(logarithms, bins=BINS, range=(LEAST, 0.0))
    middles = (edges[:-1] + edges[1:]) / 2
    return [Point(float(x), float(count / len(logarithms))) for x, count in zip(middles, counts, strict=True)]


def median_probability(results: Sequence[SampleResult]) -> str:
    """Write the probability that half of the samples have at least, of the same samples as `probabilities`."""
    found = sorted(number for result in results if (number := decimal_logarithm(result)) is not None)
    if not found:
        return "-"
    middle = found[len(found) // 2]
    if middle == -inf:
        return "0"
    power = floor(middle + 1e-9)
    return f"{10**middle:.2g}" if middle > -4 else f"{10 ** (middle - power):.1f}e{power}"


def decimal_logarithm(result: SampleResult) -> float | None:
    """Return the logarithm that `probabilities` shows; -inf of 0, None where no probability was measured."""
    logprob = result.logprob if result.sampled_logprob is None else result.sampled_logprob
    return None if logprob is None else logprob / log(10) if logprob > -inf else -inf


def _points(places: Sequence[int], answers: np.ndarray, results: Sequence[SampleResult], options: dict) -> list[Point]:
    """Compute the share of yes at each place.

    Args:
        places: the columns.
        answers: [samples, places] 1 or 0, NaN where a sample was not asked.
        results: the samples.
        options: `confidence`.
    """
    intervals = share_intervals(answers, [result.document_id for result in results], **options)
    return [
        Point(place, float(np.nanmean(column)), *(interval or (None, None)))
        for place, column, (interval, _) in zip(places, answers.T, intervals, strict=True)
    ]
