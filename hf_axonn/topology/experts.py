"""The ranks on which the experts of a mixture lie, and whether tokens can travel to them.

With `experts: move` every expert lies whole on one rank of (z, x, y), and tokens travel to it. With `experts: gather`
it lies on one position of (y, x), its weights divided over z and gathered for use. Plain arithmetic, no torch: the
planner follows the same rules.

A token goes once to each rank that has experts which it chose. Which ones those are only training shows, so rows are
an expectation, over routers to which all sets of k of E experts are alike:

    a rank with e experts gets a token with probability 1 - C(E - e, k) / C(E, k)
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import ceil, comb
from typing import NamedTuple

from hf_axonn.topology.grid import Grid, GridPosition, ceil_div
from hf_axonn.topology.local_slices import slices_at


EXPERTS = ("auto", "gather", "move")
DISPATCH = ("z", "x", "y")  # the ranks among which the experts of a layer lie, in the order of their numbers


def why_not_move(experts: Iterable[int], grid: Grid) -> str:
    """Return why tokens cannot travel to their experts on a grid; empty where they can.

    Args:
        experts: the number of experts of each layer that has some.
    """
    counts, ranks = list(experts), grid.z * grid.x * grid.y
    if not counts:
        return "no layer has experts"
    if ranks == 1:
        return "z * x * y is 1: every expert is on every rank"
    if min(counts) < ranks:
        return (
            f"z * x * y = {grid.z} * {grid.x} * {grid.y} = {ranks} ranks are more than the {min(counts)} experts of a "
            "layer, of which each lies on one rank"
        )
    return ""


def own_experts(experts: int, place: GridPosition, *, over_z: bool) -> range:
    """Return the experts of a layer of `experts` that lie at a position: sharded over y, x and, with `over_z`, z."""
    axes = ("y", "x", "z") if over_z else ("y", "x")
    sizes, here = [place.size(axis) for axis in axes], [place.index(axis) for axis in axes]
    (own,) = slices_at((experts,), (0,) * len(axes), sizes, here)
    return range(own.start, own.stop)


def expert_owners(experts: int, grid: Grid) -> list[range]:
    """Return the experts of every rank of DISPATCH, in the order of these ranks, where each expert lies on one."""
    positions = itertools.product(*(range(getattr(grid, axis)) for axis in DISPATCH))
    places = (GridPosition(grid, {"data": 0, "pipe": 0, "z": z, "x": x, "y": y}) for z, x, y in positions)
    return [own_experts(experts, place, over_z=True) for place in places]


class Rows(NamedTuple):
    """Rows of hidden states that a rank sends to other ranks, and receives from them."""

    sent: Fraction
    received: Fraction


def expect_rows(number: int, chosen: int, grid: Grid, own: int = 0) -> Rows:
    """Return the expected rows for each token of a rank, of which all ranks have as many.

    Args:
        number, chosen: E, and k of them for a token.
        own: the rank, by its number in DISPATCH.
    """
    return _expect_rows(number, chosen, tuple(getattr(grid, axis) for axis in DISPATCH), own)


@functools.lru_cache(maxsize=4096)
def _expect_rows(number: int, chosen: int, sizes: tuple[int, ...], own: int) -> Rows:
    owners = expert_owners(number, Grid(**dict(zip(DISPATCH, sizes, strict=True))))
    counts = Counter(map(len, owners))
    reached = {size: 1 - Fraction(comb(number - size, chosen), comb(number, chosen)) for size in counts}
    here = reached[len(owners[own])]
    return Rows(sum(count * reached[size] for size, count in counts.items()) - here, (len(owners) - 1) * here)


class WaysSent(NamedTuple):
    """Bytes that a rank sends for its layers of experts in one micro-batch.

    weights, sizes: whatever the tokens, with `gather` of weights and their gradients, with `move` of numbers of rows.
    gathered, moved: for each token of the rank, with `gather` and with `move`.
    """

    weights: float
    sizes: float
    gathered: float
    moved: float

    def fewer_by_gather(self) -> int | None:
        """Return the tokens of a rank from which on `gather` sends fewer bytes; None where it never does."""
        more = self.moved - self.gathered
        return max(1, ceil((self.weights - self.sizes) / more)) if more > 0 else None


def bytes_sent(
    layers: Iterable[tuple[int, Iterable[Sequence[int]]]], chosen: int, hidden: int, grid: Grid
) -> WaysSent:
    """Return the bytes that rank 0 sends, forward and backward without recomputation, of a model cut by blocks.

    In bfloat16, with reductions in float32, for routers to which all experts are alike.

    Args:
        layers: (E, [A, B] of each parameter [E, A, B]) of each layer.
        chosen: k experts of a token.
        hidden: features of a token.
    """
    narrow, wide, size = 2, 4, 8  # of hidden states; of choices, their weights and reductions; of a number of rows
    ranks, all_ranks, place = grid.x * grid.y, grid.z * grid.x * grid.y, grid.place(0)
    weights = sizes = gathered = moved = 0.0
    for number, shapes in layers:
        own = len(own_experts(number, place, over_z=False))
        elements = sum(own * rows * ceil_div(columns, grid.z) for rows, columns in shapes)
        weights += elements * (2 * narrow + wide) * (grid.z - 1)
        gathered += (4 * hidden * narrow + 3 * chosen * wide) * (ranks - 1)
        sizes += size * (1 + chosen) * (all_ranks - 1)
        rows, pairs = expect_rows(number, chosen, grid), 2 * chosen * wide
        moved += float(rows.sent + rows.received) * (2 * hidden * narrow + pairs)
    return WaysSent(weights, sizes, gathered, moved)
