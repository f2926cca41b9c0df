"""What a rank has of a parameter or of attention, in plain numbers."""

from __future__ import annotations

from hf_axonn.planner.model.stack import Block, LinearShape, Weight
from hf_axonn.topology.grid import Grid, bounds
from hf_axonn.topology.weight_kind import WeightKind


def shard_shape(kind: WeightKind, linear: LinearShape, grid: Grid, here: dict[str, int]) -> tuple[int, int]:
    """(rows, cols) of a weight on the rank at `here` before the cut over z. Kinds: column, full, row,
    vocabulary, gathered."""

    def own(size: int, axis: str) -> int:
        start, stop = bounds(size, getattr(grid, axis), here[axis])
        return stop - start

    if kind in (WeightKind.VOCABULARY, WeightKind.GATHERED):
        return own(own(linear.rows, "y"), "x"), linear.cols
    first, second = ("y", "x") if kind == WeightKind.ROW else ("x", "y")
    return own(linear.rows, first), own(linear.cols, second)


def own_experts(number: int, grid: Grid, here: dict[str, int]) -> int:
    """Experts of the rank at `here`: sharded over y, then x."""
    return shard_shape(WeightKind.VOCABULARY, LinearShape(number, 1), grid, here)[0]


def own_elements(weight: Weight, grid: Grid, here: dict[str, int]) -> int:
    """Elements of a parameter on the rank at `here`, the cut over z included."""

    def over_z(size: int) -> int:
        start, stop = bounds(size, grid.z, here["z"])
        return stop - start

    if weight.kind == WeightKind.EXPERTS:
        return own_experts(weight.experts, grid, here) * weight.rows * over_z(weight.cols)
    rows, cols = shard_shape(weight.kind, LinearShape(weight.rows, weight.cols), grid, here)
    return over_z(rows) * cols


def heads_repeat(block: Block, grid: Grid) -> int:
    """Ranks that compute the same attention because the heads do not divide, see topology/heads.py."""
    if block.query % (grid.x * grid.y) == 0:
        return 1
    return grid.y if block.query % grid.x == 0 else grid.x * grid.y
