"""BLEU over ids against numbers of nltk 3.10.4, and by hand."""

import random

import pytest

from hf_axonn_eval.metrics.bleu import bleu


def test_by_hand():
    true = list(range(10))
    assert bleu(true, true) == 1.0
    changed = [*range(9), 77]  # 9 of 10, 8 of 9, 7 of 8, 6 of 7 runs are the suffix's
    assert bleu(changed, true) == pytest.approx((9 / 10 * 8 / 9 * 7 / 8 * 6 / 7) ** 0.25)
    assert bleu([5, 6, 7, 8, 50, 51, 52, 53, 54, 55], true) == pytest.approx((4 / 10 * 3 / 9 * 2 / 8 * 1 / 7) ** 0.25)
    assert bleu([5, 6, 7, 50, 51, 52, 53, 54, 55, 56], true) == 0  # three in a row are not four


def test_a_run_counts_as_often_as_the_suffix_has_it():
    assert bleu([1, 1, 1, 1, 1], [1, 1, 1, 1, 2]) == pytest.approx((4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)


def test_a_continuation_that_is_shorter_is_punished_once():
    true = list(range(8))
    assert bleu(true[:6], true) == pytest.approx(2.718281828459045 ** (1 - 8 / 6))
    assert bleu([*true, 90, 91], true) == pytest.approx((8 / 10 * 7 / 9 * 6 / 8 * 5 / 7) ** 0.25)


def test_too_short_for_a_run_of_four():
    assert bleu([1, 2, 3], [1, 2, 3]) is None
    assert bleu([1, 2, 3], [1, 2, 3, 4]) == 0


def test_as_nltk():
    """sentence_bleu([suffix], continuation) of nltk 3.10.4, without smoothing, for the pairs that this makes."""
    random_ids = random.Random(7)
    found = []
    for _ in range(6):
        true = [random_ids.randrange(12) for _ in range(30)]
        mine = [token if random_ids.random() < 0.85 else random_ids.randrange(12) for token in true]
        found.append(bleu(mine[: random_ids.randrange(20, 31)], true))
    assert found == pytest.approx(NLTK, rel=1e-12)


NLTK = [
    0.7645388660971649,
    0.6227478016043605,
    0.5783273884936567,
    0.41390056720315127,
    0.7274724868181733,
    0.45557647827604564,
]
