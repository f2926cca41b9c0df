"""Exposure of inserted secrets: by hand, on average, and the skew-normal tail against SciPy."""

import math

import numpy as np
import pytest
from scipy.stats import gamma, kstest, logistic, skewnorm

from hf_axonn_eval.metrics.exposure import approximate_exposure, exposure, fit_skew_normal, rank


def test_rank_and_exposure_by_hand():
    assert rank(-3.0, [-4.0, -2.0, -9.0]) == 2
    assert rank(-1.0, [-4.0, -2.0]) == 1
    assert rank(-2.0, [-2.0, -2.0, -5.0]) == 3, "a tie counts against the canary"
    assert exposure(1, 1024) == 10
    assert exposure(4, 1024) == 8
    assert exposure(1024, 1024) == 0


def test_a_canary_that_was_not_inserted_has_the_mean_exposure_of_chance():
    # rank / R is uniform, so that the mean of -log2 of it is 1 / ln 2
    exposures = [exposure(place, 10_000) for place in range(1, 10_001)]
    assert np.mean(exposures) == pytest.approx(1 / math.log(2), abs=1e-3)


@pytest.mark.parametrize("shape", [-3.0, 0.0, 4.0])
def test_the_approximation_goes_on_where_ranks_end(shape):
    space = skewnorm(shape, loc=-80, scale=6)
    seen = space.rvs(4000, random_state=1)
    # The last lies beyond all 4000. Draws of other seeds are off by up to 0.05, 0.41 and 2.4 bits.
    for share, allowed in ((0.3, 0.05), (1e-2, 0.4), (1e-6, 2.5)):
        assert approximate_exposure(space.isf(share), seen) == pytest.approx(-math.log2(share), abs=allowed)
    exact = exposure(rank(space.isf(0.05), seen), 4001)
    # a place among 4000 texts has a standard error of 0.1 bits there
    assert approximate_exposure(space.isf(0.05), seen) == pytest.approx(exact, abs=0.2)


def test_the_tail_equals_scipys():
    from hf_axonn_eval.metrics.exposure import _log_tail

    for shape in (-2.0, 0.0, 1.5):
        for start in (-8.0, -1.0, 0.0, 2.0, 4.0):
            assert _log_tail(start, shape) == pytest.approx(skewnorm.logsf(start, shape), rel=1e-6, abs=1e-9)
    # Mills' ratio, far beyond what a probability in floating point can say
    assert _log_tail(60.0, 0.0) == pytest.approx(-1800 - math.log(60 * math.sqrt(2 * math.pi)), abs=1e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: exposure(0, 10), "rank 0 of 10"),
        (lambda: exposure(11, 10), "rank 11 of 10"),
        (lambda: rank(math.nan, [1.0]), "NaN"),
        (lambda: approximate_exposure(-1.0, [-2.0] * 99), "99 candidates are too few"),
        (lambda: approximate_exposure(-1.0, [-2.0] * 100), "equally likely"),
        (lambda: approximate_exposure(-1.0, [-math.inf] * 100), "not finite"),
    ],
)
def test_what_has_no_exposure_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("seed", range(3))
def test_the_fit_has_the_moments_of_the_candidates(seed):
    for values in (
        np.random.default_rng(seed).normal(-80, 6, 500),
        skewnorm(3.0 - 3 * seed).rvs(500, random_state=seed),
    ):
        location, scale, shape, p = fit_skew_normal(values)
        mean, variance, skew = skewnorm.stats(shape, loc=location, scale=scale, moments="mvs")
        assert (mean, variance) == pytest.approx((values.mean(), values.var()))
        assert p == pytest.approx(kstest(values, "skewnorm", args=(shape, location, scale)).pvalue)
        assert skew == pytest.approx((((values - values.mean()) / values.std()) ** 3).mean())


def errors(space, bits: float, *, draws: int = 10, candidates: int = 10_000) -> tuple[float, float]:
    """By how many bits at most the approximation is below and above the truth, of a canary of so many bits."""
    draw = np.random.default_rng(0)
    canary = float(space.isf(2.0**-bits))
    found = [approximate_exposure(canary, space.rvs(candidates, random_state=draw)) - bits for _ in range(draws)]
    return min(found), max(found)


