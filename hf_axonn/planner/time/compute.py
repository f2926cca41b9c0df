"""Seconds that one rank computes: matrix products, attention, everything that only moves memory, the optimizer.

    product      2 M K N / (gemm_flops * gemm_fraction * share), not faster than memory delivers its operands; in our
                 engine each Linear by itself, and where y shards features one for each rank of y (engine/matmul3d.py)
                 share: tiles of TILE x TILE on `units` multiprocessors, the last wave is not full; or the machine's
                 own measured table by the smallest dim
    attention    two products of half the square (causal), backward 2.5 times as many, at the speed of the kernel
    elementwise  bytes read and written / (memory_fraction * memory_bandwidth)

Legend: T = tokens of one (data, z) position (its positions of rows that context divides), a = heads * head_dim, k = kv
heads * head_dim, I = intermediate.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from hf_axonn.planner.experts import expected_rows
from hf_axonn.planner.machine import Machine
from hf_axonn.planner.memory import ORIGIN
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
    heads_repeat,
    own_experts,
    shard_shape,
)
from hf_axonn.planner.step import Step
from hf_axonn.topology.grid import Grid, ceil_div
from hf_axonn.topology.weight_kind import WeightKind


TILE = 128  # rows and columns of a product's result that one multiprocessor computes at a time; cuBLAS: 128 or 256
ATTENTION_BACKWARD = 2.5  # products in attention's backward to those in forward: FlashAttention-2, arXiv 2307.08691
NORM_AND_RESIDUAL = 8  # kernels of a layer's norms and residuals
# Bytes of a parameter that clipping and AdamW read and write in fp32: clip 3; weight, gradient and two moments 7.
OPTIMIZER_BYTES = 40


class Group(NamedTuple):
    """Seconds of one group of weights (those that are multiplied together): forward, dI and dW, and what else runs
    after it; `attends`: whether that is attention."""

    forward: float
    input_gradient: float
    weight_gradient: float
    after_forward: float
    after_backward: float
    attends: bool = False


def product(
    machine: Machine, rows: float, inner: float, cols: float, *, element: int = 2, accumulate: bool = False
) -> float:
    """Seconds of [rows, inner] @ [inner, cols], which may be added to what is there."""
    if not (rows and inner and cols):
        return 0.0
    flops = 2 * rows * inner * cols
    rate = machine.gemm_flops * machine.gemm_fraction * share(machine, rows, inner, cols)
    moved = element * (rows * inner + inner * cols + (2 if accumulate else 1) * rows * cols)
    return max(machine.kernel, flops / rate, moved / (machine.memory_fraction * machine.memory_bandwidth))


def share(machine: Machine, rows: float, inner: float, cols: float) -> float:
    """Share of the best product's speed that a product of this shape can have."""
    table = machine.gemm_by_size
    if table:
        smallest = min(rows, inner, cols)
        below = [entry for entry in table if entry[0] <= smallest] or [(table[0][0], table[0][1])]
        above = [entry for entry in table if entry[0] >= smallest] or [below[-1]]
        (low, low_share), (high, high_share) = below[-1], above[0]
        if low >= high:
            return min(low_share, low_share * smallest / low)
        return low_share + (high_share - low_share) * (smallest - low) / (high - low)
    tiles = -(-rows // TILE) * -(-cols // TILE)
    useful = rows * cols / (tiles * TILE * TILE)
    waves = -(-tiles // machine.units)
    # Fewer tiles than multiprocessors: libraries split the contraction too, so that none idles for want of tiles.
    return useful * (1.0 if tiles < machine.units else tiles / (waves * machine.units))


def _sums(one: tuple[float, float, float], other: tuple[float, float, float]) -> tuple[float, float, float]:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


class Compute:
    """Seconds that one rank of a grid computes in a micro-batch.

    Args:
        shape, machine, grid, step: the model, where it runs, and the step.
        attention: name of the attention kernel, of those of the machine; None: its first.
    """

    def __init__(
        self, shape: ModelShape, machine: Machine, grid: Grid, step: Step, *, attention: str | None = None
    ) -> None:
        self.attention_rates = machine.attention_rates(attention)
        self.shape, self.machine, self.grid, self.step = shape, machine, grid, step
        self.tokens = step.tokens(grid)
        self.stream_share = 1.0 if shape.loose else 1 / (grid.x * grid.y)

    def repeats(self, block: BlockShape) -> int:
        """Ranks that compute the same attention."""
        return heads_repeat(block, self.grid)

    def gathers_latents(self, block: BlockShape) -> bool:
        """Return whether attention makes keys and values of whole rows, of gathered latents."""
        return gathers_latents(self.shape, block, self.grid, self.step.context_attention)

    def row_dims(self, block: BlockShape, repeat: int) -> tuple[list[int], list[int]]:
        """Features in and out of the products of a row layer on one rank.

        A row layer whose input is full, because heads are not divided over y, multiplies it at once.
        """
        parts = self.grid.y if repeat == 1 else 1
        inner = ceil_div(ceil_div(block.row.cols, self.grid.x), parts)
        return [inner] * parts, [ceil_div(block.row.rows, self.grid.y)]

    def column_dims(self, kind: WeightKind, linears: Sequence[LinearShape]) -> tuple[list[int], list[int]]:
        """Features in and out of the products of column layers, or of a Linear on its own, on one rank."""
        outer = [ceil_div(linear.rows, self.grid.x) for linear in linears]
        if kind == WeightKind.COLUMN:
            outer = self.grid.y * [ceil_div(rows, self.grid.y) for rows in outer]
        return [ceil_div(linears[0].cols, self.grid.y)], outer

    def groups(self, layer: LayerShape) -> list[Group]:
        """The groups of a decoder layer in their order: q, k, v; o; up (and gate); down; or experts in one."""
        found: list[Group] = []
        blocks = max(1, len(layer.blocks))
        for part in layer.parts:
            if isinstance(part, ExpertsShape):
                found.append(self.experts(part))
                continue
            if isinstance(part, UnshardedModule):
                found += [self.alone(call) for call in part.calls]
                continue
            repeat = self.repeats(part) if part.query else 1
            for kind, linears in part.groups():
                adapters = _sums(self._adapters(kind, linears), self._dequantize_seconds(kind, linears))
                if kind == WeightKind.ROW:
                    products = _sums(self._products(*self.row_dims(part, repeat)), adapters)
                    found.append(Group(*products, *self.stream(layer.norms / blocks)))
                    continue
                whole = linears[0] is part.columns[-1] and self.gathers_latents(part)
                tokens = float(self.step.rows * self.step.seq) if whole else None
                products = _sums(self._products(*self.column_dims(kind, linears), tokens), adapters)
                if kind == WeightKind.LINEAR:  # its latent is full, and so is the input of the norm that follows
                    found.append(Group(*products, *self._norm(linears[0].rows)))
                elif part.down and linears[0] != part.columns[-1]:
                    found.append(Group(*products, 0.0, 0.0))
                elif part.mixes:
                    found.append(Group(*products, *self.mixing(part, repeat)))
                elif part.query:
                    found.append(Group(*products, *self.attention(part, repeat), attends=True))
                else:
                    found.append(Group(*products, *self.activation(part.row.cols, 5 if part.gated else 2)))
        return found

    def alone(self, call: LinearCall) -> Group:
        """Seconds of a Linear on its own, and of its module's work with the output, which all ranks of (x, y) repeat:
        taken to read and write it twice."""
        linear, tokens = call.linear, float(call.inputs) * self.tokens
        inner, outer = [ceil_div(linear.cols, self.grid.y)], [ceil_div(linear.rows, self.grid.x)]
        seconds = self.memory_seconds(4 * tokens * linear.rows * self.step.compute_bytes, 2)
        products = _sums(self._products(inner, outer, tokens), self._dequantize_seconds(WeightKind.LINEAR, [linear]))
        return Group(*products, seconds, 2 * seconds)

    def experts(self, experts: ExpertsShape) -> Group:
        """Seconds of the experts of this rank, if tokens spread evenly."""
        step, machine = self.step, self.machine
        own = own_experts(experts, self.grid, ORIGIN)
        each = self.tokens * (1 if experts.sorted else experts.chosen / experts.number)  # tokens of an expert
        each *= self.grid.z if experts.moves else 1

        def seconds(m: float, k: float, n: float) -> float:  # of a product of each expert, in one kernel for all
            rate = machine.gemm_flops * machine.gemm_fraction * share(machine, m, k, n)
            moved = step.compute_bytes * (m * k + k * n + m * n)
            work = max(2 * m * k * n / rate, moved / (machine.memory_fraction * machine.memory_bandwidth))
            return max(machine.kernel, own * work)

        forward = sum(seconds(each, cols, rows) for rows, cols, _ in experts.weights)
        input_gradient = sum(seconds(each, rows, cols) for rows, cols, _ in experts.weights)
        trained = () if step.lora else experts.weights
        weight_gradient = sum(seconds(rows, each, cols) for rows, cols, _ in trained)
        hidden, inner = self.shape.hidden, sum(rows * cols for rows, cols, _ in experts.weights) / self.shape.hidden
        # Tokens are picked, put in order, weighted and added up; between the products an activation function.
        moved = own * each * (10 * hidden + 2 * inner) * step.compute_bytes
        if experts.moves:  # rows are written before they travel, and added up afterwards
            rows = self.tokens / (self.grid.x * self.grid.y) * float(sum(expected_rows(experts, self.grid, 0)))
            moved += 4 * rows * hidden * step.compute_bytes
        rest = self.memory_seconds(moved, 16 if experts.moves else 10)
        return Group(forward, input_gradient, weight_gradient, rest, 2 * rest)

    def router(self, layer: LayerShape) -> tuple[float, float]:
        """Seconds of routers on this rank's own tokens: forward, backward."""
        if not layer.routed:
            return 0.0, 0.0
        tokens = self.tokens / (self.grid.x * self.grid.y)
        seconds = product(self.machine, tokens, self.shape.hidden, layer.routed, element=self.step.compute_bytes)
        rest = self.memory_seconds(tokens * layer.routed * 6 * 4, 6)
        return seconds + rest, 2 * (seconds + rest)

    def _products(self, inner: list[int], outer: list[int], tokens: float | None = None) -> tuple[float, float, float]:
        """Seconds of forward, dI and dW of [T, sum of inner] x [sum of outer, sum of inner], a product for every pair
        of shards."""
        seconds = partial(product, self.machine, element=self.step.compute_bytes)
        tokens = self.tokens if tokens is None else tokens
        forward = input_gradient = weight_gradient = 0.0
        for (k, k_times), (n, n_times) in itertools.product(Counter(inner).items(), Counter(outer).items()):
            first, again = seconds(tokens, k, n), seconds(tokens, k, n, accumulate=True)
            forward += n_times * (first + (k_times - 1) * again)
            first, again = seconds(tokens, n, k), seconds(tokens, n, k, accumulate=True)
            input_gradient += k_times * (first + (n_times - 1) * again)
            weight_gradient += k_times * n_times * seconds(n, tokens, k)
        return forward, input_gradient, 0.0 if self.step.lora else weight_gradient

    def _adapters(self, kind: WeightKind, linears: Sequence[LinearShape]) -> tuple[float, float, float]:
        """Seconds of LoRA on these Linears: forward, gradient of the input, and of A and B, two products each."""
        rank, tokens, x, y = self.step.lora, self.tokens, self.grid.x, self.grid.y
        seconds = 0.0
        for linear in linears if rank else ():
            row = kind == WeightKind.ROW
            inner = ceil_div(linear.cols, x * y if row else y)
            rows, outer = (tokens / (x * y), linear.rows) if row else (tokens, ceil_div(linear.rows, x * y))
            seconds += product(self.machine, tokens, inner, rank, element=self.step.compute_bytes)
            seconds += product(self.machine, rows, rank, outer, element=self.step.compute_bytes)
        return seconds, seconds, seconds

    def _dequantize_seconds(self, kind: WeightKind, linears: Sequence[LinearShape]) -> tuple[float, float, float]:
        """Seconds to make numbers of the blocks' bytes, which are copied apart before: forward, and backward where a
        layer has not run again and kept them."""
        step = self.step
        if not step.block_bytes:
            return 0.0, 0.0, 0.0
        elements = sum(math.prod(shard_shape(kind, linear, self.grid, ORIGIN)) for linear in linears)
        seconds = self.memory_seconds(
            3 * step.gather_bytes(elements) + elements * step.compute_bytes, 4 * len(linears)
        )
        kept = self.grid.z > 1 and step.checkpointing and step.keeps_recomputed
        return seconds, 0.0 if kept else seconds, 0.0

    def memory_seconds(self, bytes_moved: float, kernels: int = 1) -> float:
        """Seconds to read and write `bytes_moved` bytes."""
        machine = self.machine
        return max(kernels * machine.kernel, bytes_moved / (machine.memory_fraction * machine.memory_bandwidth))

    def attention(self, block: BlockShape, repeat: int) -> tuple[float, float]:
        """Seconds of the rotation of q and k, and of attention itself: forward, backward. `repeat`: ranks that do the
        same. Where context divides rows a rank has fewer heads of more positions, or early and late queries, which is
        as much."""
        query, value, keys = block.query_features, block.value_features, block.kv_features / 2
        tokens = self.tokens * repeat / (self.grid.x * self.grid.y)
        # Scores and their use: 2 products of 2 T a for every key, of which a causal mask leaves half.
        flops = 2 * tokens * block.keys(self.step.seq) * (query + value)
        there, back = (max(self.machine.kernel, flops / rate) for rate in self.attention_rates)
        # rotation reads and writes q and k twice, the kernel reads q, k, v and writes one
        moved = 5 * query + value + 6 * keys
        rotation = self.memory_seconds(moved * tokens * self.step.compute_bytes, 4)
        copies = 0.0
        if gathers_keys(self.shape, self.grid, self.step.context_attention):
            # Before the gather they are joined, and after it stripes and then rows are put in order.
            heads = HeadFeatures.from_block(block, self.grid, divided=False)
            parts = 0 if self.grid.reach(block.window, self.step.seq) else self.grid.context
            copied = (2 + (4 * parts or 2)) * heads.keys
            if self.gathers_latents(block):  # and values are taken out of what their Linear makes
                copied = (2 + 4 * parts) * block.latent + 2 * parts * heads.output
            copies = self.memory_seconds(copied * self.tokens * self.step.compute_bytes, 3)
        elif self.grid.context > 1:  # before and after each of two exchanges what travels is read and written
            heads = HeadFeatures.from_block(block, self.grid, divided=True)
            exchanged = 4 * self.tokens * (heads.query + heads.keys + heads.output) * self.step.compute_bytes
            copies = self.memory_seconds(exchanged, 8)
        return there + rotation + copies, ATTENTION_BACKWARD * back + 2 * rotation + copies

    def mixing(self, block: BlockShape, repeat: int) -> tuple[float, float]:
        """Seconds of a mixer's work between its projections: taken to read and write what they make twice."""
        features = sum(linear.rows for linear in block.columns) * repeat / (self.grid.x * self.grid.y)
        seconds = self.memory_seconds(4 * self.tokens * features * self.step.compute_bytes, 2)
        return seconds, 2 * seconds

    def activation(self, inner: int, passes: int) -> tuple[float, float]:
        """Seconds of the MLP's activation function: reads and writes I features `passes` times, 2, or 5 if gated."""
        per_rank = self.tokens * ceil_div(ceil_div(inner, self.grid.x), self.grid.y)
        seconds = self.memory_seconds(passes * per_rank * self.step.compute_bytes, 2)
        return seconds, 2 * seconds

    def stream(self, norms: float) -> tuple[float, float]:
        """Seconds of one residual addition and `norms` norms: reads and writes of the stream, p bytes an element, c of
        activations."""
        param, compute = self.step.stream_bytes, self.step.compute_bytes
        elements = self.tokens * self.shape.hidden * self.stream_share
        moved = elements * ((2 * param + compute) + norms * (param + compute))
        seconds = self.memory_seconds(moved, NORM_AND_RESIDUAL // 2)
        return seconds, 2 * seconds

    def _norm(self, features: int) -> tuple[float, float]:
        """Seconds of a norm of full activations, which all ranks repeat."""
        seconds = self.memory_seconds(2 * self.tokens * features * self.step.compute_bytes, 2)
        return seconds, 2 * seconds

    def embedding(self) -> float:
        """Seconds of the embedding, which are in `head`: its output is written."""
        parts = self.grid.x * self.grid.y
        return self.memory_seconds(self.tokens * self.shape.hidden / parts * self.step.param_bytes)

    def head(self) -> tuple[float, float]:
        """Seconds of embedding, head and loss of all tokens on the own share of the vocabulary: products, the rest.

        Three products (logits, dI, and dW where it is trained); logits are written, read as fp32 by max, exp and sum,
        and made a gradient.
        """
        parts = self.grid.x * self.grid.y
        vocab = ceil_div(ceil_div(self.shape.vocab, self.grid.y), self.grid.x)
        tokens, hidden = self.tokens, self.shape.hidden
        seconds = product(self.machine, tokens, hidden, vocab, element=self.step.compute_bytes)
        seconds += product(self.machine, tokens, vocab, hidden, element=self.step.compute_bytes)
        if not self.step.lora:
            seconds += product(self.machine, vocab, tokens, hidden, element=self.step.compute_bytes)
        rest = self.memory_seconds(tokens * vocab * 6 * 4, 6)
        rest += self.memory_seconds(3 * tokens * hidden / parts * self.step.param_bytes, 3)
        return seconds, rest

    def optimizer(self, parameters: float) -> float:
        """Seconds of clipping and AdamW on the parameters of this rank."""
        return self.memory_seconds(OPTIMIZER_BYTES * parameters)
