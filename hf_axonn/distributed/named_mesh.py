"""The mesh that users see: torch's DeviceMesh with the names of a grid's axes, over process groups that exist."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hf_axonn.topology.grid import FINEST_AXES, GridPosition


class NamedMesh(DeviceMesh):
    """A DeviceMesh with the dims data, pipe, rows, context, x and y, as far as the grid has a process group for each.

    `mesh["x"]` is the mesh of one axis and `mesh["x"].get_group()` the process group; `mesh["z"]` is that of rows and
    context together. It opens no communicator. Left out are axes of one rank for which no group exists, and rows where
    context and data divide ranks too: there the mesh has the ranks with the same rows as this one.

    Args:
        here: the position of this rank.
        groups: the process groups that exist, by axis, in the order of FINEST_AXES.
        over_z: the process group over z.
        device_type: of the tensors that are placed on the mesh.
    Raises:
        KeyError: from `[]` and `get_group`: the name is of no axis, or of one without a process group.
    """

    def __init__(
        self, here: GridPosition, groups: Mapping[str, ProcessGroup], over_z: ProcessGroup, device_type: str
    ) -> None:
        grid = here.grid
        ranks = torch.arange(grid.size).view([getattr(grid, axis) for axis in FINEST_AXES])
        for dim, axis in reversed([*enumerate(FINEST_AXES)]):
            if axis not in groups:
                ranks = ranks.select(dim, here.index(axis))
        made = DeviceMesh.from_group([*groups.values()], device_type, mesh=ranks, mesh_dim_names=tuple(groups))
        vars(self).update(vars(made))
        self._grid = grid
        self._over_z = DeviceMesh.from_group(over_z, device_type, mesh_dim_names=("z",))

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        if names in ("z", ("z",)):
            return self._over_z
        self._check((names,) if isinstance(names, str) else names)
        return super().__getitem__(names)

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        if mesh_dim == "z":
            return self._over_z.get_group()
        if isinstance(mesh_dim, str):
            self._check((mesh_dim,))
        return super().get_group(mesh_dim)

    def _check(self, names: tuple[str, ...]) -> None:
        """Raise KeyError unless each name is of a dim of this mesh."""
        dims = self.mesh_dim_names or ()
        for name in names:
            if name == "z":
                raise KeyError('z is no dim of this mesh: write mesh["z"] alone, or name its parts, rows and context.')
            if name not in FINEST_AXES:
                raise KeyError(f"{name} is no axis of a grid: the dims of this mesh are {', '.join(dims)}, and z.")
            if name not in dims:
                size = getattr(self._grid, name)
                remedy = "leave it out" if size == 1 else "make one with torch.distributed.new_group"
                raise KeyError(
                    f"the grid {self._grid} has no process group over {name} alone, an axis of {size} rank(s): "
                    f"{remedy}; the dims of this mesh are {', '.join(dims)}, and z."
                )
