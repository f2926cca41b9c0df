"""Tokens that travel to their experts (`experts: move`): on which grids, and how many rows of how many tokens.

    place_experts(shape, grid, requested)   the model as it is sharded on a grid: `moves` of experts where they travel
    expected_rows(experts, grid, rank)      rows that a rank sends to others and receives, for each of its tokens

Rows are an expectation (topology/experts.py). No routing sends a token to more than min(k, ranks) ranks. Routers that
choose groups of experts first (DeepSeek-V3) send a token to fewer ranks where a rank has several experts of a group:
their groups are not read.
"""

from __future__ import annotations

from hf_axonn.planner.shapes import ExpertsShape, ModelShape
from hf_axonn.topology.experts import DISPATCH, Rows, expect_rows, why_not_move
from hf_axonn.topology.grid import Grid


def why_gathered(shape: ModelShape, grid: Grid, requested: str = "auto") -> str:
    """Return why tokens do not travel to the experts of a model on a grid; empty where they do.

    Args:
        requested: auto, gather or move, as in the settings of a run.
    """
    if any(experts.sorted for experts in shape.experts):
        return "its experts are handed all tokens"
    why = why_not_move((experts.number for experts in shape.experts), grid)
    return why or ("as configured" if requested == "gather" else "")


def place_experts(shape: ModelShape, grid: Grid, requested: str) -> ModelShape:
    """Return a model as it is sharded on a grid: with experts to which tokens travel, or as it is. Arguments as
    `why_gathered`."""
    return shape if not shape.experts or why_gathered(shape, grid, requested) else shape.with_moving_experts


def choose_way(shape: ModelShape, grid: Grid, requested: str) -> str:
    """Return gather or move, as a grid takes what is requested; for a model without experts auto. Arguments as
    `why_gathered`."""
    if not shape.experts:
        return "auto"
    return "gather" if why_gathered(shape, grid, requested) else "move"


def expected_rows(experts: ExpertsShape, grid: Grid, rank: int) -> Rows:
    """Return the rows that a rank sends and receives for each of its tokens (`expect_rows`)."""
    return expect_rows(experts.number, experts.chosen, grid, grid.place(rank).index(*DISPATCH))
