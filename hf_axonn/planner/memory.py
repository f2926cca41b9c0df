"""Bytes that one rank holds at the worst moment of a training step, by what they are for (docs/algorithm.md, Memory).

    states        parameters, gradients and AdamW's two moments, all of one dtype but for moments in 8 bits: of the
                  rank's shards, and the small ones in full; of moments and weights in host memory the buckets that a
                  step has on the device, and of weights rounded copies; with Muon one moment of the layers' matrices
    activations   saved for backward: of all layers, or under checkpointing the input of each; weights that are kept
    gathered      full blocks of the weights of two layers, this one and the next one, and the gradients of two groups
    layer         what backward makes of a layer besides: under checkpointing all that it saves
    logits        a chunk of the loss, the head's block and its input
    head          gradients of the head, which the loss leaves for backward
    embedding     at the end of backward: the gradient of its output, and over z that of its weight
    buckets       averages over data in flight

Not all are there at once: `Memory.total` is the largest of four moments. tests/benchmarks/planner/simulate.py counts
what the engine holds and finds the same within a tenth, in most cases within a twentieth.

What is not counted: the CUDA context and the communicators' own buffers, and what the allocator loses; RESERVE is left
for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from hf_axonn.planner.experts import expected_rows
from hf_axonn.planner.shapes import (
    BlockShape,
    ExpertsShape,
    HeadFeatures,
    LayerPart,
    LayerShape,
    LinearCall,
    LinearShape,
    ModelShape,
    UnshardedModule,
    WeightShape,
    gathers_keys,
    gathers_latents,
    heads_repeat,
    own_elements,
    own_experts,
    shard_shape,
)
from hf_axonn.planner.step import Step
from hf_axonn.planner.traffic.volumes import BUCKET_BYTES, CHUNK_LOGITS, INDEX_BYTES
from hf_axonn.topology.grid import Grid, ceil_div
from hf_axonn.topology.weight_kind import WeightKind


RESERVE = 0.1  # share of a GPU's memory that a plan leaves free: an assumption
FOREIGN_BYTES = 2**25  # layers/moe.py: up to so much a GPU takes pairs of other ranks' experts along, in bf16
ADAPTER_BYTES = 4  # of an element of LoRA: PEFT makes adapters in float32
MOMENT_BUCKET = 2**27  # bytes, as in engine/host_moments.py
LOW_BIT_BLOCK, LOW_BIT_SIZE = 256, 4096  # of bitsandbytes: values that share a scale, and the fewest quantized
ORIGIN = {"data": 0, "z": 0, "y": 0, "x": 0}  # rank 0 holds the longest shards


class Memory(NamedTuple):
    """Bytes of one rank; fields as in the head of this file. `parameters`: elements of its parameters; `trained`: of
    those that are trained.

    moments: those in `states`, and weights that come with them; gradients: likewise, those that come one by one in
    backward; last: those of the embedding and of one layer, which come when its work is done; waits: whether all are
    there from the first micro-batch on.
    """

    parameters: int
    trained: int
    states: float
    gathered: float
    activations: float
    layer: float
    logits: float
    head: float
    embedding: float
    buckets: float
    moments: float
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
        # With all buckets in flight, their bytes of gradients are there, and the activations of their layers are not.
        middle = 0.0
        if self.buckets < self.gradients - self.last:
            middle = max(early, self.buckets) + self.buckets + work
            middle += (1 - self.buckets / self.gradients) * self.activations
        end = self.buckets + max(self.gradients - self.last + work, self.gradients + self.embedding)
        return self.states - self.gradients + max(loss, begin, middle, end)

    def by_kind(self) -> dict[str, float]:
        """Bytes of each kind, and their `total` at the worst moment, when not all of them are there."""
        rest = ("activations", "gathered", "layer", "logits", "head", "embedding", "buckets")
        weights = self.states - self.gradients - self.moments
        found = {"parameters": weights, "gradients": self.gradients, "optimizer": self.moments}
        return found | {name: getattr(self, name) for name in rest} | {"total": self.total}

    def fits(self, capacity: float) -> bool:
        """True if it leaves RESERVE of `capacity` bytes."""
        return self.total <= (1 - RESERVE) * capacity


def local_parameters(shape: ModelShape, grid: Grid) -> int:
    """Elements of parameters on rank 0."""
    return sum(elements * count for elements, count in _local_sizes(shape, grid))


def _local_sizes(shape: ModelShape, grid: Grid) -> Iterator[tuple[int, int]]:
    """Yield the elements of parameters on rank 0, and how many there are of each size; the vocabulary's come first."""
    yield own_elements(_vocabulary(shape), grid, ORIGIN), shape.begins + shape.has_head
    for layer, count in shape.everything:
        yield from ((own_elements(weight, grid, ORIGIN), count) for weight in layer.weights)
    for table in shape.tables:
        if shape.begins and table.kind != WeightKind.REPLICATED:
            yield own_elements(WeightShape(table.kind, table.rows, shape.hidden), grid, ORIGIN), 1
    yield from Counter(shape.replicated).items()
    yield from ((own_elements(weight, grid, ORIGIN), 1) for weight in shape.idle)


