"""gloo.py: gathers by messages keep their order, take any shape, and end when a peer does not come."""

from __future__ import annotations

import os
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from hf_axonn import Grid, parallelize
from hf_axonn.compat.torch import backend_of
from hf_axonn.distributed import gloo
from hf_axonn.distributed.collectives import (
    barrier,
    start_all_gather,
    start_all_gathers,
    start_all_reduce,
    start_reduce_scatter,
)
from hf_axonn.distributed.mesh import grid_mesh
from hf_axonn.distributed.watchdog import watchdog
from hf_axonn.distributed.watchdog.watchdog import watch
from hf_axonn.engine.gradient_sync import sync_gradients
from tests.helpers.models import tiny_model
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


class Issued(TorchDispatchMode):
    """Notes the operators of torch.distributed that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.add(func._schema.name.removeprefix("c10d::"))
        return func(*args, **kwargs or {})


def check_no_collective_is_a_coalesced_one():
    model, _ = parallelize(tiny_model("mixtral").float(), Grid(z=2, x=2))
    with Issued() as issued:
        model(input_ids=torch.arange(8).view(2, 4)).logits.sum().backward()
        sync_gradients(model)
    assert {"alltoall_base_", "_allgather_base_"} <= issued.names
    assert not [name for name in issued.names if "coalesced" in name], issued.names


def check_gathers_in_one_call():
    """Small ones travel as one, large ones alone; each arrives as its own, whatever is waited for first."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    sizes = [[3, 0], [1], [2**17, 5], []]
    for dtype in (torch.float64, torch.bfloat16):
        bundle = [[torch.full((size,), 10.0 * size + rank).to(dtype) for size in row] for row in sizes]
        for pending, row in reversed(list(zip(start_all_gathers(bundle, group), bundle, strict=True))):
            assert pending.wait() is pending.wait()
            for gathered, block in zip(pending.wait(), row, strict=True):
                peers = [torch.full_like(block, 10.0 * len(block) + peer) for peer in range(world)]
                assert torch.equal(gathered, torch.stack(peers))


def check_a_peer_that_does_not_come():
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2), backend="gloo")
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["noticed"], timedelta(minutes=3))  # it stays, but sends nothing
        return
    with pytest.raises(RuntimeError, match="2000ms"):
        start_all_gather(torch.ones(2**18), group).wait()
    store.set("noticed", "")


def begin_again(folder, backend):
    """Make the process group of two ranks as scripts do."""
    dist.destroy_process_group()
    world = dict(init_method=f"file://{folder}/{backend}", rank=int(os.environ["RANK"]), world_size=2)
    dist.init_process_group(backend, **world)


def check_backends(folder, backend):
    begin_again(folder, backend)
    mesh = grid_mesh(Grid(x=2), "cpu")
    assert backend_of() == backend_of(mesh.group("x"), torch.device("cpu")) == "gloo"
    with mock.patch.object(gloo, "sum_blocks", side_effect=gloo.sum_blocks) as sums:
        assert start_reduce_scatter(torch.ones(2, 4), mesh.group("x")).wait().tolist() == [2, 2, 2, 2]
    assert sums.call_count == 1
    barrier()
    watch()
    assert watchdog._watch._blocking


@pytest.mark.parametrize("backend", [None, "cpu:gloo,cuda:gloo"])
def test_a_world_with_a_backend_for_each_device_is_gloo_on_cpus(tmp_path, backend):
    run_ranks(check_backends, 2, tmp_path, backend)


def check_no_backend(folder):
    begin_again(folder, "cuda:gloo")
    missing = "no backend for tensors on cpu, only cuda:gloo: move the model to the device"
    with pytest.raises(ValueError, match=missing):
        parallelize(tiny_model("llama"), Grid(x=2))
    begin_again(folder, "cpu:gloo,cuda:fake")
    with mock.patch("hf_axonn.parallel.parallelize.default_device_type", return_value="cuda"):
        on_cpu = r"on the CPU, but the process trains on cuda, by fake: move the model first, with model.to\('cuda'\)"
        with pytest.raises(ValueError, match=on_cpu):
            parallelize(tiny_model("llama"), Grid(x=2))
    parallelize(tiny_model("llama"), Grid(x=2))  # a process that trains on CPUs
    begin_again(folder, "gloo")  # the ranks meet once more at their end
    with mock.patch("hf_axonn.parallel.parallelize.default_device_type", return_value="cuda"):
        parallelize(tiny_model("llama"), Grid(x=2))  # a world of CPUs, on a machine that has GPUs


def test_a_model_on_a_device_without_a_backend_is_refused(tmp_path):
    run_ranks(check_no_backend, 2, tmp_path)


@pytest.mark.parametrize("world", [2, 3])
def test_gathers_arrive_in_order(world):
    run_ranks(check_order, world)


@pytest.mark.parametrize("world", [2, 3])
def test_gathers_in_one_call_arrive_each_as_its_own(world):
    run_ranks(check_gathers_in_one_call, world)


def test_no_collective_is_a_coalesced_one():
    run_ranks(check_no_collective_is_a_coalesced_one, 4)


def test_a_peer_that_does_not_come_is_noticed_within_the_timeout():
    run_ranks(check_a_peer_that_does_not_come, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("ranks", [2, 5])
def test_blocks_are_summed(ranks, dtype):
    blocks = torch.arange(ranks * 6).view(ranks, 2, 3).to(dtype)
    assert torch.equal(gloo.sum_blocks(blocks), blocks.sum(dim=0))
