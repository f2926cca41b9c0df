"""The mesh of process groups that makes a grid out of ranks."""

from __future__ import annotations

import atexit
import os
import time
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hf_axonn.compat.torch import backend_of, bind_world, high_priority, make_group, unnamed_mesh, world_timeout
from hf_axonn.distributed.collectives import reduce_
from hf_axonn.distributed.named_mesh import NamedMesh
from hf_axonn.topology.experts import DISPATCH
from hf_axonn.topology.grid import FINEST_AXES, Grid, GridPosition


STAGE = ("data", "z", "x", "y")  # the ranks that have the same layers
ROWS = ("data", "rows")  # ranks that differ along these see different rows of a batch
TOKENS = ("data", "z")  # ranks that differ along these see different tokens: other rows, or positions of the same rows
SAME_SAMPLES = ("pipe", "context", "x", "y")  # ranks that differ along these alone are given the same rows
HEADS = ("context", "x", "y")  # ranks that share the heads of a mixer, where context divides them too
# In the order in which all ranks make them; DISPATCH where a model has experts to which tokens travel, HEADS where
# mixers exchange heads for positions.
GROUPS = (
    *(("data",), ("z",), ("x",), ("y",), ("x", "y"), TOKENS, ("pipe",), STAGE, ("context",), ROWS, SAME_SAMPLES),
    DISPATCH,
    HEADS,
)


class GridMesh(GridPosition):
    """The live process groups of a grid, as seen from this rank.

    Building it is collective over the world: every rank must call it, with the same grid. On NCCL the world gets the
    device of this rank, if `init_process_group` did not get it (one all-reduce over the world). Groups are made once
    for each axis and for the products that the algorithm uses: ("x", "y"), TOKENS, with pipelines pipe, the ranks of a
    stage and those that share samples, and with context those of context and of ROWS; those of DISPATCH and HEADS when
    a model needs them (`open_group`). A rank makes its own groups and does not name those of others, so that the cost
    does not grow with the world.

    NCCL runs the collectives of a communicator one after the other: the gather of the next weights would wait for the
    reduction of gradients. So there are two communicators over z there, and streams of high priority for all. On gloo,
    whose collectives of a group run beside each other, a second one would only cost threads and sockets.

    Attributes:
        reductions: the group over z that sums weight gradients; those gathered over z travel in `group("z")`.

    Raises:
        ValueError: the grid is not the size of the world.
        RuntimeError: torch.distributed has not been initialized.
    """

    def __init__(self, grid: Grid, device_type: str) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                f"the grid {grid} needs {grid.size} processes, but torch.distributed is not initialized: {_remedy()}."
            )
        grid.check(dist.get_world_size())
        self.rank = dist.get_rank()
        super().__init__(grid, grid.coordinates(self.rank))
        self.device_type = device_type
        self._nccl = backend_of(device=torch.device(device_type)) == "nccl"
        if self._nccl and dist.group.WORLD is not None:
            reduce_(torch.zeros((), device=self.device), dist.group.WORLD)  # its communicator is there then
            bind_world(self.device)
        self._groups: dict[tuple[str, ...], ProcessGroup] = {}
        alone = grid.pipe == 1
        unused = {("pipe",): alone, STAGE: alone, ("context",): grid.context == 1, DISPATCH: True, HEADS: True}
        for axes in GROUPS:
            if not unused.get(axes):
                self.open_group(axes)
        if grid.pipe == 1 and dist.group.WORLD is not None:
            self._groups[STAGE] = dist.group.WORLD  # as it was without pipelines, on NCCL too
        self.reductions = (
            self._make_group(("z",), "_reductions") if self._nccl and grid.z > 1 else self._groups[("z",)]
        )

    def _find_group(self, axes: tuple[str, ...]) -> ProcessGroup | None:
        """Return a group that has the ranks along `axes` already, if any; NCCL's world has no priority, and context
        and tokens on their way to experts would wait there for the weights that are gathered over z."""
        if self._nccl and axes in (("context",), DISPATCH) and self.grid.z > 1:
            return None
        world = dist.group.WORLD
        return self._same_ranks(axes, *((world,) if world is not None and not self._nccl else ()))

    def _same_ranks(self, axes: tuple[str, ...], *others: ProcessGroup) -> ProcessGroup | None:
        """Return the first group of this mesh, and of `others`, that has the ranks along `axes`; None without one."""
        ranks = self.grid.ranks_along(axes, self.rank)
        there = (*self._groups.values(), *others)
        return next((group for group in there if dist.get_process_group_ranks(group) == ranks), None)

    def _make_group(self, axes: tuple[str, ...], suffix: str = "") -> ProcessGroup:
        seconds = world_timeout(self.device_type)
        options = high_priority(seconds) if self._nccl else None
        ranks = self.grid.ranks_along(axes, self.rank)
        named = [axis for axis in axes if axis != "context" or self.grid.context > 1]
        return make_group(ranks, f"axonn_{'_'.join(named)}{suffix}", seconds=seconds, options=options)

    def open_group(self, axes: tuple[str, ...]) -> None:
        """Make the group along `axes` if it is not there. Collective over its ranks, which all do so in one order."""
        if axes not in self._groups:
            self._groups[axes] = self._find_group(axes) or self._make_group(axes)

    def group(self, *axes: str) -> ProcessGroup:
        """Return the group of ranks that differ from this one along `axes` alone; group ranks ascend by coordinate."""
        if axes not in self._groups:
            raise KeyError(f"no group along {axes}; there are {sorted(self._groups)}")
        return self._groups[axes]

    def find_axes(self, group: ProcessGroup) -> tuple[str, ...] | None:
        """Return the axes along which a group lies, the first of GROUPS where several have the same ranks; None for a
        group that is not of this mesh. No communication."""
        if group.group_name == self.reductions.group_name:
            return ("z",)
        names = {axes: each.group_name for axes, each in self._groups.items()}
        return next((axes for axes in GROUPS if names.get(axes) == group.group_name), None)

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, torch.get_device_module(self.device_type).current_device())

    @cached_property
    def sample_mesh(self) -> DeviceMesh:
        """The mesh (dp_shard, tp) by which Accelerate divides samples among ranks; no communicator of its own.

        Without context, x, y and pipe it is (dp_shard) alone: Accelerate looks for tp by its name.
        """
        if self.size(*SAME_SAMPLES) == 1:
            return DeviceMesh.from_group(self.group(*ROWS), self.device_type, mesh_dim_names=("dp_shard",))
        grid = self.grid
        ranks = torch.arange(grid.size).view(grid.data, grid.pipe, grid.rows, -1).transpose(1, 2)
        ranks = ranks.reshape(self.size(*ROWS), self.size(*SAME_SAMPLES))
        groups = [self.group(*ROWS), self.group(*SAME_SAMPLES)]
        return DeviceMesh.from_group(groups, self.device_type, mesh=ranks, mesh_dim_names=("dp_shard", "tp"))

    @cached_property
    def named_mesh(self) -> NamedMesh:
        """The mesh of data, pipe, rows, context, x and y that users see (named_mesh.py)."""
        there = {axis: self._groups.get((axis,)) or self._same_ranks((axis,)) for axis in FINEST_AXES}
        groups = {axis: group for axis, group in there.items() if group is not None}
        return NamedMesh(self, groups, self.group("z"), self.device_type)

    @cached_property
    def storage_mesh(self) -> DeviceMesh:
        """The mesh of y, x and z, as far as they have several ranks, on which parameters are stored as DTensors.

        Made from the groups above, so it opens no communicator of its own. It has no axis names: PEFT sizes adapters
        by the local shard on a named mesh.
        """
        grid, here, axes = self.grid, self.coordinates, self.grid.storage_axes
        ranks = torch.arange(grid.size).view(grid.data, grid.pipe, grid.z, grid.x, grid.y)
        ranks = ranks[here["data"], here["pipe"]].permute(2, 1, 0).reshape([getattr(grid, axis) for axis in axes])
        return unnamed_mesh([self._groups[(axis,)] for axis in axes], self.device_type, ranks, grid)


