"""training_scripts/study/findings/effects.py: estimates over articles, lines, and whether intervals hold the truth."""

from math import isclose, log10

import numpy as np
import pytest

from hf_axonn_eval.analysis.intervals import mean_intervals
from hf_axonn_scripts.study.findings.effects import Cell, estimate, line, ratio


ARTICLES = 24
SIZES = [log10(size) for size in (3e5, 1e6, 3e6, 1e7, 3e7)]


def cell(values, articles=None):
    values = np.asarray(values, dtype=np.float64)
    return Cell.from_passages(values, np.arange(len(values)) if articles is None else articles, ARTICLES)


def test_a_mean_has_the_interval_of_means_over_documents():
    draw = np.random.default_rng(1)
    values, articles = draw.gamma(1.0, size=60), draw.integers(0, ARTICLES, size=60)
    found = estimate([(1.0, cell(values, articles))])
    (expected,) = mean_intervals(values[:, None], articles.tolist())
    assert isclose(found["mean"], values.mean())
    assert (found["low"], found["high"]) == pytest.approx(tuple(expected.interval))
    assert found["articles"] == len(set(articles.tolist())) and found["passages"] == 60


def test_a_difference_of_the_same_articles_is_as_sure_as_its_pairs():
    draw = np.random.default_rng(2)
    common, change = draw.normal(0, 10, ARTICLES), draw.normal(1, 0.1, ARTICLES)
    found = estimate([(1.0, cell(common + change)), (-1.0, cell(common))])
    (expected,) = mean_intervals(change[:, None], list(range(ARTICLES)))
    assert (found["low"], found["high"]) == pytest.approx(tuple(expected.interval))
    assert found["high"] - found["low"] < 0.2  # what articles have in common, 100 times as much, cancels


def test_cells_of_different_articles_are_as_sure_as_two_samples():
    draw = np.random.default_rng(3)
    half = ARTICLES // 2
    one, two = draw.normal(3, 1, half), draw.normal(1, 1, half)
    cells = [(1.0, cell(one)), (-1.0, cell(two, np.arange(half, ARTICLES)))]
    found = estimate(cells)
    error = np.sqrt(one.var(ddof=1) / half + two.var(ddof=1) / half)
    assert isclose(found["mean"], one.mean() - two.mean())
    assert 3.5 * error < found["high"] - found["low"] < 5.5 * error
    assert found["articles"] == ARTICLES


def test_nothing_is_said_where_all_articles_have_the_same_or_few_are_there():
    same = estimate([(0.3, cell([0.1] * ARTICLES)), (-0.3, cell([0.7] * ARTICLES))])
    assert same["low"] is None and "same" in same["interval"] and isclose(same["mean"], -0.18)
    few = estimate([(1.0, cell([1.0, 2.0, 3.0]))])
    assert few["low"] is None and "3 documents are too few" in few["interval"]
    one = estimate([(1.0, cell([1.0]))])
    assert one["mean"] == 1.0 and one["low"] is None


def test_a_ratio_has_no_number_where_its_divisor_may_be_0():
    draw = np.random.default_rng(4)
    whole = draw.normal(10, 1, ARTICLES)
    part = 0.25 * whole + draw.normal(0, 0.1, ARTICLES)
    found = ratio([(1.0, cell(part))], [(1.0, cell(whole))])
    assert isclose(found["mean"], part.mean() / whole.mean()) and found["low"] < 0.25 < found["high"]
    assert found["high"] - found["low"] < 0.03  # numerator and divisor lose the same article
    around_0 = cell(draw.normal(0, 1, ARTICLES))
    nothing = ratio([(1.0, cell(part))], [(1.0, around_0)])
    assert nothing["mean"] is None and "may be 0" in nothing["interval"]


def test_a_line_is_that_of_least_squares():
    draw = np.random.default_rng(5)
    heights = [draw.normal(place**2, 1, ARTICLES) for place in SIZES]
    names = list("abcde")
    found = line(SIZES, [[(1.0, cell(values))] for values in heights], names)
    means = [values.mean() for values in heights]
    slope, start = np.polyfit(SIZES, means, 1)
    assert isclose(found["slope"]["mean"], slope)
    misses = [mean - start - slope * place for mean, place in zip(means, SIZES, strict=True)]
    assert [found["residuals"][name]["mean"] for name in names] == pytest.approx(misses)
    from scipy.stats import linregress, t

    fit = linregress(SIZES, means)
    reach = t.ppf(0.975, 3) * fit.stderr
    assert (found["over_sizes"]["low"], found["over_sizes"]["high"]) == pytest.approx((slope - reach, slope + reach))
    assert isclose(found["r_squared"], fit.rvalue**2)


def test_what_a_line_misses_is_found_and_what_it_does_not_is_not():
    draw = np.random.default_rng(6)

    def missed(bend):
        heights = [place + bend * (number == 2) + draw.normal(0, 0.3, ARTICLES) for number, place in enumerate(SIZES)]
        found = line(SIZES, [[(1.0, cell(values))] for values in heights], list("abcde"))
        return any(miss["low"] > 0 or miss["high"] < 0 for miss in found["residuals"].values())

    assert sum(missed(1.0) for _ in range(50)) == 50
    assert sum(missed(0.0) for _ in range(200)) <= 20  # all five together 95% of the time


def test_two_sizes_have_a_slope_and_one_has_none():
    draw = np.random.default_rng(7)
    terms = [[(1.0, cell(draw.normal(place, 1, ARTICLES)))] for place in (1, 2)]
    found = line([log10(43_200), log10(133_000)], terms, ["a", "b"])
    assert found["over_sizes"]["low"] is None and "2 sizes are too few" in found["over_sizes"]["interval"]
    assert found["slope"]["low"] is not None
    assert all(miss["low"] is None and miss["mean"] == 0 for miss in found["residuals"].values())
    with pytest.raises(ValueError, match="two places, not 1"):
        line([1.0, 1.0], terms, ["a", "b"])


@pytest.mark.parametrize("shared", [0.0, 2.0], ids=["articles alike", "articles differ"])
def test_the_interval_of_a_slope_holds_the_truth(shared):
    """Gains of 24 articles at five sizes, with what an article has in common at all, against a control."""
    draw = np.random.default_rng(8)
    held = 0
    rounds = 300
    for _ in range(rounds):
        level, steepness = draw.normal(0, shared, ARTICLES), 0.5 + draw.normal(0, shared / 4, ARTICLES)
        terms = []
        for place in SIZES:
            control = level + draw.normal(0, 1, ARTICLES)
            trained = level + steepness * place + draw.normal(0, 1, ARTICLES)
            terms.append([(1.0, cell(trained)), (-1.0, cell(control))])
        found = line(SIZES, terms, list("abcde"))["slope"]
        held += found["low"] <= 0.5 <= found["high"]
    assert 0.92 <= held / rounds <= 0.98
