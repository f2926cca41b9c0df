"""Attention and MLP, cut as whole blocks.

    Block    the module around them; its input becomes [B, S, H/y], its output this rank's tokens again
    Column   q, k, v, or gate, up: the projections that share the block's input, multiplied as one group
    Row      o, or down: the projection that ends the block

The heads of an attention block may be divided over ("x", "y"), over ("x",) or not at all, see `Heads`; an MLP's
intermediate features are always divided over both.

Source: DESIGN 2.3; AxoNN (arXiv 2502.08145) for the alternation of column and row (transposed) layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_axonn.collectives import all_gather, all_reduce, all_reduce_backward, reduce_scatter
from hf_axonn.grid import GridMesh
from hf_axonn.layouts import (
    ceil_div,
    features_to_tokens,
    gather_features,
    pad_dim,
    take_features,
    tokens_to_features,
)
from hf_axonn.matmul3d import Product
from hf_axonn.overlap import GradientSlot, gather_with_slot, wait_gradient
from hf_axonn.state import ModelState, replicated_local
from hf_axonn.styles import cut_weight, feature_slice, take_slice, wrap_forward


@dataclass(frozen=True)
class Heads:
    """Over which axes the query heads of an attention block are divided, and how its kv heads follow.

    Args:
        query, kv: numbers of heads in the whole model.
        axes: ("x", "y"), ("x",) or (): the longest whose product divides `query`.
        expand: kv heads do not divide as the query heads do; every rank gets one kv head for each of its query heads.
    """

    query: int
    kv: int
    axes: tuple[str, ...]
    expand: bool

    @classmethod
    def divide(cls, query: int, kv: int, mesh: GridMesh) -> Heads:
        for axes in (("x", "y"), ("x",), ()):
            if query % mesh.size(*axes) == 0:
                return cls(query, kv, axes, expand=bool(axes) and kv % mesh.size(*axes) != 0)
        raise AssertionError("the empty product divides every number")

    def kv_of_own_queries(self, mesh: GridMesh) -> list[int]:
        """For each query head of this rank the kv head that it reads."""
        own = self.query // mesh.size(*self.axes)
        first = mesh.index(*self.axes) * own
        return [head // (self.query // self.kv) for head in range(first, first + own)]


class Column:
    """The column layers of one block: one gather, one multiplication and one reduction over y for all of them.

    Global shapes: input [B, S, K], output [B, S, N]. Local: [B, S, K/y] and [B, S, N/(x*y)], or all of the features
    that the heads of this rank need. Collectives: all-gather over z; reduce-scatter over y (all-reduce where heads are
    not divided over y); all-gather over x or (x, y) of the kv heads that do not divide. The first projection that is
    called computes all of them.
    """

    def __init__(self, state: ModelState, linears: list[nn.Linear], heads: Heads | None = None) -> None:
        self.state = state
        self.linears = linears
        self.heads = heads
        self.axes = heads.axes if heads else ("x", "y")
        self.weights = [state.weight_of(linear) for linear in linears]
        self.cuts = [cut_weight("column", linear.out_features, linear.in_features, state.mesh) for linear in linears]
        self._entered: tuple[Tensor, Product, Tensor | None] | None = None
        self._computed: tuple[Tensor, dict[int, Tensor]] | None = None
        for index, linear in enumerate(linears):
            wrap_forward(linear, functools.partial(self._project, index))

    @property
    def bias_axes(self) -> tuple[str, ...]:
        """Axes on which ranks have different parts of a bias' gradient."""
        return ("x", "y") if "y" in self.axes else ("x",)

    def enter(self, hidden: Tensor) -> Tensor:
        """This rank's tokens -> [B, S, H/y]. All-to-all over y, all-gather over x, which backward only launches."""
        state, tokens = self.state, self.state.tokens
        if not tokens.sharded:
            return take_features(hidden, state.mesh, "y")
        slot = GradientSlot()
        hidden = tokens_to_features(hidden.to(state.compute_dtype(hidden)), state.mesh)
        hidden = wait_gradient(hidden, slot)
        product = Product(state, self.weights, self.cuts)
        handle = product.begin()
        hidden = gather_with_slot(hidden, state.mesh.group("x"), slot, overlap=state.overlap_all_reduce)
        hidden = hidden.flatten(0, 1)[: tokens.count].view(tokens.batch, tokens.seq, -1)
        self._entered = (hidden, product, handle)
        return hidden

    def leave(self) -> None:
        """Forget the pass: nothing of it may outlive the block."""
        self._entered = self._computed = None

    def _project(self, index: int, _original: Callable, hidden: Tensor) -> Tensor:
        if self._computed is None or self._computed[0] is not hidden or index not in self._computed[1]:
            self._computed = (hidden, dict(enumerate(self._compute(hidden))))
        return self._computed[1].pop(index)

    def _compute(self, hidden: Tensor) -> list[Tensor]:
        if self._entered is not None and self._entered[0] is hidden:
            _, product, handle = self._entered
        else:
            product = Product(self.state, self.weights, self.cuts)
            handle = product.begin()
        mesh = self.state.mesh
        outputs = product.run(hidden.reshape(1, -1, hidden.shape[-1]), handle)
        sizes = [cut.out_size for cut in self.cuts]
        if "y" in self.axes:
            outputs = [reduce_scatter(output, mesh.group("y")) for output in outputs]
            outputs = outputs if len(outputs) == len(sizes) else list(outputs[0].split(sizes, dim=-1))
        else:
            outputs = [all_reduce(output, mesh.group("y")) for output in outputs]
            outputs = outputs if len(outputs) == len(sizes) else outputs[0].split(sizes, dim=-1)
            outputs = [
                output.movedim(0, -2).flatten(-2)[..., : ceil_div(linear.out_features, mesh.size("x"))]
                for output, linear in zip(outputs, self.linears, strict=True)
            ]
        return [
            self._place(output, linear).view(*hidden.shape[:-1], -1)
            for output, linear in zip(outputs, self.linears, strict=True)
        ]

    def _place(self, output: Tensor, linear: nn.Linear) -> Tensor:
        """[T, own features] -> the features that the heads of this rank need."""
        mesh, size, heads = self.state.mesh, linear.out_features, self.heads
        if linear.bias is not None:
            bias = replicated_local(linear.bias, mesh, self.bias_axes)
            output = output + take_slice(bias, size, mesh, *self.bias_axes).to(output.dtype)
        if heads is None or (heads.axes and not (heads.expand and self._is_kv(linear))):
            return output
        shares = bool(heads.axes)  # each rank uses some of the gathered heads, so gradients are shares of a sum
        if "y" in heads.axes:
            x_size = ceil_div(size, mesh.size("x"))
            blocks = all_gather(output, mesh.group("x", "y")).unflatten(0, (mesh.size("x"), mesh.size("y")))
            output = blocks.movedim(1, 2).flatten(2)[..., :x_size].movedim(0, 1).flatten(1)[:, :size]
        else:
            output = gather_features(output, size, mesh, "x", replicated=not shares)
        return output[:, self.feature_index(linear)] if shares else output

    def output_size(self, linear: nn.Linear) -> int:
        """Features that this rank's projection returns, padding included."""
        return (
            self.cuts[self.linears.index(linear)].out_size if self.heads is None else len(self.feature_index(linear))
        )

    def _is_kv(self, linear: nn.Linear) -> bool:
        return linear is not self.linears[0]

    def feature_index(self, linear: nn.Linear) -> Tensor:
        """Which features of the whole output this rank's projection returns (LoRA's B takes these rows)."""
        mesh, size, heads = self.state.mesh, linear.out_features, self.heads
        if heads is not None and heads.expand and self._is_kv(linear):
            width = size // heads.kv
            starts = torch.tensor(heads.kv_of_own_queries(mesh), device=mesh.device) * width
            return (starts[:, None] + torch.arange(width, device=mesh.device)).flatten()
        own, _ = feature_slice(size, mesh, *self.axes)
        return torch.arange(own.start, own.stop, device=mesh.device)


