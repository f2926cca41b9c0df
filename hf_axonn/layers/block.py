"""Attention and MLP, sharded as blocks.

    Block    the module at whose input this rank's tokens become [B, S, H/y]: attention, an MLP, or a lone Linear
    ColumnParallel   q, k, v, or gate, up: the projections that share the block's input, multiplied as one group
    RowParallel      o, or down: the projection that ends the block; its output is this rank's tokens again

The heads of an attention block may be divided over ("x", "y"), over ("x",) or not at all, see `Heads`; an MLP's
intermediate features are always divided over both.

Source: AxoNN (arXiv 2502.08145) for the alternation of column and row (transposed) layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hf_axonn.compat.torch import changes_of
from hf_axonn.distributed.collectives import (
    all_gather,
    all_reduce,
    all_reduce_backward,
    reduce_,
    reduce_scatter,
    reduce_scatter_rows,
)
from hf_axonn.engine.activation_layouts import (
    ceil_div,
    features_to_tokens,
    gather_features,
    pad_dim,
    take_features,
    tokens_to_features,
)
from hf_axonn.engine.dtensors import replicated_local
from hf_axonn.engine.linears import linear_size
from hf_axonn.engine.matmul3d import Product
from hf_axonn.engine.rows import Rows
from hf_axonn.engine.state import ParallelState
from hf_axonn.engine.weight_layout import weight_layout
from hf_axonn.layers.base import patch_forward, take_slice
from hf_axonn.layers.head_exchange import HeadExchange, RowExchange
from hf_axonn.topology.heads import Heads
from hf_axonn.topology.weight_kind import WeightKind


EXCHANGES = (
    "the projections of this mixer exchange positions for heads over context, and an adapter or a copy of one would "
    "get none of their input: add adapters before the model is parallelized (before it is prepared), then its mixers "
    "gather whole rows, or use a grid without context."
)


@dataclass
class BlockPass:
    """One pass through a block, from its entry to its end. In the order of time.

        Block               opens it, with the input that `ColumnParallel.enter` has made; where x gathers the input,
                            products are made in the same node of the graph
        first projection    makes the outputs of all: of those products, if it is called with that input and nothing
                            has changed it in place
        other projections   take theirs, if they are called with the same input
        Block               closes it: nothing of it outlives the block

    Args:
        input: [B, S, K/y] for the projections.
        version: of the input (`changes_of`).
        products: of the input with the weights, not yet reduced over y; None: they are not made yet.
        dtype: of the block's input, where weights of 4 bits ask to be multiplied in another; else None.
        shown: what the block's code is given in the place of the input, of the shape of whole rows, where its
            projections exchange positions for heads; else None.

    Attributes:
        computed: the input that `outputs` were made of.
        outputs: of the projections that have not been called yet, by their places.
    """

    input: Tensor
    version: int = 0
    products: list[Tensor] | None = None
    dtype: torch.dtype | None = None
    shown: Tensor | None = None
    computed: Tensor | None = None
    outputs: dict[int, Tensor] = field(default_factory=dict)

    def products_of(self, hidden: Tensor) -> list[Tensor] | None:
        """Return the products if they are of this input, as it now is."""
        made = self.products is not None and hidden is self.input and changes_of(hidden) == self.version
        return self.products if made else None


class ColumnParallel:
    """The column layers of one block: one gather, one multiplication and one reduction over y for all of them.

    Global shapes: input [B, S, K], output [B, S, N]. Local: [B, S, K/y] and [B, S, N/(x*y)], or all of the features
    that the heads of this rank need. Collectives: all-gather over z; reduce-scatter over y (all-reduce where heads are
    not divided over y); all-gather over x or (x, y) of the kv heads that do not divide.

    Attributes:
        passing: the pass that is inside of the block; None outside of it, and for projections that have no `Block`.
        gathers_rows: whether the block works on whole rows where context divides them (`Block.gather_rows`).
        row_exchanges: of each projection, where the block works on whole rows of some heads (`exchange_rows`).
    """

    def __init__(
        self,
        state: ParallelState,
        linears: list[nn.Module],
        heads: Heads | None,
        segments: list[tuple[str, ...]],
    ) -> None:
        self.state = state
        self.linears = linears
        self.heads = heads
        self.axes = heads.axes if heads else ("x", "y")
        self.segments = segments
        self.exchanges = [
            HeadExchange(linear_size(linear)[0], parts, heads, state.grid_mesh)
            for linear, parts in zip(linears, segments, strict=True)
        ]
        self.weights = [state.weight_of(linear) for linear in linears]
        self.layouts = [weight_layout(WeightKind.COLUMN, *linear_size(linear), state.grid_mesh) for linear in linears]
        self.passing: BlockPass | None = None
        self.gathers_rows = False
        self.row_exchanges: list[RowExchange] = []
        for index, linear in enumerate(linears):
            state.add_layer(linear, self)
            patch_forward(linear, functools.partial(self._project, index))

    @property
    def bias_axes(self) -> tuple[str, ...]:
        """Axes on which ranks have different parts of a bias' gradient."""
        return ("x", "y") if "y" in self.axes else ("x",)

    def enter(self, hidden: Tensor, *, early: bool = True) -> BlockPass:
        """This rank's tokens -> a pass with the input [B, S, H/y]; `early`: and its products, which are of no use
        where the block's code changes the input first. All-to-all over y (none in the feature layout), all-gather
        over x, which backward of `early` products only launches, and over context where the block gathers rows."""
        state, tokens = self.state, self.state.context.tokens
        assert tokens is not None  # Block has seen to that
        rows = state.context.rows if self.gathers_rows else None
        if not tokens.sharded:
            hidden = all_reduce_backward(take_features(hidden, state.grid_mesh, "y"), state.grid_mesh.group("x"))
            return BlockPass(hidden if rows is None else rows.join(hidden))
        group = state.grid_mesh.group("x")
        dtype = hidden.dtype if state.requested_dtype(hidden, self.weights) else None
        hidden = hidden.to(state.compute_dtype(hidden, self.weights))
        if state.grid_mesh.size("y") > 1 and not tokens.features:
            # Some layers hand their MLP flat tokens.
            hidden = tokens_to_features(hidden.reshape(1, -1, hidden.shape[-1]), state.grid_mesh)
        early = early and rows is None  # else products are of whole rows
        if not early:
            hidden = all_gather(hidden.reshape(-1, hidden.shape[-1]), group).flatten(0, 1)
        if not early or group.size() == 1:
            if tokens.padded_count(state.grid_mesh) > tokens.count:
                hidden = hidden.reshape(-1, hidden.shape[-1])[: tokens.count]
            hidden = hidden.reshape(tokens.batch, tokens.seq, -1)
            return BlockPass(hidden if rows is None else rows.join(hidden), dtype=dtype)
        # The products are made here, where the input is gathered: so backward reduces its gradient beside theirs.
        hidden, *products = Product(state, self.weights, self.layouts).run(hidden, over=group, tokens=tokens)
        return BlockPass(hidden, changes_of(hidden), products, dtype)

    def exchange_rows(self, inner: Heads) -> None:
        """Return whole rows of a part of the heads where context divides rows: `inner`, over (x, y, context).
        All-to-all over context of what all projections make, both ways."""
        self.row_exchanges = [
            RowExchange(exchange, linear_size(linear)[0], parts, inner, self.state.grid_mesh)
            for exchange, linear, parts in zip(self.exchanges, self.linears, self.segments, strict=True)
        ]

    def install_copy(self, index: int, copy_: nn.Module) -> ColumnParallel:
        """Install a column layer of its own on a copy of one of the projections, for the same input.

        Raises:
            ValueError: projections exchange positions for heads.
        """
        if self.row_exchanges:
            raise ValueError(EXCHANGES)
        return type(self)(self.state, [copy_], self.heads, [self.segments[index]])

    def _project(self, index: int, _original: Callable, hidden: Tensor) -> Tensor:
        passing = self.passing
        if passing is not None and passing.shown is not None:
            hidden = passing.input
        if len(self.linears) == 1 or passing is None:
            return self._compute(hidden)[index]
        if passing.computed is not hidden or index not in passing.outputs:
            passing.computed, passing.outputs = hidden, dict(enumerate(self._compute(hidden)))
        return passing.outputs.pop(index)

    def _compute(self, hidden: Tensor) -> list[Tensor]:
        passing, mesh = self.passing, self.state.grid_mesh
        outputs = None if passing is None else passing.products_of(hidden)
        if outputs is None:
            outputs = Product(self.state, self.weights, self.layouts).run(hidden)
        sizes = [layout.out_size for layout in self.layouts]
        if mesh.size("y") == 1:
            pass
        elif "y" in self.axes:
            outputs = [reduce_scatter(output, mesh.group("y")) for output in outputs]
            outputs = outputs if len(outputs) == len(sizes) else list(outputs[0].split(sizes, dim=-1))
        else:
            outputs = [all_reduce(output, mesh.group("y")) for output in outputs]
            outputs = outputs if len(outputs) == len(sizes) else outputs[0].split(sizes, dim=-1)
            outputs = [
                output.movedim(0, -2).flatten(-2)[..., : ceil_div(linear_size(linear)[0], mesh.size("x"))]
                for output, linear in zip(outputs, self.linears, strict=True)
            ]
        outputs = [self._place(output, index) for index, output in enumerate(outputs)]
        if self.state.requested_dtype(hidden, self.weights):
            dtype = passing.dtype if passing is not None and passing.dtype is not None else hidden.dtype
            outputs = [output.to(dtype) for output in outputs]
        outputs = [
            output if output.dim() == hidden.dim() else output.view(*hidden.shape[:-1], -1) for output in outputs
        ]
        rows = self.state.context.rows if self.row_exchanges else None
        return outputs if rows is None else self._to_heads(outputs, rows)

    def _to_heads(self, outputs: list[Tensor], rows: Rows) -> list[Tensor]:
        """[B, L, features of the heads of this (x, y)] each -> whole rows [B, S, features of a part of them]."""
        blocks = [exchange.blocks(output) for exchange, output in zip(self.row_exchanges, outputs, strict=True)]
        whole = rows.to_heads(torch.cat(blocks, dim=-1))
        return list(whole.split([exchange.size for exchange in self.row_exchanges], dim=-1))

    def _place(self, output: Tensor, index: int) -> Tensor:
        """[T, own features], or [B, S, own features] of a projection -> the features that this rank works on."""
        mesh, linear, exchange, heads = self.state.grid_mesh, self.linears[index], self.exchanges[index], self.heads
        every_head = heads is not None and not heads.axes  # every rank of x continues with all of them
        if linear._parameters.get("bias") is None and exchange.is_slice and not every_head:
            return output
        size = linear_size(linear)[0]
        if linear.bias is not None:
            bias = replicated_local(linear.bias, mesh, self.bias_axes)
            output = output + take_slice(bias, size, mesh, *self.bias_axes).to(output.dtype)
        if every_head:
            return gather_features(output, size, mesh, "x")
        return output if exchange.is_slice else exchange.exchange(output.reshape(-1, output.shape[-1]))

    def exchange_of(self, linear: nn.Module) -> HeadExchange:
        """The features of a projection that this rank works on (LoRA's B takes these rows)."""
        return self.exchanges[self.linears.index(linear)]


