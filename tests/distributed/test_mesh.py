"""Process groups of a grid, on NCCL without a GPU, so that names, ranks and options are compared; the named mesh."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from hf_axonn import parallelize
from hf_axonn.compat.torch import bind_world, fake_world, high_priority
from hf_axonn.distributed import mesh
from hf_axonn.topology.experts import DISPATCH
from hf_axonn.topology.grid import FINEST_AXES, Grid
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks


@pytest.fixture
def nccl(monkeypatch):
    """A world of NCCL, as far as GridMesh asks; what `make_group` was given."""
    asked, make_group = [], mesh.make_group

    def making(ranks, label, *, seconds, options):
        asked.append((label, ranks, options))
        return make_group(ranks, label, seconds=seconds)

    monkeypatch.setattr(mesh, "backend_of", lambda device: "nccl")
    monkeypatch.setattr(mesh, "high_priority", lambda seconds: ("high priority", seconds))
    monkeypatch.setattr(mesh, "make_group", making)
    monkeypatch.setattr(mesh, "reduce_", lambda value, group: None)
    monkeypatch.setattr(mesh.torch, "zeros", lambda *_, device: device)
    monkeypatch.setattr(mesh.torch.cuda, "current_device", lambda: 3)
    return asked


def test_on_nccl_the_world_gets_the_device_of_the_rank(nccl, monkeypatch):
    """As accelerate makes it, it has none. Its communicator has to be there before, so a collective comes first."""
    order = []
    monkeypatch.setattr(mesh, "reduce_", lambda value, group: order.append((value, group, group.bound_device_id)))
    with fake_world(4):
        made = mesh.GridMesh(Grid(z=2, x=2), "cuda")
        world, device = dist.group.WORLD, torch.device("cuda", 3)
        assert order == [(device, world, None)]
        assert world.bound_device_id == made.group("z").bound_device_id == device


def test_a_device_that_the_world_was_given_stays():
    with fake_world(2):
        bind_world(torch.device("cuda", 1))
        bind_world(torch.device("cuda", 0))
        assert dist.group.WORLD.bound_device_id == torch.device("cuda", 1)
    with fake_world(2):
        mesh.GridMesh(Grid(z=2), "cpu")
        assert dist.group.WORLD.bound_device_id is None


def test_on_nccl_weights_and_gradients_have_communicators_of_their_own(nccl):
    with fake_world(8):
        made = mesh.GridMesh(Grid(data=2, z=2, x=2), "cuda")
        assert made.reductions is not made.group("z")
        assert dist.get_process_group_ranks(made.reductions) == dist.get_process_group_ranks(made.group("z"))
        assert made.storage_mesh.get_group(1) is made.group("z")
        assert made.group("x", "y") is made.group("x")
    assert [(label, ranks) for label, ranks, _ in nccl] == [
        ("axonn_data", [0, 4]),
        ("axonn_z", [0, 2]),
        ("axonn_x", [0, 1]),
        ("axonn_y", [0]),
        ("axonn_data_z", [0, 2, 4, 6]),
        ("axonn_z_reductions", [0, 2]),
    ]
    assert all(options == ("high priority", 1800) for *_, options in nccl)


def test_on_nccl_an_axis_of_all_ranks_has_priority_too(nccl):
    """The world's own group has none."""
    with fake_world(4):
        made = mesh.GridMesh(Grid(z=4), "cuda")
        assert dist.group.WORLD not in (made.group("z"), made.reductions)
    assert [label for label, *_ in nccl] == ["axonn_data", "axonn_z", "axonn_z_reductions"]


def test_tokens_travel_to_experts_by_a_communicator_of_their_own_where_weights_are_gathered(nccl):
    with fake_world(8):
        made = mesh.GridMesh(Grid(data=2, z=2, x=2), "cuda")
        for _ in range(2):  # of two models
            made.open_group(DISPATCH)
        assert made.find_axes(made.group(*DISPATCH)) == DISPATCH
    with fake_world(8):
        alone = mesh.GridMesh(Grid(data=2, x=2, y=2), "cuda")
        alone.open_group(DISPATCH)
        assert alone.group(*DISPATCH) is alone.group("x", "y")
    assert [ranks for label, ranks, _ in nccl if label == "axonn_z_x_y"] == [[0, 1, 2, 3]]


def test_elsewhere_one_group_does_both():
    with fake_world(4):
        made = mesh.GridMesh(Grid(z=4), "cpu")
        made.open_group(DISPATCH)
        assert made.reductions is made.group("z") is made.group(*DISPATCH) is dist.group.WORLD
        made = mesh.GridMesh(Grid(x=4), "cuda")
        assert made.reductions is made.group("z") and made.reductions.size() == 1


def test_without_z_nothing_is_doubled(nccl):
    with fake_world(4):
        made = mesh.GridMesh(Grid(y=2, x=2), "cuda")
        assert made.reductions is made.group("z")


