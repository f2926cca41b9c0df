"""The grid: who sits where, and what it says to a user who has miscounted."""

import itertools
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hf_axonn.distributed.mesh import SAME_SAMPLES, GridMesh, grid_mesh
from hf_axonn.topology.grid import AXES, Grid
from tests.helpers.ranks import all_grids, run_ranks


GRIDS = [grid for size in range(1, 9) for grid in all_grids(size)]
ALWAYS = ("data", "z", "y", "x")  # pipe has a group only where it is longer than 1


def test_ranks_and_coordinates_are_a_bijection():
    for grid in GRIDS:
        seen = {tuple(grid.coordinates(rank).values()) for rank in range(grid.size)}
        assert seen == set(itertools.product(*(range(getattr(grid, axis)) for axis in AXES))), grid
        for rank in range(grid.size):
            assert grid.rank(**grid.coordinates(rank)) == rank, grid


def test_y_varies_fastest_then_x_then_z_then_data():
    grid = Grid(data=2, z=3, y=4, x=5)
    assert [grid.rank(**{axis: 1}) for axis in ("y", "x", "z", "data")] == [1, 4, 20, 60]
    assert grid.coordinates(60 + 40 + 4 * 3 + 2) == {"data": 1, "pipe": 0, "z": 2, "x": 3, "y": 2}


def test_pipe_lies_between_data_and_z_and_is_written_only_where_it_is():
    grid = Grid(data=2, pipe=3, z=2, y=2, x=2)
    assert [grid.rank(**{axis: 1}) for axis in ("y", "x", "z", "pipe", "data")] == [1, 2, 4, 8, 24]
    assert grid.size == 48 and grid.dp_size == 4
    assert grid.coordinates(24 + 16 + 5) == {"data": 1, "pipe": 2, "z": 1, "x": 0, "y": 1}
    assert grid.ranks_along(("pipe",), 25) == [25, 33, 41]
    assert Grid(data=2, pipe=3, z=2, x=2).ranks_along(("pipe", "x", "y"), 2) == [2, 3, 6, 7, 10, 11], (
        "these share samples"
    )
    assert str(grid) == "data=2,pipe=3,z=2,y=2,x=2"
    assert list(grid.as_dict()) == ["data", "pipe", "z", "y", "x"]
    assert list(Grid(data=2).as_dict()) == ["data", "z", "y", "x"]
    assert Grid(pipe=2, x=2).picture().splitlines()[1:4] == [
        "data=0 pipe=0 z=0   (x down, y across)",
        "    0",
        "    1",
    ]
    with pytest.raises(ValueError, match="grid axis pipe is 0.*write pipe=1"):
        Grid(pipe=0)


def test_context_divides_z_and_varies_fastest_inside_it():
    grid = Grid(data=2, z=4, x=2, context=2)
    assert (grid.size, grid.rows, grid.dp_size) == (16, 2, 4)
    place = grid.place(8 + 3 * 2 + 1)
    assert [place.index(axis) for axis in ("data", "z", "rows", "context", "x")] == [1, 3, 1, 1, 1]
    assert place.index("data", "rows") == 3 and place.size("data", "rows") == 4
    assert [place.move(("x", "context"), index).index("rows", "context", "x") for index in range(4)] == [4, 6, 5, 7]
    assert grid.ranks_along(("context",), 15) == [13, 15]
    assert grid.ranks_along(("rows",), 15) == [11, 15]
    assert grid.ranks_along(("z",), 15) == grid.ranks_along(("rows", "context"), 15) == [9, 11, 13, 15]
    assert grid.ranks_along(SAME_SAMPLES, 15) == [12, 13, 14, 15]
    assert str(grid) == "data=2,z=4,y=1,x=2,context=2"
    assert "data=1 z=3 (rows=1 context=1)   (x down, y across)" in grid.picture()
    with pytest.raises(ValueError, match="data \\* z \\* y \\* x = 2 \\* 4 \\* 1 \\* 2 = 16, but 8"):
        grid.check(8)
    with pytest.raises(ValueError, match="context 8 does not divide z = 1.*write z: 8, and data: 1"):
        Grid(data=8, context=8)


@pytest.mark.parametrize("axes", [("y",), ("x", "y"), ("data", "z"), AXES], ids="-".join)
def test_groups_part_the_ranks(axes):
    for grid in GRIDS:
        groups = {tuple(grid.ranks_along(axes, rank)) for rank in range(grid.size)}
        assert sorted(rank for group in groups for rank in group) == list(range(grid.size)), grid
        for group in groups:
            assert list(group) == sorted(group), grid
            others = {tuple(grid.coordinates(rank)[axis] for axis in AXES if axis not in axes) for rank in group}
            assert len(others) == 1, grid