class RowParallel:
    """The row layer that ends a block, or a copy that may stand in for it (`like`).

    Global: [B, S, K] -> [B, S, N]. Local: [B, S, K/(x*y)] -> this rank's tokens [1, T/(x*y), N], or [1, T/x, N/y] in
    the feature layout, where the residual stream is sharded, else [B, S, N]. Collectives: all-gather over y of the
    features (where heads are divided over y), all-gather over z, reduce-scatter over x of the tokens (all-reduce where
    the residual stream is replicated), all-to-all over y (none in the feature layout, all-gather where replicated).

    Attributes:
        gathers_rows: whether the block works on whole rows where context divides them (`Block.gather_rows`).
        exchanges_rows: whether it then works on a part of the heads of this (x, y) (`ColumnParallel.exchange_rows`).
    """

    bias_axes = ("x", "y")

    def __init__(
        self, state: ParallelState, linear: nn.Linear, heads: Heads | None = None, *, like: RowParallel | None = None
    ) -> None:
        self.state = state
        self.linear = linear
        self.heads = heads
        self.axes = heads.axes if heads else ("x", "y")
        self.like = like
        self.gathers_rows: bool = False if like is None else like.gathers_rows
        self.exchanges_rows: bool = False if like is None else like.exchanges_rows
        self._leading: torch.Size | None = None
        state.add_layer(linear, self)
        self.weights = [state.weight_of(linear)]
        self.hidden_size = linear_size(linear)[0]
        self.layouts = [
            weight_layout(WeightKind.ROW, *linear_size(linear), state.grid_mesh, full_input="y" not in self.axes)
        ]
        patch_forward(linear, self._forward)

    @property
    def leading(self) -> torch.Size | None:
        """Leading dims of the block's input, which its output has, too."""
        return self._leading if self.like is None else self.like.leading

    def enter(self, hidden: Tensor) -> None:
        """Note the input of the block, when a pass comes to it."""
        self._leading = hidden.shape[:-1]

    def take_positions(self, hidden: Tensor) -> Tensor:
        """The input of the row layer -> this rank's positions of it, if the block works on whole rows. All-to-all over
        context, both ways, where they are rows of a part of the heads."""
        rows = self.state.context.rows if self.gathers_rows or self.exchanges_rows else None
        if rows is None:
            return hidden
        return rows.to_positions(hidden) if self.exchanges_rows else rows.take(hidden)

    def exchange_rows(self) -> None:
        """Get whole rows of a part of the heads of this (x, y) where context divides rows."""
        self.exchanges_rows = True

    def install_copy(self, copy_: nn.Module) -> RowParallel:
        """Install a row layer of its own on a copy, which stands at the place of this one in the block."""
        return RowParallel(self.state, copy_, self.heads, like=self)

    def _forward(self, _original: Callable, hidden: Tensor) -> Tensor:
        state, mesh, tokens = self.state, self.state.grid_mesh, self.state.context.tokens
        assert tokens is not None  # Block has seen to that
        hidden = self.take_positions(hidden)
        product = Product(state, self.weights, self.layouts)
        rows = hidden.to(state.compute_dtype(hidden, self.weights))
        if tokens.sharded and tokens.padded_count(mesh) > tokens.count:
            rows = pad_dim(rows.reshape(tokens.count, -1), 0, tokens.padded_count(mesh))
        if mesh.size("y") > 1 and "y" in self.axes:
            (output,) = product.run(rows, over=mesh.group("y"))
        else:
            rows = take_features(rows, mesh, "x") if not self.axes else rows
            (output,) = product.run(all_reduce_backward(rows, mesh.group("y")))
        in_place = mesh.size("y") == 1 or tokens.features  # where these rows of tokens are this rank's own
        if tokens.sharded:
            output = reduce_scatter_rows(output, mesh.group("x"), self.leading if in_place else (-1,))
        elif torch.is_grad_enabled():
            output = all_reduce(output, mesh.group("x"))
        else:  # no graph holds it
            output = reduce_(output, mesh.group("x"))
        if self.linear.bias is not None:
            bias = replicated_local(self.linear.bias, mesh, self.bias_axes if tokens.sharded else ("y",))
            output = output + take_slice(bias, self.hidden_size, mesh, "y").to(output.dtype)
        if state.requested_dtype(hidden, self.weights):
            output = output.to(hidden.dtype)
        if tokens.sharded:
            return output if in_place else features_to_tokens(output, self.hidden_size, mesh).view(*self.leading, -1)
        output = gather_features(output, self.hidden_size, mesh, "y")
        return output if output.shape[:-1] == self.leading else output.view(*self.leading, -1)


