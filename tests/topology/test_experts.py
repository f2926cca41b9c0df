"""The ranks on which experts lie (no processes)."""

from __future__ import annotations

import pytest

from hf_axonn.topology.experts import expert_owners, own_experts, why_not_move
from hf_axonn.topology.grid import Grid


GRIDS = [Grid(z=4), Grid(z=2, x=2, y=2), Grid(y=3, z=2), Grid(z=2, x=3, context=2), Grid(data=2, pipe=2, z=3)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("experts", [5, 6, 8, 16, 61])
def test_every_expert_lies_on_one_rank_of_a_stage(grid, experts):
    owners = expert_owners(experts, grid)
    assert len(owners) == grid.z * grid.x * grid.y
    assert sorted(expert for owner in owners for expert in owner) == list(range(experts))
    stage = [grid.rank(z=z, x=x, y=y) for z in range(grid.z) for x in range(grid.x) for y in range(grid.y)]
    assert owners == [own_experts(experts, grid.place(rank), over_z=True) for rank in stage]


def test_ranks_of_z_share_the_experts_that_gather_has_on_a_position():
    grid = Grid(z=2, x=2, y=2)
    for rank in range(grid.size):
        together = [own_experts(16, grid.place(other), over_z=True) for other in grid.ranks_along(("z",), rank)]
        assert sum(map(list, together), []) == list(own_experts(16, grid.place(rank), over_z=False))


def test_tokens_can_travel_where_every_rank_can_have_an_expert():
    assert why_not_move([8, 16], Grid(z=8)) == ""
    assert why_not_move([8], Grid(y=2)) == ""
    assert "z * x * y is 1" in why_not_move([8], Grid(data=4, pipe=2))
    assert "no layer" in why_not_move([], Grid(z=4))
    assert "4 * 1 * 2 = 8 ranks are more than the 6 experts" in why_not_move([16, 6], Grid(z=4, y=2))
