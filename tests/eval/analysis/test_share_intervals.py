"""Intervals of shares and of their differences: by hand, documents, and what they promise."""

import numpy as np
import pytest

from hf_axonn_eval.analysis.intervals import (
    clopper_pearson,
    difference_interval,
    kish,
    paired_difference,
    share_intervals,
)


EXACT, BY_DOCUMENT = "clopper-pearson", "clopper-pearson, documents as trials"


def test_which_interval_a_share_gets():
    nan = np.nan
    answers = np.array([[1, 1, 0, 1, 1], [nan, 0, 0, 1, nan], [0, 0, 0, 1, nan], [nan, 0, 0, 1, nan], [1, 1, 0, 1, 0]])
    found = share_intervals(answers, list("aabba"))
    assert [one.kind for one in found] == [*[BY_DOCUMENT] * 4, "none: a single document"]
    assert found[4].interval is None
    trials = kish(np.array([3, 2]))
    assert found[1].interval == pytest.approx(clopper_pearson(0.4 * trials, trials))
    assert found[2].interval == clopper_pearson(0, trials) and found[3].interval == clopper_pearson(trials, trials)
    assert share_intervals(answers[:, :1], list("abcde")) == [(clopper_pearson(2, 3), EXACT)]
    assert share_intervals(np.array([[1.0], [nan]]), list("aa")) == [(clopper_pearson(1, 1), EXACT)], "one sample"


def test_a_share_of_few_documents_does_not_jump():
    """5 documents of 200 windows: one hit is hardly more than none."""
    none, one = np.zeros((1000, 1)), np.zeros((1000, 1))
    one[0] = 1
    documents = np.repeat(range(5), 200).tolist()
    [(before, _)], [(after, _)] = share_intervals(none, documents), share_intervals(one, documents)
    assert before == clopper_pearson(0, 5) and before.high == pytest.approx(0.5218, abs=5e-5)
    assert 0 < after.high - before.high < 0.01


def test_a_document_with_nearly_all_samples_leaves_one_trial():
    answers = np.array([[1.0]] * 100 + [[0.0]])
    [(interval, _)] = share_intervals(answers, ["long"] * 100 + ["short"])
    trials = 101**2 / (100**2 + 1)
    assert interval.low == pytest.approx(clopper_pearson(100 / 101 * trials, trials).low)
    assert 0.025 < interval.low < 0.029, "0.025 of a single document"


@pytest.mark.parametrize("correlation", [0, 1])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_shares_hold_the_truth(share, correlation):
    """Ten documents of ten samples that are independent, or all alike; docs/results/coverage.md has more."""
    generator = np.random.default_rng(10)
    documents = np.repeat(range(10), 10)
    chance = (generator.random((10, 1000)) < share)[documents] if correlation else share
    answers = (generator.random((100, 1000)) < chance).astype(float)
    held = [low <= share <= high for (low, high), _ in share_intervals(answers, documents.tolist())]
    assert sum(held) > 1000 * 0.94


def test_which_interval_a_difference_gets():
    yes = np.arange(8) < 6
    was = np.arange(8) < 1
    assert difference_interval(yes, was, range(8)) == (paired_difference(5, 0, 8), "mover of clopper-pearson")
    twice = np.repeat(yes, 2), np.repeat(was, 2), np.repeat(range(8), 2).tolist()
    assert difference_interval(*twice).interval == pytest.approx(paired_difference(5, 0, 8)), "a document is a trial"
    assert difference_interval(yes, was, [0, *range(7)]) == (None, "none: 7 documents are too few")
    assert difference_interval(yes, was, [0] * 8) == (None, "none: a single document")


def test_the_difference_of_paired_shares_by_hand():
    """3 gained and 1 lost of 10."""
    more, less = clopper_pearson(3, 10), clopper_pearson(1, 10)
    r = -((0.3 * 0.1 / (0.7 * 0.9)) ** 0.5)
    below, above = 0.3 - more.low, more.high - 0.3
    of_lost = less.high - 0.1, 0.1 - less.low
    low = 0.2 - (below**2 - 2 * r * below * of_lost[0] + of_lost[0] ** 2) ** 0.5
    high = 0.2 + (above**2 - 2 * r * above * of_lost[1] + of_lost[1] ** 2) ** 0.5
    assert paired_difference(3, 1, 10) == pytest.approx((low, high))
    assert paired_difference(1, 3, 10) == pytest.approx((-high, -low))


def test_the_difference_of_paired_shares_closes_at_the_ends_and_keeps_its_width():
    assert paired_difference(0, 0, 12) == pytest.approx((-clopper_pearson(0, 12).high, clopper_pearson(0, 12).high))
    low, high = paired_difference(12, 0, 12)
    assert high == 1 and 0.6 < low < clopper_pearson(12, 12).low
    for counts in ((0, 5, 5), (5, 0, 5), (1, 0, 1), (3, 1, 4), (2, 2, 4), (0.5, 0.7, 2.5)):
        low, high = paired_difference(*counts)
        assert -1 <= low < high <= 1
    for wrong in ((-1, 1, 3), (1, -1, 3), (2, 2, 3), (0, 0, 0)):
        with pytest.raises(ValueError, match="are not counts of the same trials"):
            paired_difference(*wrong)


@pytest.mark.parametrize("chances", [(0.0, 0.0), (0.3, 0.0), (0.02, 0.01), (0.1, 0.1), (0.5, 0.4)])
def test_differences_hold_the_truth(chances):
    generator = np.random.default_rng(8)
    truth, held = chances[0] - chances[1], 0
    for gained, lost, _ in generator.multinomial(12, [*chances, 1 - sum(chances)], size=1000):
        low, high = paired_difference(gained, lost, 12)
        held += low <= truth <= high
    assert held > 1000 * 0.92, "0.93 but for chance in 1000 tries"


def test_intervals_are_of_95_percent_unless_asked_otherwise():
    answers, documents = np.array([[1.0], [0.0], [1.0], [1.0]]), list("aabb")
    yes, was = np.arange(8) < 6, np.arange(8) < 1
    for call in (
        lambda **options: share_intervals(answers, documents, **options)[0].interval,
        lambda **options: share_intervals(answers, list("abcd"), **options)[0].interval,
        lambda **options: difference_interval(yes, was, range(8), **options).interval,
        lambda **options: paired_difference(2, 0, 3, **options),
    ):
        assert call() == call(confidence=0.95)
        narrow, plain, wide = call(confidence=0.5), call(), call(confidence=0.99)
        assert wide.low <= plain.low <= narrow.low < narrow.high <= plain.high <= wide.high and narrow != wide
