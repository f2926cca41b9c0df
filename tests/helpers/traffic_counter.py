"""Counts the collectives that really run, in the terms of planner/traffic/volumes.py.

with count_traffic(grid) as counter:
    model(**batch).loss.backward()
    with counter.during("gradients"):
        sync_gradients(model)
counter.ledger == volumes(shape, grid, step)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hf_axonn.distributed.collectives import observe
from hf_axonn.engine.overlap import in_backward
from hf_axonn.planner.traffic.ledger import Ledger
from hf_axonn.topology.grid import AXES, PARTS_OF_Z, Grid


class TrafficCounter:
    """The collectives that this rank has issued, by phase, kind and axes, in `ledger`.

    The phase is backward while autograd runs (a checkpointed layer that runs again belongs to it), but reductions
    over `data` are of gradients whenever they run; else it is forward, or what `during` says.
    """

    def __init__(self, grid: Grid) -> None:
        self.ledger = Ledger(grid)
        self._phase = "forward"
        self._axes: dict[ProcessGroup, tuple[str, ...]] = {}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Enter what runs inside, and not in backward, under `phase`."""
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before

    def __call__(self, kind: str, payload: int, group: ProcessGroup) -> None:
        """Enter one collective; `collectives.observe` calls this."""
        if group not in self._axes:
            grid = self.ledger.grid
            ranks = dist.get_process_group_ranks(group)
            places = [grid.place(rank) for rank in ranks]
            finest = [axis for axis in (*AXES, *PARTS_OF_Z) if axis != "z"]
            self._axes[group] = tuple(axis for axis in finest if len({place.index(axis) for place in places}) > 1)
        axes, phase = self._axes[group], self._phase
        if in_backward():
            phase = "gradients" if "data" in axes else "backward"
        self.ledger.add(phase, kind, axes, payload)


@contextmanager
def count_traffic(grid: Grid) -> Iterator[TrafficCounter]:
    """Count the collectives that this rank issues inside, in models that are parallelized over `grid`."""
    counter = TrafficCounter(grid)
    with observe(counter):
        yield counter
