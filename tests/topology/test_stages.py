"""Layers over stages: every division of small models is tried, and what a published model has."""

import itertools
import random
from fractions import Fraction

import pytest

from hf_axonn.topology.stages import as_listed, divide_layers


def every_division(layers: int, stages: int):
    """All contiguous divisions of the layers, as their lengths."""
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield [stop - start for start, stop in itertools.pairwise((0, *cuts, layers))]


def sums(costs, lengths, first, last):
    """Exact costs of the stages."""
    found, start = [], 0
    for length in lengths:
        found.append(sum(map(Fraction, costs[start : start + length])))
        start += length
    found[0] += Fraction(first)
    found[-1] += Fraction(last)
    return found


def lengths(ranges):
    return [len(each) for each in ranges]


@pytest.mark.parametrize("seed", range(40))
def test_no_division_is_better(seed):
    draw = random.Random(seed)
    layers = draw.randint(1, 9)
    stages = draw.randint(1, layers)
    # Few values, so that many divisions are equally good; or any floats, or some layers that cost nothing.
    values = draw.choice([[1.0], [1.0, 2.0], [0.0, 0.1, 0.3], [draw.random() for _ in range(layers)]])
    costs = [draw.choice(values) for _ in range(layers)]
    first, last = draw.choice([0.0, 0.5, 1.1]), draw.choice([0.0, 1.0, 2.7])

    def rank(each):
        of_stages = sums(costs, each, first, last)
        return max(of_stages), sum(cost * cost for cost in of_stages), each

    found = divide_layers(costs, stages, first=first, last=last)
    assert lengths(found) == min(every_division(layers, stages), key=rank)
    assert [index for each in found for index in each] == list(range(layers))


@pytest.mark.parametrize(
    ("layers", "stages", "first", "last", "expected"),
    [
        (8, 4, 0, 0, [2, 2, 2, 2]),
        (10, 4, 0, 0, [2, 2, 3, 3]),  # earlier stages have fewer
        (6, 4, 0, 2, [1, 2, 2, 1]),  # the head costs as much as two layers: no stage costs more than 3
        (126, 16, 1, 1, [7, *[8] * 14, 7]),  # Llama 3 405B: arXiv 2407.21783, section 3.3.2
        (3, 3, 100, 0, [1, 1, 1]),
    ],
)
def test_what_stands_before_and_after_weighs(layers, stages, first, last, expected):
    assert lengths(divide_layers([1.0] * layers, stages, first=first, last=last)) == expected


def test_equal_costs_are_equal_whatever_the_unit():
    # As floats, sums of 0.1 differ by where they begin, and the most even division would hang on the last bit.
    for unit in (0.1, 1 / 3, 1e-7, 1.7e13):
        assert lengths(divide_layers([unit] * 11, 4)) == [2, 3, 3, 3]


def test_many_layers():
    found = divide_layers([1.0 + 0.01 * (layer % 3) for layer in range(192)], 64, first=0.2, last=1.5)
    assert len(found) == 64 and {len(each) for each in found[:-1]} <= {3, 4} and len(found[-1]) == 2


def test_what_is_refused():
    with pytest.raises(ValueError, match="4 layers cannot be divided over 8 stages.*at most 4 stages"):
        divide_layers([1.0] * 4, 8)
    with pytest.raises(ValueError, match="stages is 0"):
        divide_layers([1.0] * 4, 0)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a cost is .*finite"):
            divide_layers([1.0, wrong], 1)
        with pytest.raises(ValueError, match="a cost is .*finite"):
            divide_layers([1.0, 1.0], 1, last=wrong)


def test_a_list_of_layers_is_taken_as_it_is():
    assert as_listed([1, 3, 2], 6) == [range(0, 1), range(1, 4), range(4, 6)]
    with pytest.raises(ValueError, match=r"lists 1 \+ 3 = 4 layers, but the model has 6"):
        as_listed([1, 3], 6)
