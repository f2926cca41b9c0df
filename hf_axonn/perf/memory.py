"""Bytes that one rank holds at the worst moment of a training step, by what they are for (docs/algorithm.md, Memory).

    states        parameters, gradients and AdamW's two moments of the rank's shards, and the small ones whole
    gathered      whole blocks of two groups of weights, this one and the next one, and the gradients of two
    activations   saved for backward: of all layers, or under checkpointing the input of each and one layer's own
    logits        two chunks of the loss, the head's block and its gradient
    buckets       averages over data in flight

What is not counted: the CUDA context and the communicators' own buffers, and what the allocator loses; RESERVE is left
for them.
"""

from __future__ import annotations

from typing import NamedTuple

from hf_axonn.grid import Grid, ceil_div
from hf_axonn.perf.shapes import LinearShape, ModelShape, Step
from hf_axonn.perf.volumes import BUCKET_BYTES, CHUNK_LOGITS, shard_shape


RESERVE = 0.1  # share of a GPU's memory that a plan leaves free: an assumption
MOMENT_BYTES = 8  # AdamW's two moments in fp32
ORIGIN = {"data": 0, "z": 0, "y": 0, "x": 0}  # rank 0 holds the longest pieces


class Memory(NamedTuple):
    """Bytes of one rank; fields as in the head of this file. `parameters`: elements of its parameters."""

    parameters: int
    states: float
    gathered: float
    activations: float
    logits: float
    buckets: float

    @property
    def total(self) -> float:
        """The sum. The moments of gathered weights and of logits differ: the larger of the two counts."""
        return self.states + max(self.gathered, self.logits) + self.activations + self.buckets

    def fits(self, capacity: float) -> bool:
        """Whether it leaves RESERVE of `capacity` bytes."""
        return self.total <= (1 - RESERVE) * capacity


def local_parameters(shape: ModelShape, grid: Grid) -> int:
    """Elements of parameters on rank 0."""
    layer = [("column", linear) for part in (shape.attention(), shape.mlp()) for linear in part[0]]
    layer += [("row", part[1]) for part in (shape.attention(), shape.mlp())]
    vocabulary = _local("vocabulary", LinearShape(shape.vocab, shape.hidden), grid)
    per_layer = sum(_local(kind, linear, grid) for kind, linear in layer)
    return shape.layers * per_layer + (1 if shape.tied else 2) * vocabulary + sum(shape.replicated())


def memory(shape: ModelShape, grid: Grid, step: Step, *, layout: str = "token") -> Memory:
    """What rank 0 holds.

    Args:
        shape, grid, step: which.
        layout: of the residual stream, token or feature.
    """
    parameters = local_parameters(shape, grid)
    return Memory(
        parameters=parameters,
        states=parameters * (2 * step.param_bytes + MOMENT_BYTES),
        gathered=_gathered(shape, grid, step),
        activations=_activations(shape, grid, step, layout),
        logits=_logits(shape, grid, step),
        buckets=min(3 * BUCKET_BYTES, parameters * step.param_bytes) if grid.data > 1 else 0,
    )


def _local(kind: str, linear: LinearShape, grid: Grid) -> int:
    rows, cols = shard_shape(kind, linear, grid, ORIGIN)
    return ceil_div(rows, grid.z) * cols


def _block(kind: str, linears: list[LinearShape], grid: Grid) -> int:
    """Elements of a rank's gathered weights; none are gathered where z is 1."""
    if grid.z == 1:
        return 0
    shapes = [shard_shape(kind, linear, grid, ORIGIN) for linear in linears]
    return sum(ceil_div(rows, grid.z) * grid.z * cols for rows, cols in shapes)


def _gathered(shape: ModelShape, grid: Grid, step: Step) -> int:
    groups = []
    for columns, row in (shape.attention(), shape.mlp()):
        groups += [_block("column", columns, grid), _block("row", [row], grid)]
    largest = max(first + second for first, second in zip(groups, [*groups[1:], groups[0]], strict=True))
    kept = min(step.kept_layers, shape.layers) * sum(groups) * step.compute_bytes
    gradient = max(step.compute_bytes, step.reduce_bytes)
    if grid.z > 1:
        return kept + largest * (step.compute_bytes + gradient)
    # At z = 1 nothing is gathered, but the product uses a copy in the compute dtype, and so does its gradient.
    own = max(
        sum(rows * cols for rows, cols in (shard_shape(kind, linear, grid, ORIGIN) for linear in linears))
        for kind, linears in (("column", shape.mlp()[0]), ("row", [shape.mlp()[1]]))
    )
    return own * (step.compute_bytes + gradient)


def _activations(shape: ModelShape, grid: Grid, step: Step, layout: str) -> float:
    tokens, parts = step.padded(grid), grid.x * grid.y
    compute, stream = step.compute_bytes, step.param_bytes
    width, kv = shape.heads * shape.width, shape.kv * shape.width
    repeat = heads_repeat(shape, grid)
    feature = layout == "feature" and grid.y > 1
    residual = tokens * shape.hidden / parts * stream
    layer = residual * shape.norms_per_layer * (1 if feature else 2)
    layer += (2 * width + 2 * kv) * tokens / parts * repeat * compute
    layer += (3 if shape.gated else 2) * tokens * shape.intermediate / parts * compute
    layer += (2 * tokens * shape.hidden / grid.y + tokens * shape.intermediate / grid.x) * compute
    if grid.y > 1:
        layer += tokens * width / grid.x * compute
    layer += 4 * tokens / (grid.x if feature else parts) * 2 + 4 * tokens * shape.heads / parts * repeat
    return shape.layers * residual + layer if step.checkpointing else shape.layers * layer


def heads_repeat(shape: ModelShape, grid: Grid) -> int:
    """Ranks that compute the same attention because the heads do not divide, see heads.py."""
    if shape.heads % (grid.x * grid.y) == 0:
        return 1
    return grid.y if shape.heads % grid.x == 0 else grid.x * grid.y


def _logits(shape: ModelShape, grid: Grid, step: Step) -> float:
    parts = grid.x * grid.y
    vocab = ceil_div(ceil_div(shape.vocab, grid.y), grid.x)
    chunk = min(CHUNK_LOGITS, step.padded(grid) * vocab)
    head = vocab * shape.hidden * (step.compute_bytes + max(4, step.compute_bytes, step.reduce_bytes))
    return 2 * 4 * chunk + head + step.padded(grid) * shape.hidden / parts * (step.compute_bytes + 4)