class Row:
    """The row layer that ends a block.

    Global: [B, S, K] -> [B, S, N]. Local: [B, S, K/(x*y)] -> [1, T/x, N/y] where the residual stream is sharded, else
    [B, S, N/y]. Collectives: all-gather over y of the features (where heads are divided over y), all-gather over z,
    reduce-scatter over x of the tokens (all-reduce where the residual stream is replicated).
    """

    bias_axes = ("x", "y")

    def __init__(self, state: ModelState, linear: nn.Linear, heads: Heads | None = None) -> None:
        self.state = state
        self.linear = linear
        self.axes = heads.axes if heads else ("x", "y")
        self.weights = [state.weight_of(linear)]
        whole_input = "y" not in self.axes
        self.cuts = [cut_weight("row", linear.out_features, linear.in_features, state.mesh, whole_input=whole_input)]
        wrap_forward(linear, self._forward)

    def _forward(self, _original: Callable, hidden: Tensor) -> Tensor:
        state, mesh, tokens = self.state, self.state.mesh, self.state.tokens
        product = Product(state, self.weights, self.cuts)
        flat = hidden.reshape(tokens.count, -1).to(state.compute_dtype(hidden))
        if tokens.sharded:
            flat = pad_dim(flat, 0, tokens.padded(mesh))
        if "y" in self.axes:
            slot = GradientSlot()
            flat = wait_gradient(flat, slot)
            handle = product.begin()
            blocks = gather_with_slot(flat, mesh.group("y"), slot, overlap=state.overlap_all_reduce)
        else:
            flat = take_features(flat, mesh, "x") if not self.axes else flat
            handle = product.begin()
            blocks = all_reduce_backward(flat, mesh.group("y")).unsqueeze(0)
        (output,) = product.run(blocks, handle)
        output = output.squeeze(0)
        if tokens.sharded:
            output = reduce_scatter(output.view(mesh.size("x"), -1, output.shape[-1]), mesh.group("x"))
        else:
            output = all_reduce(output, mesh.group("x"))
        if self.linear.bias is not None:
            bias = replicated_local(self.linear.bias, mesh, self.bias_axes)
            output = output + take_slice(bias, self.linear.out_features, mesh, "y").to(output.dtype)
        return output.unsqueeze(0) if tokens.sharded else output.view(tokens.batch, tokens.seq, -1)


