"""Tokens that travel to their experts (`experts: move`): on which grids, and how many rows of how many tokens.

    place_experts(shape, grid, requested)   the model as it is sharded on a grid: `moves` of experts where they travel
    expected_rows(experts, grid, rank)      rows that a rank sends to others and receives, for each of its tokens

A token goes once to each rank that has experts which it chose. Which ones those are only training shows, so rows are
an expectation, over routers to which all sets of k of E experts are alike:

    a rank with e experts gets a token with probability 1 - C(E - e, k) / C(E, k)

No routing sends a token to more than min(k, ranks) ranks. Routers that choose groups of experts first (DeepSeek-V3)
send a token to fewer ranks where a rank has several experts of a group: their groups are not read.
"""

from __future__ import annotations

import functools
from collections import Counter
from fractions import Fraction
from math import comb
from typing import NamedTuple

from hf_axonn.planner.shapes import ExpertsShape, ModelShape
from hf_axonn.topology.experts import DISPATCH, expert_owners, why_not_move
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


class Rows(NamedTuple):
    """Rows of hidden states that a rank sends to other ranks, and receives from them."""

    sent: Fraction
    received: Fraction


def expected_rows(experts: ExpertsShape, grid: Grid, rank: int) -> Rows:
    """Expected rows for each token of a rank, of which all ranks have as many."""
    return _expected_rows(experts.number, experts.chosen, (grid.z, grid.x, grid.y), grid.place(rank).index(*DISPATCH))


@functools.lru_cache(maxsize=4096)
def _expected_rows(number: int, chosen: int, sizes: tuple[int, ...], own: int) -> Rows:
    owners = expert_owners(number, Grid(**dict(zip(DISPATCH, sizes, strict=True))))
    counts = Counter(map(len, owners))
    reached = {size: 1 - Fraction(comb(number - size, chosen), comb(number, chosen)) for size in counts}
    here = reached[len(owners[own])]
    return Rows(sum(count * reached[size] for size, count in counts.items()) - here, (len(owners) - 1) * here)
