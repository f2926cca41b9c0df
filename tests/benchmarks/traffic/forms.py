"""Other ways to divide a decoder layer, as equations: the collectives and bytes of one layer and one micro-batch.

T tokens a (data, z) position, Linear [N, K]; every collective is a ring (hf_axonn/planner/traffic/ledger.py).

    layer by layer   AxoNN, equations 3 and 4 of its performance model (arXiv 2502.08145): each Linear is reduced on
                     its own. Column layer: forward all-reduce over y of T*N/x, backward all-reduce over x of T*K/y;
                     row layer: x and y exchanged.
    fused            the same with q, k, v and gate, up each as one Linear: one reduction of their input's gradient.
    Megatron TP+SP   y = z = 1. Each block gathers its tokens [T, H] over x and scatters its output; backward does both
                     again, and gathers the input once more for the weight gradient, because only the local part of
                     it was saved (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).
"""

from __future__ import annotations

from hf_axonn.planner.dense import DenseShape
from hf_axonn.planner.shapes import LinearShape
from hf_axonn.planner.step import Step
from hf_axonn.planner.traffic.ledger import Ledger
from hf_axonn.topology.grid import Grid


def all_reduce_form(shape: DenseShape, grid: Grid, step: Step, *, fused: bool) -> Ledger:
    """AxoNN's equations for one layer, sizes divisible by x and y; without the weights' traffic over z."""
    ledger, unit = Ledger(grid), step.tokens(grid) * step.compute_bytes

    def enter(linear: LinearShape, *, column: bool) -> None:
        inner, outer = ("y", "x") if column else ("x", "y")  # the axes that divide K and N
        ledger.add("forward", "all_reduce", (inner,), unit * linear.rows // getattr(grid, outer))
        ledger.add("backward", "all_reduce", (outer,), unit * linear.cols // getattr(grid, inner))

    for block in (shape.attention, shape.mlp):
        columns, row = block.columns, block.row
        if fused:
            columns = [LinearShape(sum(column.rows for column in columns), columns[0].cols)]
        for column in columns:
            enter(column, column=True)
        enter(row, column=False)
    return ledger


def megatron(shape: DenseShape, grid: Grid, step: Step) -> Ledger:
    """Tensor and sequence parallelism over x for one layer, which has two blocks.

    Raises:
        ValueError: y or z is not 1.
    """
    if grid.y * grid.z > 1:
        raise ValueError(f"Megatron's tensor parallelism has one axis, so y = z = 1, but the grid is {grid}.")
    ledger, block = Ledger(grid), step.tokens(grid) // grid.x * shape.hidden * step.compute_bytes
    for phase, kind, calls in (
        ("forward", "all_gather", 2),
        ("forward", "reduce_scatter", 2),
        ("backward", "all_gather", 4),
        ("backward", "reduce_scatter", 2),
    ):
        ledger.add(phase, kind, ("x",), calls * block, calls)
    return ledger