@pytest.mark.parametrize("size", [0, -2, 1.5, True, "2", None])
def test_a_size_is_a_whole_number_of_ranks(size):
    with pytest.raises(ValueError, match=rf"grid axis z is {size!r}.*write z=1"):
        Grid(z=size)


def test_sizes_are_given_by_name():
    with pytest.raises(TypeError):
        Grid(2, 2)


def test_a_wrong_number_of_processes_is_answered_with_both_remedies():
    with pytest.raises(ValueError, match=r"data \* z \* y \* x = 1 \* 2 \* 1 \* 3 = 6, but 4.*start 6.*product is 4"):
        Grid(z=2, x=3).check(4)
    Grid(z=2, x=2).check(4)


def test_a_rank_that_is_not_on_the_grid():
    with pytest.raises(ValueError, match="rank 4 is not on the grid data=1,z=2,y=1,x=2, whose ranks are 0 to 3"):
        Grid(z=2, x=2).coordinates(4)


def test_text_and_picture():
    grid = Grid(z=2, y=2, x=3)
    assert str(grid) == "data=1,z=2,y=2,x=3"
    assert grid.picture().splitlines() == [
        "grid data=1,z=2,y=2,x=3: 12 rank(s)",
        "data=0 z=0   (x down, y across)",
        "     0  1",
        "     2  3",
        "     4  5",
        "data=0 z=1   (x down, y across)",
        "     6  7",
        "     8  9",
        "    10 11",
    ]


def test_a_mesh_needs_a_world(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match="torch.distributed is not initialized: start the script with"):
        GridMesh(Grid(z=2), "cpu")
    for name in ("RANK", "WORLD_SIZE"):  # it was started by a launcher, so that is not what is missing
        monkeypatch.setenv(name, "1")
    with pytest.raises(RuntimeError, match="not initialized: make Accelerator.., or the arguments of Trainer, before"):
        GridMesh(Grid(z=2), "cpu")


def groups_keep_the_timeout(folder):
    dist.destroy_process_group()
    rank, grid = int(os.environ["RANK"]), Grid(z=2, x=2)
    world = dict(init_method=f"file://{folder}/again", rank=rank, world_size=grid.size)
    dist.init_process_group("gloo", timeout=timedelta(seconds=5), **world)
    mesh = grid_mesh(grid, "cpu")
    for axes in (*((axis,) for axis in ALWAYS), ("x", "y"), ("data", "z")):
        backend = mesh.group(*axes)._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=5), axes
    if rank == 0:
        with pytest.raises(RuntimeError, match="5000ms"):  # the other rank along z sends nothing
            dist.recv(torch.empty(1), group=mesh.group("z"), group_src=1)
    dist.barrier(dist.new_group(range(grid.size), timeout=timedelta(seconds=60)))
    assert dist.new_group([rank], use_local_synchronization=True)._get_backend(
        torch.device("cpu")
    ).options._timeout == timedelta(minutes=30), "groups that a script makes afterwards have torch's timeout"


def test_groups_have_the_timeout_of_the_world(tmp_path):
    run_ranks(groups_keep_the_timeout, 4, tmp_path)


def groups_are_right():
    dist.new_group([0, 1])  # a script's own, which only its members count
    for grid in all_grids(4):
        mesh = grid_mesh(grid, "cpu")
        assert grid_mesh(grid, "cpu") is mesh
        assert mesh.coordinates == grid.coordinates(dist.get_rank())
        for axes in (*((axis,) for axis in ALWAYS), ("x", "y"), ("data", "z")):
            group = mesh.group(*axes)
            assert dist.get_process_group_ranks(group) == grid.ranks_along(axes, mesh.rank)
            assert dist.get_group_rank(group, mesh.rank) == mesh.index(*axes)
            assert group.size() == mesh.size(*axes)
        storage = mesh.storage_mesh
        assert storage.mesh_dim_names is None
        axes = [axis for axis in ("y", "x", "z") if getattr(grid, axis) > 1] or ["z"]
        assert list(storage.shape) == [getattr(grid, axis) for axis in axes]
        assert list(storage.get_coordinate()) == [mesh.coordinates[axis] for axis in axes]
        assert [storage.get_group(dim) for dim in range(len(axes))] == [mesh.group(axis) for axis in axes]
        try:
            mesh.group("z", "y")
        except KeyError as error:
            assert "no group along" in str(error)
        else:
            raise AssertionError("a group that was never made")
    try:
        grid_mesh(Grid(z=3), "cpu")
    except ValueError as error:
        assert "but 4 process(es)" in str(error)
    else:
        raise AssertionError("a grid of 3 ranks in a world of 4")


def test_groups_on_four_ranks():
    run_ranks(groups_are_right, 4)
