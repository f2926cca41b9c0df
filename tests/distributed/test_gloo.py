"""gloo.py: gathers by messages keep their order, take any shape, and end when a peer does not come."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hf_axonn.distributed import gloo
from hf_axonn.distributed.collectives import start_all_gather, start_all_reduce, start_reduce_scatter
from tests.helpers.ranks import run_ranks


def check_order():
    """Many gathers of different sizes under way at once, among other collectives, waited for in another order."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    shapes = [(), (1,), (0, 3), (700, 501), (2, 0), (1000, 333), (3,), (2**18,), (2**17,), (1,)]
    started = []
    for number, shape in enumerate(shapes):
        block = torch.full(shape, 100.0 * number + rank)
        started.append((number, start_all_gather(block, group)))
        reductions = [start_all_reduce(torch.ones(5), group), start_reduce_scatter(torch.ones(world, 4), group)]
    for number, pending in reversed(started):
        assert pending.wait().shape == (world, *shapes[number])
        for peer, row in enumerate(pending.wait()):
            assert (row == 100.0 * number + peer).all()
    assert all((reduction.wait() == world).all() for reduction in reductions)


def check_a_peer_that_does_not_come():
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2), backend="gloo")
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["noticed"], timedelta(minutes=3))  # it stays, but sends nothing
        return
    with pytest.raises(RuntimeError, match="2000ms"):
        start_all_gather(torch.ones(2**18), group).wait()
    store.set("noticed", "")


@pytest.mark.parametrize("world", [2, 3])
def test_gathers_arrive_in_order(world):
    run_ranks(check_order, world)


def test_a_peer_that_does_not_come_is_noticed_within_the_timeout():
    run_ranks(check_a_peer_that_does_not_come, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("ranks", [2, 5])
def test_blocks_are_summed(ranks, dtype):
    blocks = torch.arange(ranks * 6).view(ranks, 2, 3).to(dtype)
    assert torch.equal(gloo.sum_blocks(blocks), blocks.sum(dim=0))
