"""Bytes that one rank holds at the worst moment of a training step, by what they are for (docs/algorithm.md, Memory).

    states        parameters, gradients and AdamW's two moments of the rank's shards, and the small ones whole
    activations   saved for backward: of all layers, or under checkpointing the input of each; weights that are kept
    gathered      whole blocks of two groups of weights, this one and the next one, and the gradients of two
    layer         what backward makes of a layer besides: under checkpointing all that it saves
    logits        a chunk of the loss, the head's block and its input
    head          gradients of the head, which the loss leaves for backward
    embedding     at the end of backward: the gradient of its output, and over z that of its weight
    buckets       averages over data in flight

Not all are there at once: `Memory.total` is the largest of four moments. benchmarks/simulate.py counts what the engine
holds and finds the same within a tenth, in most cases within a twentieth.

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
    """Bytes of one rank; fields as in the head of this file. `parameters`: elements of its parameters.

    gradients: those in `states`, which come one by one in backward; last: those of the embedding and of one layer,
    which come when its work is done; waits: whether all are there from the first micro-batch on.
    """

    parameters: int
    states: float
    gathered: float
    activations: float
    layer: float
    logits: float
    head: float
    embedding: float
    buckets: float
    gradients: float
    last: float
    waits: bool

    @property
    def total(self) -> float:
        """The largest of four moments.

        At the loss everything that is saved is there, and logits. As backward begins, saved activations; as it ends,
        the gradients; in both one layer's work. At the very end, the gradient of the embedding.
        """
        early = self.gradients if self.waits else 0.0
        saved = self.activations + self.head
        work = self.gathered + self.layer
        loss = early + saved + self.logits
        begin = early + saved + work
        # Where as many buckets are in flight as may be, so many gradients are there, and as many activations are not.
        middle = 0.0
        if self.buckets < self.gradients - self.last:
            middle = max(early, self.buckets) + self.buckets + work
            middle += (1 - self.buckets / self.gradients) * self.activations
        end = self.buckets + max(self.gradients - self.last + work, self.gradients + self.embedding)
        return self.states - self.gradients + max(loss, begin, middle, end)

    def by_kind(self) -> dict[str, float]:
        """Bytes of each kind, and their `total` at the worst moment, when not all of them are there."""
        rest = ("activations", "gathered", "layer", "logits", "head", "embedding", "buckets")
        optimizer = MOMENT_BYTES * self.parameters
        weights = self.states - self.gradients - optimizer
        found = {"parameters": weights, "gradients": self.gradients, "optimizer": optimizer}
        return found | {name: getattr(self, name) for name in rest} | {"total": self.total}

    def fits(self, capacity: float) -> bool:
        """Whether it leaves RESERVE of `capacity` bytes."""
        return self.total <= (1 - RESERVE) * capacity


def local_parameters(shape: ModelShape, grid: Grid) -> int:
    """Elements of parameters on rank 0."""
    layer, vocabulary = _sharded(shape, grid)
    return shape.layers * layer + (1 if shape.tied else 2) * vocabulary + sum(shape.replicated())


def _sharded(shape: ModelShape, grid: Grid) -> tuple[int, int]:
    """Elements on rank 0 of the weights of one layer, and of the embedding."""
    layer = [("column", linear) for part in (shape.attention(), shape.mlp()) for linear in part[0]]
    layer += [("row", part[1]) for part in (shape.attention(), shape.mlp())]
    vocabulary = _local("vocabulary", LinearShape(shape.vocab, shape.hidden), grid)
    return sum(_local(kind, linear, grid) for kind, linear in layer), vocabulary


def memory(shape: ModelShape, grid: Grid, step: Step, *, layout: str = "token", gloo: bool = False) -> Memory:
    """What rank 0 holds.

    Args:
        shape, grid, step: which.
        layout: of the residual stream, token or feature.
        gloo: whether the backend is gloo, where large gradients are averaged in place and not in buckets, and a
            reduce-scatter receives all blocks before it adds them up (collectives.py).
    """
    parameters = local_parameters(shape, grid)
    gradients = parameters * step.param_bytes
    first, vocabulary = _sharded(shape, grid)
    last = (first + (0 if shape.tied else vocabulary)) * step.param_bytes
    saved, layer, reduced = _activations(shape, grid, step, layout)
    layer += reduced * (2 if gloo else 1)
    saved += min(step.kept_layers, shape.layers) * sum(_groups(shape, grid)) * step.compute_bytes
    logits, head = _logits(shape, grid, step)
    return Memory(
        parameters=parameters,
        states=parameters * (2 * step.param_bytes + MOMENT_BYTES),
        gathered=_gathered(shape, grid, step),
        activations=saved,
        layer=layer,
        logits=logits,
        head=head,
        embedding=_embedding(shape, grid, step),
        buckets=min(3 * BUCKET_BYTES, gradients - last) if grid.data > 1 and not gloo else 0,
        gradients=gradients,
        last=0 if step.micro_batches > 1 else last,
        waits=step.micro_batches > 1,
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


def _groups(shape: ModelShape, grid: Grid) -> list[int]:
    """Elements of the gathered weights of a layer's four groups."""
    groups = []
    for columns, row in (shape.attention(), shape.mlp()):
        groups += [_block("column", columns, grid), _block("row", [row], grid)]
    return groups


