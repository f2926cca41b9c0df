"""Intervals against published values, and against what they promise."""

import numpy as np
import pytest
from scipy.stats import binomtest, t

from hf_axonn_eval.analysis.intervals import (
    clopper_pearson,
    kish,
    mcnemar,
    mean_intervals,
    number_documents,
    sign_test,
)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [  # Newcombe, Statistics in Medicine 17 (1998), table I, method 5
        (81, 263, 0.2527, 0.3676),
        (15, 148, 0.0578, 0.1617),
        (0, 20, 0.0000, 0.1684),
        (1, 29, 0.0009, 0.1776),
    ],
)
def test_clopper_pearson_equals_published_values(successes, trials, low, high):
    interval = clopper_pearson(successes, trials)
    assert interval.low == pytest.approx(low, abs=5e-5)
    assert interval.high == pytest.approx(high, abs=5e-5)


def test_clopper_pearson_equals_scipys():
    for successes, trials in ((0, 1), (1, 1), (3, 12), (81, 263), (0, 5000), (4999, 5000)):
        for confidence in (0.5, 0.95, 0.999):
            expected = binomtest(successes, trials).proportion_ci(confidence, method="exact")
            assert clopper_pearson(successes, trials, confidence=confidence) == pytest.approx(expected, abs=1e-12)


def test_clopper_pearson_is_symmetric_closes_at_the_ends_and_does_not_jump():
    assert clopper_pearson(0, 12).low == 0 and clopper_pearson(12, 12).high == 1
    assert clopper_pearson(12, 12).low == pytest.approx(1 - clopper_pearson(0, 12).high)
    assert clopper_pearson(3, 12, confidence=0.99).high > clopper_pearson(3, 12, confidence=0.9).high
    highs = [clopper_pearson(yes, 5).high for yes in np.linspace(0, 5, 501)]
    assert max(np.diff(highs)) < 0.003 and min(np.diff(highs)) >= 0
    assert clopper_pearson(2.5, 7.5).low > clopper_pearson(2, 6).low, "more trials of the same share"


@pytest.mark.parametrize(("successes", "trials"), [(0, 0), (1, 0), (-1, 5), (6, 5), (2, 1), (0, -1)])
def test_clopper_pearson_refuses_what_is_no_share(successes, trials):
    with pytest.raises(ValueError, match="is not a share"):
        clopper_pearson(successes, trials)


def test_kishs_number_of_documents():
    assert kish(np.array([3, 3, 3])) == pytest.approx(3)
    assert kish(np.array([1, 2, 3])) == pytest.approx(36 / 14)
    assert kish(np.array([1, 1_000_000])) == pytest.approx(1, abs=1e-5), "one document has nearly all samples"


SKEWED_VALUES = np.array([0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4, 0.5, 0.9, 1.2, 1.6])


def interval(values, documents, **options):
    [(found, _)] = mean_intervals(np.asarray(values, dtype=float)[:, None], list(documents), **options)
    return found


def test_a_mean_of_values_without_skewness_has_students_interval():
    values = np.array([-5.0, -4, -3, -2, -1, -0.5, 0.5, 1, 2, 3, 4, 5]) + 7
    half = t.ppf(0.975, 11) * values.std(ddof=1) / np.sqrt(12)
    assert interval(values, range(12)) == pytest.approx((7 - half, 7 + half))


def test_a_mean_of_skewed_values_reaches_further_to_their_long_side():
    low, high = interval(SKEWED_VALUES, range(12))
    assert high - SKEWED_VALUES.mean() > 1.8 * (SKEWED_VALUES.mean() - low)
    turned = interval(-SKEWED_VALUES, range(12))
    assert (turned.low, turned.high) == pytest.approx((-high, -low))
    # Hall's transformation of the lower end gives back Student's quantile
    z = (SKEWED_VALUES.mean() - high) / (SKEWED_VALUES.std(ddof=1) / np.sqrt(12))
    a = ((SKEWED_VALUES - SKEWED_VALUES.mean()) ** 3).mean() / SKEWED_VALUES.std() ** 3 / np.sqrt(12)
    assert z + a * z**2 / 3 + a**2 * z**3 / 27 + a / 6 == pytest.approx(-t.ppf(0.975, 11))


def test_a_mean_that_a_few_documents_decide_has_no_interval():
    """0.170 [0.10, 0.57] of eight documents, and 2.631 [0.00, 3.13] nats: the correction was out of its range."""
    one = np.array([*[0.1] * 11, 0.9])
    assert mean_intervals(one[:, None], range(12)) == [(None, "none: a few documents decide the mean")]
    assert mean_intervals(-one[:, None], range(12)) == [(None, "none: a few documents decide the mean")]
    losses = np.array([*np.linspace(2.6, 3.3, 14), 0.01])
    assert mean_intervals(losses[:, None], range(15))[0].interval is None
    assert mean_intervals(losses[:14, None], range(14))[0].interval is not None


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_the_correction_never_leaves_its_range(confidence):
    """Where there is an interval Hall's transformation grows steadily at both ends, so that its inverse is the one."""
    generator = np.random.default_rng(5)
    given = 0
    for values in generator.lognormal(0, 1.2, size=(300, 12)):
        [(found, kind)] = mean_intervals(values[:, None], range(12), confidence=confidence)
        a = ((values - values.mean()) ** 3).mean() / values.std() ** 3 / np.sqrt(12)
        quantile = t.ppf(0.5 + confidence / 2, 11)
        reaches = min(1 + a * (quantile - a / 6), 1 - a * (quantile + a / 6)) > 0
        assert (found is not None) == reaches and (reaches or kind == "none: a few documents decide the mean")
        given += reaches
        if reaches:
            error = values.std(ddof=1) / np.sqrt(12)
            assert found.low < values.mean() < found.high and found.high - values.mean() < 3 / abs(a) * error
    assert 0 < given < 300


