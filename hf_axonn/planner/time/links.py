"""Seconds that a collective takes on a machine, for ranks numbered along the axes in some order.

    ring        base + steps + bytes that a rank sends / bandwidth
                steps: p - 1 for an all-gather or reduce-scatter, 2 (p - 1) for an all-reduce; those that cross from
                node to node (one for each node in the ring) take inter_step, the others intra_step
    tree        an all-reduce takes this where it is faster, as in NCCL: base + 2 (intra steps in a node + log2(nodes)
                inter steps), the full tensor twice
    exchange    all-to-all: base + steps as a ring; what leaves a node is divided by all of the node's bandwidth
    measured    a kind that the machine's relative_latency has: that factor times base + p - 1 steps, in place of the
                start-up and steps above

Bandwidth is the machine's for the stride and length of the ring, planner/machine.py. Axes that lie side by side in the
order make one longer ring. Bytes that a rank sends for a payload: planner/traffic/ledger.py.

Source: AxoNN (arXiv 2502.08145), equations (1) to (7); Thakur, Rabenseifner and Gropp 2005 for the latency terms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from hf_axonn.planner.machine import Machine
from hf_axonn.planner.traffic.ledger import Ledger, LedgerKey, Volume
from hf_axonn.topology.axis_order import ORDER, check_order
from hf_axonn.topology.grid import PARTS_OF_Z, Grid


def strides(grid: Grid, order: tuple[str, ...] = ORDER) -> dict[str, int]:
    """Ranks between neighbours along each axis, P_i: the product of the sizes of the axes further in."""
    found, stride = {}, 1
    for axis in order:
        found[axis] = stride
        stride *= getattr(grid, axis)
    return found


class Ring(NamedTuple):
    """A group of ranks as the machine sees it.

    ranks, nodes: number of ranks, and of the nodes that they lie on; stride: ranks between neighbours; bandwidth:
    bytes/s of the ring; scatter: bytes/s of a rank that sends to all others.
    """

    ranks: int
    nodes: int
    stride: int
    bandwidth: float
    scatter: float


class Links:
    """The groups of a grid on a machine.

    Args:
        machine, grid: the machine, and the sizes of the axes.
        order: axes from the innermost (consecutive ranks) to the outermost. The engine's is ORDER.
    Raises:
        ValueError: the order does not name each axis once.
    """

    def __init__(self, machine: Machine, grid: Grid, order: tuple[str, ...] = ORDER) -> None:
        self.machine, self.grid, self.order = machine, grid, check_order(order)
        self._rings: dict[tuple[str, ...], Ring] = {}

    @cached_property
    def strides(self) -> dict[str, int]:
        """Ranks between neighbours along each axis, and along the parts of z, of which context is further in."""
        found = strides(self.grid, self.order)
        return found | {"context": found["z"], "rows": found["z"] * self.grid.context}

    def ring(self, axes: Iterable[str]) -> Ring:
        """The group along `axes`, which may be those of a ledger's keys."""
        axes = tuple(axes)
        if axes not in self._rings:
            order = [part for axis in self.order for part in ((axis,) if axis != "z" else ("z", *PARTS_OF_Z[::-1]))]
            self._rings[axes] = self._ring([axis for axis in order if axis in axes])
        return self._rings[axes]

    def _ring(self, axes: list[str]) -> Ring:
        machine = self.machine
        axes = [axis for axis in axes if getattr(self.grid, axis) > 1]
        ranks = math.prod(getattr(self.grid, axis) for axis in axes)
        if ranks == 1:
            return Ring(1, 1, 1, math.inf, math.inf)
        stride = self.strides[axes[0]]
        span = self.strides[axes[-1]] * getattr(self.grid, axes[-1])
        if machine.gpus_per_node % span == 0:
            beta = machine.bandwidth(stride, ranks) if stride * ranks == span else self._slowest(axes)
            return Ring(ranks, 1, stride, beta, beta)
        # A node holds gpus_per_node / stride of a group's ranks, or fewer where an outer axis skips nodes.
        inside = 1
        for axis in axes:
            inside *= max(1, min(getattr(self.grid, axis), machine.gpus_per_node // self.strides[axis]))
        nodes = -(-ranks // inside)
        # Sibling rings that leave a node at once: where axes of others lie between these, one for each `inside` ranks.
        together = stride * ranks == span
        rings = min(machine.gpus_per_node, stride) if together else machine.gpus_per_node / inside
        beta = min(machine.inter / rings, machine.fastest_link)
        # All of a node's ranks send at once, of what each sends the share outside the node.
        outside = (ranks - inside) / (ranks - 1)
        scatter = machine.inter / machine.gpus_per_node / outside if outside else math.inf
        return Ring(ranks, nodes, stride, beta, min(scatter, machine.fastest_link))

    def _slowest(self, axes: list[str]) -> float:
        return min(self.machine.bandwidth(self.strides[axis], getattr(self.grid, axis)) for axis in axes)

    def hops(self, axis: str, payload: float) -> list[float]:
        """Seconds in which `payload` bytes go from each rank along an axis to the next one, and from the last one to
        the first, while all ranks do so."""
        machine, stride, size = self.machine, self.strides[axis], getattr(self.grid, axis)
        node, found = machine.gpus_per_node, []
        outside = min(machine.inter / min(node, stride), machine.fastest_link)
        for index in range(size):
            here, there = index * stride // node, (index + 1) % size * stride // node
            inside = here == there and node % stride == 0
            bandwidth = machine.bandwidth(stride, 2) if inside and machine.within(stride, 2) else outside
            step = machine.intra_step if inside else machine.inter_step
            found.append(machine.base + step + payload / bandwidth)
        return found

    def seconds(self, kind: str, axes: Iterable[str], payload: float, calls: int = 1) -> float:
        """Seconds of `calls` collectives whose payloads are `payload` bytes in all; kinds and payloads:
        planner/traffic/ledger.py."""
        ring, machine = self.ring(axes), self.machine
        if ring.ranks == 1 or not calls:
            return 0.0
        p = ring.ranks
        step = (ring.nodes - 1) * machine.inter_step + (p - ring.nodes) * machine.intra_step
        cost = machine.relative_cost.get(kind, 1.0)
        latency = calls * (machine.base + step) * machine.relative_latency.get(kind, 1.0)
        if kind == "all_reduce":
            by_ring = cost * 2 * (p - 1) / p * payload / ring.bandwidth
            if kind in machine.relative_latency:  # measured, whatever the algorithm is
                return latency + by_ring
            depth = (p / ring.nodes - 1) * machine.intra_step + math.log2(ring.nodes) * machine.inter_step
            by_tree = calls * (machine.base + 2 * depth) + cost * 2 * payload / ring.bandwidth
            return min(calls * (machine.base + 2 * step) + by_ring, by_tree)
        if kind in ("all_to_all", "exchange"):
            sent = payload if kind == "exchange" else (p - 1) / p * payload
            return latency + cost * sent / ring.scatter
        sent = payload if kind == "broadcast" else (p - 1) * payload
        return latency + cost * sent / ring.bandwidth

    def entry_seconds(self, key: LedgerKey, volume: Volume) -> float:
        """Seconds of an entry of a ledger."""
        return self.seconds(key.kind, key.axes, float(volume.payload), volume.calls)

    def ledger_seconds(self, ledger: Ledger, phase: str | None = None) -> float:
        """Seconds of all entries of a ledger, or of those of one phase."""
        return math.fsum(self.entry_seconds(key, volume) for key, volume in ledger.chosen(phase=phase))
