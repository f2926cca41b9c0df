"""Curves of hand-made results."""

from math import log

import pytest

from hf_axonn_eval import clopper_pearson
from hf_axonn_eval.report.curves import (
    BINS,
    LEAST,
    by_offset,
    by_prefix_length,
    draws,
    median_probability,
    probabilities,
    survival,
)
from tests.helpers.eval_support import result


OPTIONS = {"confidence": 0.95}


def some(name: str, divergence: int, length: int = 4, **changes):
    return result(name, divergence_point=divergence, suffix_length=length, exact_match=divergence == length, **changes)


def test_survival_is_the_exact_match_of_shorter_suffixes():
    points = survival([some("a", 4), some("b", 2), some("c", 0), some("d", 2, length=2)], **OPTIONS)
    assert [(point.x, point.y) for point in points] == [(1, 3 / 4), (2, 3 / 4), (3, 1 / 3), (4, 1 / 3)]
    assert (points[0].low, points[0].high) == pytest.approx(clopper_pearson(3, 4))
    of_three = clopper_pearson(1, 3)
    assert (points[3].low, points[3].high) == pytest.approx(of_three), "of the three suffixes that are so long"


def test_several_samples_of_a_document_count_as_one_trial_where_all_agree():
    results = [
        some(f"{document}{place}", 4 if document == "a" else 0, document_id=document)
        for document in "abc"
        for place in range(3)
    ]
    points = survival(results, **OPTIONS)
    assert (points[0].y, points[0].low, points[0].high) == pytest.approx((1 / 3, *clopper_pearson(1, 3)))
    none = survival([some(f"{place}", 0, document_id=str(place % 2)) for place in range(6)], **OPTIONS)
    assert (none[0].low, none[0].high) == pytest.approx(clopper_pearson(0, 2))
    one = survival([some("x", 4, document_id="a"), some("y", 0, document_id="a")], **OPTIONS)
    assert one[0].y == 0.5 and one[0].low is None


def test_by_prefix_length():
    results = [some("a", 4, prefix_length=50), some("b", 0, prefix_length=10), some("c", 4, prefix_length=10)]
    points = by_prefix_length(results, **OPTIONS)
    assert [(point.x, point.y) for point in points] == [(10, 0.5), (50, 1.0)]
    assert (points[1].low, points[1].high) == pytest.approx(clopper_pearson(1, 1))


def test_by_offset_and_prefix_length():
    results = [some("a", 4, offset=0, prefix_length=8), some("b", 0, offset=0, prefix_length=8)]
    results.append(some("c", 4, offset=5, prefix_length=2))
    found = by_offset(results, **OPTIONS)
    assert {pair: point.y for pair, point in found.items()} == {(0, 8): 0.5, (5, 2): 1.0}
    assert (found[0, 8].low, found[0, 8].high) == pytest.approx(clopper_pearson(1, 2))


def test_draws_that_discover():
    # a tenth: 1 - 0.9^n is at least a half from n = 7 on, and at least 0.9 from n = 22 on
    results = [some("a", 0, sampled_logprob=log(0.1)), some("b", 0, sampled_logprob=float("-inf")), some("c", 0)]
    curves = draws(results, **OPTIONS)
    for p, needed in ((0.5, 7), (0.9, 22)):
        assert {point.x: point.y for point in curves[p]} == {point.x: (point.x >= needed) / 2 for point in curves[p]}
    assert [curves[0.5][0].x, curves[0.5][-1].x] == [1, 1_000_000]
    assert draws([some("c", 0)], **OPTIONS) == {}


def test_histogram_of_probabilities():
    width = -LEAST / BINS
    results = [
        some("certain", 4, logprob=0.0),
        some("a hundredth", 0, logprob=0.0, sampled_logprob=log(1e-3)),  # that of the sampler counts
        some("never", 0, sampled_logprob=float("-inf")),
        some("hardly", 0, logprob=-1e5),
    ]
    points = probabilities(results)
    assert [point.x for point in points] == pytest.approx([LEAST + width * (place + 0.5) for place in range(BINS)])
    assert [point.y for point in points] == [0.5] + [0.0] * (BINS - 3) + [0.25, 0.25]
    assert median_probability(results) == "0.001"
    assert median_probability([some("d", 0, logprob=-200.0)]) == "1.4e-87"
    assert median_probability(results[2:3]) == "0" and median_probability([some("e", 0, logprob=None)]) == "-"


def test_the_places_of_the_histogram_and_of_the_draws():
    points = probabilities([some("a", 0, logprob=-1.0)])
    assert [point.x for point in points] == list(range(-49, 0, 2)), "25 bins of two powers of ten"
    assert [point.y for point in points] == [0.0] * 24 + [1.0]
    curve = draws([some("a", 0, sampled_logprob=0.0)], **OPTIONS)[0.5]
    assert [point.x for point in curve] == [
        1, 2, 3, 6, 10, 18, 32, 56, 100, 178, 316, 562, 1000, 1778, 3162, 5623, 10_000, 17_783, 31_623, 56_234,
        100_000, 177_828, 316_228, 562_341, 1_000_000,
    ]  # fmt: skip
    assert probabilities([some("a", 0, logprob=None)]) == []


@pytest.mark.parametrize(
    ("logarithm", "place"),
    [(0.0, 24), (-1.99, 24), (-2.0, 24), (-2.01, 23), (-48.0, 1), (-48.01, 0), (-50.0, 0), (-60.0, 0)],
)
def test_a_probability_has_its_bin(logarithm, place):
    points = probabilities([some("a", 0, logprob=logarithm * log(10))])
    # a bin begins with its lower bound
    assert [point.y for point in points].index(1.0) in ({place, place - 1} if logarithm == -2.0 else {place})


@pytest.mark.parametrize(
    ("logarithms", "text"),
    [
        ([0.0], "1"),
        ([log(0.25)], "0.25"),
        ([log(0.25), log(0.5)], "0.5"),  # of two the larger
        ([log(0.125), log(0.5), log(0.25)], "0.25"),
        ([log(2e-4)], "0.0002"),
        ([log(1.2e-4)], "0.00012"),
        ([log(9e-5)], "9.0e-5"),
        ([log(1e-5)], "1.0e-5"),
        ([float("-inf"), 0.0], "1"),
        ([float("-inf"), float("-inf"), 0.0], "0"),
    ],
)
def test_the_probability_in_the_middle(logarithms, text):
    assert median_probability([some(str(place), 0, logprob=one) for place, one in enumerate(logarithms)]) == text


def test_a_suffix_of_one_token_survives_or_does_not():
    points = survival([some("a", 1, length=1), some("b", 0, length=1)], **OPTIONS)
    assert [(point.x, point.y) for point in points] == [(1, 0.5)]
    assert (points[0].low, points[0].high) == pytest.approx(clopper_pearson(1, 2))
