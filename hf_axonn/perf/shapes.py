"""A decoder and a training step, described by plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hf_axonn.grid import Grid


class LinearShape(NamedTuple):
    """A Linear's weight [rows, cols] = [out_features, in_features], and whether it has a bias [rows]."""

    rows: int
    cols: int
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer, pre-norm, all layers alike.

    Args:
        layers, hidden, heads, intermediate, vocab: sizes of the whole model.
        kv_heads: key and value heads; None: as many as `heads`.
        head_dim: width of a head; None: hidden / heads.
        gated: whether the MLP multiplies two column layers (gate and up), or has one.
        tied: whether embedding and head share their weight.
        qkv_bias, out_bias, mlp_bias, head_bias: biases of q, k, v; of o; of both kinds of MLP layers; of the head.
        packed_qkv, packed_mlp: q, k, v are one Linear; gate and up are one Linear.
        layer_norm: LayerNorm with weight and bias, else RMSNorm with a weight.
        norms_per_layer: norms on the residual stream of one layer.
        qk_norm: RMSNorms [head_dim] of each query and key head.
        positions: rows of a learned position embedding [positions, hidden], held whole; 0 for none.
    Raises:
        ValueError: a size is below 1, or kv_heads does not divide heads.
    """

    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocab: int
    kv_heads: int | None = None
    head_dim: int | None = None
    gated: bool = True
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    packed_qkv: bool = False
    packed_mlp: bool = False
    layer_norm: bool = False
    norms_per_layer: int = 2
    qk_norm: bool = False
    positions: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "intermediate", "vocab", "kv", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but a model has at least 1 of it.")
        if self.heads % self.kv:
            raise ValueError(f"{self.kv} kv heads do not divide {self.heads} query heads: use a divisor.")

    @property
    def kv(self) -> int:
        """Number of kv heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def width(self) -> int:
        """Features of a head."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    def attention(self) -> tuple[list[LinearShape], LinearShape]:
        """The column layers of an attention block (queries first) and its row layer."""
        return self._blocks[0]

    def mlp(self) -> tuple[list[LinearShape], LinearShape]:
        """The column layers of an MLP and its row layer."""
        return self._blocks[1]

    def replicated(self) -> list[int]:
        """Elements of every parameter that all ranks hold whole: norms, biases, positions."""
        return self._replicated

    def sharded(self) -> list[tuple[str, LinearShape]]:
        """Kind (column, row, vocabulary) and shape of every parameter that is cut, in the order of the model."""
        return self._sharded

    # A planner asks a thousand times.

    @cached_property
    def _blocks(self) -> tuple[tuple[list[LinearShape], LinearShape], tuple[list[LinearShape], LinearShape]]:
        query, kv = self.heads * self.width, self.kv * self.width
        rows = [query + 2 * kv] if self.packed_qkv else [query, kv, kv]
        attention = [LinearShape(size, self.hidden, self.qkv_bias) for size in rows]
        count = 2 if self.gated else 1
        rows = [count * self.intermediate] if self.packed_mlp else [self.intermediate] * count
        mlp = [LinearShape(size, self.hidden, self.mlp_bias) for size in rows]
        return (
            (attention, LinearShape(self.hidden, query, self.out_bias)),
            (mlp, LinearShape(self.hidden, self.intermediate, self.mlp_bias)),
        )

    @cached_property
    def _replicated(self) -> list[int]:
        norm = [self.hidden] * (2 if self.layer_norm else 1)
        linears = [*self.attention()[0], self.attention()[1], *self.mlp()[0], self.mlp()[1]]
        layer = [linear.rows for linear in linears if linear.bias]
        layer += self.norms_per_layer * norm + ([self.width] * 2 if self.qk_norm else [])
        whole = [self.positions * self.hidden] if self.positions else []
        return whole + self.layers * layer + norm + ([self.vocab] if self.head_bias else [])

    @cached_property
    def _sharded(self) -> list[tuple[str, LinearShape]]:
        layer = []
        for columns, row in (self.attention(), self.mlp()):
            layer += [("column", linear) for linear in columns] + [("row", row)]
        vocabulary = ("vocabulary", LinearShape(self.vocab, self.hidden))
        return [vocabulary, *self.layers * layer, *([] if self.tied else [vocabulary])]

    def parameters(self) -> int:
        """Elements of all parameters; tied ones once."""
        return sum(linear.rows * linear.cols for _, linear in self.sharded()) + sum(self.replicated())


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step, as one (data, z) position of the grid sees it.

    Args:
        rows, seq: samples of a micro-batch at one (data, z) position, and tokens a sample, padding included.
        micro_batches: forward and backward passes before the optimizer steps.
        compute_bytes: bytes an element of activations and gathered weights (2 for bf16).
        param_bytes: bytes an element of parameters, of their gradients, and so of the residual stream: it begins as
            the rows of the embedding (4 for fp32 master weights).
        reduce_bytes: bytes an element of `reduce_dtype`.
        checkpointing: whether every layer runs again in backward (not reentrant, which is Transformers' default).
        kept_layers: number of layers whose gathered weights are kept from forward to backward (`keep_gathered`).
        counted: whether the number of kept tokens is known beforehand (num_items_in_batch, as Trainer passes it).
    """

    rows: int
    seq: int
    micro_batches: int = 1
    compute_bytes: int = 2
    param_bytes: int = 4
    reduce_bytes: int = 4
    checkpointing: bool = False
    kept_layers: int = 0
    counted: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch at one (data, z) position."""
        return self.rows * self.seq

    def padded(self, grid: Grid) -> int:
        """Tokens after padding to a multiple of x * y."""
        parts = grid.x * grid.y
        return -(-self.tokens // parts) * parts