def _linears(shape: ModelShape, grid: Grid) -> int:
    """Elements of the layers' Linears on rank 0."""
    return sum(
        count * own_elements(WeightShape(kind, linear.rows, linear.cols), grid, ORIGIN)
        for layer, count in shape.everything
        for part in layer.parts
        if not isinstance(part, ExpertsShape)
        for kind, linears in part.groups()
        for linear in linears
    )


def _count_multiplied(shape: ModelShape, grid: Grid) -> int:
    """Elements on rank 0 of weights that only products read: Linears and experts of layers, and a head of its own."""
    layers = sum(
        count * _count_sharded((weight for weight in layer.weights if weight.kind != WeightKind.GATHERED), grid)
        for layer, count in shape.everything
    )
    return layers + shape.has_head * own_elements(_vocabulary(shape), grid, ORIGIN)


def _vocabulary(shape: ModelShape) -> WeightShape:
    return WeightShape(WeightKind.VOCABULARY, shape.vocab, shape.hidden)


def _count_sharded(weights: Iterable[WeightShape], grid: Grid) -> int:
    """Elements of weights on rank 0."""
    return sum(own_elements(weight, grid, ORIGIN) for weight in weights)


def memory(shape: ModelShape, grid: Grid, step: Step, *, layout: str = "token", gloo: bool = False) -> Memory:
    """Bytes that rank 0 holds.

    Args:
        shape, grid, step: the model, the grid and the step.
        layout: of the residual stream, token or feature.
        gloo: whether the backend is gloo, where large gradients are averaged in place and not in buckets, a
            reduce-scatter receives all blocks before it adds them up (distributed/collectives.py), and a rank has the
            rows of its own experts alone.
    """
    base = local_parameters(shape, grid)
    linears = _linears(shape, grid) if step.block_bytes else 0
    weights = (base - linears) * step.param_bytes + step.weight_bytes(linears)
    adapters = sum(shape.adapters(step.lora))
    trained, size = (adapters, ADAPTER_BYTES) if step.lora else (base, step.param_bytes)
    gradients = trained * size
    moved = _count_multiplied(shape, grid) if step.weights_on_host and grid.size > 1 else 0
    weights -= moved * (step.param_bytes - step.compute_bytes)
    moments = moment_bytes(_moments(shape, grid, step, gradients) + moved * step.param_bytes, step.offload)
    embedding = [_vocabulary(shape)] if shape.begins and not shape.tied else []
    last = _count_sharded([*shape.runs[0][0].weights, *embedding], grid)
    last *= 0 if step.lora else step.param_bytes
    saved, layer, reduced = _activations(shape, grid, step, layout, gloo)
    layer += reduced * (2 if gloo else 1)
    saved += kept_bytes(shape, grid, step)
    logits, head = _logits(shape, grid, step)
    return Memory(
        parameters=base + adapters,
        trained=trained,
        states=weights + adapters * ADAPTER_BYTES + gradients + moments,
        gathered=_gathered_bytes(shape, grid, step, gloo),
        activations=saved,
        layer=layer,
        logits=logits,
        head=head,
        embedding=_embedding(shape, grid, step),
        moments=moments,
        buckets=min(3 * BUCKET_BYTES, gradients - last) if grid.data > 1 and not gloo else 0,
        gradients=gradients,
        last=0 if step.micro_batches > 1 else last,
        waits=step.micro_batches > 1,
    )