class Block:
    """The way in to a group of column layers: the forward of `entry` sees [B, S, H/y] where it is given tokens.

    Collectives: those of ColumnParallel.enter.
    """

    def __init__(self, state: ParallelState, entry: nn.Module, column: ColumnParallel, row: RowParallel) -> None:
        self.state = state
        self.column = column
        self.row = row
        patch_forward(entry, self._forward)

    def around(self, wrapper: nn.Module) -> None:
        """Enter already where `wrapper` is called, which stands around an entry that is a lone Linear."""
        patch_forward(wrapper, self._forward)

    def gather_rows(self) -> None:
        """Work on whole rows where context divides them: from the entry, which gathers them over context, to the row
        layer, which goes on with this rank's positions. Ranks of context repeat the work between the two."""
        self.column.gathers_rows = self.row.gathers_rows = True

    def enter(self, hidden: Tensor, args: tuple, kwargs: dict) -> BlockPass:
        """Return a pass for the block's input. Collectives: those of ColumnParallel.enter.

        Args:
            args, kwargs: with which the entry is called; `hidden` is among them.
        """
        return self.column.enter(hidden)

    def _forward(self, original: Callable, *args, **kwargs):
        if self.column.passing is not None:
            return original(*args, **kwargs)
        if self.state.context.tokens is None:
            raise RuntimeError(
                "a parallelized attention or MLP block was called outside of its decoder: its input is laid out by "
                "the first decoder layer, so call the model (or its base model) instead."
            )
        hidden = args[0] if args else kwargs["hidden_states"]
        self.row.enter(hidden)
        passing = self.enter(hidden, args, kwargs)
        shown = passing.input if passing.shown is None else passing.shown
        if args:
            args = (shown, *args[1:])
        else:
            kwargs["hidden_states"] = shown
        del hidden
        self.column.passing = passing
        try:
            return original(*args, **kwargs)
        finally:
            self.column.passing = None
