"""torch's Muon on shards: each matrix is orthogonalized once among the ranks that hold its shards.

Momentum, weight decay and the learning rate are elementwise: torch's own step computes them on this rank's shards
(optimizer_steps.py). What it would orthogonalize is put off until the step is over, and then done for all matrices:

    deal      matrices go round the ranks of (z, x, y), largest first; a rank has at most one in a round
    gather    each rank sends its shard of an update to the owner, in bfloat16, in which torch orthogonalizes
    scatter   the owner sends each rank its shard of the result, which is added to the parameter

The matrices of a round have about the same size, so all ranks have about equal work, and a rank has buffers for one
matrix. Ranks that differ along data alone do the same work: nothing travels over data. A matrix that lies whole on
every rank is orthogonalized there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from hf_axonn.compat.muon import adjust_rate, orthogonalize, replace_parts
from hf_axonn.compat.torch import grid_of
from hf_axonn.distributed.collectives import start_exchange_rows
from hf_axonn.distributed.mesh import GridMesh, grid_mesh
from hf_axonn.engine.dtensors import local_slices
from hf_axonn.topology.experts import DISPATCH
from hf_axonn.topology.grid import GridPosition


@dataclass(eq=False)
class Update:
    """The update of one matrix that waits to be orthogonalized.

    Args:
        parameter: the matrix [N, K].
        shard: this rank's values of it.
        values: this rank's shard of the update.
        options: of the orthogonalization.
        rate: the learning rate of the matrix.
    """

    parameter: DTensor
    shard: Tensor
    values: Tensor
    options: tuple[Any, ...]
    rate: float = 0.0

    def box(self, place: GridPosition) -> tuple[slice, ...]:
        """Return the slice of the matrix that lies at a place."""
        return local_slices(self.parameter.shape, self.parameter.placements, place)

    def sends(self, sender: GridPosition, owner: GridPosition) -> bool:
        """Return whether a rank sends its shard to an owner: of ranks that hold the same shard, the one that stands
        where the owner does."""
        axes = zip(sender.grid.storage_axes, self.parameter.placements, strict=True)
        return all(isinstance(each, Shard) or sender.index(axis) == owner.index(axis) for axis, each in axes)


def find_mesh(parameters: Sequence[Tensor]) -> GridMesh | None:
    """Return the mesh on which sharded matrices lie; None where they lie on several, or on one that is no grid's."""
    meshes = {parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}
    mesh = meshes.pop() if len(meshes) == 1 else None
    grid = None if mesh is None else grid_of(mesh)
    return None if mesh is None or grid is None else grid_mesh(grid, mesh.device_type)


@contextlib.contextmanager
def orthogonalize_once(parameters: Sequence[Tensor], shards: Sequence[Tensor], mesh: GridMesh) -> Iterator[None]:
    """Let a step of Muon that is taken inside put off what is sharded, and finish that afterwards.

    Args:
        parameters: those with gradients, in the order of the optimizer's groups.
        shards: what the step gets in their place.
    Collectives: two exchanges over (z, x, y) for as many sharded matrices as it has ranks.
    """
    updates: list[Update] = []
    coming, current = zip(parameters, shards, strict=True), parameters[0]

    def put_off(values: Tensor, *options: Any) -> Tensor:
        nonlocal current
        current, shard = next(coming)
        if not (isinstance(current, DTensor) and any(isinstance(each, Shard) for each in current.placements)):
            return orthogonalize(values, *options)
        updates.append(Update(current, shard, values.bfloat16(), options))
        return values.new_zeros(())  # adds nothing

    def rate_of_whole(lr: Any, kind: str | None, shape: torch.Size) -> float:
        rate = adjust_rate(lr, kind, current.shape)
        if updates and updates[-1].parameter is current:
            updates[-1].rate = rate
        return rate

    with replace_parts(orthogonalize=put_off, adjust_rate=rate_of_whole):
        yield
    mesh.open_group(DISPATCH)
    ranks = mesh.size(*DISPATCH)
    updates.sort(key=lambda update: -update.parameter.numel())
    with torch.no_grad():
        for begin in range(0, len(updates), ranks):
            _take_round(updates[begin : begin + ranks], mesh)


def _take_round(updates: list[Update], mesh: GridMesh) -> None:
    """Orthogonalize matrices, each on the rank of its number, and add this rank's shards to the parameters."""
    group = mesh.group(*DISPATCH)
    places = [mesh.grid.place(rank) for rank in mesh.grid.ranks_along(DISPATCH, mesh.rank)]
    dealt: list[Update | None] = [*updates, *[None] * (len(places) - len(updates))]
    own, nothing = dealt[mesh.index(*DISPATCH)], updates[0].values.new_empty(0)
    parts = [
        update.values.flatten() if update is not None and update.sends(mesh, owner) else nothing
        for update, owner in zip(dealt, places, strict=True)
    ]
    counts = [_count(own.box(place)) if own is not None and own.sends(place, mesh) else 0 for place in places]
    arrived = start_exchange_rows(torch.cat(parts), [*map(len, parts)], counts, group).wait()
    parts = [nothing] * len(places)
    if own is not None:
        matrix = arrived.new_empty(own.parameter.shape)
        for place, part in zip(places, arrived.split(counts), strict=True):
            if len(part):
                box = own.box(place)
                matrix[box] = part.view(matrix[box].shape)
        result = orthogonalize(matrix, *own.options)
        parts = [result[own.box(place)].flatten() for place in places]
    counts = [0 if update is None else update.values.numel() for update in dealt]
    arrived = start_exchange_rows(torch.cat(parts), [*map(len, parts)], counts, group).wait()
    for update, part in zip(updates, arrived.split(counts), strict=False):
        update.shard.add_(part.view(update.shard.shape), alpha=-update.rate)


def _count(box: tuple[slice, ...]) -> int:
    rows, cols = (part.stop - part.start for part in box)
    return rows * cols