def _moments(shape: ModelShape, grid: Grid, step: Step, gradients: int) -> int:
    if step.optimizer == "adamw":
        return 2 * gradients
    if step.optimizer == "muon":
        return 2 * gradients - (gradients if step.lora else _matrices(shape, grid) * step.param_bytes)
    if step.lora:
        return sum(map(low_bit_bytes, shape.adapters(step.lora)))
    (vocabulary, count), *others = _local_sizes(shape, grid)
    embeddings = min(shape.begins, count)  # which Trainer keeps in float32
    found = embeddings * 8 * vocabulary + (count - embeddings) * low_bit_bytes(vocabulary)
    return found + sum(count * low_bit_bytes(elements) for elements, count in others)


def _matrices(shape: ModelShape, grid: Grid) -> int:
    """Elements of the layers' matrices on rank 0, of which Muon keeps one moment. Experts that lie in one tensor are
    none, and Muon refuses them."""
    stacked = (WeightKind.EXPERTS, WeightKind.WHOLE_EXPERTS)
    return sum(
        count * _count_sharded((weight for weight in layer.weights if weight.kind not in stacked), grid)
        for layer, count in shape.everything
    )


def low_bit_bytes(elements: int) -> int:
    """Bytes of both moments of a tensor with bitsandbytes' 8-bit AdamW, which leaves small ones in float32."""
    return 8 * elements if elements < LOW_BIT_SIZE else 2 * elements + 8 * ceil_div(elements, LOW_BIT_BLOCK)


def moment_bytes(moments: int, offload: str) -> int:
    """Bytes of moments on the device: with `offload: optimizer` those of three buckets in a step, with the float32
    weights that come with them."""
    return min(3 * MOMENT_BUCKET, moments) if offload == "optimizer" else moments


def _groups(layer: LayerShape, grid: Grid) -> list[tuple[LayerPart, int]]:
    """The part, and the elements of the weights that a rank works with, of each group that is used together."""
    return [
        (part, _gathered_elements(part, kind, linears, grid))
        for part in layer.parts
        for kind, linears in part.groups()
    ]


def _gathered_elements(part: LayerPart, kind: WeightKind, linears: Iterable[LinearShape], grid: Grid) -> int:
    if isinstance(part, ExpertsShape):  # z shards the other dim, or experts
        z = 1 if part.moves else grid.z
        return own_experts(part, grid, ORIGIN) * sum(linear.rows * ceil_div(linear.cols, z) * z for linear in linears)
    shapes = [shard_shape(kind, linear, grid, ORIGIN) for linear in linears]
    return sum(ceil_div(rows, grid.z) * grid.z * cols for rows, cols in shapes)


def kept_bytes(shape: ModelShape, grid: Grid, step: Step) -> int:
    """Bytes of gathered weights that are kept from forward to backward, of the last layers."""
    kept, total = step.kept_layers, 0
    for layer, count in reversed(shape.runs) if kept and grid.z > 1 else ():
        held = min(max(kept, 0), count)
        groups = _groups(layer, grid)
        total += held * (sum(elements for _, elements in groups) - _staying(groups)) * step.compute_bytes
        kept -= held
    return total


def _gathered_bytes(shape: ModelShape, grid: Grid, step: Step, gloo: bool) -> int:
    gradient = 0 if step.lora else max(step.compute_bytes, step.reduce_bytes)
    most = layers = 0
    for layer, _ in shape.kinds:
        groups = _groups(layer, grid)
        sizes, staying = [elements for _, elements in groups], _staying(groups)
        if grid.z == 1:
            # Nothing is gathered, but the product uses a copy in the compute dtype, and so does its gradient.
            most = max(most, max(sizes) * (step.compute_bytes + gradient))
            continue
        if step.block_bytes:
            # Bytes of two layers, and what is made of them: of one layer if it is kept until its backward is over.
            linears = [elements for part, elements in groups if not isinstance(part, ExpertsShape)]
            made = sum(linears) if step.checkpointing and step.keeps_recomputed else max(linears, default=0)
            experts = 2 * (sum(sizes) - sum(linears)) - staying
            arriving = experts * step.compute_bytes + 2 * step.gather_bytes(sum(linears))
            layers = max(layers, arriving + made * step.compute_bytes)
            continue
        # Experts that stay have a copy in the compute dtype while they work.
        layers = max(layers, (2 * sum(sizes) - staying) * step.compute_bytes)
        held = [elements * gradient for elements in sizes]
        for index, (part, elements) in enumerate(groups):
            if gloo and isinstance(part, ExpertsShape) and not part.moves:
                # It receives the gradient of all experts of one weight while those of the others are there.
                weights = [weight.rows * weight.cols for weight in part.weights]
                held[index] += elements * max(weights) // sum(weights) * gradient
        most = max(most, *(first + second for first, second in zip(held, [*held[1:], held[0]], strict=True)))
    return layers + most


