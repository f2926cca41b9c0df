"""Bytes that a rank sends with `experts: gather` and with `move`, and from how many tokens on the first are fewer.

Gathered weights are as many for any number of tokens, and tokens that travel grow with it.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import NamedTuple

from hf_axonn.planner.experts import place_experts, why_gathered
from hf_axonn.planner.shapes import ModelShape
from hf_axonn.planner.step import Step
from hf_axonn.planner.traffic.volumes import volumes
from hf_axonn.topology.grid import Grid


class ExpertBytes(NamedTuple):
    """Bytes that rank 0 sends in forward and backward of one micro-batch, with `gather` and with `move`.

    tokens: of a rank and micro-batch, from which on `gather` sends fewer; None: it never does.
    """

    gather: float
    move: float
    tokens: int | None


def compare_bytes(shape: ModelShape, grid: Grid, step: Step, *, layout: str = "token") -> ExpertBytes | None:
    """Return the bytes of both ways; None where tokens cannot travel. Arguments as `volumes`."""
    if not shape.experts or why_gathered(shape, grid):
        return None

    def count(way: str, rows: int) -> float:
        ledger = volumes(
            place_experts(shape, grid, way), grid, replace(step, rows=rows, micro_batches=1), layout=layout
        )
        return float(ledger.bytes_sent(phase="forward") + ledger.bytes_sent(phase="backward"))

    gather, move = count("gather", step.rows), count("move", step.rows)
    more = count("move", 2 * step.rows) - count("gather", 2 * step.rows) - (move - gather)  # for as many rows again
    if more <= 0:
        return ExpertBytes(gather, move, None)
    rows = step.rows * (1 + (gather - move) / more)
    tokens = rows * step.padded_tokens(grid) / (step.rows * grid.x * grid.y)
    return ExpertBytes(gather, move, max(1, ceil(tokens)))
