"""The other forms of tests/benchmarks/traffic/traffic.py, against the coefficients of docs/algorithm.md."""

from dataclasses import replace
from fractions import Fraction

import pytest

from hf_axonn.planner.dense import DenseShape
from hf_axonn.planner.step import Step
from hf_axonn.planner.traffic.volumes import layer_volumes
from hf_axonn.topology.grid import Grid
from tests.benchmarks.traffic.forms import all_reduce_form, megatron


GATED = DenseShape(layers=1, hidden=96, heads=16, intermediate=256, vocab=9)
PLAIN = replace(GATED, intermediate=384, gated=False)
STEP = Step(rows=4, seq=32)


@pytest.mark.parametrize("grid", [Grid(x=4), Grid(y=4), Grid(x=2, y=4)], ids=str)
@pytest.mark.parametrize(("shape", "fused", "on_x"), [(GATED, True, 8), (GATED, False, 14), (PLAIN, False, 12)])
def test_all_reduce_forms_send_24_units_on_y_and_8_14_or_12_on_x(grid, shape, fused, on_x):
    ledger = all_reduce_form(shape, grid, STEP, fused=fused)
    unit = Fraction(STEP.rows * STEP.seq * 96 * STEP.compute_bytes)
    assert ledger.bytes_sent(axes=("y",)) == 24 * unit / grid.x * Fraction(grid.y - 1, grid.y)
    assert ledger.bytes_sent(axes=("x",)) == on_x * unit / grid.y * Fraction(grid.x - 1, grid.x)


def test_megatron_gathers_the_input_of_a_block_once_more_than_ours():
    grid = Grid(x=4)
    theirs, ours = megatron(GATED, grid, STEP), layer_volumes(GATED, grid, STEP)
    assert theirs.bytes_sent() / ours.bytes_sent() == Fraction(10, 8)
    assert theirs.calls() - ours.calls() == 2
    with pytest.raises(ValueError, match="y = z = 1"):
        megatron(GATED, Grid(x=2, y=2), STEP)