def _staying(groups: list[tuple[LayerPart, int]]) -> int:
    """Elements of experts that are not gathered over z, because tokens travel to them."""
    return sum([elements for part, elements in groups if isinstance(part, ExpertsShape) and part.moves])


def _activations(shape: ModelShape, grid: Grid, step: Step, layout: str, gloo: bool) -> tuple[float, float, float]:
    """Bytes that forward saves, that one layer makes again in backward, and of the largest gradient in reduction."""
    parts = 1 if shape.loose else grid.x * grid.y
    own = step.padded_tokens(grid) * shape.hidden / parts
    last = _saved_by_norm(shape, step) * own if shape.ends else 0.0  # the norm before the head
    if step.lora:  # PEFT makes the embedding's output a leaf, which lives
        last += step.tokens(grid) * shape.hidden * step.param_bytes
    saved = {layer: _saved_by_layer(shape, layer, grid, step, layout, gloo) for layer, _ in shape.kinds}
    # Gradients of an input before they are reduced. Other gradients take the place of what is saved and used up.
    at_work = max((_at_work(shape, part, grid, step) for layer in saved for part in layer.parts), default=0.0)
    if step.checkpointing:
        routes = sum(
            count * _routes(part, grid, step)
            for layer, count in (shape.kinds if shape.experts else ())
            for part in layer.parts
            if isinstance(part, ExpertsShape)
        )
        return shape.depth * own * step.stream_bytes + routes + last, max(saved.values()), at_work
    return sum(count * saved[layer] for layer, count in shape.kinds) + last, 0.0, at_work


def _rows(experts: ExpertsShape, grid: Grid, step: Step) -> tuple[float, float]:
    """Rows of hidden states that rank 0 sends to experts, and receives for its own, those that stay included."""
    tokens, ranks = step.padded_tokens(grid) / (grid.x * grid.y), grid.z * grid.x * grid.y
    there, back = map(float, expected_rows(experts, grid, 0))
    return tokens * (there + back / (ranks - 1)), tokens * back * ranks / (ranks - 1)


def _routes(experts: ExpertsShape, grid: Grid, step: Step) -> float:
    """Bytes of the routes of tokens, which a recomputed layer uses again: choices, and the rows of each token."""
    if not experts.moves:
        return 0.0
    ranks = grid.z * grid.x * grid.y
    numbers = step.padded_tokens(grid) / (grid.x * grid.y) * (experts.chosen + min(experts.chosen, ranks))
    return INDEX_BYTES * (numbers + _rows(experts, grid, step)[0])


def _saved_by_norm(shape: ModelShape, step: Step, *, own: bool = False) -> int:
    """Bytes an element that a norm saves. One of Transformers keeps its input in the dtype that it computes in, and an
    RMSNorm whose weight is trained also what it has normalized, in that of its input; `own` ones, of the feature
    layout, their input alone."""
    if own:
        return step.stream_bytes
    return step.param_bytes + (0 if shape.centered or step.lora else step.stream_bytes)


def _saved_by_layer(shape: ModelShape, layer: LayerShape, grid: Grid, step: Step, layout: str, gloo: bool) -> float:
    """Bytes that forward saves of one layer, all of its activations."""
    tokens, parts = step.padded_tokens(grid), 1 if shape.loose else grid.x * grid.y
    feature = layout == "feature" and grid.y > 1
    saved = tokens * shape.hidden / parts * layer.norms * _saved_by_norm(shape, step, own=feature)
    saved += 4 * tokens / (grid.x if feature else parts) * 2
    saved += sum(rows * cols for rows, cols, *_ in layer.gathered) * step.param_bytes
    for part in layer.parts:
        if isinstance(part, ExpertsShape):
            saved += _saved_by_experts(shape, part, grid, step, gloo)
        elif isinstance(part, UnshardedModule):
            saved += sum(_saved_by_call(call, grid, step) for call in part.calls)
        elif part.down and part.query:
            saved += _saved_by_latents(shape, part, grid, step)
        elif part.mixes:
            saved += tokens * shape.hidden / grid.y * step.compute_bytes
            saved += _saved_by_mixer(part, grid, step)
        elif part.query:
            saved += tokens * shape.hidden / grid.y * step.compute_bytes
            saved += _saved_by_attention(shape, part, grid, step)
        else:
            inner = part.row.cols
            saved += ((3 if part.gated else 1) + len(part.inner_norms)) * tokens * inner / parts * step.compute_bytes
            into_row = inner / (parts if step.lora else grid.x)
            saved += tokens * (shape.hidden / grid.y + into_row) * step.compute_bytes
        if step.lora and isinstance(part, BlockShape):
            saved += _saved_by_adapters(part, grid, step)
    return saved


