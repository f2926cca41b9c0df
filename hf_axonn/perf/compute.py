"""Seconds that one rank computes: matrix products, attention, everything that only moves memory, the optimizer.

    product      2 M K N / (gemm_flops * gemm_fraction * share), not faster than memory delivers its operands; in our
                 engine each Linear by itself, and where y cuts features one for each of its ranks (matmul3d.py)
                 share: tiles of TILE x TILE on `units` multiprocessors, the last wave is not full; or the machine's
                 own measured table by the smallest dim
    attention    two products of half the square (causal), backward 2.5 times forward, at ATTENTION of gemm_flops
    elementwise  bytes read and written / (memory_fraction * memory_bandwidth)

Legend: T = tokens of one (data, z) position, a = heads * head_dim, k = kv heads * head_dim, I = intermediate.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import NamedTuple

from hf_axonn.grid import Grid, ceil_div
from hf_axonn.perf.machines import Machine
from hf_axonn.perf.shapes import ModelShape, Step


TILE = 128  # rows and columns of a product's result that one multiprocessor computes at a time; cuBLAS: 128 or 256
# Share of gemm_flops of a fused attention kernel, forward and backward. Source: FlashAttention-2 (arXiv 2307.08691)
# reports up to 73% forward and 63% backward of A100's 312 TFLOP/s, less for short sequences and narrow heads.
ATTENTION = 0.6
ATTENTION_BACKWARD = 2.5  # products in its backward to those in forward; the same source
NORM_AND_RESIDUAL = 8  # kernels of a layer's norms and residuals
# Bytes of a parameter that clipping and AdamW read and write in fp32: clip 3; weight, gradient and two moments 7.
OPTIMIZER_BYTES = 40


class Group(NamedTuple):
    """Seconds of one group of Linears (those that share an input): forward, dI and dW, and what else runs after it."""

    forward: float
    input_gradient: float
    weight_gradient: float
    after_forward: float
    after_backward: float


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


class Compute:
    """What one rank of a grid computes in a micro-batch.

    Args:
        shape, machine, grid, step: which.
        repeat_heads, repeat_stream: ranks that repeat the same attention, and the same norms and residuals; 1 and 1
            in our engine where heads divide, y and x in AxoNN's schedule.
        blocks: whether products are those of our engine; else one for each group of Linears.
    """

    def __init__(
        self,
        shape: ModelShape,
        machine: Machine,
        grid: Grid,
        step: Step,
        *,
        repeat_heads: int = 1,
        repeat_stream: int = 1,
        blocks: bool = True,
    ) -> None:
        self.blocks, self.repeat_heads = blocks, repeat_heads
        self.shape, self.machine, self.grid, self.step = shape, machine, grid, step
        self.heads_share = repeat_heads / (grid.x * grid.y)
        self.stream_share = repeat_stream / (grid.x * grid.y)

    def groups(self) -> list[Group]:
        """The four groups of a decoder layer in their order: q, k, v; o; up (and gate); down."""
        found: list[Group] = []
        y, x = self.grid.y, self.grid.x
        for columns, row in (self.shape.attention(), self.shape.mlp()):
            is_attention = not found
            between = self.attention() if is_attention else self.activation()
            inner = ceil_div(columns[0].cols, y)
            if self.blocks:
                features = [ceil_div(ceil_div(linear.rows, x), y) for linear in columns for _ in range(y)]
            else:
                features = [sum(ceil_div(linear.rows, x) for linear in columns)]
            found.append(Group(*self._products([inner], features), *between))
            # A row layer whose input is whole, because heads are not divided over y, has it in one piece.
            parts = y if self.blocks and not (is_attention and self.repeat_heads > 1) else 1
            inner = ceil_div(ceil_div(row.cols, x), parts)
            found.append(Group(*self._products([inner] * parts, [ceil_div(row.rows, y)]), *self.stream()))
        return found

    def _products(self, inner: list[int], outer: list[int]) -> tuple[float, float, float]:
        """Forward, dI and dW of [T, sum of inner] x [sum of outer, sum of inner], a product for every two pieces."""
        tokens, element = self.step.tokens, self.step.compute_bytes
        seconds = [0.0, 0.0, 0.0]
        for (k, k_times), (n, n_times) in itertools.product(Counter(inner).items(), Counter(outer).items()):
            times, last = k_times * n_times, {"element": element}
            more = last | {"accumulate": True}
            first = product(self.machine, tokens, k, n, **last)
            again = product(self.machine, tokens, k, n, **more)
            seconds[0] += n_times * (first + (k_times - 1) * again)
            first = product(self.machine, tokens, n, k, **last)
            again = product(self.machine, tokens, n, k, **more)
            seconds[1] += k_times * (first + (n_times - 1) * again)
            seconds[2] += times * product(self.machine, n, tokens, k, **last)
        return seconds[0], seconds[1], seconds[2]

    def moved(self, bytes_moved: float, kernels: int = 1) -> float:
        """Seconds to read and write so many bytes."""
        machine = self.machine
        return max(kernels * machine.kernel, bytes_moved / (machine.memory_fraction * machine.memory_bandwidth))

    def attention(self) -> tuple[float, float]:
        """Rotation of q and k, and attention itself: forward, backward."""
        width, kv = self.shape.heads * self.shape.width, self.shape.kv * self.shape.width
        tokens = self.step.tokens * self.heads_share
        # Scores and their use: 2 products of 2 T S a, of which the causal half is computed.
        flops = 2 * tokens * self.step.seq * width
        seconds = max(self.machine.kernel, flops / (self.machine.gemm_flops * ATTENTION))
        # rotation reads and writes q and k twice, the kernel reads q, k, v and writes one
        rotation = self.moved((4 * (width + kv) + 2 * (width + kv)) * tokens * self.step.compute_bytes, 4)
        return seconds + rotation, ATTENTION_BACKWARD * seconds + 2 * rotation

    def activation(self) -> tuple[float, float]:
        """The MLP's activation function: read and write I; a gated one reads and writes 5 I."""
        passes = 5 if self.shape.gated else 2
        per_rank = self.step.tokens * ceil_div(ceil_div(self.shape.intermediate, self.grid.x), self.grid.y)
        seconds = self.moved(passes * per_rank * self.step.compute_bytes, 2)
        return seconds, 2 * seconds

    def stream(self) -> tuple[float, float]:
        """One residual addition and one norm: reads and writes of the stream, p bytes an element, c of activations."""
        param, compute = self.step.param_bytes, self.step.compute_bytes
        elements = self.step.tokens * self.shape.hidden * self.stream_share
        count = self.shape.norms_per_layer / 2
        moved = elements * ((2 * param + compute) + count * (param + compute))
        seconds = self.moved(moved, NORM_AND_RESIDUAL // 2)
        return seconds, 2 * seconds

    def head(self) -> tuple[float, float]:
        """Embedding, head and loss of all tokens on the own share of the vocabulary: products, the rest.

        Three products (logits, dI, dW); logits are written, read as fp32 by max, exp and sum, and made a gradient.
        """
        parts = self.grid.x * self.grid.y
        vocab = ceil_div(ceil_div(self.shape.vocab, self.grid.y), self.grid.x)
        tokens, hidden = self.step.tokens, self.shape.hidden
        seconds = product(self.machine, tokens, hidden, vocab, element=self.step.compute_bytes)
        seconds += product(self.machine, tokens, vocab, hidden, element=self.step.compute_bytes)
        seconds += product(self.machine, vocab, tokens, hidden, element=self.step.compute_bytes)
        rest = self.moved(tokens * vocab * 6 * 4, 6)
        rest += self.moved(3 * tokens * hidden / parts * self.step.param_bytes, 3)
        return seconds, rest

    def optimizer(self, parameters: float) -> float:
        """Clipping and AdamW on the parameters of this rank."""
        return self.moved(OPTIMIZER_BYTES * parameters)
