"""Curves of hand-made results."""

from math import log

import pytest

from hf_axonn_eval import wilson
from hf_axonn_eval.report.curves import (
    BINS,
    LEAST,
    by_prefix_length,
    draws,
    median_probability,
    probabilities,
    survival,
)
from tests.helpers.eval_support import result


OPTIONS = {"confidence": 0.95, "resamples": 200, "seed": 0}


def some(name: str, divergence: int, length: int = 4, **changes):
    return result(name, divergence_point=divergence, suffix_length=length, exact_match=divergence == length, **changes)


def test_survival_is_the_exact_match_of_shorter_suffixes():
    points = survival([some("a", 4), some("b", 2), some("c", 0), some("d", 2, length=2)], **OPTIONS)
    assert [(point.x, point.y) for point in points] == [(1, 3 / 4), (2, 3 / 4), (3, 1 / 3), (4, 1 / 3)]
    assert (points[0].low, points[0].high) == pytest.approx(wilson(3, 4))
    assert (points[3].low, points[3].high) == pytest.approx(wilson(1, 3)), "of the three suffixes that are so long"


def test_several_samples_of_a_document_count_as_one_trial_where_all_agree():
    results = [
        some(f"{document}{place}", 4 if document == "a" else 0, document_id=document)
        for document in "abc"
        for place in range(3)
    ]
    points = survival(results, **OPTIONS)
    assert points[0].y == pytest.approx(1 / 3) and points[0].low == 0 and points[0].high > 0.6
    none = survival([some(f"{place}", 0, document_id=str(place % 2)) for place in range(6)], **OPTIONS)
    assert (none[0].low, none[0].high) == pytest.approx(wilson(0, 2))
    one = survival([some("x", 4, document_id="a"), some("y", 0, document_id="a")], **OPTIONS)
    assert one[0].y == 0.5 and one[0].low is None


def test_by_prefix_length():
    results = [some("a", 4, prefix_length=50), some("b", 0, prefix_length=10), some("c", 4, prefix_length=10)]
    points = by_prefix_length(results, **OPTIONS)
    assert [(point.x, point.y) for point in points] == [(10, 0.5), (50, 1.0)]
    assert (points[1].low, points[1].high) == pytest.approx(wilson(1, 1))


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
