"""The grid of ranks: five axes, one of them divided once more, and who sits where.

Axes, from the slowest to the fastest varying rank: data, pipe, z, x, y. So

    rank = (((data * P + pipe) * Z + z) * X + x) * Y + y

y is innermost because it carries about three times the traffic of x and so belongs on the fastest links. We say
*axis* for the grid and *dim* for a tensor. What each axis splits (docs/algorithm.md has the picture):

    data   samples; weights repeated
    pipe   layers: each rank has those of its stages, and the samples of all of them pass through it
    z      samples; every weight once more, gathered for use and freed again. Its ranks are rows x context:
           rows      different rows of a batch
           context   different positions of the same rows; it varies fastest inside z
    x      out_features of a column layer, in_features of a row layer
    y      in_features of a column layer, out_features of a row layer

`Grid` is plain arithmetic and imports no torch, because the launcher checks a grid before torch is loaded;
`GridMesh` (distributed/mesh.py) holds the live process groups.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass


AXES = ("data", "pipe", "z", "x", "y")
PARTS_OF_Z = ("rows", "context")
FINEST_AXES = ("data", "pipe", *PARTS_OF_Z, "x", "y")  # as AXES, z by its parts
SIZES = (*AXES, "context")  # what a grid is written as
WEIGHT_AXES = ("y", "x", "z")  # the order in which a weight is sharded: rectangles over y and x, then z inside each


def ceil_div(size: int, parts: int) -> int:
    """Length of the longest of `parts` chunks of `size`."""
    return -(-size // parts)


def bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of chunk `index` of `parts`, as torch.chunk and DTensor shard: the longest chunks first."""
    step = ceil_div(size, parts)
    return min(index * step, size), min((index + 1) * step, size)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Sizes of the five axes, whose product is the number of ranks, and of context, which divides z.

    Args:
        data: copies of the full model, each with its own samples.
        pipe: ranks among which the layers are divided, in stages of consecutive ones.
        z: ranks among which every weight is divided once more, each with its own samples.
        y: ranks that divide the contraction of a column layer and the output of a row layer.
        x: ranks that divide the output of a column layer and the contraction of a row layer.
        context: ranks among those of z that divide the positions of the same rows.
    Raises:
        ValueError: a size is not a whole number of at least 1, or context does not divide z.
    """

    data: int = 1
    pipe: int = 1
    z: int = 1
    y: int = 1
    x: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for axis, size in vars(self).items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"grid axis {axis} is {size!r}, but the size of an axis is a whole number of ranks: write "
                    f"{axis}=1 to leave the axis unused."
                )
        if self.z % self.context:
            raise ValueError(
                f"context {self.context} does not divide z = {self.z}: it divides positions among ranks of z, whose "
                f"number is a multiple of it: write z: {self.context * ceil_div(self.z, self.context)}, and data: 1 "
                "where that makes too many ranks."
            )

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.as_dict().items())

    @property
    def size(self) -> int:
        """Number of ranks, data * pipe * z * y * x."""
        return self.data * self.pipe * self.z * self.y * self.x

    @property
    def rows(self) -> int:
        """Number of ranks of z that see different rows, z / context."""
        return self.z // self.context

    @property
    def dp_size(self) -> int:
        """Number of ranks that see different rows, data * z / context."""
        return self.data * self.rows

    @property
    def storage_axes(self) -> tuple[str, ...]:
        """The axes among WEIGHT_AXES that have several ranks: those of the mesh on which parameters are stored.

        Of a grid without one z: a mesh has at least one dim. DTensor plans each operation for all dims of a mesh
        together, so that dims of one rank would cost a multiple.
        """
        return tuple(axis for axis in WEIGHT_AXES if getattr(self, axis) > 1) or ("z",)

    def as_dict(self) -> dict[str, int]:
        """Sizes in the order in which they are written: data, pipe, z, y, x, context; pipe and context only where they
        are more than 1."""
        return {axis: size for axis, size in vars(self).items() if axis not in ("pipe", "context") or size > 1}

    def check(self, num_processes: int) -> None:
        """Raise unless the grid has exactly `num_processes` ranks.

        Raises:
            ValueError: the product of the sizes is another number; the message names both remedies.
        """
        if self.size != num_processes:
            axes = {axis: size for axis, size in self.as_dict().items() if axis != "context"}
            sizes, numbers = " * ".join(axes), " * ".join(map(str, axes.values()))
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

    def place(self, rank: int) -> GridPosition:
        """Return where `rank` stands, also on the parts of z."""
        return GridPosition(self, self.coordinates(rank))

    def positions(self, length: int) -> int:
        """Positions of a row of `length` that each rank of context holds, those that fill it up included: an even
        number, as they may be two stripes (engine/rows.py)."""
        return 2 * ceil_div(length, 2 * self.context) if self.context > 1 else length

    def reach(self, window: int | None, length: int) -> int:
        """Positions before a stripe of a row of `length` that attention in a window sees, where the stripe before has
        all of them: then the ends of stripes are exchanged. 0: attention sees more, or a stripe lies behind the end of
        the row."""
        stripe, reach = self.positions(length) // 2, (window or 0) - 1
        return reach if 0 < reach <= stripe and (2 * self.context - 1) * stripe < length else 0

    def rank(self, *, data: int = 0, pipe: int = 0, z: int = 0, y: int = 0, x: int = 0) -> int:
        """The rank at a position; the inverse of `coordinates`."""
        return (((data * self.pipe + pipe) * self.z + z) * self.x + x) * self.y + y

    def ranks_along(self, axes: tuple[str, ...], rank: int) -> list[int]:
        """Ranks that share every coordinate with `rank` except those of `axes`, in ascending order."""
        here = self.place(rank)
        free = {*axes, *PARTS_OF_Z} if "z" in axes else {*axes}
        spans = [range(getattr(self, axis)) if axis in free else (here.index(axis),) for axis in FINEST_AXES]
        return [
            self.rank(data=data, pipe=pipe, z=rows * self.context + context, y=y, x=x)
            for data, pipe, rows, context, x, y in itertools.product(*spans)
        ]

    def picture(self) -> str:
        """The grid as text: for each (data, pipe, z) one table of ranks, x down and y across."""
        lines = [f"grid {self}: {self.size} rank(s)"]
        width = len(str(self.size - 1))
        for data, pipe, z in itertools.product(range(self.data), range(self.pipe), range(self.z)):
            stage = f" pipe={pipe}" if self.pipe > 1 else ""
            part = f" (rows={z // self.context} context={z % self.context})" if self.context > 1 else ""
            lines.append(f"data={data}{stage} z={z}{part}   (x down, y across)")
            for x in range(self.x):
                row = (f"{self.rank(data=data, pipe=pipe, z=z, y=y, x=x):>{width}}" for y in range(self.y))
                lines.append("    " + " ".join(row))
        return "\n".join(lines)


class GridPosition:
    """A position on a grid: pure arithmetic, for this rank or any other."""

    def __init__(self, grid: Grid, coordinates: dict[str, int]) -> None:
        self.grid = grid
        self.coordinates = coordinates
        self._sizes: dict[tuple[str, ...], int] = {}

    def move(self, axes: tuple[str, ...], index: int) -> GridPosition:
        """Return the position whose index along `axes` together is `index`; the other coordinates stay. `axes` are of
        AXES, or context in the place of z."""
        coordinates = dict(self.coordinates)
        for axis in reversed(axes):
            index, own = divmod(index, getattr(self.grid, axis))
            if axis == "context":
                coordinates["z"] += own - self.index("context")
            else:
                coordinates[axis] = own
        return GridPosition(self.grid, coordinates)

    def size(self, *axes: str) -> int:
        """Number of ranks along `axes` together."""
        if axes not in self._sizes:
            self._sizes[axes] = math.prod(getattr(self.grid, axis) for axis in axes)
        return self._sizes[axes]

    def index(self, *axes: str) -> int:
        """The position along `axes` together, the last one varying fastest."""
        index, here = 0, self.coordinates
        for axis in axes:
            if axis not in PARTS_OF_Z:
                own = here[axis]
            else:
                own = here["z"] // self.grid.context if axis == "rows" else here["z"] % self.grid.context
            index = index * getattr(self.grid, axis) + own
        return index


def divisors(number: int) -> list[int]:
    """Divisors in ascending order."""
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})
