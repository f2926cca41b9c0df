"""A decoder as the engine shards it (architectures/plan.py), in plain numbers, and a rank's share of it.

ModelShape     runs of decoder layers that are alike, and what stands around them
LayerShape     the parts of one decoder layer, its norms, and every parameter
BlockShape     attention, a mixer or MLP: column layers and the row layer that ends it; latent attention makes latents
               first
ExpertsShape   the experts of a mixture
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from math import lcm, prod
from typing import NamedTuple

from hf_axonn.topology.grid import Grid
from hf_axonn.topology.heads import Heads, latents_travel
from hf_axonn.topology.local_slices import slices_at
from hf_axonn.topology.weight_kind import SHARDED_DIMS, WeightKind


class LinearShape(NamedTuple):
    """A Linear's weight [rows, cols] = [out_features, in_features], and whether it has a bias [rows]."""

    rows: int
    cols: int
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """Attention, a mixer or an MLP.

    Args:
        columns, segments: its projections (queries first), and what the output of each consists of
            (topology/heads.py).
        row: the projection that ends it.
        query, kv: numbers of heads; 0 for an MLP, and for a mixer of channels.
        inner_norms: norms over all features that one of `columns` returns (its number) or that the row layer gets
            (None), and whether each is a LayerNorm.
        down: latent attention: the Linears that make latents of full activations.
        rotary: latent attention: features of a latent that go to every head.
        latent: latent attention: features of a position that its keys and values are made of, and nothing else
            (architectures/divided_rows.py); 0 where that is not known.
        window: tokens that attention looks back over at most (sliding window); 0: all before.
        mixes: whether it is a mixer (layers/mixer.py), which reads along the row without attention.
        norm_groups: groups of heads of which a mixer's norm takes the mean square each; 0: none.
        inner: Linears between the projections of a mixer, of whose weights a rank uses a part.
        sums: features of a token that those of them make which are summed over the ranks.
    """

    columns: tuple[LinearShape, ...]
    segments: tuple[tuple[str, ...], ...]
    row: LinearShape
    query: int = 0
    kv: int = 0
    inner_norms: tuple[tuple[int | None, bool], ...] = ()
    down: tuple[LinearShape, ...] = ()
    rotary: int = 0
    latent: int = 0
    window: int = 0
    mixes: bool = False
    norm_groups: int = 0
    inner: tuple[LinearShape, ...] = ()
    sums: int = 0

    @cached_property
    def is_attention(self) -> bool:
        """True if its heads attend to keys."""
        return self.query > 0 and not self.mixes

    def keys(self, seq: float) -> float:
        """Keys that a query of a sequence attends to, in the mean, under a causal mask."""
        if not self.window or self.window >= seq:
            return seq / 2
        return self.window - self.window**2 / (2 * seq)

    @property
    def gated(self) -> bool:
        """True if an MLP multiplies two column layers (gate and up), False if it has one."""
        return sum(linear.rows for linear in self.columns) == 2 * self.row.cols

    @property
    def packed(self) -> bool:
        """True if one Linear makes several projections."""
        return any(len(segments) > 1 for segments in self.segments) or (self.is_attention and len(self.columns) == 1)

    @property
    def value_features(self) -> int:
        """Features that attention hands to its row layer, of all query heads."""
        return self.row.cols

    @cached_property
    def query_features(self) -> int:
        """Features of all query heads, without those of a gate that are made beside them."""
        if self.packed:
            return self.row.cols
        if self.down:  # the last one makes keys and values
            return self.columns[-2].rows
        keys = [linear.rows for linear, kinds in zip(self.columns, self.segments, strict=True) if "kv" in kinds[0]]
        return keys[0] // self.kv * self.query if keys else self.columns[0].rows

    @cached_property
    def kv_features(self) -> int:
        """Features of all keys and values, each kv head once."""
        return (self.query_features + self.value_features) // self.query * self.kv

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        """All its Linears."""
        return (*self.down, *self.columns, self.row)

    def groups(self) -> list[tuple[WeightKind, tuple[LinearShape, ...]]]:
        """(kind, Linears) of each product: the columns share one, but each of those of latents has its own."""
        columns = [(linear,) for linear in self.columns] if self.down else [self.columns]
        found = [(WeightKind.LINEAR, (linear,)) for linear in self.down]
        return [*found, *((WeightKind.COLUMN, linears) for linears in columns), (WeightKind.ROW, (self.row,))]

    def flops(self) -> int:
        """Multiplications and additions a token that its weights ask for."""
        return 2 * sum(linear.rows * linear.cols for linear in (*self.linears, *self.inner))


