"""The ranks of processes: the order in which the axes of a grid lie on the machine.

The engine numbers ranks with y innermost, then x, z, pipe, data (grid.py). Launchers number processes machine by
machine, so the ranks of y are neighbours and have the fastest links. Where another axis is to have them,
`axonn_config.order` says so, and every process takes, before anything reads it, the rank that lies at its place in
that order:

    order: [z, y, x, data]      innermost first, on the grid data=1,z=4,y=2,x=1:
    place    0  1  2  3  4  5  6  7
    z        0  1  2  3  0  1  2  3
    y        0  0  0  0  1  1  1  1
    rank     0  2  4  6  1  3  5  7

So an order changes where ranks run and nothing else: what a rank computes, sends and writes stays the same. The first
process is rank 0 in every order. An order that does not name pipe has it next to data, on its inner side. Plain
arithmetic, no torch.
"""

from __future__ import annotations

import json
from collections.abc import MutableMapping, Sequence

from hf_axonn.topology.grid import AXES, Grid


ORDER = tuple(reversed(AXES))  # the engine's own
PLACED = "AXONN_PLACED"  # set in a process that has taken its rank, for those that it starts


def check_order(order: object) -> tuple[str, ...]:
    """An order as a tuple. One without pipe is the order of the other axes; pipe is then the slowest but data.

    Raises:
        ValueError: it does not name each axis once.
    """
    axes = list(map(str, order)) if isinstance(order, Sequence) and not isinstance(order, str) else []
    if "pipe" not in axes and "data" in axes:
        axes.insert(axes.index("data"), "pipe")
    if sorted(axes) != sorted(AXES):
        raise ValueError(
            f"order is {order!r}, but it names each axis once, the one with the fastest links first: write order: "
            f"[{', '.join(ORDER)}], or leave it out."
        )
    return tuple(axes)


def trim_order(order: Sequence[str], grid: Grid) -> list[str]:
    """Return an order as users write it: without pipe where the grid has no pipeline."""
    return [axis for axis in order if axis != "pipe" or grid.pipe > 1]


def rank_at(grid: Grid, order: Sequence[str], place: int) -> int:
    """The rank of the process that the launcher numbers `place`, where the axes lie in `order`, innermost first."""
    here = {}
    for axis in order:
        place, here[axis] = divmod(place, getattr(grid, axis))
    return grid.rank(**here)


def take_rank(environ: MutableMapping[str, str]) -> None:
    """Write the rank at its place to RANK, in a process that a launcher started under AXONN_CONFIG.

    Nothing where no order is given, in processes that such a process starts, and where the number of processes is not
    that of the grid, which is refused later and with more words.

    Raises:
        ValueError: the configuration cannot be used.
    """
    section = json.loads(environ["AXONN_CONFIG"])
    order = section.get("order")
    if order is None or "RANK" not in environ or "MASTER_PORT" not in environ:
        return
    grid, order = Grid(**section["grid"]), check_order(order)
    if environ.get("WORLD_SIZE") != str(grid.size):
        return
    job = f"{environ.get('MASTER_ADDR')}:{environ['MASTER_PORT']}"
    if environ.get(PLACED) == f"{job}:{environ['RANK']}":
        return
    environ["RANK"] = str(rank_at(grid, order, int(environ["RANK"])))
    environ[PLACED] = f"{job}:{environ['RANK']}"
