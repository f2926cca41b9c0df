"""What a rank has of a parameter or of attention, in plain numbers."""

from __future__ import annotations

import functools
from math import prod

from hf_axonn.planner.model.shapes import BlockShape, LinearShape, WeightShape
from hf_axonn.topology.grid import Grid
from hf_axonn.topology.local_slices import slices_at
from hf_axonn.topology.weight_kind import SHARDED_DIMS, WeightKind


# A search asks for the same shapes again and again.
@functools.lru_cache(maxsize=65536)
def _local_shape(
    kind: WeightKind, shape: tuple[int, ...], sizes: tuple[int, ...], here: tuple[int, ...]
) -> tuple[int, ...]:
    dims = SHARDED_DIMS[kind][: len(sizes)]
    return tuple(part.stop - part.start for part in slices_at(shape, dims, sizes, here))


def shard_shape(kind: WeightKind, linear: LinearShape, grid: Grid, here: dict[str, int]) -> tuple[int, int]:
    """(rows, cols) of a weight on the rank at `here`, gathered over z."""
    rows, cols = _local_shape(kind, (linear.rows, linear.cols), (grid.y, grid.x), (here["y"], here["x"]))
    return rows, cols


def own_experts(number: int, grid: Grid, here: dict[str, int]) -> int:
    """Experts of the rank at `here`."""
    return _local_shape(WeightKind.EXPERTS, (number,), (grid.y, grid.x), (here["y"], here["x"]))[0]


def own_elements(weight: WeightShape, grid: Grid, here: dict[str, int]) -> int:
    """Elements of a parameter on the rank at `here`."""
    experts = (weight.experts,) if weight.kind == WeightKind.EXPERTS else ()
    sizes, coordinates = (grid.y, grid.x, grid.z), (here["y"], here["x"], here["z"])
    return prod(_local_shape(weight.kind, (*experts, weight.rows, weight.cols), sizes, coordinates))


def heads_repeat(block: BlockShape, grid: Grid) -> int:
    """Ranks that compute the same attention because the heads do not divide, see topology/heads.py."""
    if block.query % (grid.x * grid.y) == 0:
        return 1
    return grid.y if block.query % grid.x == 0 else grid.x * grid.y