@dataclass(frozen=True, kw_only=True)
class ExpertsShape:
    """The experts of one layer (layers/moe.py).

    Args:
        number: E, of the full model.
        chosen: experts that work on a token.
        weights: [A, B] of each parameter [E, A, B].
        sorted: whether they are handed all tokens, one expert after another (Llama 4).
        moves: whether each lies whole on one rank of (z, x, y), to which tokens travel (planner/experts.py).
        waiting, ahead: how many of the parts before and after are computed while tokens travel
            (layers/computed_ahead.py).
    """

    number: int
    chosen: int
    weights: tuple[LinearShape, ...]
    sorted: bool = False
    moves: bool = False
    waiting: int = 0
    ahead: int = 0

    @property
    def kind(self) -> WeightKind:
        """The kind of their weights."""
        return WeightKind.WHOLE_EXPERTS if self.moves else WeightKind.EXPERTS

    def groups(self) -> list[tuple[WeightKind, tuple[LinearShape, ...]]]:
        """(kind, weights) of the one group: they are used together."""
        return [(self.kind, self.weights)]

    def flops(self) -> int:
        """Multiplications and additions a token that its weights ask for: those of the chosen experts."""
        return 2 * self.chosen * sum(weight.rows * weight.cols for weight in self.weights)


class LinearCall(NamedTuple):
    """A Linear on its own, called once.

    Args:
        linear: its shape.
        inputs: how many it gets for each token.
        narrow: whether autocast has narrowed them before, else they come in the dtype of parameters.
        backward: whether the output takes part in backward, and whether the input does.
    """

    linear: LinearShape
    inputs: Fraction = Fraction(1)
    narrow: bool = False
    backward: tuple[bool, bool] = (True, True)


@dataclass(frozen=True, kw_only=True)
class UnshardedModule:
    """A module whose activations are full: the same on every rank of (x, y).

    Args:
        calls: its Linears in the order in which they are called.
        taken: full tensors that are gathered from the ranks' tokens for it; 0 where activations are full anyway.
        narrow: whether its output is in the compute dtype, else in that of parameters.
    """

    calls: tuple[LinearCall, ...]
    taken: int = 1
    narrow: bool = True

    def groups(self) -> list[tuple[WeightKind, tuple[LinearShape, ...]]]:
        """(kind, Linears) of each product."""
        return [(WeightKind.LINEAR, (call.linear,)) for call in self.calls]

    def flops(self) -> int:
        """Multiplications and additions a token that its weights ask for."""
        return int(2 * sum(call.inputs * call.linear.rows * call.linear.cols for call in self.calls))


LayerPart = BlockShape | ExpertsShape | UnshardedModule


class WeightShape(NamedTuple):
    """A sharded parameter [rows, cols] and its kind; `experts`: the first dim of one that is [experts, rows, cols]."""

    kind: WeightKind
    rows: int
    cols: int
    experts: int = 1

    @property
    def elements(self) -> int:
        """Elements of the full parameter."""
        return self.experts * self.rows * self.cols


