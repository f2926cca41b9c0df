"""The ranks on which the experts of a mixture lie, and whether tokens can travel to them.

With `experts: move` every expert lies whole on one rank of (z, x, y), and tokens travel to it. With `experts: gather`
it lies on one position of (y, x), its weights divided over z and gathered for use. Plain arithmetic, no torch: the
planner follows the same rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from hf_axonn.topology.grid import Grid, GridPosition
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
