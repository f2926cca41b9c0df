"""Collectives that one rank issues in a training step, and the bytes that it sends: exact, and without running it.

    volumes(shape, grid, step)          -> Ledger of one optimizer step
    layer_volumes(shape, grid, step)    -> Ledger of one decoder layer and one micro-batch, forward and backward

Follows the engine line by line; what is computed where stands beside each entry. tests/planner/test_traffic.py counts
the real collectives and finds the same numbers. For decoders whose layers are sharded into blocks and experts
(architectures/plan.py), without adapters and dropout and with every parameter trained.

Legend: T = tokens of a (data, z) position padded to a multiple of x * y; H = hidden; N, K = out and in features.
"""

from __future__ import annotations

from hf_axonn.planner.shapes import LinearShape, ModelShape, own_elements
from hf_axonn.planner.step import Step
from hf_axonn.planner.traffic.layer_volumes import LayerAccount
from hf_axonn.planner.traffic.ledger import Ledger
from hf_axonn.topology.grid import Grid, ceil_div
from hf_axonn.topology.weight_kind import WeightKind


CHUNK_LOGITS = 2**26  # as loss.CHUNK_LOGITS
BUCKET_BYTES = 32 * 2**20  # as gradients.BUCKET_BYTES


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


class StepAccount(LayerAccount):
    """The layers, and one method for each other part of the model. Arguments as `volumes`."""

    def embedding(self) -> Ledger:
        """Embedding, and the first layer's taking of its tokens. In the dtype of the parameters."""
        ledger, size = Ledger(self.grid), self.step.param_bytes
        if not self.shape.begins:
            return ledger
        weight = self.travels(WeightKind.VOCABULARY, [LinearShape(self.shape.vocab, self.shape.hidden)])
        ledger.add("forward", "all_gather", ("z",), weight * size)
        self.reduces(ledger, weight, size)
        ledger.add("forward", "all_reduce", ("x", "y"), self.tokens * self.shape.hidden * size)
        for table in self.shape.tables:
            if table.kind == WeightKind.GATHERED:
                self.gathered_parameter(ledger, table.rows, self.shape.hidden)
            elif table.kind == WeightKind.VOCABULARY:
                weight = self.travels(WeightKind.VOCABULARY, [LinearShape(table.rows, self.shape.hidden)])
                ledger.add("forward", "all_gather", ("z",), weight * size)
                self.reduces(ledger, weight, size)
                looked_up = self.step.seq if table.shared else self.tokens
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
        weight = self.travels(WeightKind.VOCABULARY, [LinearShape(shape.vocab, shape.hidden)])
        ledger.add("forward", "all_gather", ("z",), weight * size)
        self.reduces(ledger, weight, self.wide)
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
