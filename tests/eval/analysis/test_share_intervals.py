"""Intervals of shares and of their differences: published values, documents, and what they promise."""

import numpy as np
import pytest

from hf_axonn_eval.analysis.intervals import (
    bootstrap,
    difference_interval,
    share_intervals,
    wilson,
    wilson_of_difference,
)


def test_which_interval_a_share_gets():
    nan = np.nan
    answers = np.array([[1, 1, 0, 1, 1], [nan, 0, 0, 1, nan], [0, 0, 0, 1, nan], [nan, 0, 0, 1, nan], [1, 1, 0, 1, 0]])
    found = share_intervals(answers, list("aabba"), resamples=300)
    assert [one.kind for one in found] == [
        "bootstrap, at least wilson", "bootstrap, at least wilson", "wilson", "wilson", "none: a single document",
    ]  # fmt: skip
    assert found[2].interval == wilson(0, 2) and found[3].interval == wilson(2, 2), "a document is one trial"
    assert found[4].interval is None
    alone = share_intervals(answers[:, :1], list("abcde"))
    assert alone == [(wilson(2, 3), "wilson")]
    drawn, independent = bootstrap(answers[:, 1], list("aabba"), resamples=300), wilson(2, 5)
    assert found[1].interval == (min(drawn.low, independent.low), max(drawn.high, independent.high))


def test_a_share_of_few_documents_is_not_surer_than_of_independent_samples():
    """Each of 4 documents has 2 of 25: resampling them finds no spread at all."""
    answers = np.tile([1.0, 1.0] + [0.0] * 23, 4)[:, None]
    documents = np.repeat(range(4), 25).tolist()
    assert bootstrap(answers[:, 0], documents) == pytest.approx((0.08, 0.08))
    assert share_intervals(answers, documents)[0].interval == pytest.approx(wilson(8, 100))


def test_a_share_whose_documents_differ_is_less_sure():
    answers = np.repeat([1.0] * 6 + [0.0] * 6, 10)[:, None]
    [(interval, _)] = share_intervals(answers, np.repeat(range(12), 10).tolist())
    independent = wilson(60, 120)
    assert interval.high - interval.low > 2 * (independent.high - independent.low)
    half = 2.201 * 0.5 / np.sqrt(11)  # by Student's t; the shares of resampled documents lie on steps of 1/12
    assert interval == pytest.approx((0.5 - half, 0.5 + half), abs=1 / 24)


@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_shares_cover_the_truth(spread):
    """Ten documents of ten samples; the chance of a document lies anywhere within `spread` of a half."""
    generator, covered = np.random.default_rng(10), 0
    for seed in range(200):
        chance = generator.uniform(0.5 - spread, 0.5 + spread, size=10)
        answers = (generator.random((10, 10)) < chance[:, None]).astype(float).reshape(-1, 1)
        [(interval, _)] = share_intervals(answers, np.repeat(range(10), 10).tolist(), resamples=200, seed=seed)
        covered += interval.low <= 0.5 <= interval.high
    assert covered > 200 * 0.91  # 0.95 as it says, less two and a half standard errors of 200


def test_which_interval_a_difference_gets():
    yes = np.array([True, True, True, True])
    some = np.array([True, False, False, True])
    low = wilson(2, 2).low
    assert difference_interval(yes, ~yes, list("aabb")) == ((low, 1.0), "wilson")
    assert difference_interval(~yes, yes, list("aabb")) == ((-1.0, -low), "wilson")
    assert difference_interval(some, some, list("aabb")) == ((low - 1, 1 - low), "wilson")
    assert difference_interval(yes, some, list("abcd")) == (wilson_of_difference(2, 2, 0, 0), "wilson")
    interval, kind = difference_interval(yes, some, list("aabb"), resamples=200)
    assert kind == "bootstrap, at least wilson" and interval == pytest.approx(wilson_of_difference(2, 2, 0, 0))
    assert difference_interval(yes, some, list("aaaa")) == (None, "none: a single document")


@pytest.mark.parametrize(
    ("counts", "low", "high"),  # both, gained, lost, neither
    [
        ((36, 12, 2, 0), 0.0569, 0.3404),  # Newcombe, Statistics in Medicine 17 (1998), 2635-2650, method 10
        ((1, 1, 7, 12), -0.507, -0.026),  # Fagerland, Lydersen and Laake, Statistical Analysis of Contingency Tables
    ],
)
def test_the_difference_of_paired_shares_equals_published_values(counts, low, high):
    interval = wilson_of_difference(*counts)
    assert interval.low == pytest.approx(low, abs=5e-5 if low > 0 else 5e-4)
    assert interval.high == pytest.approx(high, abs=5e-5 if low > 0 else 5e-4)
    both, gained, lost, neither = counts
    assert wilson_of_difference(both, lost, gained, neither) == pytest.approx((-interval.high, -interval.low))


