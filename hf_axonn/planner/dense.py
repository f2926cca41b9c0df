"""A dense decoder in a few numbers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

from hf_axonn.planner.shapes import BlockShape, LayerShape, LinearShape, ModelShape, TableShape, WeightShape
from hf_axonn.topology.weight_kind import WeightKind


SMALLEST_PART = 1 / 64  # as gathered.SMALLEST_PART


@dataclass(frozen=True, kw_only=True)
class DenseShape(ModelShape):
    """A decoder-only transformer, all layers alike: attention and an MLP.

    Args:
        layers, hidden, heads, intermediate, vocab: sizes of the full model.
        kv_heads: key and value heads; None: as many as `heads`.
        head_dim: width of a head; None: hidden / heads.
        gated: whether the MLP multiplies two column layers (gate and up), or has one.
        qkv_bias, out_bias, mlp_bias: biases of q, k, v; of o; of both kinds of MLP layers.
        packed_qkv, packed_mlp: q, k, v are one Linear; gate and up are one Linear.
        layer_norm: LayerNorm with weight and bias, else RMSNorm with a weight.
        norms_per_layer: norms on the residual stream of one layer.
        qk_norm: RMSNorms [head_dim] of each query and key head.
        positions: rows of a learned position embedding [positions, hidden]; 0 for none.
        offset_positions: whether the class of the embedding shifts its positions, so that it is not a plain one.
        windows: of each layer, tokens that its attention looks back over at most; 0: all before. Empty: all 0.
        drops: whether features are dropped after the MLP (their mask is saved, so recomputation goes to the end).
        tied, head_bias, ends_full, context: as in `ModelShape`.
    Raises:
        ValueError: a size is below 1, kv_heads does not divide heads, or windows are not as many as layers.
    """

    runs: tuple[tuple[LayerShape, int], ...] = field(init=False, repr=False)
    centered: bool = field(init=False, repr=False)
    final: tuple[int, ...] = field(init=False, repr=False)
    tables: tuple[TableShape, ...] = field(init=False, repr=False)
    layers: int
    heads: int
    intermediate: int
    kv_heads: int | None = None
    head_dim: int | None = None
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    packed_qkv: bool = False
    packed_mlp: bool = False
    layer_norm: bool = False
    norms_per_layer: int = 2
    qk_norm: bool = False
    positions: int = 0
    offset_positions: bool = False
    windows: tuple[int, ...] = ()
    drops: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "intermediate", "vocab", "kv", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but a model has at least 1 of it.")
        if self.heads % self.kv:
            raise ValueError(f"{self.kv} kv heads do not divide {self.heads} query heads: use a divisor.")
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(f"{len(self.windows)} windows are not those of {self.layers} layers.")
        # The fields of ModelShape that follow from these numbers. The class is frozen, and each needs those before it.
        object.__setattr__(self, "centered", self.layer_norm)
        object.__setattr__(self, "final", (self.hidden,) * (2 if self.layer_norm else 1))
        windows = groupby(self.windows or (0,) * self.layers)
        object.__setattr__(self, "runs", tuple((self._layer(window), len(list(run))) for window, run in windows))
        object.__setattr__(self, "tables", self._tables())

    @property
    def kv(self) -> int:
        """Number of kv heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def width(self) -> int:
        """Features of a head."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    def _tables(self) -> tuple[TableShape, ...]:
        """Table of positions: as the vocabulary if it is large, gathered if it is not small (parallel/install.py)."""
        if not self.positions:
            return ()
        largest = max(weight.elements for weight in self.runs[0][0].weights)
        small = self.positions * self.hidden < SMALLEST_PART * max(largest, self.vocab * self.hidden)
        plain = not self.offset_positions and 4 * self.positions >= self.vocab
        return (
            TableShape(
                WeightKind.VOCABULARY if plain else WeightKind.REPLICATED if small else WeightKind.GATHERED,
                self.positions,
            ),
        )

    @cached_property
    def attention(self) -> BlockShape:
        """The attention block of a layer."""
        query, kv = self.heads * self.width, self.kv * self.width
        rows = [query + 2 * kv] if self.packed_qkv else [query, kv, kv]
        return BlockShape(
            columns=tuple(LinearShape(size, self.hidden, self.qkv_bias) for size in rows),
            segments=(("query", "kv", "kv"),) if self.packed_qkv else (("query",), ("kv",), ("kv",)),
            row=LinearShape(self.hidden, query, self.out_bias),
            query=self.heads,
            kv=self.kv,
        )

    @cached_property
    def mlp(self) -> BlockShape:
        """The MLP of a layer."""
        count = 2 if self.gated else 1
        packed = self.gated and self.packed_mlp
        rows = [count * self.intermediate] if packed else [self.intermediate] * count
        return BlockShape(
            columns=tuple(LinearShape(size, self.hidden, self.mlp_bias) for size in rows),
            segments=(("own",) * count,) if packed else (("own",),) * count,
            row=LinearShape(self.hidden, self.intermediate, self.mlp_bias),
        )

    def _layer(self, window: int) -> LayerShape:
        """The layer with this window."""
        blocks = (replace(self.attention, window=window), self.mlp)
        replicated = [linear.rows for block in blocks for linear in block.linears if linear.bias]
        replicated += self.norms_per_layer * list(self.final) + ([self.width] * 2 if self.qk_norm else [])
        weights: list[WeightShape] = []
        for block in blocks:
            weights += [WeightShape(WeightKind.COLUMN, linear.rows, linear.cols) for linear in block.columns]
            weights.append(WeightShape(WeightKind.ROW, block.row.rows, block.row.cols))
        return LayerShape(
            parts=blocks,
            norms=self.norms_per_layer,
            weights=tuple(weights),
            replicated=tuple(replicated),
            # Two norms stand before the blocks; where there are more, one comes after the MLP and saves its input.
            ends=None if self.norms_per_layer > 2 or self.drops else 1,
        )
