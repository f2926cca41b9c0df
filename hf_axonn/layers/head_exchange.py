"""The way from the features that a product leaves on each rank to those that each rank works on.

The two are the same where a projection is q alone, or gate alone, and heads divide. Where q, k and v are packed into
one weight, or kv heads do not divide, one exchange sends every rank just what it needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_axonn.distributed.collectives import exchange_rows
from hf_axonn.distributed.mesh import GridMesh
from hf_axonn.engine.activation_layouts import pad_dim
from hf_axonn.topology.grid import GridPosition
from hf_axonn.topology.heads import (
    Heads,
    arriving_features,
    feature_ranges,
    feature_slice,
    is_own_slice,
    sent_features,
)


class HeadExchange:
    """The features of one projection's output [N] that this rank works on. Arguments as heads.feature_ranges.

    Attributes:
        counts: the number of features, without padding, that each rank along the axes works on.
    """

    def __init__(self, size: int, segments: Sequence[str], heads: Heads | None, mesh: GridMesh) -> None:
        self.mesh = mesh
        self.axes = ("x", "y") if heads is None else heads.axes
        self.is_slice = is_own_slice(size, segments, heads, mesh)
        found = feature_ranges(size, segments, heads, mesh)
        self.padded = [part.padded for part in found]
        ranks = (mesh.move(self.axes, index) for index in range(mesh.size(*self.axes)))
        self.counts = tuple(
            sum(len(run) for part in feature_ranges(size, segments, heads, rank) for run in part.ranges)
            for rank in ranks
        )
        needed = [[feature for run in part.ranges for feature in run] for part in found]
        self.indices = [self._tensor(features) for features in needed]
        if self.is_slice or not self.axes:
            return
        own, _ = feature_slice(size, mesh, *self.axes)
        sent = sent_features(size, segments, heads, mesh)
        arriving = arriving_features(size, segments, heads, mesh)
        self.send_sizes = [len(features) for features in sent]
        self.send = self._tensor([feature - own.start for features in sent for feature in features])
        self.receive_sizes = [len(features) for features in arriving]
        arrived = [feature for features in arriving for feature in features]
        place_of = {feature: place for place, feature in enumerate(arrived)}
        self.order = [self._tensor([place_of[feature] for feature in features]) for features in needed]

    def _tensor(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self.mesh.device)

    @property
    def size(self) -> int:
        """Features that this rank works on, padding included."""
        return sum(self.padded)

    def take(self, full: Tensor, dim: int = -1) -> Tensor:
        """This rank's features of a tensor that has all N of them in `dim`, zero-padded in each packed part."""
        return self._join([full.index_select(dim, index) for index in self.indices], dim)

    def exchange(self, output: Tensor) -> Tensor:
        """[T, N/axes], what a product has left on this rank -> [T, size]. One exchange over the axes, both ways."""
        rows = output.t().index_select(0, self.send)
        arrived = exchange_rows(rows, self.send_sizes, self.receive_sizes, self.mesh.group(*self.axes))
        return self._join([arrived.index_select(0, order) for order in self.order], 0).t().contiguous()

    def _join(self, parts: list[Tensor], dim: int) -> Tensor:
        return _pad_and_join(parts, self.padded, dim)


class RowExchange:
    """The way of a projection's output from own positions and the heads of this (x, y) to whole rows and a part of
    these heads, where context divides rows.

    Args:
        outer: the features of the heads of this (x, y), without padding.
        inner: heads as they are divided over (x, y, context).
    """

    def __init__(self, outer: HeadExchange, size: int, segments: Sequence[str], inner: Heads, mesh: GridMesh) -> None:
        here = torch.cat(outer.indices).tolist()
        assert len(here) == outer.size, "features are padded"
        place_of = {feature: place for place, feature in enumerate(here)}
        ranks = [mesh.move(("context",), index) for index in range(mesh.size("context"))]
        parts = (feature_ranges(size, segments, inner, rank) for rank in ranks)
        needed = [[place_of[each] for part in found for run in part.ranges for each in run] for found in parts]
        self.size = len(needed[0])
        self.index = torch.tensor(needed, dtype=torch.long, device=mesh.device).flatten()

    def blocks(self, output: Tensor) -> Tensor:
        """[B, L, outer features] -> [context, B, L, size], what each rank of context needs. No communication."""
        return output.index_select(-1, self.index).unflatten(-1, (-1, self.size)).movedim(-2, 0)


def take_heads(full: Tensor, dim: int, segments: Sequence[str], heads: Heads | None, place: GridPosition) -> Tensor:
    """The features of the rank at `place` of a tensor that has all N of them in `dim`; as `HeadExchange.take`."""
    found = feature_ranges(full.shape[dim], segments, heads, place)
    indices = (torch.tensor([each for run in part.ranges for each in run], dtype=torch.long) for part in found)
    return _pad_and_join([full.index_select(dim, index) for index in indices], [part.padded for part in found], dim)


def _pad_and_join(parts: list[Tensor], padded: Sequence[int], dim: int) -> Tensor:
    parts = [pad_dim(part, dim, size) for part, size in zip(parts, padded, strict=True)]
    return torch.cat(parts, dim=dim) if len(parts) > 1 else parts[0]
