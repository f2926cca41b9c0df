"""A ledger of the collectives that one rank issues in one optimizer step, and of the bytes that it sends for them.

The payload of a collective, in bytes, is what the code hands to it; a ring (all-gather, reduce-scatter, all-reduce)
or a pairwise exchange (all-to-all) of p ranks makes every rank send

    kind             payload n                             sent by each rank
    all_gather       the block of one rank                 (p - 1) * n
    reduce_scatter   the block that is left on one rank    (p - 1) * n
    exchange         what this rank sends to others        n
    all_reduce       the full tensor                       2 * (p - 1) / p * n
    all_to_all       the full tensor                       (p - 1) / p * n
    broadcast        the full tensor                       n

All are linear in the payload, so payloads are added up as integers, or as fractions where a paper's equations divide
without padding, and the bytes follow exactly.

Source: Thakur, Rabenseifner and Gropp 2005, ring and pairwise algorithms; AxoNN (arXiv 2502.08145), equations 1 to 5.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

from hf_axonn.topology.grid import PARTS_OF_Z, Grid


PHASES = ("forward", "backward", "gradients")
AXES = ("data", "pipe", "z", *PARTS_OF_Z, "x", "y")  # in the order in which keys have them
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "exchange", "broadcast")


def sent_bytes(kind: str, ranks: int, payload: int | Fraction) -> Fraction:
    """Bytes that each of `ranks` ranks sends for a collective of this kind and payload (see the head of this file)."""
    factor = {
        "all_gather": Fraction(ranks - 1),
        "reduce_scatter": Fraction(ranks - 1),
        "all_reduce": Fraction(2 * (ranks - 1), ranks),
        "all_to_all": Fraction(ranks - 1, ranks),
        "exchange": Fraction(1),
        "broadcast": Fraction(1),
    }[kind]
    return factor * payload


class LedgerKey(NamedTuple):
    """Key of an entry: phase (PHASES), kind of collective (KINDS), and the axes along which its ranks differ."""

    phase: str
    kind: str
    axes: tuple[str, ...]


class Volume(NamedTuple):
    """Number of collectives, and their payloads added up, in bytes."""

    calls: int
    payload: int | Fraction


NOTHING = Volume(0, 0)


class Ledger:
    """The collectives of one rank on a grid, added up by `LedgerKey`.

    `axes` of a key are those longer than 1, in the order of AXES: a group of all ranks on data=2, x=2 is
    ("data", "x"), as is any other group of the same ranks. The parts of z have names of their own where both are
    longer than 1; together they are z. What has one rank costs nothing and is not entered.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.entries: dict[LedgerKey, Volume] = {}

    def add(self, phase: str, kind: str, axes: Collection[str], payload: int | Fraction, calls: int = 1) -> None:
        """Enter `calls` collectives whose payloads are `payload` bytes in all."""
        if "rows" in axes or "context" in axes:
            axes = self._join_parts(axes)
        axes = tuple([axis for axis in AXES if axis in axes and getattr(self.grid, axis) > 1])
        if axes and calls:
            key = LedgerKey(phase, kind, axes)
            before = self.entries.get(key, NOTHING)
            self.entries[key] = Volume(before.calls + calls, before.payload + payload)

    def _join_parts(self, axes: Collection[str]) -> Collection[str]:
        """Replace parts of z that are all of it by its name."""
        long_parts = {part for part in PARTS_OF_Z if getattr(self.grid, part) > 1}
        return {*axes, "z"} - {*PARTS_OF_Z} if long_parts <= {*axes} else axes

    def include(self, other: Ledger, times: int = 1) -> None:
        """Enter everything of another ledger of the same grid, `times` over."""
        for key, volume in other.entries.items():
            self.add(key.phase, key.kind, key.axes, times * volume.payload, times * volume.calls)

    def ranks(self, axes: tuple[str, ...]) -> int:
        """Number of ranks in a group along `axes`."""
        size = 1
        for axis in axes:
            size *= getattr(self.grid, axis)
        return size

    def chosen(
        self, *, phase: str | None = None, kind: str | None = None, axes: tuple[str, ...] | None = None
    ) -> Iterator[tuple[LedgerKey, Volume]]:
        """The entries that match all that is given."""
        for key, volume in self.entries.items():
            if phase in (None, key.phase) and kind in (None, key.kind) and axes in (None, key.axes):
                yield key, volume

    def calls(self, **which: Any) -> int:
        """Number of collectives; arguments as `chosen`."""
        return sum(volume.calls for _, volume in self.chosen(**which))

    def bytes_sent(self, **which: Any) -> Fraction:
        """Bytes that this rank sends; arguments as `chosen`."""
        entries = self.chosen(**which)
        return sum(
            (sent_bytes(key.kind, self.ranks(key.axes), volume.payload) for key, volume in entries), Fraction(0)
        )

    def lines(self) -> list[str]:
        """A plain text table: one line an entry, in the order of PHASES, KINDS and axes."""
        lines = [f"{'phase':<10} {'collective':<15} {'axes':<12} {'calls':>7} {'payload':>15} {'bytes sent':>15}"]
        for key in sorted(self.entries, key=lambda key: (PHASES.index(key.phase), KINDS.index(key.kind), key.axes)):
            volume = self.entries[key]
            sent = float(sent_bytes(key.kind, self.ranks(key.axes), volume.payload))
            lines.append(
                f"{key.phase:<10} {key.kind:<15} {'+'.join(key.axes):<12} {volume.calls:>7,} {volume.payload:>15,} "
                f"{sent:>15,.0f}"
            )
        return lines
