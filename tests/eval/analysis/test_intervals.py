"""Intervals against published values, and against what they promise."""

import numpy as np
import pytest
from scipy.stats import binomtest, norm, t

from hf_axonn_eval.analysis.intervals import (
    bootstrap,
    bootstrap_columns,
    interval_of,
    mcnemar,
    numbered,
    resampled_documents,
    sign_test,
    wilson,
)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_equals_published_values(successes, trials, low, high):
    interval = wilson(successes, trials)
    assert interval.low == pytest.approx(low, abs=5e-5)
    assert interval.high == pytest.approx(high, abs=5e-5)


def test_wilson_equals_scipys():
    for successes, trials in ((0, 1), (1, 1), (3, 12), (81, 263), (0, 5000), (4999, 5000)):
        for confidence in (0.5, 0.95, 0.999):
            expected = binomtest(successes, trials).proportion_ci(confidence, method="wilson")
            assert wilson(successes, trials, confidence=confidence) == pytest.approx(expected, abs=1e-12)


def test_wilson_is_symmetric_and_closes_at_the_ends():
    assert wilson(0, 12).low == 0 and wilson(12, 12).high == 1
    assert wilson(12, 12).low == pytest.approx(1 - wilson(0, 12).high)
    assert wilson(3, 12, confidence=0.99).high > wilson(3, 12, confidence=0.9).high


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_what_is_no_share(successes, trials):
    with pytest.raises(ValueError, match="is not a share"):
        wilson(successes, trials)


def test_confidence_must_be_a_share():
    with pytest.raises(ValueError, match="95"):
        wilson(1, 2, confidence=95)
    with pytest.raises(ValueError, match="95"):
        bootstrap([1.0, 2.0], ["a", "b"], confidence=95)


def test_the_tails_are_cut_further_out_for_few_documents():
    drawn = norm.ppf((np.arange(100_000) + 0.5) / 100_000)
    for count in (5, 12, 100_000):
        low, high = interval_of(drawn, 0.95, count)
        expected = np.sqrt(count / (count - 1)) * t.ppf(0.975, count - 1)
        assert (-low, high) == pytest.approx((expected, expected), rel=2e-3)


def test_a_bootstrap_of_few_documents_covers_the_mean_as_often_as_it_says():
    generator, covered, plain = np.random.default_rng(0), 0, 0
    for seed in range(800):
        values = generator.normal(size=8)
        low, high = bootstrap(values, range(8), resamples=300, seed=seed)
        covered += low <= 0 <= high
        means = values[generator.integers(8, size=(300, 8))].mean(axis=1)
        plain += np.quantile(means, 0.025) <= 0 <= np.quantile(means, 0.975)
    assert 800 * 0.92 < covered < 800 * 0.97  # 0.95 as it says; the standard error of 800 is 0.008
    assert plain < 800 * 0.91, "plain percentiles do not, so that this test can fail"


def test_bootstrap_of_independent_values_agrees_with_the_standard_error():
    values = np.random.default_rng(1).normal(3.0, 2.0, size=400).tolist()
    interval = bootstrap(values, range(400))
    half = 1.96 * np.std(values) / np.sqrt(400)
    allowed = 0.1 * half  # 2000 draws know an end with a standard error of 3% of it
    assert interval.low == pytest.approx(np.mean(values) - half, abs=allowed)
    assert interval.high == pytest.approx(np.mean(values) + half, abs=allowed)


def test_bootstrap_resamples_documents_and_not_samples():
    values = np.random.default_rng(2).normal(size=20)
    alone = bootstrap(values.tolist(), range(20))
    # ten copies of each value inside its document bring no new information
    copied = bootstrap(np.repeat(values, 10).tolist(), np.repeat(np.arange(20), 10).tolist())
    assert copied == pytest.approx(alone)
    unaware = bootstrap(np.repeat(values, 10).tolist(), range(200))
    assert unaware.high - unaware.low < 0.5 * (alone.high - alone.low)


def test_bootstrap_repeats_itself_with_its_seed():
    values, documents = np.random.default_rng(3).normal(size=30).tolist(), range(30)
    assert bootstrap(values, documents, seed=7) == bootstrap(values, documents, seed=7)
    assert bootstrap(values, documents, seed=7) != bootstrap(values, documents, seed=8)


