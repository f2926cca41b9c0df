"""The decoder layers of a pipeline's stages: contiguous ranges, divided by what the layers cost.

What stands before the layers (the embedding) belongs to the first stage, what stands after them (the last norm, the
head and the loss) to the last one. Both weigh, so those stages get fewer layers: of the 126 layers of Llama 3 405B the
first and the last of 16 pipeline ranks have 7, each other one has 8 (arXiv 2407.21783, section 3.3.2). Plain
arithmetic, no torch, for the engine and the planner, which also counts attention; what it plans can be listed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate


def divide_layers(costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0) -> list[range]:
    """The layers of each stage, so that the most expensive stage is as cheap as it can be.

    Of the divisions whose most expensive stage is the cheapest, the most even one is taken (the smallest sum of
    squares), and of equally even ones that whose earlier stages have fewer layers: they hold the activations of more
    micro-batches. The result is exact, and the same on every machine.

    Args:
        costs: of each layer in its order, in any unit.
        stages: how many, of all ranks together.
        first, last: what the first and the last stage have besides, in the same unit.
    Returns:
        For each stage the indices of its layers, at least one.
    Raises:
        ValueError: there are fewer layers than stages, or a cost is negative or not finite.
    """
    if stages < 1:
        raise ValueError(f"stages is {stages}, but a pipeline has at least 1.")
    if len(costs) < stages:
        raise ValueError(
            f"{len(costs)} layers cannot be divided over {stages} stages of at least one layer each: take at most "
            f"{len(costs)} stages (pipe times stages of a rank)."
        )
    for cost in (*costs, first, last):
        if not 0 <= cost < math.inf:
            raise ValueError(f"a cost is {cost!r}, but costs are finite numbers from 0 on.")
    *weights, before, after = _integers([*costs, first, last])
    weights[0] += before
    weights[-1] += after
    # The smallest bound under which that number of stages suffices. Fewer can be cut further: costs are not negative.
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        if _stages_under(weights, middle) <= stages:
            high = middle
        else:
            low = middle + 1
    return _most_even(weights, stages, low)


def as_listed(counts: Sequence[int], layers: int) -> list[range]:
    """Return the layers of each stage, by their `counts`.

    Raises:
        ValueError: they are not all layers.
    """
    if sum(counts) != layers:
        raise ValueError(
            f"stage_layers lists {' + '.join(map(str, counts))} = {sum(counts)} layers, but the model has {layers}."
        )
    return [range(stop - count, stop) for count, stop in zip(counts, accumulate(counts), strict=True)]


def _integers(costs: Sequence[float]) -> list[int]:
    """Return the costs as multiples of one unit: sums of floats would depend on their order."""
    exact = [Fraction(cost) for cost in costs]
    unit = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * unit) for cost in exact]


def _stages_under(weights: list[int], bound: int) -> int:
    """Return the number of stages that the layers need where none may cost more than `bound`."""
    count, filled = 1, 0
    for weight in weights:
        if filled + weight > bound:
            count, filled = count + 1, 0
        filled += weight
    return count


def _most_even(weights: list[int], stages: int, bound: int) -> list[range]:
    """The division into stages under `bound` with the smallest sum of squares; the first stages are the shortest."""
    sums, layers = [0, *accumulate(weights)], len(weights)
    # From the last stage to the first: for each layer at which it may begin the sum of squares from there on, and
    # where the next stage begins.
    begins: list[dict[int, tuple[int, int]]] = [{layers: (0, layers)}]
    for stage in reversed(range(stages)):
        found: dict[int, tuple[int, int]] = {}
        for start in range(stage, layers - (stages - stage) + 1) if stage else (0,):
            for stop in range(start + 1, layers + 1):
                cost = sums[stop] - sums[start]
                if cost > bound:
                    break
                if stop in begins[-1]:
                    squares = cost * cost + begins[-1][stop][0]
                    if start not in found or squares < found[start][0]:
                        found[start] = (squares, stop)
        begins.append(found)
    ranges, start = [], 0
    for found in reversed(begins[1:]):
        ranges.append(range(start, found[start][1]))
        start = ranges[-1].stop
    return ranges