def _remedy() -> str:
    """Return the remedy where ranks have not met: one that a launcher has started only has to make something first."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return (
            "make Accelerator(), or the arguments of Trainer, before the model, or call "
            "torch.distributed.init_process_group"
        )
    return "start the script with accelerate launch or torchrun, or call torch.distributed.init_process_group first"


_meshes: dict[tuple[Grid, str], tuple[ProcessGroup, GridMesh]] = {}


def grid_mesh(grid: Grid, device_type: str) -> GridMesh:
    """Return the GridMesh of a grid, made once in a process: every model on the same grid shares its communicators.

    Collective over the world the first time. A world that was destroyed and initialized anew gets a new one.
    """
    world, mesh = _meshes.get((grid, device_type), (None, None))
    if mesh is None or not dist.is_initialized() or world is not dist.group.WORLD:
        if device_type == "cpu" and not _meshes:
            atexit.register(_let_go)
        mesh = GridMesh(grid, device_type)
        _meshes[grid, device_type] = (dist.group.WORLD, mesh)
    return mesh


def _let_go() -> None:
    """Give the threads of gloo time, at the end of the program, to drop the tensors of the last collective.

    They need the interpreter for that, and one that comes too late ends the process with an abort. Without a grid
    `destroy_process_group` waits for them; here meshes still hold the groups then.
    """
    _meshes.clear()
    time.sleep(0.05)
