"""The features of a projection that a rank works on: heads of attention, or a share of an MLP's intermediate features.

A projection's output [N] is a row of segments, one after another: q alone, k alone, or q, k and v packed into one
weight, or gate and up. In each segment a rank works on

    query    the features of its own query heads
    kv       those of the kv heads that its query heads read
    own      its share of features that belong to no head
    all      all of them

Heads of all segments are of one width, which follows from N; or each segment says its own, as in "query:64".

No communication.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from hf_axonn.topology.grid import GridPosition, ceil_div


def feature_slice(size: int, place: GridPosition, *axes: str) -> tuple[slice, int]:
    """The features of `size` that lie on this rank when sharded over `axes` in turn, and their number with padding."""
    start, stop, padded = 0, size, size
    for axis in axes:
        # Cut the padded length, as the activations are: then padding is at the end of every shard.
        padded = ceil_div(padded, place.size(axis))
        start = start + place.index(axis) * padded
        stop = min(start + padded, stop)
    return slice(min(start, stop), stop), padded


@dataclass(frozen=True)
class Heads:
    """The axes over which the query heads of an attention block are divided, and the way its kv heads follow.

    Args:
        query, kv: numbers of heads in the full model.
        axes: ("x", "y"), ("x",) or (): the longest whose product divides `query`.
        replicate_kv: kv heads do not divide as the query heads do; every rank gets the one kv head that its query
            heads share, or one for each of its query heads.
    """

    query: int
    kv: int
    axes: tuple[str, ...]
    replicate_kv: bool

    @classmethod
    def divide(cls, query: int, kv: int, place: GridPosition) -> Heads:
        for axes in (("x", "y"), ("x",), ()):
            if query % place.size(*axes) == 0:
                return cls(query, kv, axes, replicate_kv=bool(axes) and kv % place.size(*axes) != 0)
        raise AssertionError("the empty product divides every number")

    def kv_of_own_queries(self, place: GridPosition) -> list[int]:
        """Return the kv head that each query head of this rank reads."""
        own = self.query // place.size(*self.axes)
        first = place.index(*self.axes) * own
        return [head // (self.query // self.kv) for head in range(first, first + own)]

    def kv_read(self, place: GridPosition) -> list[int]:
        """The kv heads that this rank works on, where `replicate_kv`: one if its query heads share it, else one for
        each."""
        each = self.kv_of_own_queries(place)
        # Alike on all ranks: the groups of query heads are as long as the ranks' shares, or several shares long.
        return each[:1] if self.query // self.kv % len(each) == 0 else each

    def own_query(self, place: GridPosition) -> int:
        """Query heads of this rank."""
        return self.query // place.size(*self.axes)

    def own_kv(self, place: GridPosition) -> int:
        """Kv heads of this rank, repeated ones included."""
        return len(self.kv_read(place)) if self.replicate_kv else self.kv // place.size(*self.axes)

    def why(self, place: GridPosition) -> str:
        """Return the reason why heads are not divided over all of (x, y), or k and v are gathered; else nothing."""
        sizes = f"x*y = {place.size('x', 'y')}"
        if self.axes == ("x", "y"):
            return (
                f"{self.kv} kv heads are not divisible by {sizes}: k and v are gathered" if self.replicate_kv else ""
            )
        if self.axes:
            return f"{self.query} heads are divisible by x = {place.size('x')} but not by {sizes}: repeated over y"
        return f"{self.query} heads are not divisible by x = {place.size('x')}: attention on all heads on every rank"


def divide_with_context(query: int, kv: int, channels: int, place: GridPosition) -> Heads | None:
    """Return the division of heads over (x, y, context): each rank of context has a part of the heads of its (x, y).

    Args:
        query, kv: numbers of heads; 0 where `channels` belong to none, and are divided each by itself.
    Returns:
        None where they do not divide so.
    """
    axes = ("x", "y", "context")
    number, ranks = query or channels, place.size(*axes)
    if number % ranks:
        return None
    return Heads(number, kv or number, axes, replicate_kv=(kv or number) % ranks != 0)


def latents_travel(latent: int, own: int, heads: Heads, place: GridPosition) -> bool:
    """Return whether ranks that need keys and values of each other's positions gather what these are made of.

    That is narrower, and no other rank of (x, y) takes part in making them, to which whole rows would travel instead.

    Args:
        latent: features of a position's latent and rotary key; 0 where keys and values are not made of such.
        own: features of the keys and values of one rank.
    """
    return 0 < latent < own and bool(heads.axes) and place.size("y") == 1


@dataclass(frozen=True)
class FeatureRange:
    """This rank's share of one packed part of a projection: ranges of its features, and their number with padding."""

    ranges: tuple[range, ...]
    padded: int