class GatheredShape(NamedTuple):
    """A parameter [rows, cols] that is gathered while its module runs (layers/gathered.py).

    Args:
        partial: whether ranks do different work with it.
        heads: of the mixer that it belongs to, whose axes then are those that do; 0: all of (x, y).
    """

    rows: int
    cols: int
    partial: bool = False
    heads: int = 0


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One decoder layer.

    Args:
        parts: in the order in which they run.
        norms: norms on the residual stream.
        weights: every parameter that is sharded, in the order of the model.
        replicated: elements of every other parameter, in the order of the model.
        gathered: parameters that are full while their module runs: large routers and kernels.
        routed: features that routers make of a token, all together.
        ends: index of the part after which nothing is saved for backward, so that a recomputation stops at its last
            product; None where there is no such part, as where a norm follows the last one.
    """

    parts: tuple[LayerPart, ...]
    norms: int
    weights: tuple[WeightShape, ...]
    replicated: tuple[int, ...]
    gathered: tuple[GatheredShape, ...] = ()
    routed: int = 0
    ends: int | None = None

    @cached_property
    def blocks(self) -> tuple[BlockShape, ...]:
        """Its attention and MLP blocks."""
        return tuple(part for part in self.parts if isinstance(part, BlockShape))

    def find_meanwhile(self, index: int) -> range:
        """Return which parts are computed while tokens travel to the experts that are the part `index`."""
        part = self.parts[index]
        if isinstance(part, ExpertsShape) and part.moves:
            return range(index - part.waiting - part.ahead, index)
        return range(index, index)

    def with_moving_experts(self) -> LayerShape:
        """The same layer with experts that lie whole on one rank, after the parts that are computed meanwhile."""
        parts = list(self.parts)
        for index, part in enumerate(self.parts):
            if isinstance(part, ExpertsShape):
                end = index + part.ahead + 1
                parts[index:end] = [*parts[index + 1 : end], replace(part, moves=True)]
        weights = (
            WeightShape(WeightKind.WHOLE_EXPERTS, *weight[1:]) if weight.kind == WeightKind.EXPERTS else weight
            for weight in self.weights
        )
        return replace(self, parts=tuple(parts), weights=tuple(weights))


class TableShape(NamedTuple):
    """An embedding beside that of tokens, of positions or types: its kind (vocabulary, gathered, replicated), its
    rows, and whether all rows of the batch share what is looked up."""

    kind: WeightKind
    rows: int
    shared: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only model: `runs` of decoder layers that are alike, and what is around them.

    Args:
        runs: (layer, how many) in the order of the model
        hidden, vocab: features of the residual stream, rows of the embedding
        tied, head_bias: whether embedding and head are one weight; whether the head has a bias
        centered, final: whether norms take off the mean (LayerNorm); elements of each parameter of the last one
        tables: other embeddings [rows, hidden]
        features: whether the residual stream takes the feature layout where y > 1
        ends_full: whether the last layer hands on full activations, where the code after it is not known to work
            token by token (architectures/plan.py); ends_narrow: in the compute dtype then, not that of parameters
        loose: whether activations are full everywhere, Linear by Linear
        outside: what runs after the layers, once
        idle: every parameter that is sharded and gets no gradient
        begins, ends: whether it has the embeddings; whether it has the last norm, head and loss. What a rank of a
            pipeline has is a ModelShape of its own (planner/stages.py)
        max_positions: tokens of a sequence that the config allows; 0: not said
        divides_layers: whether pipe may divide its layers into stages (architectures/divided_layers.py)
        divides_rows: whether it is known that context may divide the positions of its rows: each token is computed by
            itself but in attention (layers/context_attention.py)
        notes: what a plan leaves out or only estimates, for its reader
    """

    runs: tuple[tuple[LayerShape, int], ...]
    hidden: int
    vocab: int
    tied: bool = False
    head_bias: bool = False
    centered: bool = False
    final: tuple[int, ...]
    tables: tuple[TableShape, ...] = ()
    features: bool = True
    ends_full: bool = False
    ends_narrow: bool = False
    loose: bool = False
    outside: LayerShape | None = None
    idle: tuple[WeightShape, ...] = ()
    begins: bool = True
    ends: bool = True
    max_positions: int = 0
    divides_layers: bool = False
    divides_rows: bool = False
    notes: tuple[str, ...] = ()

    # A search reads these a thousand times.

    @cached_property
    def kinds(self) -> tuple[tuple[LayerShape, int], ...]:
        """(layer, how many) of every kind of layer, the most frequent first."""
        found: Counter[LayerShape] = Counter()
        for layer, count in self.runs:
            found[layer] += count
        return tuple(found.most_common())

    @cached_property
    def depth(self) -> int:
        """Number of decoder layers."""
        return sum(count for _, count in self.runs)

    @cached_property
    def everything(self) -> tuple[tuple[LayerShape, int], ...]:
        """`runs`, and what is outside of them."""
        return self.runs if self.outside is None else (*self.runs, (self.outside, 1))

    @cached_property
    def experts(self) -> tuple[ExpertsShape, ...]:
        """The experts of each kind of layer."""
        return tuple(part for layer, _ in self.kinds for part in layer.parts if isinstance(part, ExpertsShape))

    @cached_property
    def with_moving_experts(self) -> ModelShape:
        """The same model with experts that lie whole on one rank."""
        values = {item.name: getattr(self, item.name) for item in fields(ModelShape)}
        values["runs"] = tuple((layer.with_moving_experts(), count) for layer, count in self.runs)
        values["outside"] = self.outside.with_moving_experts() if self.outside is not None else None
        return ModelShape(**values)

    @cached_property
    def replicated(self) -> list[int]:
        """Elements of every parameter that all ranks hold in full, in the order of the model."""
        found = [table.rows * self.hidden for table in self.tables if table.kind == WeightKind.REPLICATED]
        found = found if self.begins else []
        for layer, count in self.everything:
            found += count * layer.replicated
        return [*found, *self.final, *([self.vocab] if self.head_bias else [])] if self.ends else found

    @cached_property
    def weights(self) -> list[WeightShape]:
        """Every parameter that is sharded, in the order of the model."""
        vocabulary = WeightShape(WeightKind.VOCABULARY, self.vocab, self.hidden)
        found = [vocabulary]
        found += [
            WeightShape(table.kind, table.rows, self.hidden)
            for table in self.tables
            if table.kind != WeightKind.REPLICATED
        ]
        found = found if self.begins else []
        for layer, count in self.everything:
            found += count * layer.weights
        return [*found, vocabulary] if self.has_head else found

    @property
    def has_head(self) -> bool:
        """True if it has a weight for the head beside that of the embedding."""
        return self.ends and not (self.tied and self.begins)

    def layout(self, grid: Grid) -> str:
        """The layout of the residual stream that the engine takes, feature or token."""
        return "feature" if self.features and grid.y > 1 else "token"

    def parameters(self) -> int:
        """Elements of all parameters; tied ones once."""
        return sum(weight.elements for weight in (*self.weights, *self.idle)) + sum(self.replicated)

    def adapters(self, rank: int) -> list[int]:
        """Elements of each of LoRA's A [rank, K] and B [N, rank] of every Linear of the layers' blocks."""
        found = []
        for layer, count in self.everything:
            linears = [linear for block in layer.blocks for linear in block.linears]
            found += count * [size for linear in linears for size in (rank * linear.cols, linear.rows * rank)]
        return found

    def flops(self, seq: int) -> int:
        """Multiplications and additions a token of one forward pass of all decoder layers, attention in full
        squares: twice what a causal mask leaves, and of a sliding window twice what it leaves."""
        return self.weight_flops + self.attention_flops(seq)

    @cached_property
    def weight_flops(self) -> int:
        """`flops` of products with weights."""
        return sum(
            count * (sum(part.flops() for part in layer.parts) + 2 * layer.routed * self.hidden)
            for layer, count in self.everything
        )

    def attention_flops(self, seq: float) -> int:
        """`flops` of attention."""
        return sum(
            count * round(4 * block.keys(seq) * (block.query_features + block.value_features))
            for layer, count in self.everything
            for block in layer.blocks
            if block.is_attention
        )

    def model_flops(self, seq: float, trained: float = 1) -> float:
        """FLOP a token of a step that the model asks for, embedding rows and what runs again not counted: 6 a weight,
        or 4 where it is not trained, and full squares of attention.

        Source: PaLM (arXiv 2204.02311), appendix B.

        Args:
            seq: tokens of a sequence.
            trained: share of the weights that are trained.
        """
        return (2 + trained) * (self.weight_flops + 2 * self.vocab * self.hidden) + 3 * self.attention_flops(seq)


