"""Which collectives one rank issues in a training step, and how many bytes it sends: exact, and without running it.

    volumes(shape, grid, step)          -> Ledger of one optimizer step
    layer_volumes(shape, grid, step)    -> Ledger of one decoder layer and one micro-batch, forward and backward

Follows the engine line by line; what is computed where stands beside each entry. tests/test_traffic.py counts the
real collectives and finds the same numbers. For dense decoders whose blocks are cut whole (plans.py), without
adapters and dropout and with every parameter trained.

Legend: T = tokens of a (data, z) position padded to a multiple of x * y; H = hidden; N, K = out and in features.
"""

from __future__ import annotations

from hf_axonn.grid import Grid, Place, bounds, ceil_div
from hf_axonn.heads import Heads, exchanged_features, is_own_slice
from hf_axonn.perf.ledger import Key, Ledger
from hf_axonn.perf.shapes import LinearShape, ModelShape, Step


LAYOUTS = ("token", "feature")
CHUNK_LOGITS = 2**26  # as loss.CHUNK_LOGITS
BUCKET_BYTES = 32 * 2**20  # as gradients.BUCKET_BYTES


def volumes(shape: ModelShape, grid: Grid, step: Step, *, layout: str = "token", rank: int = 0) -> Ledger:
    """The collectives of one optimizer step.

    Args:
        shape: the model.
        grid: sizes of the axes.
        step: the batch and the dtypes.
        layout: token or feature, how the residual stream is divided (DESIGN 2.3); at y = 1 they are one.
        rank: whose; where sizes do not divide, the first ranks hold most, so rank 0 is the busiest.
    Raises:
        ValueError: an unknown layout, or the rank is not on the grid.
    """
    account = Account(shape, grid, step, layout, rank)
    micro_batch = account.embedding()
    kept = min(step.kept_layers, shape.layers)
    micro_batch.include(account.layer(), times=shape.layers - kept)
    micro_batch.include(account.layer(kept=True), times=kept)
    micro_batch.include(account.end())
    total = account.gradients()
    total.include(micro_batch, times=step.micro_batches)
    return total


def layer_volumes(shape: ModelShape, grid: Grid, step: Step, *, layout: str = "token", rank: int = 0) -> Ledger:
    """The collectives of one decoder layer and one micro-batch, forward and backward. Arguments as `volumes`."""
    return Account(shape, grid, step, layout, rank).layer()


def shard_shape(kind: str, linear: LinearShape, grid: Grid, here: dict[str, int]) -> tuple[int, int]:
    """(rows, cols) of a weight on the rank at `here` before the cut over z. Kinds: column, row, vocabulary."""

    def own(size: int, axis: str) -> int:
        start, stop = bounds(size, getattr(grid, axis), here[axis])
        return stop - start

    if kind == "vocabulary":
        return own(own(linear.rows, "y"), "x"), linear.cols
    first, second = ("x", "y") if kind == "column" else ("y", "x")
    return own(linear.rows, first), own(linear.cols, second)


