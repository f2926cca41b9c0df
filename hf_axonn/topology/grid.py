"""The grid of ranks: four axes, who sits where, and the process groups along each axis.

Axes, from the slowest to the fastest varying rank: data, z, x, y. So

    rank = ((data * Z + z) * X + x) * Y + y

y is innermost because it carries about three times the traffic of x and so belongs on the fastest links. We say
*axis* for the grid and *dim* for a tensor. What each axis splits (docs/algorithm.md has the picture):

    data   samples; weights repeated
    z      samples; every weight once more, gathered for use and freed again
    x      out_features of a column layer, in_features of a row layer
    y      in_features of a column layer, out_features of a row layer

`Grid` is plain arithmetic and imports no torch, because the launcher checks a grid before torch is loaded;
`GridMesh` holds the live process groups.
"""

from __future__ import annotations

import atexit
import itertools
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


AXES = ("data", "z", "x", "y")
WEIGHT_AXES = ("y", "x", "z")  # the order in which a weight is cut: rectangles first, then z inside each


def ceil_div(size: int, parts: int) -> int:
    """Length of the longest of `parts` pieces of `size`."""
    return -(-size // parts)


def bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Where piece `index` of `parts` begins and ends, cut as torch.chunk and DTensor do: the longest pieces first."""
    step = ceil_div(size, parts)
    return min(index * step, size), min((index + 1) * step, size)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Sizes of the four axes; their product is the number of ranks.

    Args:
        data: copies of the whole model, each with its own samples.
        z: ranks among which every weight is divided once more, each with its own samples.
        y: ranks that divide the contraction of a column layer and the output of a row layer.
        x: ranks that divide the output of a column layer and the contraction of a row layer.
    Raises:
        ValueError: a size is not a whole number of at least 1.
    """

    data: int = 1
    z: int = 1
    y: int = 1
    x: int = 1

    def __post_init__(self) -> None:
        for axis, size in self.as_dict().items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"grid axis {axis} is {size!r}, but the size of an axis is a whole number of ranks: write "
                    f"{axis}=1 to leave the axis unused."
                )

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.as_dict().items())

    @property
    def size(self) -> int:
        """Number of ranks, data * z * y * x."""
        return self.data * self.z * self.y * self.x

    @property
    def samples_size(self) -> int:
        """Number of ranks that see different samples, data * z."""
        return self.data * self.z

    def as_dict(self) -> dict[str, int]:
        """Sizes in the order in which they are written: data, z, y, x."""
        return asdict(self)

    def check(self, num_processes: int) -> None:
        """Raise unless the grid has exactly `num_processes` ranks.

        Raises:
            ValueError: the product of the sizes is another number; the message names both ways to mend it.
        """
        if self.size != num_processes:
            sizes = " * ".join(self.as_dict())
            numbers = " * ".join(map(str, self.as_dict().values()))
            raise ValueError(
                f"{sizes} = {numbers} = {self.size}, but {num_processes} process(es) are to run: start {self.size} "
                f"processes (num_processes: {self.size}), or choose sizes whose product is {num_processes}."
            )

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` on every axis, keyed by axis in the order of AXES."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not on the grid {self}, whose ranks are 0 to {self.size - 1}.")
        coordinates = {}
        for axis in reversed(AXES):
            rank, coordinates[axis] = divmod(rank, getattr(self, axis))
        return {axis: coordinates[axis] for axis in AXES}

    def rank(self, *, data: int = 0, z: int = 0, y: int = 0, x: int = 0) -> int:
        """The rank at a position; the inverse of `coordinates`."""
        return ((data * self.z + z) * self.x + x) * self.y + y

    def ranks_along(self, axes: tuple[str, ...], rank: int) -> list[int]:
        """Ranks that share every coordinate with `rank` except those of `axes`, in ascending order."""
        here = self.coordinates(rank)
        spans = [range(getattr(self, axis)) if axis in axes else (here[axis],) for axis in AXES]
        return [self.rank(**dict(zip(AXES, position, strict=True))) for position in itertools.product(*spans)]

    def picture(self) -> str:
        """The grid as text: for each (data, z) one table of ranks, x down and y across."""
        lines = [f"grid {self}: {self.size} rank(s)"]
        width = len(str(self.size - 1))
        for data, z in itertools.product(range(self.data), range(self.z)):
            lines.append(f"data={data} z={z}   (x down, y across)")
            for x in range(self.x):
                row = (f"{self.rank(data=data, z=z, y=y, x=x):>{width}}" for y in range(self.y))
                lines.append("    " + " ".join(row))
        return "\n".join(lines)


class Place:
    """A position on a grid: pure arithmetic, for this rank or any other."""

    def __init__(self, grid: Grid, coordinates: dict[str, int]) -> None:
        self.grid = grid
        self.coordinates = coordinates

    def moved(self, axes: tuple[str, ...], index: int) -> Place:
        """The place whose position along `axes` together is `index`, and that is like this one otherwise."""
        coordinates = dict(self.coordinates)
        for axis in reversed(axes):
            index, coordinates[axis] = divmod(index, getattr(self.grid, axis))
        return Place(self.grid, coordinates)

    def size(self, *axes: str) -> int:
        """Number of ranks along `axes` together."""
        size = 1
        for axis in axes:
            size *= getattr(self.grid, axis)
        return size

    def index(self, *axes: str) -> int:
        """The position along `axes` together, the last one varying fastest."""
        index = 0
        for axis in axes:
            index = index * getattr(self.grid, axis) + self.coordinates[axis]
        return index


class GridMesh(Place):
    """The live process groups of a grid, as seen from this rank.

    Building it is collective over the whole world: every rank must call it, with the same grid. Groups are made once
    for each axis and for the two products that the algorithm uses, ("x", "y") and ("data", "z").

    Raises:
        ValueError: the grid is not the size of the world.
        RuntimeError: torch.distributed has not been initialized.
    """

    def __init__(self, grid: Grid, device_type: str) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        from hf_axonn.compat.torch import groups_with_world_timeout

        if not dist.is_initialized():
            raise RuntimeError(
                f"the grid {grid} needs {grid.size} processes, but torch.distributed is not initialized: start the "
                "script with accelerate launch or torchrun, or call torch.distributed.init_process_group first."
            )
        grid.check(dist.get_world_size())
        self.rank = dist.get_rank()
        super().__init__(grid, grid.coordinates(self.rank))
        self.device_type = device_type
        with groups_with_world_timeout(device_type):
            mesh = init_device_mesh(device_type, tuple(getattr(grid, axis) for axis in AXES), mesh_dim_names=AXES)
            self._groups: dict[tuple[str, ...], ProcessGroup] = {(axis,): mesh.get_group(axis) for axis in AXES}
            for axes in (("x", "y"), ("data", "z")):
                self._groups[axes] = self._product_group(axes)

    def _product_group(self, axes: tuple[str, ...]) -> ProcessGroup:
        import torch.distributed as dist

        long_axes = tuple(axis for axis in axes if getattr(self.grid, axis) > 1)
        if len(long_axes) < 2:  # then one of the axes' own groups has these very ranks
            return self._groups[(long_axes or axes)[:1]]
        first = (rank for rank in range(self.grid.size) if not any(self.grid.coordinates(rank)[axis] for axis in axes))
        group, _ = dist.new_subgroups_by_enumeration([self.grid.ranks_along(axes, rank) for rank in first])
        return group

    def group(self, *axes: str) -> ProcessGroup:
        """The group of ranks that differ from this one only along `axes`; their group ranks ascend by coordinate."""
        if axes not in self._groups:
            raise KeyError(f"no group along {axes}; there are {sorted(self._groups)}")
        return self._groups[axes]

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        import torch

        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, torch.get_device_module(self.device_type).current_device())

    @cached_property
    def sample_mesh(self) -> DeviceMesh:
        """The mesh (dp_shard, tp) by which Accelerate tells who gets which samples; no communicator of its own.

        Without x and y it is (dp_shard) alone: Accelerate looks for tp by its name.
        """
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        if self.size("x", "y") == 1:
            return DeviceMesh.from_group(self.group("data", "z"), self.device_type, mesh_dim_names=("dp_shard",))
        ranks = torch.arange(self.grid.size).view(self.size("data", "z"), self.size("x", "y"))
        groups = [self.group("data", "z"), self.group("x", "y")]
        return DeviceMesh.from_group(groups, self.device_type, mesh=ranks, mesh_dim_names=("dp_shard", "tp"))

    @cached_property
    def storage_mesh(self) -> DeviceMesh:
        """The mesh (y, x, z) on which sharded parameters are stored as DTensors.

        Made from the groups above, so it opens no communicator of its own. It has no axis names: PEFT sizes adapters
        by the local shard on a named mesh.
        """
        import torch

        from hf_axonn.compat.torch import unnamed_mesh

        here = self.coordinates
        ranks = torch.tensor(
            [
                [
                    [self.grid.rank(data=here["data"], z=z, y=y, x=x) for z in range(self.grid.z)]
                    for x in range(self.grid.x)
                ]
                for y in range(self.grid.y)
            ]
        )
        return unnamed_mesh([self._groups[(axis,)] for axis in WEIGHT_AXES], self.device_type, ranks)


_meshes: dict[tuple[Grid, str], tuple[ProcessGroup, GridMesh]] = {}


def grid_mesh(grid: Grid, device_type: str) -> GridMesh:
    """The GridMesh of a grid, made once in a process: every model on the same grid shares its communicators.

    Collective over the world the first time. A world that was destroyed and initialized anew gets a new one.
    """
    import torch.distributed as dist

    world, mesh = _meshes.get((grid, device_type), (None, None))
    if mesh is None or not dist.is_initialized() or world is not dist.group.WORLD:
        if device_type == "cpu" and not _meshes:
            atexit.register(_let_go)
        mesh = GridMesh(grid, device_type)
        _meshes[grid, device_type] = (dist.group.WORLD, mesh)
    return mesh


def _let_go() -> None:
    """At the end of the program give the threads of gloo time to drop the tensors of the last collective.

    They need the interpreter for that, and one that comes too late ends the process with an abort. Without a grid
    `destroy_process_group` waits for them; here meshes still hold the groups then.
    """
    _meshes.clear()
    time.sleep(0.05)