def feature_ranges(size: int, segments: Sequence[str], heads: Heads | None, place: GridPosition) -> list[FeatureRange]:
    """The features of a projection's output [N] that the rank at `place` works on, one range for each packed part.

    Args:
        size: N.
        segments: "query", "kv", "own" or "all" for each part, with the width of a head where parts differ in it.
        heads: None where the features belong to no head; then they are divided over (x, y).
        place: whose.
    Raises:
        ValueError: the heads do not explain N.
    """
    kinds, widths = _kinds_and_widths(tuple(segments))
    units = [1 if heads is None or kind in ("own", "all") else getattr(heads, kind) for kind in kinds]
    if not all(widths):
        widths = [size // sum(units)] * len(units)
        how = "one width"
    else:
        how = f"{', '.join(map(str, widths))} features"
    if sum(unit * width for unit, width in zip(units, widths, strict=True)) != size:
        raise ValueError(f"{size} features are not {' + '.join(map(str, units))} heads of {how}.")
    axes = ("x", "y") if heads is None else heads.axes
    found, start = [], 0
    for kind, unit, width in zip(kinds, units, widths, strict=True):
        if kind == "all":
            found.append(FeatureRange((range(start, start + width),), width))
        elif kind == "kv" and heads is not None and heads.replicate_kv:
            starts = [start + head * width for head in heads.kv_read(place)]
            found.append(FeatureRange(tuple(range(first, first + width) for first in starts), len(starts) * width))
        else:
            own, padded = feature_slice(unit * width, place, *axes)
            found.append(FeatureRange((range(start + own.start, start + own.stop),), padded))
        start += unit * width
    return found


def own_count(number: int, kind: str, heads: Heads | None, place: GridPosition) -> int:
    """Return the share of the rank at `place` of a number of heads or features of the full model, which counts what
    `kind` says: segments, separated by commas."""
    return sum(part.padded for part in feature_ranges(number, kind.split(","), heads, place))


@functools.lru_cache(maxsize=1024)  # a search of grids asks again and again
def _kinds_and_widths(segments: tuple[str, ...]) -> tuple[list[str], list[int]]:
    """Return (["query", "kv"], [64, 16]) of ("query:64", "kv:16"); a width is 0 where it is not there."""
    pairs = [segment.partition(":") for segment in segments]
    return [kind for kind, _, _ in pairs], [int(width or 0) for *_, width in pairs]


def is_own_slice(size: int, segments: Sequence[str], heads: Heads | None, place: GridPosition) -> bool:
    """Return whether the features that a rank works on are those that the product leaves there."""
    if segments[0].startswith("all") and place.size("x", "y") > 1:
        return False
    return len(segments) == 1 and not (segments[0].startswith("kv") and heads is not None and heads.replicate_kv)


def sent_features(size: int, segments: Sequence[str], heads: Heads | None, place: GridPosition) -> list[list[int]]:
    """The features of [N] that the rank at `place` sends to each rank along the axes, itself included, each once; a
    product leaves shard i of [N], sharded over the axes, on rank i."""
    axes = ("x", "y") if heads is None else heads.axes
    own, _ = feature_slice(size, place, *axes)
    receivers = (place.move(axes, index) for index in range(place.size(*axes)))
    return [_within(own, _list_features(size, segments, heads, receiver)) for receiver in receivers]


def arriving_features(size: int, segments: Sequence[str], heads: Heads | None, place: GridPosition) -> list[list[int]]:
    """The features of [N] that each rank along the axes sends to the one at `place`; the other end of
    `sent_features`."""
    axes = ("x", "y") if heads is None else heads.axes
    needed = _list_features(size, segments, heads, place)
    senders = (place.move(axes, index) for index in range(place.size(*axes)))
    return [_within(feature_slice(size, sender, *axes)[0], needed) for sender in senders]


def exchanged_features(
    size: int, segments: Sequence[str], heads: Heads | None, place: GridPosition
) -> tuple[int, int]:
    """Return the number of features that the rank at `place` sends to others, and of those that it gets from them.

    The lengths of `sent_features` and `arriving_features` without the rank itself, from ranges alone: a plan asks for
    many grids.
    """
    axes = ("x", "y") if heads is None else heads.axes
    own, _ = feature_slice(size, place, *axes)

    def read(of: GridPosition, within: slice) -> int:
        # A set, because a kv head that several query heads of a rank repeat travels once.
        ranges = {span for part in feature_ranges(size, segments, heads, of) for span in part.ranges}
        return sum(max(0, min(span.stop, within.stop) - max(span.start, within.start)) for span in ranges)

    here = place.index(*axes)
    others = (place.move(axes, index) for index in range(place.size(*axes)) if index != here)
    return sum(read(other, own) for other in others), read(place, slice(0, size)) - read(place, own)


def _list_features(size: int, segments: Sequence[str], heads: Heads | None, place: GridPosition) -> list[int]:
    # A dict, because a kv head that several query heads of a rank repeat travels once.
    found = feature_ranges(size, segments, heads, place)
    return list(dict.fromkeys(feature for part in found for span in part.ranges for feature in span))


def _within(own: slice, features: list[int]) -> list[int]:
    return [feature for feature in features if own.start <= feature < own.stop]