def test_one_document_has_no_interval():
    assert bootstrap([0.1, 0.2, 0.3], ["a", "a", "a"]) is None


def test_bootstrap_names_wrong_input():
    with pytest.raises(ValueError, match="2 values of 1 documents"):
        bootstrap([1.0, 2.0], ["a"])
    with pytest.raises(ValueError, match="10 resamples"):
        bootstrap([1.0, 2.0], ["a", "b"], resamples=10)


def test_columns_are_bootstrapped_together_as_they_are_alone():
    generator = np.random.default_rng(4)
    values = generator.normal(size=(60, 4))
    values[:20, 1] = np.nan  # documents 0 to 3 have none of it
    values[::2, 2] = np.nan  # every document has some
    values[5:, 3] = np.nan  # one document only
    documents = [place // 5 for place in range(60)]
    together = bootstrap_columns(values, documents, seed=5)
    for column, interval in zip(values.T, together, strict=True):
        has = ~np.isnan(column)
        alone = bootstrap(column[has], [documents[place] for place in np.flatnonzero(has)], seed=5)
        assert interval == (None if alone is None else pytest.approx(alone, abs=1e-12))
    assert together[3] is None and together[0] is not None


def test_a_bootstrap_of_many_documents_is_made_in_pieces():
    values = np.random.default_rng(6).normal(size=30_000)
    low, high = bootstrap(values, range(30_000), resamples=200)
    # 200 draws know the width with a standard error of 7%
    assert high - low == pytest.approx(2 * 1.96 / np.sqrt(30_000), rel=0.2)


@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    [(0, 0, 1.0), (3, 3, 1.0), (5, 0, 2 / 32), (0, 10, 2 / 1024), (9, 1, 2 * 11 / 1024), (8, 2, 2 * 56 / 1024)],
)
def test_the_sign_test_by_hand(gained, lost, p):
    assert sign_test(gained, lost) == pytest.approx(p, rel=1e-12)


def test_the_sign_test_far_out():
    assert 0 < sign_test(400, 1000) < 1e-50
    assert sign_test(0, 5000) == 0  # less than the smallest float


def test_mcnemar_counts_pairs():
    after = [True, True, True, True, False, False, True]
    before = [True, False, False, False, True, False, False]
    assert mcnemar(after, before) == {
        "gained": 4, "lost": 1, "both": 1, "neither": 1,
        "documents_gained": 4, "documents_lost": 1, "p": pytest.approx(2 * 6 / 32),
    }  # fmt: skip


def test_mcnemar_counts_a_document_once():
    documents = ["a"] * 10 + ["b"] * 2 + ["c"] * 2 + ["d"]
    after = [True] * 10 + [True, False] + [False, False] + [False]
    before = [False] * 10 + [False, True] + [False, False] + [True]
    found = mcnemar(after, before, documents)
    # a changes ten times one way, b once either way, c not at all, d once the other way
    assert (found["gained"], found["lost"]) == (11, 2)
    assert (found["documents_gained"], found["documents_lost"], found["p"]) == (1, 1, 1.0)


def test_mcnemar_keeps_its_level_where_samples_of_a_document_change_together():
    generator = np.random.default_rng(7)
    documents = np.arange(30).repeat(20).tolist()
    rejected = 0
    for _ in range(300):
        # neither model is better, but a document goes one way as a whole
        way = generator.integers(3, size=30).repeat(20)
        rejected += mcnemar(way == 1, way == 2, documents)["p"] <= 0.05
    assert rejected <= 300 * 0.05 + 3 * np.sqrt(300 * 0.05 * 0.95)


def test_mcnemar_names_wrong_input():
    with pytest.raises(ValueError, match="2 and 1 answers"):
        mcnemar([True, False], [True])
    with pytest.raises(ValueError, match="-1 gained"):
        sign_test(-1, 2)


@pytest.mark.parametrize("confidence", [0, 1, -0.5, 1.5])
def test_a_confidence_lies_between_0_and_1(confidence):
    for call in (
        lambda: wilson(1, 2, confidence=confidence),
        lambda: bootstrap([1.0, 2.0], "ab", confidence=confidence),
        lambda: bootstrap_columns(np.ones((2, 1)), "ab", confidence=confidence),
    ):
        with pytest.raises(ValueError, match="between 0 and 1"):
            call()