def test_an_interval_does_not_depend_on_the_unit():
    """Probabilities of long suffixes are near 1e-150, and their third powers are not."""
    low, high = interval(SKEWED_VALUES, range(12))
    for unit in (1e-150, 1e-300, 1e150):
        found = interval(SKEWED_VALUES * unit, range(12))  # as ratios: approx takes all that is below 1e-12 as equal
        assert (found.low / unit, found.high / unit) == pytest.approx((low, high), rel=1e-9)


def test_documents_are_counted_and_not_samples():
    values = np.random.default_rng(2).normal(size=20)
    alone = interval(values, range(20))
    # ten copies of each value inside its document bring no new information
    assert interval(np.repeat(values, 10), np.repeat(np.arange(20), 10)) == pytest.approx(alone)
    unaware = interval(np.repeat(values, 10), range(200))
    assert unaware.high - unaware.low < 0.5 * (alone.high - alone.low)


def test_a_mean_in_which_one_document_weighs_much_is_less_sure():
    values = np.array([-2.0, -1.5, -1, -0.8, -0.5, -0.2, 0.2, 0.5, 0.8, 1, 1.5, 2])
    even = interval(np.repeat(values, 2), np.repeat(np.arange(12), 2))
    sizes = [4, 4, *[1] * 8, 4, 4]
    heavy = interval(np.repeat(values, sizes), np.repeat(np.arange(12), sizes))
    assert heavy.high - heavy.low > 1.5 * (even.high - even.low)


@pytest.mark.parametrize("sizes", ["equal", "unequal"])
def test_means_hold_the_truth_as_often_as_they_say(sizes):
    """Of exponential values of 20 documents; docs/results/coverage.md has more."""
    generator = np.random.default_rng(0)
    counts = np.full(20, 5) if sizes == "equal" else np.ceil(generator.lognormal(1.5, 0.7, size=20)).astype(int)
    index = np.repeat(np.arange(20), counts)
    columns = generator.exponential(size=(20, 2000))[index]
    found = [ends for ends, _ in mean_intervals(columns, index.tolist())]
    found = [ends for ends in found if ends is not None]
    assert len(found) > 1000
    held = sum(low <= 1 <= high for low, high in found)
    assert len(found) * 0.92 < held < len(found) * 0.97  # the standard error of 1200 is 0.007
    plain = 1.96 * columns.std(axis=0) / np.sqrt(len(index))
    assert (abs(columns.mean(axis=0) - 1) < plain).sum() < 2000 * 0.8, "samples as if independent do not"


def test_of_few_documents_or_equal_values_there_is_no_interval():
    values = np.arange(16.0)
    kinds = {
        count: mean_intervals(values[:, None], [place % count for place in range(16)])[0] for count in (1, 11, 12)
    }
    assert kinds[1] == (None, "none: a single document") and kinds[11] == (None, "none: 11 documents are too few")
    assert kinds[12].kind == "student's t over documents" and kinds[12].interval is not None
    assert mean_intervals(np.full((16, 1), 0.1), range(16))[0] == (None, "none: all documents have the same")
    heavy = np.repeat(range(13), [1000, *[1] * 12])
    assert mean_intervals(heavy[:, None] * 1.0, heavy)[0] == (None, "none: few documents have nearly all samples")
    some = np.where(values < 7, values, np.nan)
    assert mean_intervals(some[:, None], range(16))[0].kind == "none: 7 documents are too few", "that have a value"


def test_columns_are_estimated_together_as_they_are_alone():
    generator = np.random.default_rng(4)
    values = generator.normal(size=(60, 4))
    values[:15, 1] = np.nan  # documents 0 to 2 have none of it
    values[::2, 2] = np.nan  # every document has some
    values[5:, 3] = np.nan  # one document only
    documents = [place // 5 for place in range(60)]
    together = mean_intervals(values, documents)
    for column, found in zip(values.T, together, strict=True):
        has = ~np.isnan(column)
        [alone] = mean_intervals(column[has][:, None], [documents[place] for place in np.flatnonzero(has)])
        assert found.kind == alone.kind
        assert found.interval == (None if alone.interval is None else pytest.approx(alone.interval))
    assert together[3].interval is None and together[0].interval is not None


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


@pytest.mark.parametrize("confidence", [0, 1, -0.5, 1.5, 95])
def test_a_confidence_lies_between_0_and_1(confidence):
    for call in (
        lambda: clopper_pearson(1, 2, confidence=confidence),
        lambda: mean_intervals(np.ones((9, 1)), range(9), confidence=confidence),
    ):
        with pytest.raises(ValueError, match="between 0 and 1"):
            call()
    values = np.random.default_rng(0).normal(size=50)
    assert interval(values, range(50)) == interval(values, range(50), confidence=0.95)
    assert clopper_pearson(3, 9) == clopper_pearson(3, 9, confidence=0.95)


def test_documents_are_numbered_as_they_come():
    index, count = number_documents(["b", "a", "b", "c"])
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
