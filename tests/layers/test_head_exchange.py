"""Which features each rank works on, and the exchange that brings them there."""

import pytest
import torch
import torch.distributed as dist

from hf_axonn.distributed.mesh import grid_mesh
from hf_axonn.layers.head_exchange import HeadExchange, RowExchange
from hf_axonn.topology.grid import Grid
from hf_axonn.topology.heads import (
    Heads,
    arriving_features,
    divide_with_context,
    feature_ranges,
    feature_slice,
    is_own_slice,
    sent_features,
)
from tests.helpers.devices import rank_device, seeded
from tests.helpers.ranks import all_grids, fake_mesh, run_ranks


pytestmark = pytest.mark.usefixtures("device")


GRIDS = [grid for size in (2, 3, 4, 6, 8) for grid in all_grids(size) if grid.x * grid.y > 1]
CASES = {  # segments, query heads, kv heads, features of a head
    "k of few heads": (("kv",), 12, 2, 3),
    "k of one head": (("kv",), 8, 1, 4),
    "packed q, k, v": (("query", "kv", "kv"), 12, 4, 2),
    "packed, as many kv heads": (("query", "kv", "kv"), 6, 6, 2),
    "q, k, v of each head": (("query",), 6, 6, 3),
    "gate and up": (("own", "own"), 0, 0, 11),
}


def case(name, grid, rank):
    segments, query, kv, width = CASES[name]
    mesh = fake_mesh(grid, rank)
    heads = Heads.divide(query, kv, mesh) if query else None
    size = sum(getattr(heads, kind) if heads else 1 for kind in segments) * width
    return size, segments, heads, mesh


# Packed parts, and sizes; heads of another width in each part, groups that ranks share, channels of no head.
OVER_CONTEXT = {
    "Mamba 2": (("query:3", "query:3", "kv:2", "kv:2", "query:1"), 8, 2, 0, 8 * 7 + 2 * 4),
    "a delta net": (("kv:2", "kv:2", "query:3"), 8, 4, 0, 4 * 4 + 8 * 3),
    "channels": (("own", "own"), 0, 0, 16, 32),
}


@pytest.mark.parametrize("grid", [Grid(z=2, context=2), Grid(z=4, x=2, context=2), Grid(z=4, y=2, context=4)], ids=str)
@pytest.mark.parametrize("name", OVER_CONTEXT)
def test_each_rank_of_context_is_sent_the_features_of_its_heads(name, grid):
    segments, query, kv, channels, size = OVER_CONTEXT[name]
    for rank in range(grid.size):
        mesh = fake_mesh(grid, rank)
        outer = HeadExchange(size, segments, Heads.divide(query, kv, mesh) if query else None, mesh)
        inner = divide_with_context(query, kv, channels, mesh)
        blocks = RowExchange(outer, size, segments, inner, mesh).blocks(torch.cat(outer.indices)[None, None])
        for index, block in enumerate(blocks):
            found = feature_ranges(size, segments, inner, mesh.move(("context",), index))
            assert block.flatten().tolist() == [number for part in found for run in part.ranges for number in run]
    assert divide_with_context(query and 6, kv, channels and 18, fake_mesh(Grid(z=4, context=4), 0)) is None


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_rank_is_sent_what_it_needs_once(name, grid):
    for rank in range(grid.size):
        size, segments, heads, mesh = case(name, grid, rank)
        axes = heads.axes if heads else ("x", "y")
        needed = {
            its for piece in feature_ranges(size, segments, heads, mesh) for part in piece.ranges for its in part
        }
        arriving = arriving_features(size, segments, heads, mesh)
        assert sorted(its for features in arriving for its in features) == sorted(needed)
        for sender, features in enumerate(arriving):
            there = mesh.move(axes, sender)
            assert features == sent_features(size, segments, heads, there)[mesh.index(*axes)]
            own, _ = feature_slice(size, there, *axes)
            assert all(own.start <= feature < own.stop for feature in features)
        if is_own_slice(size, segments, heads, mesh):
            own, _ = feature_slice(size, mesh, *axes)
            assert needed == set(range(own.start, own.stop))


def test_packed_parts_have_to_explain_the_size():
    heads = Heads.divide(4, 2, fake_mesh(Grid(x=2), 0))
    with pytest.raises(ValueError, match="30 features are not 4 \\+ 2 \\+ 2 heads of one width"):
        feature_ranges(30, ("query", "kv", "kv"), heads, fake_mesh(Grid(x=2), 0))


def _exchanges(grids):
    for grid in grids:
        mesh = grid_mesh(grid, rank_device().type)
        for name in CASES:
            size, segments, heads, _ = case(name, grid, dist.get_rank())
            exchange = HeadExchange(size, segments, heads, mesh)
            if exchange.is_slice or not exchange.axes:
                continue
            whole = torch.randn(5, size, dtype=torch.float64, generator=seeded(1))
            whole.requires_grad_()
            own, padded = feature_slice(size, mesh, *exchange.axes)
            mine = torch.nn.functional.pad(whole[:, own], (0, padded - (own.stop - own.start)))
            taken = exchange.exchange(mine)
            expected = exchange.take(whole)
            assert torch.equal(taken, expected) and taken.shape[1] == exchange.size, (name, str(grid))
            # Each rank's gradients are shares of a sum over the axes, whichever way the features came.
            weights = torch.arange(1.0, 1 + taken.numel(), dtype=torch.float64).view_as(taken) * (1 + dist.get_rank())
            shares = []
            for output in (taken, expected):
                (gradient,) = torch.autograd.grad((output * weights).sum(), whole)
                dist.all_reduce(gradient, group=mesh.group(*exchange.axes))
                shares.append(gradient)
            torch.testing.assert_close(*shares, rtol=1e-12, atol=0)


def test_an_exchange_is_the_exchange_of_the_whole():
    run_ranks(_exchanges, 4, [grid for grid in all_grids(4) if grid.x * grid.y > 1])
