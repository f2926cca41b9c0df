"""The order of the axes on the machine: which process takes which rank, by arithmetic and in a real launch."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import yaml

from hf_axonn.config import AxonnConfig
from hf_axonn.distributed.mesh import grid_mesh
from hf_axonn.planner.time.links import strides
from hf_axonn.topology.axis_order import ORDER, PLACED, check_order, rank_at, take_rank, trim_order
from hf_axonn.topology.grid import AXES, Grid
from tests.helpers import ROOT
from tests.helpers.float64 import Float64
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks


ORDERS = list(itertools.permutations(AXES))
GRIDS = [
    Grid(data=2, z=3, y=4, x=5),
    Grid(z=2, y=2),
    Grid(x=4),
    Grid(data=2, z=2, y=2, x=2),
    Grid(data=2, pipe=3, z=2, x=2),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_order_gives_each_process_a_rank_and_each_axis_its_stride(grid):
    for order in ORDERS:
        ranks = [rank_at(grid, order, place) for place in range(grid.size)]
        assert sorted(ranks) == list(range(grid.size)) and ranks[0] == 0
        place_of = {rank: place for place, rank in enumerate(ranks)}
        for axis, stride in strides(grid, order).items():  # what the planner counts with
            for rank in range(grid.size):
                here = grid.coordinates(rank)
                if here[axis] + 1 < getattr(grid, axis):
                    neighbour = grid.rank(**here | {axis: here[axis] + 1})
                    assert place_of[neighbour] - place_of[rank] == stride, (order, axis)
    assert [rank_at(grid, ORDER, place) for place in range(grid.size)] == list(range(grid.size))


def environment(order, rank, **others):
    config = AxonnConfig(grid=Grid(z=4, y=2), order=order)
    environ = {"AXONN_CONFIG": config.to_json(), "RANK": str(rank), "WORLD_SIZE": "8", "MASTER_PORT": "1234"}
    return environ | {"MASTER_ADDR": "here"} | others


def test_a_process_takes_its_rank_once():
    assert [rank_at(Grid(z=4, y=2), ("z", "y", "x", "data"), place) for place in range(8)] == [0, 2, 4, 6, 1, 3, 5, 7]
    here = environment(("z", "y", "x", "data"), 1)
    take_rank(here)
    assert here["RANK"] == "2" and here[PLACED] == "here:1234:2"
    take_rank(here)  # as in a process that it starts
    assert here["RANK"] == "2"
    another = here | {"MASTER_PORT": "99", "RANK": "3"}  # a launch inside of a process that has its rank
    take_rank(another)
    assert another["RANK"] == "6"


def test_ranks_stay_where_there_is_nothing_to_order():
    for environ in (
        environment(ORDER, 1),
        environment(("z", "y", "x", "data"), 1, WORLD_SIZE="4"),
        {"AXONN_CONFIG": "{}"},
    ):
        before = dict(environ)
        take_rank(environ)
        assert environ == before
    assert "order" not in json.loads(AxonnConfig(grid=Grid(x=2)).to_json())


@pytest.mark.parametrize("order", ["yxzd", ["y", "x"], ["y", "x", "z", "z"], 3, {"y": 1}, ["y", "x", "z", "Data"]])
def test_an_order_names_each_axis_once(order):
    with pytest.raises(ValueError, match=r"names each axis once.*write order: \[y, x, z, pipe, data\]"):
        check_order(order)
    with pytest.raises(ValueError, match="axonn_config: order is"):
        AxonnConfig.from_mapping({"grid": {"x": 2}, "order": order})


def test_an_order_without_pipe_has_it_inside_of_data():
    assert check_order(["y", "x", "z", "data"]) == ORDER == ("y", "x", "z", "pipe", "data")
    assert check_order(["z", "data", "y", "x"]) == ("z", "pipe", "data", "y", "x")
    assert check_order(["pipe", "z", "x", "data", "y"]) == ("pipe", "z", "x", "data", "y")
    assert trim_order(ORDER, Grid(z=2)) == ["y", "x", "z", "data"]
    assert trim_order(ORDER, Grid(pipe=2)) == list(ORDER)


# Each process writes its rank and where it is. More is not imported in it, which takes seconds of each.
RANKS = """
import json, os, sys
import torch
from hf_axonn.config import AxonnConfig
rank = int(os.environ["RANK"])
found = {"rank": rank, "here": AxonnConfig.from_env().grid.coordinates(rank)}
open(os.path.join(sys.argv[1], os.environ["LOCAL_RANK"]), "w").write(json.dumps(found))
"""
TRAINING = """
import json, os, sys
import torch
from accelerate import Accelerator
from tests.helpers.float64 import Float64
from tests.helpers.models import tiny_batch, tiny_model
accelerator = Accelerator()
model = accelerator.prepare(tiny_model("llama").train())
mesh = accelerator.axonn_mesh
rows = {name: rows.chunk(mesh.size("data", "z"))[mesh.index("data", "z")] for name, rows in tiny_batch(4, 7).items()}
with Float64():
    loss = model(**rows).loss
    accelerator.backward(loss)
norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
total = accelerator.reduce(loss.detach(), "mean")
found = {"rank": accelerator.state.process_index, "here": mesh.coordinates, "loss": float(total), "norm": float(norm)}
open(os.path.join(sys.argv[1], os.environ["LOCAL_RANK"]), "w").write(json.dumps(found))
accelerator.end_training()
"""


ORDERED, GRID = ["z", "x", "y", "data"], Grid(z=2, y=2)


def launched(tmp_path, script):
    """What the processes of a launch in that order have found, by place."""
    settings = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_machines": 1}
    settings |= {"num_processes": 4, "use_cpu": True, "mixed_precision": "no"}
    settings["axonn_config"] = {"grid": GRID.as_dict(), "order": ORDERED}
    (tmp_path / "launch.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config", str(tmp_path / "launch.yaml")]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, str(tmp_path / "script.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads((tmp_path / str(place)).read_text()) for place in range(4)]
    for place, process in enumerate(found):
        assert process["here"] == {"data": 0, "pipe": 0, "z": place % 2, "x": 0, "y": place // 2}
        assert process["rank"] == GRID.rank(**process["here"]) == rank_at(GRID, ORDERED, place)
    return found


def _neighbours(places):
    """Where this rank is, and the sum of 10 ** place over the ranks on each of its axes, by the groups of the grid."""
    mesh = grid_mesh(GRID, "cpu")
    found = {"here": mesh.coordinates}
    for axis in ("data", "z", "y", "x"):
        total = torch.tensor(10 ** places[dist.get_rank()])
        dist.all_reduce(total, group=mesh.group(axis))
        found[axis] = int(total)
    return found


def test_processes_of_a_launch_lie_in_the_order_of_the_file(tmp_path):
    """The ranks that they take there, in groups of forks; slow: a training in the groups of the launch itself."""
    processes = launched(tmp_path, RANKS)
    ranks = run_ranks(_neighbours, 4, {process["rank"]: place for place, process in enumerate(processes)})
    found = [ranks[process["rank"]] for process in processes]
    assert [process["here"] for process in processes] == [process["here"] for process in found]
    assert [process["z"] for process in found] == [11, 11, 1100, 1100], "neighbours"
    assert [process["y"] for process in found] == [101, 1010, 101, 1010]
    assert [(process["data"], process["x"]) for process in found] == [(10**place, 10**place) for place in range(4)]


@pytest.mark.slow
def test_a_launch_in_another_order_equals_one_process(tmp_path):
    model = tiny_model("llama").train()
    with Float64():
        loss = model(**tiny_batch(4, 7)).loss
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for found in launched(tmp_path, TRAINING):
        assert found["loss"] == pytest.approx(float(loss.detach()), rel=1e-10)
        assert found["norm"] == pytest.approx(float(norm), rel=1e-10)