# A search reads the same shapes again and again.
@functools.lru_cache(maxsize=65536)
def _local_shape(
    kind: WeightKind, shape: tuple[int, ...], sizes: tuple[int, ...], here: tuple[int, ...]
) -> tuple[int, ...]:
    dims = SHARDED_DIMS[kind][: len(sizes)]
    return tuple(part.stop - part.start for part in slices_at(shape, dims, sizes, here))


def shard_shape(kind: WeightKind, linear: LinearShape, grid: Grid, here: dict[str, int]) -> tuple[int, int]:
    """(rows, cols) of a weight on the rank at `here`, gathered over z."""
    rows, cols = _local_shape(kind, (linear.rows, linear.cols), (grid.y, grid.x), (here["y"], here["x"]))
    return rows, cols


def own_experts(experts: ExpertsShape, grid: Grid, here: dict[str, int]) -> int:
    """Number of experts of the rank at `here`."""
    axes = ("y", "x", "z") if experts.moves else ("y", "x")
    sizes, coordinates = tuple(getattr(grid, axis) for axis in axes), tuple(here[axis] for axis in axes)
    return _local_shape(experts.kind, (experts.number,), sizes, coordinates)[0]


def own_elements(weight: WeightShape, grid: Grid, here: dict[str, int]) -> int:
    """Elements of a parameter on the rank at `here`."""
    experts = (weight.experts,) if weight.kind in (WeightKind.EXPERTS, WeightKind.WHOLE_EXPERTS) else ()
    sizes, coordinates = (grid.y, grid.x, grid.z), (here["y"], here["x"], here["z"])
    return prod(_local_shape(weight.kind, (*experts, weight.rows, weight.cols), sizes, coordinates))


