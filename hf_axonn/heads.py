"""Which features of a projection a rank works on: heads of attention, or a share of an MLP's intermediate features.

A projection's output [N] is a row of segments, one after another: q alone, k alone, or q, k and v packed into one
weight, or gate and up. In each segment a rank works on

    query    the features of its own query heads
    kv       those of the kv heads that its query heads read
    own      its share of features that belong to no head

No communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_axonn.grid import GridMesh
from hf_axonn.layouts import pad_dim
from hf_axonn.styles import feature_slice


@dataclass(frozen=True)
class Heads:
    """Over which axes the query heads of an attention block are divided, and how its kv heads follow.

    Args:
        query, kv: numbers of heads in the whole model.
        axes: ("x", "y"), ("x",) or (): the longest whose product divides `query`.
        expand: kv heads do not divide as the query heads do; every rank gets the one kv head that its query heads
            share, or one for each of its query heads.
    """

    query: int
    kv: int
    axes: tuple[str, ...]
    expand: bool

    @classmethod
    def divide(cls, query: int, kv: int, mesh: GridMesh) -> Heads:
        for axes in (("x", "y"), ("x",), ()):
            if query % mesh.size(*axes) == 0:
                return cls(query, kv, axes, expand=bool(axes) and kv % mesh.size(*axes) != 0)
        raise AssertionError("the empty product divides every number")

    def kv_of_own_queries(self, mesh: GridMesh) -> list[int]:
        """For each query head of this rank the kv head that it reads."""
        own = self.query // mesh.size(*self.axes)
        first = mesh.index(*self.axes) * own
        return [head // (self.query // self.kv) for head in range(first, first + own)]

    def kv_read(self, mesh: GridMesh) -> list[int]:
        """The kv heads that this rank works on, where `expand`: one if its query heads share it, else one for each."""
        each = self.kv_of_own_queries(mesh)
        # Alike on all ranks: the groups of query heads are as long as the ranks' shares, or several shares long.
        return each[:1] if self.query // self.kv % len(each) == 0 else each

    def own_query(self, mesh: GridMesh) -> int:
        """Query heads of this rank."""
        return self.query // mesh.size(*self.axes)

    def own_kv(self, mesh: GridMesh) -> int:
        """Kv heads of this rank, repeated ones included."""
        return len(self.kv_read(mesh)) if self.expand else self.kv // mesh.size(*self.axes)

    def why(self, mesh: GridMesh) -> str:
        """How the block is cut, where it is not over all of (x, y) without more ado."""
        sizes = f"x*y = {mesh.size('x', 'y')}"
        if self.axes == ("x", "y"):
            return f"{self.kv} kv heads are not divisible by {sizes}: k and v are gathered" if self.expand else ""
        if self.axes:
            return f"{self.query} heads are divisible by x = {mesh.size('x')} but not by {sizes}: repeated over y"
        return f"{self.query} heads are not divisible by x = {mesh.size('x')}: attention on all heads on every rank"


class Selection:
    """The features of one projection's output [N] that a rank works on.

    Args:
        size: N.
        segments: "query", "kv" or "own" for each packed part; heads of all parts are of one width.
        heads: None where the features belong to no head; then they are divided over (x, y).
    """

    def __init__(self, size: int, segments: Sequence[str], heads: Heads | None, mesh: GridMesh) -> None:
        units = [1 if heads is None or kind == "own" else getattr(heads, kind) for kind in segments]
        width = size // sum(units)
        if width * sum(units) != size:
            raise ValueError(f"{size} features are not {' + '.join(map(str, units))} heads of one width.")
        axes = ("x", "y") if heads is None else heads.axes
        self.is_packed = len(segments) > 1
        self.indices: list[Tensor] = []
        self.padded: list[int] = []
        self.is_slice = not self.is_packed  # this rank's own piece of [N] cut over the axes, nothing else
        start = 0
        for kind, unit in zip(segments, units, strict=True):
            if kind == "kv" and heads is not None and heads.expand:
                first = torch.tensor(heads.kv_read(mesh), device=mesh.device) * width + start
                index = (first[:, None] + torch.arange(width, device=mesh.device)).flatten()
                padded = len(index)
                self.is_slice = False
            else:
                own, padded = feature_slice(unit * width, mesh, *axes)
                index = torch.arange(start + own.start, start + own.stop, device=mesh.device)
            self.indices.append(index)
            self.padded.append(padded)
            start += unit * width

    @property
    def size(self) -> int:
        """Features that this rank works on, padding included."""
        return sum(self.padded)

    def take(self, whole: Tensor, dim: int = -1) -> Tensor:
        """This rank's features of a tensor that has all N of them in `dim`, zero-padded in each segment."""
        parts = [
            pad_dim(whole.index_select(dim, index), dim, padded)
            for index, padded in zip(self.indices, self.padded, strict=True)
        ]
        return torch.cat(parts, dim=dim) if len(parts) > 1 else parts[0]
