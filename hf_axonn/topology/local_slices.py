"""The slice of a global tensor that lies on a rank: one rule for storage, checkpoints and layouts."""

from __future__ import annotations

from collections.abc import Sequence

from hf_axonn.topology.grid import bounds


def narrow(span: tuple[int, int], parts: int, index: int) -> tuple[int, int]:
    """Chunk `index` of `parts` of a span (start, stop)."""
    start, stop = bounds(span[1] - span[0], parts, index)
    return span[0] + start, span[0] + stop


def slices_at(
    shape: Sequence[int], dims: Sequence[int | None], sizes: Sequence[int], coordinates: Sequence[int]
) -> tuple[slice, ...]:
    """The slice of each dim of a global tensor that lies at a position, as DTensor shards: axis after axis.

    Args:
        shape: of the global tensor.
        dims: for each axis the dim that it shards, None where it replicates.
        sizes, coordinates: of these axes, and of the position on them.
    Returns:
        One slice a dim; empty where the position lies beyond the end of a dim.
    """
    spans = [(0, size) for size in shape]
    for dim, size, index in zip(dims, sizes, coordinates, strict=True):
        if dim is not None:
            spans[dim] = narrow(spans[dim], size, index)
    return tuple(slice(*span) for span in spans)