def heads_repeat(block: BlockShape, grid: Grid) -> int:
    """Number of ranks that compute the same attention, or mix the same heads, because these do not divide, see
    topology/heads.py."""
    if block.query % (grid.x * grid.y) == 0:
        return 1
    return grid.y if block.query % grid.x == 0 else grid.x * grid.y


def own_heads(block: BlockShape, grid: Grid) -> int:
    """Query heads of a rank of (x, y), before context divides them."""
    return block.query * heads_repeat(block, grid) // (grid.x * grid.y)


def undivided_heads(shape: ModelShape, grid: Grid) -> int:
    """Query heads of a rank of (x, y) that context does not divide; 0 if it divides those of every attention."""
    every = (block for layer, _ in shape.kinds for block in layer.blocks if block.is_attention)
    return next((heads for block in every if (heads := own_heads(block, grid)) % grid.context), 0)


def gathers_keys(shape: ModelShape, grid: Grid, requested: str) -> bool:
    """Return whether attention over context gathers keys and values, and does not divide heads; `requested`: the
    setting context_attention."""
    if grid.context == 1 or requested == "heads":
        return False
    return requested == "keys" or undivided_heads(shape, grid) > 0


@dataclass(frozen=True)
class HeadFeatures:
    """Features of a token on one rank in attention: of its queries, of its keys and values, and of its output."""

    query: int
    keys: int
    output: int

    @classmethod
    def from_block(cls, block: BlockShape, grid: Grid, *, divided: bool) -> HeadFeatures:
        """Count those of rank 0; `divided`: with kv heads repeated until context divides them."""
        here = grid.place(0)
        heads = Heads.divide(block.query, block.kv, here)
        query, kv = heads.own_query(here), heads.own_kv(here)
        kv = lcm(kv, grid.context) if divided else kv
        width, of_value = block.query_features // block.query, block.value_features // block.query
        return cls(query * width, kv * (width + of_value), query * of_value)


def gathers_latents(shape: ModelShape, block: BlockShape, grid: Grid, requested: str) -> bool:
    """Return whether an attention of a model that gathers keys and values over context makes them of gathered latents;
    `requested`: as in `gathers_keys`."""
    if not (block.latent and gathers_keys(shape, grid, requested)):
        return False
    here, own = grid.place(0), HeadFeatures.from_block(block, grid, divided=False)
    return latents_travel(block.latent, own.keys, Heads.divide(block.query, block.kv, here), here)
