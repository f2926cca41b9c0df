"""Exposure of inserted secrets: by hand, on average, and the skew-normal tail against SciPy."""

import math

import numpy as np
import pytest
from scipy.stats import skewnorm

from hf_axonn_eval.metrics.exposure import _skew_normal, approximate_exposure, exposure, rank


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
        location, scale, shape = _skew_normal(values)
        mean, variance, skew = skewnorm.stats(shape, loc=location, scale=scale, moments="mvs")
        assert (mean, variance) == pytest.approx((values.mean(), values.var()))
        assert skew == pytest.approx((((values - values.mean()) / values.std()) ** 3).mean())


@pytest.mark.parametrize("sign", [1, -1])
def test_more_skew_than_the_distribution_can_have_is_cut(sign):
    values = sign * np.random.default_rng(0).exponential(size=2000) ** 2
    location, scale, shape = _skew_normal(values)
    mean, variance, skew = skewnorm.stats(shape, loc=location, scale=scale, moments="mvs")
    assert (mean, variance, skew) == pytest.approx((values.mean(), values.var(), sign * 0.99))


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