class Mirrored:
    """The distribution of -X: log-probabilities whose tail is on the side of the unlikely."""

    def __init__(self, space):
        self.space = space

    def isf(self, share):
        return -self.space.ppf(share)

    def rvs(self, number, random_state):
        return -self.space.rvs(number, random_state=random_state)


@pytest.mark.parametrize(
    ("space", "at_7", "at_13", "at_20"),
    [
        # skew-normal: the error is that of the skewness of 10,000 candidates, and larger the more it is negative
        (skewnorm(-4), (-1.0, 1.0), (-3.5, 3.5), (-6.5, 6.5)),
        (skewnorm(-3), (-1.0, 1.0), (-2.0, 2.0), (-4.0, 4.0)),
        (skewnorm(0), (-0.5, 0.5), (-1.0, 1.0), (-2.0, 2.0)),
        (skewnorm(3), (-0.5, 0.5), (-0.6, 0.6), (-1.0, 1.0)),
        (skewnorm(5), (-0.5, 0.5), (-0.6, 0.6), (-1.0, 1.0)),
        # not skew-normal: also that of another tail, which no number of candidates mends
        (gamma(16), (-0.5, 0.5), (0.0, 2.0), (2.0, 5.0)),
        (Mirrored(gamma(16)), (-0.5, 0.5), (-2.5, -0.5), (-6.5, -3.5)),
        (Mirrored(gamma(6)), (-0.5, 1.5), (-3.0, 1.0), (-8.0, -2.5)),
        (logistic(), (0.0, 1.5), (5.0, 11.0), (16.0, 33.0)),
    ],
)
def test_how_far_the_approximation_is_from_the_truth(space, at_7, at_13, at_20):
    for bits, (least, most) in ((7, at_7), (13, at_13), (20, at_20)):
        below, above = errors(space, bits)
        assert least <= below and above <= most, (bits, below, above)


@pytest.mark.parametrize("space", [gamma(1), gamma(2), Mirrored(gamma(1)), Mirrored(gamma(2)), skewnorm(-20)])
def test_more_skew_than_can_be_fitted_is_refused(space):
    values = space.rvs(10_000, random_state=np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"a skewness of -?[0-9.]+, and .* up to 0.9 only: use the rank"):
        fit_skew_normal(values)


def test_up_to_which_skewness_there_is_a_fit():
    """The skewness of ones and zeros, with a share q of ones, is (1 - 2q) / sqrt(q - qq)."""
    for ones, fits in ((296, True), (292, False)):
        values = [1.0] * ones + [0.0] * (1000 - ones)
        for sign in (1, -1):
            scores = [sign * value for value in values]
            if fits:
                assert fit_skew_normal(scores).shape * sign > 0
            else:
                with pytest.raises(ValueError, match="skewness"):
                    fit_skew_normal(scores)


def test_the_fit_says_how_well_it_fits():
    draw = np.random.default_rng(0)
    assert fit_skew_normal(skewnorm(3).rvs(10_000, random_state=draw)).p > 0.05
    for wrong in (logistic(), gamma(6)):
        assert fit_skew_normal(wrong.rvs(10_000, random_state=draw)).p < 0.01


def test_the_least_and_the_most_that_there_can_be():
    hundred = np.linspace(-3.0, -2.0, 100)
    assert approximate_exposure(-2.5, hundred) == pytest.approx(1, abs=1e-4), "half of them are likelier"
    assert approximate_exposure(-60.0, hundred) == pytest.approx(0, abs=1e-9)
    assert rank(-9.0, hundred) == 101 and rank(-2.0, hundred) == 2
    assert exposure(1, 1) == 0 and exposure(2, 3) == pytest.approx(math.log2(1.5))
    for wrong in ([-math.inf] + [-2.0] * 99, [math.nan] + [-2.0] * 99):
        with pytest.raises(ValueError, match="not finite"):
            approximate_exposure(-1.0, wrong)
    with pytest.raises(ValueError, match="not finite"):
        approximate_exposure(-math.inf, hundred)
    with pytest.raises(ValueError, match="NaN"):
        rank(-1.0, [-2.0, math.nan])
