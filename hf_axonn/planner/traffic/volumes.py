"""Collectives that one rank issues in a training step, and the bytes that it sends: exact, and without running it.

    volumes(shape, grid, step)          -> Ledger of one optimizer step
    layer_volumes(shape, grid, step)    -> Ledger of one decoder layer and one micro-batch, forward and backward

Follows the engine line by line; what is computed where stands beside each entry. tests/planner/test_traffic.py counts
the real collectives and finds the same numbers. For decoders whose layers are sharded into blocks and experts
(architectures/plan.py), without adapters and dropout and with every parameter trained.

Legend: T = tokens of a (data, z) position padded to a multiple of x * y (its positions of rows that context divides);
H = hidden; N, K = out and in features.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_axonn.planner.experts import expected_rows
from hf_axonn.planner.shapes import (
    BlockShape,
    ExpertsShape,
    HeadFeatures,
    LayerShape,
    LinearCall,
    LinearShape,
    ModelShape,
    UnshardedModule,
    gathers_keys,
    gathers_latents,
    own_elements,
    own_experts,
    own_heads,
    shard_shape,
)
from hf_axonn.planner.step import Step
from hf_axonn.planner.traffic.ledger import Ledger, LedgerKey
from hf_axonn.topology.experts import DISPATCH
from hf_axonn.topology.grid import Grid, GridPosition, ceil_div
from hf_axonn.topology.heads import Heads, exchanged_features, is_own_slice
from hf_axonn.topology.weight_kind import WeightKind


RESIDUAL_LAYOUTS = ("token", "feature")
INDEX_BYTES = 8  # of a number of rows, or of a row
CHOICE_BYTES = 4  # of the number of an expert
CHUNK_LOGITS = 2**26  # as in losses/head_chunks.py
BUCKET_BYTES = 32 * 2**20  # as in engine/gradient_sync.py


def volumes(shape: ModelShape, grid: Grid, step: Step, *, layout: str = "token", rank: int = 0) -> Ledger:
    """The collectives of one optimizer step.

    Args:
        shape: the model.
        grid: sizes of the axes.
        step: the batch and the dtypes.
        layout: token or feature, how the residual stream is divided (docs/algorithm.md); at y = 1 they are one.
        rank: the rank that issues them; where sizes do not divide, the first ranks hold most, rank 0 is the busiest.
    Raises:
        ValueError: an unknown layout, or the rank is not on the grid.
    """
    account = StepAccount(shape, grid, step, layout, rank)
    micro_batch = account.embedding()
    kept = step.kept_layers  # the last ones
    for layer, count in reversed(shape.runs):
        held = min(kept, count)
        micro_batch.include(account.layer(layer), times=count - held)
        micro_batch.include(account.layer(layer, kept=True), times=held)
        kept -= held
    if shape.outside is not None:
        micro_batch.include(account.layer(shape.outside, once=True))
    micro_batch.include(account.end())
    total = account.gradients()
    total.include(micro_batch, times=step.micro_batches)
    return total


def layer_volumes(shape: ModelShape, grid: Grid, step: Step, *, layout: str = "token", rank: int = 0) -> Ledger:
    """The collectives of one decoder layer (the most frequent) and one micro-batch, forward and backward. Arguments as
    `volumes`."""
    return StepAccount(shape, grid, step, layout, rank).layer(shape.kinds[0][0])


class StepAccount:
    """The collectives of the parts of a model: a method for each part of a layer, and for each part around the layers.

    Arguments as `volumes`.
    """

    def __init__(self, shape: ModelShape, grid: Grid, step: Step, layout: str, rank: int = 0) -> None:
        if layout not in RESIDUAL_LAYOUTS:
            raise ValueError(
                f"layout is {layout!r}, but the residual stream is divided by {' or by '.join(RESIDUAL_LAYOUTS)}."
            )
        self.shape, self.grid, self.step = shape, grid, step
        self.gathers_keys = gathers_keys(shape, grid, step.context_attention)
        self.by_features = layout == "feature" and grid.y > 1
        self.rank, self.here = rank, grid.coordinates(rank)
        self.ranks = grid.z * grid.x * grid.y
        self.place = GridPosition(grid, self.here)
        self.tokens = step.tokens(grid)
        self.padded = step.padded_tokens(grid)
        self.hidden_y = ceil_div(shape.hidden, grid.y)
        # Statistics and the loss are at least float32; gradients are reduced in the wider of their and reduce_dtype.
        self.wide = max(step.compute_bytes, 4)

    def gathers_latents(self, block: BlockShape) -> bool:
        """Return whether attention makes keys and values of gathered latents."""
        return gathers_latents(self.shape, block, self.grid, self.step.context_attention)

    def layer(self, layer: LayerShape, *, kept: bool = False, once: bool = False) -> Ledger:
        """One decoder layer, forward and backward. `kept`: its gathered weights live until backward is done. `once`:
        it does not run again under checkpointing."""
        first, again = Ledger(self.grid), Ledger(self.grid)  # what runs once; what checkpointing runs again
        self.add_norms(again, layer.norms)
        for gathered in layer.gathered:
            axes = Heads.divide(gathered.heads, gathered.heads, self.place).axes if gathered.heads else ("y", "x")
            self.add_gathered_parameter(again, gathered.rows, gathered.cols, axes if gathered.partial else ())
        for index, part in enumerate(layer.parts):
            # Adapters come after the product of their Linear, so that all of it runs again.
            last = first if index == layer.ends and not self.step.lora else again
            if isinstance(part, ExpertsShape):
                self.add_experts(again, last, part)
                if part.moves:  # a recomputed layer routes as it did
                    first.add("forward", "all_to_all", DISPATCH, self.ranks * (1 + part.chosen) * INDEX_BYTES)
            elif isinstance(part, UnshardedModule):
                self.add_unsharded_module(again, last, part)
            else:
                self.add_block(again, last, part)
        total = Ledger(self.grid)
        total.include(first)
        total.include(again)
        if self.step.checkpointing and not once:
            for key, volume in again.chosen(phase="forward"):
                total.add("backward", key.kind, key.axes, volume.payload, volume.calls)
            # What is gathered for the recomputation serves backward too, always if it is of experts.
            if self.step.keeps_recomputed:
                for key, volume in again.chosen(phase="backward", kind="all_gather", axes=("z",)):
                    total.add(key.phase, key.kind, key.axes, -volume.payload, -volume.calls)
            else:
                for part in layer.parts:
                    if isinstance(part, ExpertsShape) and not part.moves:
                        self.add_gathers(
                            total,
                            "backward",
                            -self.expert_elements(part) * self.step.compute_bytes,
                            -len(part.weights),
                        )
        if kept:
            total.entries.pop(LedgerKey("backward", "all_gather", ("z",)), None)
        return total

    def add_pair(
        self, into: Ledger, forward: str | None, backward: str | None, over: tuple[str, ...], elements: int
    ) -> None:
        """Add a collective and its conjugate, in the compute dtype."""
        for phase, kind in (("forward", forward), ("backward", backward)):
            if kind is not None:
                into.add(phase, kind, over, elements * self.step.compute_bytes)

    def add_block(self, ledger: Ledger, last: Ledger, block: BlockShape) -> None:
        """Add attention, a mixer or an MLP. What follows its last matmul goes to `last`: recomputation stops there."""
        grid, pair = self.grid, self.add_pair
        heads = Heads.divide(block.query, block.kv, self.place) if block.query else None
        axes = heads.axes if heads else ("x", "y")
        stream = self.padded // grid.x * self.hidden_y  # a rank's part of the residual stream [T/x, H/y]
        if block.down:
            self.add_latents(ledger, block, axes)
        else:  # ColumnParallel.enter
            if not self.by_features:
                pair(ledger, "all_to_all", "all_to_all", ("y",), stream)
            pair(ledger, "all_gather", "reduce_scatter", ("x",), stream)
            self.add_weights(ledger, WeightKind.COLUMN, block.columns)
        self.add_adapters(ledger, block, axes)
        # ColumnParallel._compute: one reduction for all; without y in axes the ranks of y go on with x's.
        for linears in [[linear] for linear in block.columns] if block.down else [block.columns]:
            features = sum(ceil_div(ceil_div(linear.rows, grid.x), grid.y) for linear in linears)
            if "y" in axes:
                pair(ledger, "reduce_scatter", "all_gather", ("y",), self.tokens * features)
            else:
                pair(ledger, "all_reduce", None, ("y",), self.tokens * grid.y * features)
        # ColumnParallel._place: where heads are on no axis all features are gathered; packed ones and kv heads that
        # do not divide are exchanged
        for linear, segments in zip(block.columns, block.segments, strict=True):
            if not axes:
                pair(ledger, "all_gather", None, ("x",), self.tokens * ceil_div(linear.rows, grid.x))
            elif not is_own_slice(linear.rows, segments, heads, self.place):
                sent, arriving = exchanged_features(linear.rows, segments, heads, self.place)
                ledger.add("forward", "exchange", axes, self.tokens * sent * self.step.compute_bytes)
                ledger.add("backward", "exchange", axes, self.tokens * arriving * self.step.compute_bytes)
        for _, centered in block.inner_norms:
            self.add_statistics(ledger, axes, self.tokens, centered)
        if block.sums:  # ChannelSum
            pair(ledger, "all_reduce", "all_reduce", ("x", "y"), self.tokens * block.sums)
        if block.norm_groups and heads and own_heads(block, grid) * block.norm_groups % block.query:  # GatedNorm
            self.add_statistics(ledger, axes, self.tokens * block.norm_groups, centered=False)
        if block.is_attention and self.gathers_keys:  # ContextAttention: keys and values of whole rows
            own = HeadFeatures.from_block(block, grid, divided=False)
            if reach := grid.reach(block.window, self.step.seq):  # the ends of stripes, to the ranks beside this one
                index = self.place.index("context")
                ends = (index > 0) + (index < grid.context - 1)
                for phase in ("forward", "backward"):
                    sent = ends * reach * self.step.rows * own.keys * self.step.compute_bytes
                    ledger.add(phase, "exchange", ("context",), sent)
            else:
                sent = block.latent if self.gathers_latents(block) else own.keys
                pair(ledger, "all_gather", "reduce_scatter", ("context",), self.tokens * sent)
        elif block.is_attention and grid.context > 1:  # to whole rows of fewer heads, and back
            own = HeadFeatures.from_block(block, grid, divided=True)
            for sent in (own.query + own.keys, own.output):
                pair(ledger, "all_to_all", "all_to_all", ("context",), self.tokens * sent)
        # RowParallel._forward
        row = block.row
        if "y" in axes:
            inner = ceil_div(ceil_div(row.cols, grid.x), grid.y)
            pair(ledger, "all_gather", "reduce_scatter", ("y",), self.padded * inner)
        else:
            inner = ceil_div(row.cols, grid.x)
            pair(ledger, None, "all_reduce", ("y",), self.padded * inner)
            if not axes:
                pair(ledger, None, "all_gather", ("x",), self.padded * inner)
        self.add_weights(ledger, WeightKind.ROW, [row])
        pair(last, "reduce_scatter", "all_gather", ("x",), stream)
        if not self.by_features:
            pair(last, "all_to_all", "all_to_all", ("y",), stream)

    def add_latents(self, ledger: Ledger, block: BlockShape, axes: tuple[str, ...]) -> None:
        """Add latent attention up to its columns: full activations, Linears on their own, full latents
        (layers/latent_attention.py)."""
        grid, pair = self.grid, self.add_pair
        parts = self.padded // grid.x * self.hidden_y
        parts = parts if self.by_features else self.padded // grid.x // grid.y * self.shape.hidden
        ledger.add("forward", "all_gather", ("x", "y"), parts * self.step.param_bytes)
        for linear in (*block.down, *block.columns):  # take_features, and the sum over x of what comes back
            tokens, size = self.tokens, self.step.param_bytes
            if linear is block.columns[-1] and self.gathers_latents(block):  # in the dtype in which they travel
                tokens, size = self.step.rows * self.step.seq, self.step.compute_bytes
            self.add_full_input(ledger, tokens * ceil_div(linear.cols, grid.y) * size)
            self.add_weights(ledger, WeightKind.LINEAR if linear in block.down else WeightKind.COLUMN, [linear])
        for linear in block.down:  # FullLinear
            self.add_full_output(ledger, self.tokens * ceil_div(linear.rows, grid.x))
        if block.rotary:
            pair(ledger, None, "all_reduce", axes, self.tokens * block.rotary)

    def add_full_input(self, ledger: Ledger, payload: int) -> None:
        """Add the entry of a product whose input is full: its gradient is gathered over y and summed over x."""
        ledger.add("backward", "all_gather", ("y",), payload)
        ledger.add("backward", "all_reduce", ("x",), payload)

    def add_full_output(self, ledger: Ledger, elements: int) -> None:
        """Add the exit of a Linear on its own: sums over y, features of all ranks of x."""
        self.add_pair(ledger, "all_reduce", None, ("y",), elements)
        self.add_pair(ledger, "all_gather", None, ("x",), elements)

    def add_unsharded_module(self, ledger: Ledger, last: Ledger, module: UnshardedModule) -> None:
        """Add Linears on their own, on full activations. What follows the last one goes to `last`."""
        own, step = self.padded // (self.grid.x * self.grid.y) * self.shape.hidden, self.step
        if module.taken:  # gather_tokens before, take_tokens after
            ledger.add("forward", "all_gather", ("x", "y"), module.taken * own * step.param_bytes, module.taken)
            size = step.compute_bytes if module.narrow else step.param_bytes
            ledger.add("backward", "all_gather", ("x", "y"), own * size)
        for index, call in enumerate(module.calls):
            ends = last if index == len(module.calls) - 1 else ledger
            self.add_call(ledger, ends, call)

    def add_call(self, ledger: Ledger, last: Ledger, call: LinearCall) -> None:
        """Add a Linear on its own. What follows its product goes to `last`."""
        linear, inputs = call.linear, int(self.tokens * call.inputs)
        output, input_ = call.backward
        elements = self.shard_elements(WeightKind.LINEAR, [linear])
        self.add_gathers(ledger, "forward", self.step.gather_bytes(elements), 1)
        if output:
            self.add_reductions(ledger, elements, self.step.compute_bytes)
        if output and input_:
            self.add_gathers(ledger, "backward", self.step.gather_bytes(elements), 1)
            size = self.step.compute_bytes if call.narrow else self.step.param_bytes
            self.add_full_input(ledger, inputs * ceil_div(linear.cols, self.grid.y) * size)
        self.add_full_output(last, inputs * ceil_div(linear.rows, self.grid.x))

    def add_experts(self, ledger: Ledger, last: Ledger, experts: ExpertsShape) -> None:
        """Add the experts of a layer. What follows their work goes to `last`."""
        if experts.moves:
            self.add_moving_tokens(ledger, last, experts)
            return
        step, parts = self.step, self.grid.x * self.grid.y
        each = self.expert_elements(experts)
        for phase in ("forward", "backward"):
            self.add_gathers(ledger, phase, each * step.compute_bytes, len(experts.weights))
        self.add_reductions(ledger, each, step.compute_bytes, len(experts.weights))
        own = self.padded // parts * self.shape.hidden
        if self.shape.loose:  # all tokens are here; what comes back is summed
            self.add_pair(ledger, None, "all_reduce", ("x", "y"), self.tokens * self.shape.hidden)
            if experts.sorted:
                most = own_experts(experts, self.grid, dict.fromkeys(self.here, 0))
                self.add_pair(last, "all_gather", None, ("x", "y"), most * self.tokens * self.shape.hidden)
                return
            ledger.add("backward", "all_reduce", ("x", "y"), self.tokens * experts.chosen * self.wide)
            self.add_pair(last, "all_reduce", None, ("x", "y"), self.tokens * self.shape.hidden)
            return
        if experts.sorted:
            most = own_experts(experts, self.grid, dict.fromkeys(self.here, 0))
            for into in (ledger, last):
                self.add_pair(into, "all_to_all", "all_to_all", ("x", "y"), parts * most * own)
            return
        self.add_pair(ledger, "all_gather", "reduce_scatter", ("x", "y"), own)
        chosen = self.padded // parts * experts.chosen
        ledger.add("forward", "all_gather", ("x", "y"), chosen * CHOICE_BYTES)
        ledger.add("forward", "all_gather", ("x", "y"), chosen * self.wide)
        ledger.add("backward", "reduce_scatter", ("x", "y"), chosen * self.wide)
        self.add_pair(last, "reduce_scatter", "all_gather", ("x", "y"), own)

    def add_moving_tokens(self, ledger: Ledger, last: Ledger, experts: ExpertsShape) -> None:
        """Add the ways of tokens to experts that lie whole on one rank, and back (layers/token_routes.py)."""
        own = self.padded // (self.grid.x * self.grid.y)  # tokens of this rank
        if self.shape.loose:  # all tokens are here: each rank sends its share of them, and gathers the sums of all
            for size in (self.shape.hidden * self.step.compute_bytes, experts.chosen * self.wide):
                ledger.add("backward", "all_gather", ("x", "y"), own * size)
            last.add("forward", "all_gather", ("x", "y"), own * self.shape.hidden * self.step.compute_bytes)
        there, back = expected_rows(experts, self.grid, self.rank)
        hidden = self.shape.hidden * self.step.compute_bytes
        for phase, sizes in self.find_dispatched(experts).items():
            for size in sizes:
                ledger.add(phase, "exchange", DISPATCH, size)
        last.add("forward", "exchange", DISPATCH, int(own * back * hidden))
        last.add("backward", "exchange", DISPATCH, int(own * there * hidden))

    def find_dispatched(self, experts: ExpertsShape) -> dict[str, list[int]]:
        """Bytes that are sent to experts that lie whole on one rank in forward, and of their gradients in backward:
        hidden states, and choices with their weights in one dtype."""
        own = self.padded // (self.grid.x * self.grid.y)
        there, back = expected_rows(experts, self.grid, self.rank)
        sizes = (self.shape.hidden * self.step.compute_bytes, 2 * experts.chosen * self.wide)
        return {
            phase: [int(own * rows * size) for size in sizes]
            for phase, rows in (("forward", there), ("backward", back))
        }

    def add_gathered_parameter(self, ledger: Ledger, rows: int, cols: int, partial: tuple[str, ...] = ()) -> None:
        """Add a parameter that is full while its module runs, in its own dtype; autograd keeps it. `partial`: the axes
        whose ranks do different work with it."""
        size, linear = self.step.param_bytes, LinearShape(rows, cols)
        stored = self.shard_elements(WeightKind.GATHERED, [linear])
        ledger.add("forward", "all_gather", ("z",), stored * size)
        self.add_reductions(ledger, stored, size)
        block = ceil_div(ceil_div(rows, self.grid.y), self.grid.x) * cols * size
        for axis in ("y", "x"):
            ledger.add("forward", "all_gather", (axis,), block)
            if axis in partial and not self.step.lora:
                ledger.add("backward", "reduce_scatter", (axis,), block)
            block *= getattr(self.grid, axis)

    def expert_elements(self, experts: ExpertsShape) -> int:
        """Elements of one rank's shards of all experts' weights that are gathered over z, padded."""
        if experts.moves:
            return 0
        own = own_experts(experts, self.grid, self.here)
        return sum(own * rows * ceil_div(cols, self.grid.z) for rows, cols, _ in experts.weights)

    def add_gathers(self, ledger: Ledger, phase: str, payload: int, calls: int) -> None:
        """Add gathers of weights over z."""
        ledger.add(phase, "all_gather", ("z",), payload, calls)

    def add_reductions(self, ledger: Ledger, elements: int, size: int, calls: int = 1) -> None:
        """Add reductions over z of gradients of `size` bytes an element, unless adapters alone are trained."""
        if not self.step.lora:
            payload = elements * max(size, self.step.reduce_bytes)
            ledger.add("backward", "reduce_scatter", ("z",), payload, calls)

    def add_weights(self, ledger: Ledger, kind: WeightKind, linears: Sequence[LinearShape]) -> None:
        """Add the weights of one product, in one collective: gathered in both passes, their gradients reduced."""
        elements = self.shard_elements(kind, linears)
        for phase in ("forward", "backward"):
            self.add_gathers(ledger, phase, self.step.gather_bytes(elements), 1)
        self.add_reductions(ledger, elements, self.step.compute_bytes)

    def add_adapters(self, ledger: Ledger, block: BlockShape, axes: tuple[str, ...]) -> None:
        """Add LoRA on the Linears of a block (parallel/adapters/lora.py): sums of [T, rank]. Latents do not count."""
        if not self.step.lora or block.down:
            return
        payload = self.tokens * self.step.lora * self.step.compute_bytes
        for _ in block.columns:
            ledger.add("forward", "all_reduce", ("y",), payload)
            if "y" in axes:
                ledger.add("backward", "all_reduce", ("y",), payload)
        ledger.add("forward", "all_reduce", axes, payload)
        ledger.add("backward", "all_reduce", ("x", "y"), payload)

    def beside_weight_gradients(self, block: BlockShape) -> list[int]:
        """Payloads of the reduce-scatters that run while the weight gradients of a block's two groups are computed.

        Over x of its columns, over y of its row; 0 where there is none: where the backward of a row layer is an
        all-reduce, and before latents.
        """
        divided = not block.query or "y" in Heads.divide(block.query, block.kv, self.place).axes
        inner = ceil_div(ceil_div(block.row.cols, self.grid.x), self.grid.y)
        found = [self.padded // self.grid.x * self.hidden_y * (not block.down), self.padded * inner * divided]
        return [elements * self.step.compute_bytes for elements in found]

    def shard_elements(self, kind: WeightKind, linears: Sequence[LinearShape]) -> int:
        """Elements of one rank's shards, padded over z."""
        shapes = (shard_shape(kind, linear, self.grid, self.here) for linear in linears)
        return sum(ceil_div(rows, self.grid.z) * cols for rows, cols in shapes)

    def add_norms(self, ledger: Ledger, count: int) -> None:
        """Add norms: in the feature layout they merge their statistics over y."""
        for _ in range(count if self.by_features else 0):
            self.add_statistics(ledger, ("y",), self.padded // self.grid.x, self.shape.centered)

    def add_statistics(self, ledger: Ledger, axes: tuple[str, ...], tokens: int, centered: bool) -> None:
        """Add statistics of a norm whose features lie on several ranks: mean square, or mean and squared deviation, of
        each token."""
        size = tokens * (2 if centered else 1) * self.wide
        for phase, kind in (("forward", "all_gather" if centered else "all_reduce"), ("backward", "all_reduce")):
            ledger.add(phase, kind, axes, size)

    def embedding(self) -> Ledger:
        """Embedding, and the first layer's taking of its tokens. In the dtype of the parameters."""
        ledger, size = Ledger(self.grid), self.step.param_bytes
        if not self.shape.begins:
            return ledger
        weight = self.shard_elements(WeightKind.VOCABULARY, [LinearShape(self.shape.vocab, self.shape.hidden)])
        ledger.add("forward", "all_gather", ("z",), weight * size)
        self.add_reductions(ledger, weight, size)
        ledger.add("forward", "all_reduce", ("x", "y"), self.tokens * self.shape.hidden * size)
        for table in self.shape.tables:
            if table.kind == WeightKind.GATHERED:
                self.add_gathered_parameter(ledger, table.rows, self.shape.hidden)
            elif table.kind == WeightKind.VOCABULARY:
                weight = self.shard_elements(WeightKind.VOCABULARY, [LinearShape(table.rows, self.shape.hidden)])
                ledger.add("forward", "all_gather", ("z",), weight * size)
                self.add_reductions(ledger, weight, size)
                looked_up = self.step.positions(self.grid) if table.shared else self.tokens
                ledger.add("forward", "all_reduce", ("x", "y"), looked_up * self.shape.hidden * size)
        if not self.shape.loose:
            own = self.padded // self.grid.x
            own = own * self.hidden_y if self.by_features else own // self.grid.y * self.shape.hidden
            ledger.add("backward", "all_gather", ("x", "y"), own * self.step.stream_bytes)
        return ledger

    def end(self) -> Ledger:
        """Last norm, head and loss: chunk by chunk, gradients formed in the forward pass."""
        shape, grid, step = self.shape, self.grid, self.step
        ledger, size = Ledger(grid), step.compute_bytes
        if not shape.ends:
            return ledger
        if shape.ends_full:  # the loss then takes its tokens again
            tokens = self.padded // grid.x // grid.y
            stream = self.padded // grid.x * self.hidden_y if self.by_features else tokens * shape.hidden
            if not shape.loose:
                ledger.add("forward", "all_gather", ("x", "y"), stream * step.stream_bytes)
            taken = step.compute_bytes if shape.ends_narrow else step.param_bytes
            ledger.add("backward", "all_gather", ("x", "y"), tokens * shape.hidden * taken)
        elif self.by_features:  # back to full tokens
            for phase in ("forward", "backward"):
                ledger.add(phase, "all_to_all", ("y",), self.padded // grid.x * self.hidden_y * step.stream_bytes)
        weight = self.shard_elements(WeightKind.VOCABULARY, [LinearShape(shape.vocab, shape.hidden)])
        ledger.add("forward", "all_gather", ("z",), weight * size)
        self.add_reductions(ledger, weight, self.wide)
        parts = grid.x * grid.y
        own = self.padded // parts
        local_vocab = ceil_div(ceil_div(shape.vocab, grid.y), grid.x)
        chunks = ceil_div(own, max(1, CHUNK_LOGITS // local_vocab // parts))
        ledger.add("forward", "all_gather", ("x", "y"), own * shape.hidden * size, chunks)
        ledger.add(
            "forward", "all_reduce", ("x", "y"), 3 * self.padded * self.wide, 2 * chunks
        )  # max; sum-exp and target
        ledger.add("forward", "reduce_scatter", ("x", "y"), own * shape.hidden * size, chunks)
        if grid.context > 1:  # the loss and the losses of tokens, of whole rows
            ledger.add("forward", "all_reduce", ("context",), self.wide)
            ledger.add("forward", "all_gather", ("context",), self.tokens * self.wide)
        if not step.counted:
            ledger.add("forward", "all_reduce", ("data", "rows"), 8)
        return ledger

    def gradients(self) -> Ledger:
        """sync_gradients: flags of present gradients, sharded gradients over data, replicated ones over the world.

        One flag for each parameter and each bucket over data. Buckets fill up from the last parameter to the first.
        """
        ledger, world = Ledger(self.grid), ("data", "z", "x", "y")
        size, replicated, every = self.step.param_bytes, self.shape.replicated, self.shape.weights
        if self.step.lora:
            size, replicated, every = 4, self.shape.adapters(self.step.lora), []
        travels = max(size, self.step.reduce_bytes)  # of `size` bytes when buckets are filled
        # A layer's shapes come again in every layer.
        own = {weight: own_elements(weight, self.grid, self.here) * size for weight in dict.fromkeys(every)}
        sharded = [own[weight] for weight in every]
        over_data = buckets(sharded[::-1])
        ledger.add("gradients", "all_reduce", ("data",), sum(sharded) // size * travels, over_data)
        idle = 0 if self.step.lora else len(self.shape.idle)
        flags = len(replicated) + len(sharded) + idle + (over_data if self.grid.data > 1 else 0)
        ledger.add("gradients", "all_reduce", world, 4 * flags)
        replicated = [elements * size for elements in replicated[::-1]]
        ledger.add("gradients", "all_reduce", world, sum(replicated) // size * travels, buckets(replicated))
        return ledger


def buckets(sizes: list[int]) -> int:
    """Number of buckets of BUCKET_BYTES that gradients of these bytes fill; a gradient is never divided."""
    count, filled = 0, 0
    for size in sizes:
        if not count or filled + size > BUCKET_BYTES:
            count, filled = count + 1, 0
        filled += size
    return count