def _saved_by_adapters(block: BlockShape, grid: Grid, step: Step) -> float:
    """Bytes for adapters. PEFT casts the input of each by itself: those of a block's entrance but one are saved once
    more, and attention's output. Between A and B rank features of all tokens."""
    inputs = sum(linear.cols for linear in block.columns[1:]) / grid.y
    inputs += block.row.cols / (grid.x * grid.y) if block.query else 0
    return step.padded_tokens(grid) * (inputs + step.lora * len(block.linears)) * step.compute_bytes


def _saved_by_attention(shape: ModelShape, block: BlockShape, grid: Grid, step: Step) -> float:
    """Bytes of queries, keys, values and gates; of attention's output; of the row layer's input where y gathers it; of
    the input of norms over all heads."""
    tokens, parts, compute = step.padded_tokens(grid), grid.x * grid.y, step.compute_bytes
    repeat = heads_repeat(block, grid)
    query, kv = block.query_features, block.kv_features
    saved = (sum(linear.rows for linear in block.columns) + block.value_features) * tokens / parts * repeat * compute
    if grid.context > 1:
        saved = tokens * _saved_over_context(shape, block, grid, step) * compute
    if any(index is not None for index, _ in block.inner_norms):
        saved += (query + kv / 2) * tokens / parts * repeat * compute
    if any(index is None for index, _ in block.inner_norms):
        saved += block.value_features * tokens / parts * repeat * compute
    if grid.y > 1:
        saved += tokens * block.value_features / grid.x * compute
    if (block.packed or grid.y > 1) and not shape.tables and block.kv % parts == 0 and grid.context == 1:
        # Values are a part of one tensor with the queries and keys, which stay with them when rotated ones are made.
        saved += (query + kv / 2) * tokens / parts * compute
    return saved + 4 * tokens * block.query / parts * repeat


def _saved_by_mixer(block: BlockShape, grid: Grid, step: Step) -> float:
    """Bytes of what projections return twice, as it is and as the mixer's code uses it, and of the row layer's input
    where y gathers it."""
    tokens, made = step.padded_tokens(grid), sum(linear.rows for linear in block.columns)
    features = (2 * made + block.row.cols) / (grid.x * grid.y) * heads_repeat(block, grid)
    features += block.row.cols / grid.x if grid.y > 1 else 0
    return tokens * features * step.compute_bytes


def _saved_over_context(shape: ModelShape, block: BlockShape, grid: Grid, step: Step) -> float:
    """Features of a token that attention saves where context divides rows, in place of what they were made of; the
    output of its own positions, too, which is the row layer's input where y does not gather that.

    With heads: queries, keys, values and output of whole rows, kv heads repeated. With keys: own queries and output,
    and keys and values of whole rows, or of the windows before two stripes."""
    keys = gathers_keys(shape, grid, step.context_attention)
    features = HeadFeatures.from_block(block, grid, divided=not keys)
    seen: float = grid.context if keys else 1
    if keys and (reach := grid.reach(block.window, step.seq)):
        seen = 1 + 2 * reach / step.positions(grid)
    return features.query + features.keys * seen + features.output * (2 if grid.y == 1 else 1)