def test_a_hundred_draws_are_enough_and_2000_the_default():
    values, documents = [1.0, 5.0, 2.0, 9.0], range(4)
    assert bootstrap(values, documents, resamples=100) is not None
    with pytest.raises(ValueError, match="99 resamples"):
        bootstrap(values, documents, resamples=99)
    for wrong, message in (((), "0 values"), ((1.0,), "1 values of 2"), ((1.0, 2.0, 3.0), "3 values of 2")):
        with pytest.raises(ValueError, match=message):
            bootstrap(wrong, "ab" if wrong else "")
    values = np.random.default_rng(0).normal(size=50)
    plain = bootstrap(values, range(50))
    assert plain == bootstrap(values, range(50), confidence=0.95, resamples=2000, seed=0)
    assert [plain] == bootstrap_columns(values[:, None], range(50))
    for other in ({"resamples": 1999}, {"resamples": 2001}, {"seed": 1}, {"confidence": 0.94}):
        assert bootstrap(values, range(50), **other) != plain
        assert bootstrap_columns(values[:, None], range(50), **other) != [plain]
    assert wilson(3, 9) == wilson(3, 9, confidence=0.95)


def test_two_documents_have_an_interval_and_one_does_not():
    low, high = bootstrap([1.0, 3.0], "ab")
    assert (low, high) == (1, 3)
    columns = np.array([[1.0, np.nan], [3.0, 2.0], [np.nan, np.nan]])
    assert bootstrap_columns(columns, "abc") == [(1, 3), None], "the third has nothing, the second column one"


@pytest.mark.parametrize(("count", "width", "together"), [(10, None, 10), (10, 50, 2), (50, 10, 2), (101, None, 1)])
def test_draws_come_in_pieces_that_fit_into_memory(monkeypatch, count, width, together):
    monkeypatch.setattr("hf_axonn_eval.analysis.intervals._NUMBERS_AT_ONCE", 100)
    pieces = list(resampled_documents(count, 23, seed=0, width=width))
    assert [len(piece) for piece in pieces[:-1]] == [together] * (len(pieces) - 1)
    assert sum(map(len, pieces)) == 23 and 1 <= len(pieces[-1]) <= together
    assert all((piece.sum(axis=1) == count).all() and piece.shape[1] == count for piece in pieces)


def test_documents_are_drawn_evenly():
    drawn = np.concatenate(list(resampled_documents(4, 4000, seed=1)))
    # each is drawn once on average, with a variance of 3/4
    assert drawn.mean(axis=0) == pytest.approx([1] * 4, abs=5 * np.sqrt(0.75 / 4000))
    # the standard error of that variance is 0.75 * sqrt((2 - 1/6) / 4000), 2.1% of it, of which this is 4.7
    assert drawn.var(axis=0) == pytest.approx([0.75] * 4, rel=0.1)


def test_documents_are_numbered_as_they_come():
    index, count = numbered(["b", "a", "b", "c"])
    assert (index.tolist(), count) == ([0, 1, 0, 2], 3)


def test_a_single_change_or_none_says_nothing():
    assert sign_test(1, 0) == sign_test(0, 1) == sign_test(0, 0) == 1
    for wrong in ((-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="not both counts"):
            sign_test(*wrong)
    with pytest.raises(ValueError, match="0 and 0 answers"):
        mcnemar([], [])
    for after, before, documents in (("x", "xx", "ab"), ("xx", "x", "ab"), ("xx", "xx", "a"), ("xx", "xx", "abc")):
        with pytest.raises(ValueError, match="as many are needed, one or more"):
            mcnemar(list(map(bool, after)), list(map(bool, before)), documents)


def test_one_trial_is_a_share_and_none_is_not():
    assert wilson(0, 1).low == 0 and wilson(0, 1).high == pytest.approx(0.7935, abs=5e-5)
    assert wilson(1, 1).high == 1 and wilson(1, 1).low == pytest.approx(0.2065, abs=5e-5)
    for wrong in ((0, 0), (2, 1), (0, -1), (-1, 1)):
        with pytest.raises(ValueError, match="is not a share"):
            wilson(*wrong)