def test_options_say_priority_and_timeout(monkeypatch):
    options = SimpleNamespace(is_high_priority_stream=False)

    def make(is_high_priority_stream):
        options.is_high_priority_stream = is_high_priority_stream
        return options

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=make), raising=False)
    assert high_priority(7.0) is options
    assert options.is_high_priority_stream and options._timeout == timedelta(seconds=7)


def test_groups_of_a_label_are_split_by_their_least_rank(monkeypatch):
    """In a world that has a device torch splits its communicator by numbers of groups, which no two may share."""
    found, helper = [], dist.distributed_c10d._new_process_group_helper

    def making(size, rank, ranks, backend, store, name, *args, **kwargs):
        found.append((name, dist.distributed_c10d._process_group_color(ranks)))
        return helper(size, rank, ranks, backend, store, name, *args, **kwargs)

    with fake_world(8):
        monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", making)
        for _ in range(2):
            mesh.GridMesh(Grid(z=2, y=2, x=2), "cpu")
    first = [("axonn_data:0:0", 1), ("axonn_z:0:0", 1), ("axonn_x:0:0", 1), ("axonn_y:0:0", 1), ("axonn_x_y:0:0", 1)]
    assert found == [*first, *((name.replace(":0:", ":1:"), color) for name, color in first)]
    assert dist.distributed_c10d._process_group_color([3, 4]) != 4, "torch's own is back"


def _groups_of_four_ranks() -> list:
    found = []
    for grid in (Grid(z=4, context=2), Grid(z=2, x=2)):
        made = mesh.GridMesh(grid, "cpu")
        groups = [("context",), ("data", "rows"), ("z",)] if grid.context > 1 else [("z",), ("x",)]
        found += [made.find_axes(made.group(*axes)) for axes in groups]
    for grid in (Grid(z=2, x=2), Grid(z=4, context=2)):
        _use_the_named_mesh(grid)
    return found


def _use_the_named_mesh(grid: Grid) -> None:
    """Work of a user on the axes of a model, with torch's own functions."""
    model, _ = parallelize(tiny_model("llama"), grid)
    groups = len(dist.distributed_c10d._world.pg_map)
    named, here = model.axonn.mesh, grid.coordinates(dist.get_rank())
    assert isinstance(named, DeviceMesh) and named is model.axonn.mesh and named.size() == 4
    x, z = ("x", "z") if grid.x > 1 else ("context", "z")
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total, group=named[x].get_group())
    assert total == sum(dist.get_process_group_ranks(model.axonn.grid_mesh.group(x)))
    assert named.get_group(z) is named[z].get_group() is model.axonn.grid_mesh.group("z")
    assert named.get_local_rank("z") == here["z"] and named.get_local_rank("x") == here["x"]
    whole = torch.arange(12.0).view(4, 3)
    sharded = distribute_tensor(whole, named[x], [Shard(0)])
    assert torch.equal(sharded.to_local(), whole[2:] if named.get_local_rank(x) else whole[:2])
    assert torch.equal((sharded @ sharded.T).full_tensor(), whole @ whole.T)
    over_two = distribute_tensor(whole, named["rows", x], [Shard(0), Shard(1)])
    assert torch.equal(over_two.full_tensor(), whole)
    assert len(dist.distributed_c10d._world.pg_map) == groups
    with pytest.raises(AttributeError):
        model.axonn.mesh = None


def test_groups_and_named_mesh_of_four_ranks():
    """A group is found by its axes; collectives and DTensors of a user lie on the axes of a model's mesh."""
    for found in run_ranks(_groups_of_four_ranks, 4):
        assert found == [("context",), ("data", "rows"), ("z",), ("z",), ("x",)]


@pytest.mark.parametrize(
    ("grid", "dims"),
    [
        (Grid(x=4), ("data", "pipe", "rows", "context", "x", "y")),  # one rank's group serves every other axis
        (Grid(data=2, z=2, x=2, y=2), ("data", "rows", "x", "y")),
        (Grid(data=2, pipe=2, z=4, context=2, x=2, y=2), ("data", "pipe", "context", "x", "y")),
        (Grid(pipe=2, z=4, context=2, x=2, y=2), ("data", "pipe", "rows", "context", "x", "y")),
    ],
)
def test_an_axis_without_a_group_is_no_dim_of_the_named_mesh(grid, dims):
    with fake_world(grid.size):
        named = mesh.GridMesh(grid, "cpu").named_mesh
        assert named.mesh_dim_names == dims
        assert named.shape == tuple(getattr(grid, dim) for dim in dims)
        assert [dist.get_process_group_ranks(named[dim].get_group()) for dim in (*dims, "z")] == [
            grid.ranks_along((dim,), 0) for dim in (*dims, "z")
        ]
        for name, why in (
            ("tp", "no axis of a grid"),
            *((axis, "no process group") for axis in {*FINEST_AXES} - {*dims}),
        ):
            with pytest.raises(KeyError, match=why):
                named[name]
            with pytest.raises(KeyError, match=why):
                named.get_group(name)
        with pytest.raises(KeyError, match="rows and context"):
            named["data", "z"]
