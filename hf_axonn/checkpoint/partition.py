"""The rank that writes each shard of a tensor, in whose file it is found again: arithmetic, no communication.

A checkpoint says of each tensor its shape, its dtype and which axes shard which of its dims. From that and the grid
every rank derives its own file, and every reader, on whatever grid, the files that hold what it needs. So nothing is
gathered or planned in common, and the work of a rank does not grow with the number of ranks.

A *box* is one (start, stop) for each dim of the global tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hf_axonn.topology.grid import AXES, WEIGHT_AXES, Grid, ceil_div
from hf_axonn.topology.local_slices import narrow, slices_at


Box = tuple[tuple[int, int], ...]

# Number of the ranks that hold the same shard which take part in writing: each is a file that a reader must open.
MOST_WRITERS = 16
# A smaller tensor is written by the first of the ranks that hold it: a reader needs all of them, from few files.
SMALL_BYTES = 2**20


@dataclass(frozen=True)
class SavedTensor:
    """A global tensor of a checkpoint.

    Attributes:
        shape: of the global tensor.
        dtype: its name in safetensors, such as BF16.
        sharded_dims: for each axis of WEIGHT_AXES (y, x, z) the dim that it shards, None where its ranks are replicas.
        pipe: the place on that axis of the ranks that have it; of a weight that two stages have, the first.
    """

    shape: tuple[int, ...]
    dtype: str
    sharded_dims: tuple[int | None, ...]
    pipe: int = 0

    def __post_init__(self) -> None:
        dims = range(len(self.shape))
        if not all(_is_count(size) for size in self.shape) or len(self.sharded_dims) != len(WEIGHT_AXES):
            raise ValueError(f"no tensor has the shape {self.shape} and the sharded dims {self.sharded_dims}")
        if any(dim is not None and not (_is_count(dim) and dim in dims) for dim in self.sharded_dims):
            raise ValueError(f"a tensor of shape {self.shape} cannot be sharded along the dims {self.sharded_dims}")
        if not _is_count(self.pipe):
            raise ValueError(f"no tensor lies at pipe={self.pipe!r}")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def full_box(self) -> Box:
        """The box of all elements."""
        return tuple((0, size) for size in self.shape)

    def copy_axes(self) -> tuple[str, ...]:
        """The axes along which ranks hold the same shard."""
        sharding = {axis for axis, dim in zip(WEIGHT_AXES, self.sharded_dims, strict=True) if dim is not None}
        return tuple(axis for axis in AXES if axis not in sharding and axis != "pipe")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def box_at(tensor: SavedTensor, grid: Grid, coordinates: Mapping[str, int]) -> Box:
    """Return the shard that lies at a position of the grid."""
    sizes, here = [getattr(grid, axis) for axis in WEIGHT_AXES], [coordinates[axis] for axis in WEIGHT_AXES]
    return tuple((part.start, part.stop) for part in slices_at(tensor.shape, tensor.sharded_dims, sizes, here))


def overlap(first: Box, second: Box) -> Box | None:
    """Return the box that two boxes share, None if it is empty; of tensors without dims the empty tuple."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return common if all(start < stop for start, stop in common) else None


@functools.lru_cache(maxsize=4096)
def shards_in(tensor: SavedTensor, grid: Grid, box: Box) -> list[tuple[dict[str, int], Box]]:
    """Return `find_shards` as a list."""
    return list(find_shards(tensor, grid, box))


def find_shards(tensor: SavedTensor, grid: Grid, box: Box) -> Iterator[tuple[dict[str, int], Box]]:
    """Yield the shards of a saved tensor that overlap `box`: (coordinates on the sharding axes, the box of the shard).

    Only these are looked at, one after the other, however large the axes are.
    """
    found: Iterator[tuple[dict[str, int], Box]] = iter([({}, tensor.full_box)])
    if overlap(tensor.full_box, box) is None:
        return iter(())
    for axis, dim in zip(WEIGHT_AXES, tensor.sharded_dims, strict=True):
        if dim is not None:
            found = _cut(found, axis, getattr(grid, axis), dim, box[dim])
    return found


def _cut(
    found: Iterator[tuple[dict[str, int], Box]], axis: str, parts: int, dim: int, span: tuple[int, int]
) -> Iterator[tuple[dict[str, int], Box]]:
    """Yield the chunks along one dim of shards that overlap `span`."""
    for place, shard in found:
        start, stop = shard[dim]
        step = ceil_div(stop - start, parts)
        for index in range(max(span[0] - start, 0) // step, ceil_div(min(span[1], stop) - start, step)):
            yield {**place, axis: index}, (*shard[:dim], narrow(shard[dim], parts, index), *shard[dim + 1 :])


class Writers:
    """Writers of each tensor of a checkpoint: the same answer on every rank, and in every later reader.

    Where several ranks hold the same shard, one of up to MOST_WRITERS of them writes it, chosen so that all of these
    write about as many bytes.
    """

    def __init__(self, tensors: Mapping[str, SavedTensor], grid: Grid, bytes_of: Mapping[str, int]) -> None:
        """`bytes_of` is the size of each global tensor."""
        self.grid = grid
        self._copy_of: dict[str, dict[str, int]] = {}
        loads: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        for name in sorted(tensors):
            axes = tensors[name].copy_axes()
            copies = math.prod(getattr(grid, axis) for axis in axes)
            pipe = tensors[name].pipe
            if pipe >= grid.pipe:
                raise ValueError(f"{name} lies at pipe={pipe}, but the grid {grid} has no such ranks")
            load = loads.setdefault((pipe, axes), [0] * min(copies, MOST_WRITERS))
            chosen = 0 if bytes_of[name] < SMALL_BYTES else load.index(min(load))
            load[chosen] += bytes_of[name]
            # Far apart: neighbours are likely to share a machine, and its way to the disks.
            self._copy_of[name] = {"pipe": pipe, **self._position(axes, chosen * copies // len(load))}

    def _position(self, axes: Sequence[str], index: int) -> dict[str, int]:
        position = {}
        for axis in reversed(axes):
            index, position[axis] = divmod(index, getattr(self.grid, axis))
        return position

    def rank(self, name: str, place: Mapping[str, int]) -> int:
        """Return the rank that writes the shard at a place on the axes that shard the tensor."""
        return self.grid.rank(**self._copy_of[name], **place)

    def names_of(self, coordinates: Mapping[str, int]) -> Iterator[str]:
        """Yield the tensors of which the rank at these coordinates writes its shard."""
        for name, copy in self._copy_of.items():
            if all(coordinates[axis] == index for axis, index in copy.items()):
                yield name