def _saved_by_latents(shape: ModelShape, block: BlockShape, grid: Grid, step: Step) -> float:
    """Bytes of the inputs of all Linears; latents before and after their norms; full keys, in which every head has the
    rotary part, beside what they were made of; queries, values and attention's output."""
    tokens, parts, compute = step.padded_tokens(grid), grid.x * grid.y, step.compute_bytes
    repeat = heads_repeat(block, grid)
    inputs = sum(linear.cols for linear in (*block.down, *block.columns)) / grid.y
    latents = 2 * sum(linear.rows for linear in block.down)
    heads = (2 * block.query_features + block.value_features + block.columns[-1].rows) / parts * repeat
    if grid.context > 1:
        heads = _saved_over_context(shape, block, grid, step)
    if gathers_latents(shape, block, grid, step.context_attention):
        inputs += grid.context * block.latent - block.columns[-1].cols  # of whole rows
    saved = tokens * (inputs + latents + heads) * compute
    if grid.y > 1:
        saved += tokens * block.value_features / grid.x * compute
    return saved + 4 * tokens * block.query / parts * repeat


def _saved_by_experts(shape: ModelShape, experts: ExpertsShape, grid: Grid, step: Step, gloo: bool) -> float:
    """Bytes of the pairs (token, choice) that come to this rank, choices evenly spread: hidden states, what experts
    make of them, and results before they are weighted. Of all pairs where those of other ranks are taken along."""
    pairs = step.padded_tokens(grid) * (experts.number if experts.sorted else experts.chosen)
    inner = [
        max(rows, cols) if shape.hidden == min(rows, cols) else min(rows, cols) for rows, cols, _ in experts.weights
    ]
    own = own_experts(experts, grid, ORIGIN)
    foreign = pairs * (1 - own / experts.number) * shape.hidden * step.compute_bytes
    if not (gloo or experts.sorted or experts.moves) and step.compute_bytes == 2 and own and foreign <= FOREIGN_BYTES:
        return pairs * (2 * shape.hidden + 2 * max(inner)) * step.compute_bytes
    return pairs / (grid.x * grid.y) * (3 * shape.hidden + 2 * max(inner)) * step.compute_bytes


def _saved_by_call(call: LinearCall, grid: Grid, step: Step) -> float:
    """Bytes of the input of a Linear on its own, and of its full output twice: as it is, and as its module uses it."""
    features = call.linear.cols / grid.y + 2 * call.linear.rows
    return float(call.inputs) * step.tokens(grid) * features * step.compute_bytes


def _at_work(shape: ModelShape, part: LayerPart, grid: Grid, step: Step) -> float:
    """Bytes of the largest gradient of an input before it is reduced."""
    tokens, compute = step.padded_tokens(grid), step.compute_bytes
    if isinstance(part, ExpertsShape) and part.moves:
        # Gradients of the rows, results of pairs, and their sums by row in float32 and in the compute dtype.
        received, pairs = _rows(part, grid, step)[1], tokens * part.chosen / (grid.x * grid.y)
        return (received * (2 * compute + max(4, compute)) + pairs * compute) * shape.hidden
    if isinstance(part, ExpertsShape):
        return tokens * shape.hidden * compute if grid.x * grid.y > 1 else 0.0
    if isinstance(part, UnshardedModule):
        inner = max((float(call.inputs) * call.linear.cols for call in part.calls), default=0.0)
        return step.tokens(grid) * inner / grid.y * compute if grid.x > 1 else 0.0
    inner = 0 if part.query else part.row.cols
    at_work = tokens * inner / grid.x * compute if grid.y > 1 else 0.0
    return max(at_work, tokens * shape.hidden / grid.y * compute if grid.x > 1 else 0.0)


def _embedding(shape: ModelShape, grid: Grid, step: Step) -> float:
    """Bytes at the end of backward: the full gradient of the embedding's output, twice; and over z that of its weight,
    and its copy for the reduction."""
    if not shape.begins:
        return 0.0
    tokens, size = step.padded_tokens(grid), step.param_bytes
    vocab = ceil_div(ceil_div(shape.vocab, grid.y), grid.x)
    weight = vocab * shape.hidden * (size + max(size, step.reduce_bytes)) if grid.z > 1 and not step.lora else 0
    return 2 * tokens * shape.hidden * size + weight


def _logits(shape: ModelShape, grid: Grid, step: Step) -> tuple[float, float]:
    """Bytes of the loss while it is computed, and those that it leaves for backward: the gradients of the head."""
    if not shape.ends:
        return 0.0, 0.0
    tokens, parts, compute = step.padded_tokens(grid), grid.x * grid.y, step.compute_bytes
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
    return needed, (0 if step.lora else vocab * shape.hidden * wide) + own * compute
