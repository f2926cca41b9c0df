"""The kinds of weights: what decides how a parameter is sharded over (y, x, z)."""

from __future__ import annotations

from enum import StrEnum


class WeightKind(StrEnum):
    """The way a weight is sharded. Prints and serializes as its plain word.

    Attributes:
        COLUMN: [N, K] of a projection that begins a block, N over x and K over y.
        ROW: [N, K] of the projection that ends a block, N over y and K over x.
        LINEAR: [N, K] of a Linear on its own, stored as a column weight; its activations are full.
        VOCABULARY: [V, H] of an embedding or the head, V over y, then x.
        EXPERTS: [E, A, B] of the experts of a layer, E over y, then x, and B over z.
        WHOLE_EXPERTS: the same with E over y, x and z in turn: an expert lies whole on one rank.
        GATHERED: any other large parameter [A, ...], stored as a vocabulary weight, gathered for its module.
        REPLICATED: every rank holds the full parameter.
        ADAPTER: a small weight that PEFT adds; every rank holds it in full.
    """

    COLUMN = "column"
    ROW = "row"
    LINEAR = "linear"
    VOCABULARY = "vocabulary"
    EXPERTS = "experts"
    WHOLE_EXPERTS = "whole_experts"
    GATHERED = "gathered"
    REPLICATED = "replicated"
    ADAPTER = "adapter"


# The dim that each axis of (y, x, z) shards, the outer axis first; None: its ranks hold the same.
SHARDED_DIMS: dict[WeightKind, tuple[int | None, int | None, int | None]] = {
    WeightKind.COLUMN: (1, 0, 0),
    WeightKind.LINEAR: (1, 0, 0),
    WeightKind.ROW: (0, 1, 0),
    WeightKind.VOCABULARY: (0, 0, 0),
    WeightKind.GATHERED: (0, 0, 0),
    WeightKind.EXPERTS: (0, 0, 2),
    WeightKind.WHOLE_EXPERTS: (0, 0, 0),
    WeightKind.REPLICATED: (None, None, None),
    WeightKind.ADAPTER: (None, None, None),
}