class Block:
    """An attention or MLP module: the way in to its column layers and out of its row layer.

    Global [B, S, H] -> [B, S, H]; local as the residual stream of layouts.py. Collectives: those of Column.enter;
    all-to-all over y on the way out (all-gather over y where the residual stream is replicated).
    """

    def __init__(self, state: ModelState, module: nn.Module, column: Column, row: Row) -> None:
        self.state = state
        self.column = column
        self.hidden_size = row.linear.out_features
        wrap_forward(module, self._forward)

    def _forward(self, original: Callable, *args, **kwargs):
        if self.state.tokens is None:
            raise RuntimeError(
                "a parallelized attention or MLP block was called outside of its decoder: its input is laid out by "
                "the first decoder layer, so call the model (or its base model) instead."
            )
        if args:
            args = (self.column.enter(args[0]), *args[1:])
        else:
            kwargs["hidden_states"] = self.column.enter(kwargs["hidden_states"])
        try:
            output = original(*args, **kwargs)
        finally:
            self.column.leave()
        if isinstance(output, tuple):
            return (self._leave(output[0]), *output[1:])
        return self._leave(output)

    def _leave(self, hidden: Tensor) -> Tensor:
        mesh = self.state.mesh
        if self.state.tokens.sharded:
            return features_to_tokens(hidden.squeeze(0), self.hidden_size, mesh)
        return gather_features(hidden, self.hidden_size, mesh, "y")