def test_the_difference_of_paired_shares_closes_at_the_ends_and_keeps_its_width():
    assert wilson_of_difference(0, 0, 0, 12) == pytest.approx((-wilson(0, 12).high, wilson(0, 12).high))
    low, high = wilson_of_difference(0, 12, 0, 0)
    assert high == 1 and 0.6 < low < wilson(12, 12).low
    with pytest.raises(ValueError, match="-1 lost"):
        wilson_of_difference(1, 1, -1, 1)
    with pytest.raises(ValueError, match="0 of 0"):
        wilson_of_difference(0, 0, 0, 0)


@pytest.mark.parametrize("chances", [(0.0, 0.3, 0.0, 0.7), (0.02, 0.1, 0.01, 0.87), (0.3, 0.1, 0.1, 0.5)])
def test_the_difference_of_paired_shares_covers_the_truth_where_a_bootstrap_does_not(chances):
    generator = np.random.default_rng(8)
    truth, covered = chances[1] - chances[2], [0, 0]
    for counts in generator.multinomial(12, chances, size=300):
        ends = wilson_of_difference(*map(int, counts))
        covered[0] += ends.low <= truth <= ends.high
        change = np.repeat([0.0, 1.0, -1.0, 0.0], counts)
        ends = bootstrap(change, range(12), resamples=100)
        covered[1] += ends.low <= truth <= ends.high
    assert covered[0] > 300 * 0.92, "95% but for chance in 300 tries"
    assert covered[1] < covered[0]


def test_the_ends_of_a_difference_lie_between_minus_one_and_one():
    assert wilson_of_difference(0, 0, 5, 0).low == -1 and wilson_of_difference(0, 5, 0, 0).high == 1
    assert wilson_of_difference(5, 0, 0, 0) == pytest.approx((-(1 - wilson(5, 5).low), 1 - wilson(5, 5).low))
    for counts in ((0, 1, 0, 0), (0, 0, 1, 0), (1, 1, 1, 1), (0, 3, 1, 0)):
        low, high = wilson_of_difference(*counts)
        assert -1 <= low < high <= 1
    for wrong in ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, 1, -1)):
        with pytest.raises(ValueError, match="not all counts"):
            wilson_of_difference(*wrong)


@pytest.mark.parametrize(
    ("counts", "phi"),
    # by hand: 12 * 2 - 4 * 4 = 8 is less than half of 22, so nothing is left; 15 * 3 - 2 * 2 = 41, less 11
    [((12, 4, 4, 2), 0.0), ((15, 2, 2, 3), 30 / (17 * 5)), ((2, 7, 6, 1), (2 - 42) / (9 * 7 * 8 * 8) ** 0.5)],
)
def test_how_two_shares_go_together_makes_their_difference_surer(counts, phi):
    both, gained, lost, neither = counts
    trials = sum(counts)
    after, before = wilson(both + gained, trials), wilson(both + lost, trials)
    mine, other = (both + gained) / trials - after.low, before.high - (both + lost) / trials
    below = (gained - lost) / trials - wilson_of_difference(*counts).low
    assert below**2 == pytest.approx(mine**2 + other**2 - 2 * phi * mine * other)


def test_intervals_are_of_95_percent_unless_asked_otherwise():
    answers, documents = np.array([[1.0], [0.0], [1.0], [1.0]]), list("aabb")
    yes, was = np.array([True, True, False, True]), np.array([False, True, False, False])
    for call in (
        lambda **options: share_intervals(answers, documents, **options)[0].interval,
        lambda **options: share_intervals(answers, list("abcd"), **options)[0].interval,
        lambda **options: difference_interval(yes, was, documents, **options).interval,
        lambda **options: difference_interval(yes, was, list("abcd"), **options).interval,
        lambda **options: wilson_of_difference(1, 2, 0, 1, **options),
    ):
        assert call() == call(confidence=0.95)
        narrow, plain, wide = call(confidence=0.5), call(), call(confidence=0.99)
        assert wide.low <= plain.low <= narrow.low < narrow.high <= plain.high <= wide.high and narrow != wide


def test_of_columns_that_need_no_draws_none_is_drawn():
    found = share_intervals(np.zeros((4, 2)), list("aabb"), resamples=1)
    assert [one.kind for one in found] == ["wilson", "wilson"]
    with pytest.raises(ValueError, match="1 resamples"):
        share_intervals(np.array([[1.0], [0.0], [1.0], [1.0]]), list("aabb"), resamples=1)