class Account:
    """The sizes that all entries share, and one method for each part of the model. Arguments as `volumes`."""

    def __init__(self, shape: ModelShape, grid: Grid, step: Step, layout: str, rank: int = 0) -> None:
        if layout not in LAYOUTS:
            raise ValueError(f"layout is {layout!r}, but the residual stream is divided by {' or by '.join(LAYOUTS)}.")
        self.shape, self.grid, self.step = shape, grid, step
        self.by_features = layout == "feature" and grid.y > 1
        self.here = grid.coordinates(rank)
        self.place = Place(grid, self.here)
        self.tokens = step.tokens
        self.padded = step.padded(grid)
        self.hidden_y = ceil_div(shape.hidden, grid.y)
        # Statistics and the loss are at least float32; gradients are reduced in the wider of their and reduce_dtype.
        self.wide = max(step.compute_bytes, 4)

    def layer(self, *, kept: bool = False) -> Ledger:
        """One decoder layer, forward and backward. `kept`: its gathered weights live until backward is done."""
        shape = self.shape
        first, again = Ledger(self.grid), Ledger(self.grid)  # what runs once; what checkpointing runs again
        self.norms(again, shape.norms_per_layer)
        self.block(again, again, *shape.attention(), is_attention=True)
        self.block(again, first, *shape.mlp(), is_attention=False)
        total = Ledger(self.grid)
        total.include(first)
        total.include(again)
        if self.step.checkpointing:
            for key, volume in again.chosen(phase="forward"):
                total.add("backward", key.kind, key.axes, volume.payload, volume.calls)
        if kept:
            total.entries.pop(Key("backward", "all_gather", ("z",)), None)
        return total

    def block(
        self, ledger: Ledger, last: Ledger, columns: list[LinearShape], row: LinearShape, *, is_attention: bool
    ) -> None:
        """An attention block or an MLP. What follows its last matmul goes to `last`: a recomputation stops there."""
        shape, grid, size = self.shape, self.grid, self.step.compute_bytes
        heads = Heads.divide(shape.heads, shape.kv, self.place) if is_attention else None
        axes = heads.axes if heads else ("x", "y")
        packed = shape.packed_qkv if is_attention else shape.packed_mlp

        def both(
            into: Ledger, forward: str | None, backward: str | None, over: tuple[str, ...], elements: int
        ) -> None:
            for phase, kind in (("forward", forward), ("backward", backward)):
                if kind is not None:
                    into.add(phase, kind, over, elements * size)

        # Column.enter
        stream = self.padded // grid.x * self.hidden_y  # a rank's part of the residual stream [T/x, H/y]
        if not self.by_features:
            both(ledger, "all_to_all", "all_to_all", ("y",), stream)
        both(ledger, "all_gather", "reduce_scatter", ("x",), stream)
        self.weights(ledger, "column", columns)
        # Column._compute: one reduction for all; without y in axes the ranks of y go on with all features of x.
        features = [ceil_div(ceil_div(linear.rows, grid.x), grid.y) for linear in columns]
        if "y" in axes:
            both(ledger, "reduce_scatter", "all_gather", ("y",), self.tokens * sum(features))
        else:
            both(ledger, "all_reduce", None, ("y",), self.tokens * grid.y * sum(features))
        # Column._place: where heads are on no axis all features are gathered; packed ones and kv heads that do not
        # divide are exchanged
        names = [("query", "kv", "kv")] if packed else [("query",), ("kv",), ("kv",)][: len(columns)]
        if not is_attention:
            names = [("own", "own")] if packed else [("own",)] * len(columns)
        for linear, segments in zip(columns, names, strict=True):
            if not axes:
                both(ledger, "all_gather", None, ("x",), self.tokens * ceil_div(linear.rows, grid.x))
            elif not is_own_slice(linear.rows, segments, heads, self.place):
                sent, arriving = exchanged_features(linear.rows, segments, heads, self.place)
                ledger.add("forward", "exchange", axes, self.tokens * sent * size)
                ledger.add("backward", "exchange", axes, self.tokens * arriving * size)
        # Row._forward
        if "y" in axes:
            inner = ceil_div(ceil_div(row.cols, grid.x), grid.y)
            both(ledger, "all_gather", "reduce_scatter", ("y",), self.padded * inner)
        else:
            inner = ceil_div(row.cols, grid.x)
            both(ledger, None, "all_reduce", ("y",), self.padded * inner)
            if not axes:
                both(ledger, None, "all_gather", ("x",), self.padded * inner)
        self.weights(ledger, "row", [row])
        both(last, "reduce_scatter", "all_gather", ("x",), stream)
        if not self.by_features:
            both(last, "all_to_all", "all_to_all", ("y",), stream)

    def weights(self, ledger: Ledger, kind: str, linears: list[LinearShape]) -> None:
        """The weights of one product, in one collective: gathered in both passes, their gradients reduced."""
        elements = self.travels(kind, linears)
        for phase in ("forward", "backward"):
            ledger.add(phase, "all_gather", ("z",), elements * self.step.compute_bytes)
        ledger.add(
            "backward", "reduce_scatter", ("z",), elements * max(self.step.compute_bytes, self.step.reduce_bytes)
        )

    def beside_weight_gradients(self) -> list[int]:
        """Payloads of the reduce-scatters that run while the weight gradients of a layer's four groups are computed.

        Over x of q, k, v and of up, over y of o and of down; 0 where the backward of a row layer is an all-reduce.
        """
        heads = Heads.divide(self.shape.heads, self.shape.kv, self.place)
        found = []
        for row, divided in ((self.shape.attention()[1], "y" in heads.axes), (self.shape.mlp()[1], True)):
            inner = ceil_div(ceil_div(row.cols, self.grid.x), self.grid.y)
            found += [self.padded // self.grid.x * self.hidden_y, self.padded * inner * divided]
        return [elements * self.step.compute_bytes for elements in found]

    def travels(self, kind: str, linears: list[LinearShape]) -> int:
        """Elements of one rank's shards, padded over z."""
        shapes = (shard_shape(kind, linear, self.grid, self.here) for linear in linears)
        return sum(ceil_div(rows, self.grid.z) * cols for rows, cols in shapes)

    def norms(self, ledger: Ledger, count: int) -> None:
        """In the feature layout a norm merges its statistics over y: mean square, or mean and squared deviation."""
        if self.by_features:
            elements = self.padded // self.grid.x * (2 if self.shape.layer_norm else 1)
            forward = "all_gather" if self.shape.layer_norm else "all_reduce"
            for phase, kind in (("forward", forward), ("backward", "all_reduce")):
                ledger.add(phase, kind, ("y",), count * elements * self.wide, count)

    def embedding(self) -> Ledger:
        """Embedding, and the first layer's taking of its tokens. In the dtype of the parameters."""
        ledger, size = Ledger(self.grid), self.step.param_bytes
        weight = self.travels("vocabulary", [LinearShape(self.shape.vocab, self.shape.hidden)])
        ledger.add("forward", "all_gather", ("z",), weight * size)
        ledger.add("backward", "reduce_scatter", ("z",), weight * max(size, self.step.reduce_bytes))
        ledger.add("forward", "all_reduce", ("x", "y"), self.tokens * self.shape.hidden * size)
        own = self.padded // self.grid.x
        own = own * self.hidden_y if self.by_features else own // self.grid.y * self.shape.hidden
        ledger.add("backward", "all_gather", ("x", "y"), own * size)
        return ledger

    def end(self) -> Ledger:
        """Last norm, head and loss: chunk by chunk, gradients formed in the forward pass."""
        shape, grid, step = self.shape, self.grid, self.step
        ledger, size = Ledger(grid), step.compute_bytes
        if self.by_features:  # back to whole tokens
            for phase in ("forward", "backward"):
                ledger.add(phase, "all_to_all", ("y",), self.padded // grid.x * self.hidden_y * step.param_bytes)
        weight = self.travels("vocabulary", [LinearShape(shape.vocab, shape.hidden)])
        ledger.add("forward", "all_gather", ("z",), weight * size)
        ledger.add("backward", "reduce_scatter", ("z",), weight * max(self.wide, step.reduce_bytes))
        parts = grid.x * grid.y
        own = self.padded // parts
        local_vocab = ceil_div(ceil_div(shape.vocab, grid.y), grid.x)
        chunks = ceil_div(own, max(1, CHUNK_LOGITS // local_vocab // parts))
        ledger.add("forward", "all_gather", ("x", "y"), own * shape.hidden * size, chunks)
        ledger.add(
            "forward", "all_reduce", ("x", "y"), 3 * self.padded * self.wide, 2 * chunks
        )  # max; sum-exp and target
        ledger.add("forward", "reduce_scatter", ("x", "y"), own * shape.hidden * size, chunks)
        if not step.counted:
            ledger.add("forward", "all_reduce", ("data", "z"), 8)
        return ledger

    def gradients(self) -> Ledger:
        """sync_gradients: who has a gradient, sharded gradients over data, replicated ones over the world.

        With as many flags as parameters and buckets over data. Buckets fill up from the last parameter to the first.
        """
        ledger, world = Ledger(self.grid), ("data", "z", "x", "y")
        size, replicated, every = self.step.param_bytes, self.shape.replicated(), self.shape.sharded()
        own = {}  # a layer's shapes come again in every layer
        for kind, linear in dict.fromkeys(every):
            rows, cols = shard_shape(kind, linear, self.grid, self.here)
            start, stop = bounds(rows, self.grid.z, self.here["z"])
            own[kind, linear] = (stop - start) * cols * size
        sharded = [own[which] for which in every]
        over_data = buckets(sharded[::-1])
        ledger.add("gradients", "all_reduce", ("data",), sum(sharded), over_data)
        flags = len(replicated) + len(sharded) + (over_data if self.grid.data > 1 else 0)
        ledger.add("gradients", "all_reduce", world, 4 * flags)
        replicated = [elements * size for elements in replicated[::-1]]
        ledger.add("gradients", "all_reduce", world, sum(replicated), buckets(replicated))
        return ledger


def buckets(sizes: list[int]) -> int:
    """How many buckets of BUCKET_BYTES gradients of these bytes fill; a gradient is never divided."""
    count, filled = 0, 0
    for size in sizes:
        if not count or filled + size > BUCKET_BYTES:
            count, filled = count + 1, 0
        filled += size
    return count