def _gathered(shape: ModelShape, grid: Grid, step: Step) -> int:
    groups = _groups(shape, grid)
    largest = max(first + second for first, second in zip(groups, [*groups[1:], groups[0]], strict=True))
    gradient = max(step.compute_bytes, step.reduce_bytes)
    if grid.z > 1:
        return largest * (step.compute_bytes + gradient)
    # At z = 1 nothing is gathered, but the product uses a copy in the compute dtype, and so does its gradient.
    own = max(
        sum(rows * cols for rows, cols in (shard_shape(kind, linear, grid, ORIGIN) for linear in linears))
        for kind, linears in (("column", shape.mlp()[0]), ("row", [shape.mlp()[1]]))
    )
    return own * (step.compute_bytes + gradient)


def _activations(shape: ModelShape, grid: Grid, step: Step, layout: str) -> tuple[float, float, float]:
    """What forward saves, what one layer makes again in backward, and the largest that is reduced meanwhile."""
    tokens, parts = step.padded(grid), grid.x * grid.y
    compute, stream = step.compute_bytes, step.param_bytes
    width, kv = shape.heads * shape.width, shape.kv * shape.width
    repeat = heads_repeat(shape, grid)
    feature = layout == "feature" and grid.y > 1
    residual = tokens * shape.hidden / parts * stream
    norm = 1 if shape.layer_norm else 2  # an RMSNorm of Transformers keeps its input and what it has normalized
    layer = residual * shape.norms_per_layer * (1 if feature else norm)
    layer += (2 * width + 2 * kv) * tokens / parts * repeat * compute
    layer += (3 if shape.gated else 1) * tokens * shape.intermediate / parts * compute
    layer += (2 * tokens * shape.hidden / grid.y + tokens * shape.intermediate / grid.x) * compute
    if grid.y > 1:
        layer += tokens * width / grid.x * compute
    if (shape.packed_qkv or grid.y > 1) and not shape.positions and shape.kv % parts == 0:
        # Values are a part of one tensor with the queries and keys, which stay with them when rotated ones are made.
        layer += (width + kv) * tokens / parts * compute
    layer += 4 * tokens / (grid.x if feature else parts) * 2 + 4 * tokens * shape.heads / parts * repeat
    last = norm * residual  # the norm before the head
    # Gradients of an input before they are reduced. Other gradients take the place of what is saved and used up.
    at_work = tokens * shape.intermediate / grid.x * compute if grid.y > 1 else 0.0
    at_work = max(at_work, tokens * shape.hidden / grid.y * compute if grid.x > 1 else 0.0)
    if step.checkpointing:
        return shape.layers * residual + last, layer, at_work
    return shape.layers * layer + last, 0.0, at_work


def _embedding(shape: ModelShape, grid: Grid, step: Step) -> float:
    """At the end of backward: the gradient of the embedding's output, whole, twice; and over z that of its weight, and
    what is made of it for the reduction."""
    tokens, size = step.padded(grid), step.param_bytes
    vocab = ceil_div(ceil_div(shape.vocab, grid.y), grid.x)
    weight = vocab * shape.hidden * (size + max(size, step.reduce_bytes)) if grid.z > 1 else 0
    return 2 * tokens * shape.hidden * size + weight


def heads_repeat(shape: ModelShape, grid: Grid) -> int:
    """Ranks that compute the same attention because the heads do not divide, see heads.py."""
    if shape.heads % (grid.x * grid.y) == 0:
        return 1
    return grid.y if shape.heads % grid.x == 0 else grid.x * grid.y


def _logits(shape: ModelShape, grid: Grid, step: Step) -> tuple[float, float]:
    """What the loss needs while it is computed, and what it leaves for backward: the gradients of the head."""
    tokens, parts, compute = step.padded(grid), grid.x * grid.y, step.compute_bytes
    wide, casts = max(4, compute), compute != step.param_bytes
    vocab = ceil_div(ceil_div(shape.vocab, grid.y), grid.x)
    chunk = min(CHUNK_LOGITS, tokens * vocab)
    own = tokens * shape.hidden / parts
    needed = chunk * (wide + (compute if compute < wide else 0)) + own * step.param_bytes
    if casts or grid.z > 1:
        needed += vocab * shape.hidden * compute
    if casts:
        needed += own * compute
    if parts > 1:
        needed += chunk / vocab * shape.hidden * compute
    return needed, vocab * shape.hidden * wide + own * compute
