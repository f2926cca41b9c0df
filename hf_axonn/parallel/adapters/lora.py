"""PEFT's LoRA on a sharded layer: A and B follow the layer that they adapt.

Both are small and replicated; each rank multiplies with its own slice. For a column layer,

    h[T, r]{U_y} = x[T, K/y] @ A[:, K/y].T      reduced over y
    o[T, own features] = h @ B[own features].T

for a row layer,

    h[T, r]{U_xy} = x[T, K/(x*y)] @ A[:, own].T  reduced over (x, y), or over x where heads are divided over x alone
    o[T/(x*y), N] = h[T/(x*y)] @ B.T

and for a projection out of a latent, whose input is full on every rank, h is full, too, and B as in a column layer.
So o has the layout of the layer's own output and PEFT's addition needs no change. Where activations are full A and B
are used as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hf_axonn.distributed.collectives import all_reduce, all_reduce_backward
from hf_axonn.engine.activation_layouts import pad_dim
from hf_axonn.engine.dtensors import replicated_local, scale_gradient
from hf_axonn.engine.state import ParallelState
from hf_axonn.layers.base import Replicated, patch_forward, take_slice
from hf_axonn.layers.block import ColumnParallel, RowParallel
from hf_axonn.layers.latent_attention import LatentColumnParallel
from hf_axonn.layers.mixer import ChannelSum
from hf_axonn.layers.vocabulary import LowRank, defers, own_tokens
from hf_axonn.topology.heads import feature_slice


def pair_of(layer: nn.Module, adapter: str) -> tuple[Tensor, Tensor]:
    """(A [r, K], B [N, r]) of one adapter of PEFT's layer, a Linear's or an embedding's."""
    if adapter in layer.lora_embedding_A:
        return layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
    return layer.lora_A[adapter].weight, layer.lora_B[adapter].weight


class OwnOutput:
    """The output features of a layer that this rank continues with: all of them here.

    Args:
        axes: of (x, y), on which ranks do different work behind the layer.
    """

    def __init__(self, state: ParallelState, linear: nn.Module, axes: tuple[str, ...]) -> None:
        self.state, self.linear, self.axes = state, linear, axes

    def take(self, full: Tensor) -> Tensor:
        """[N, ...] -> [own features, ...]. No communication."""
        return full

    def parameter(self, parameter: nn.Parameter) -> Tensor:
        """This rank's rows of a replicated parameter [N, ...], in the graph."""
        return self.take(replicated_local(parameter, self.state.grid_mesh, self.axes))


class ColumnOutput(OwnOutput):
    """The output of a column layer: the features of this rank's heads."""

    def __init__(self, state: ParallelState, linear: nn.Module, column: ColumnParallel) -> None:
        super().__init__(state, linear, column.axes)
        self.exchange = column.exchange_of(linear)

    def take(self, full: Tensor) -> Tensor:
        return self.exchange.take(full, dim=0)


class InnerOutput(OwnOutput):
    """The output of a Linear between the projections of a mixer: the features of this rank's heads."""

    def __init__(self, state: ParallelState, linear: nn.Module, layer: Replicated) -> None:
        super().__init__(state, linear, layer.partial_axes)
        self.layer = layer

    def take(self, full: Tensor) -> Tensor:
        return self.layer.own["weight"](full)


class RowOutput(OwnOutput):
    """The output of a row layer: all features of this rank's tokens, or some in the feature layout."""

    def __init__(self, state: ParallelState, linear: nn.Module, row: RowParallel) -> None:
        super().__init__(state, linear, ("x", "y"))
        self.row = row

    def parameter(self, parameter: nn.Parameter) -> Tensor:
        tokens = self.state.context.tokens
        assert tokens is not None  # Block has seen to that
        if tokens.sharded:
            return super().parameter(parameter)
        return replicated_local(parameter, self.state.grid_mesh, ())  # every rank repeats the work on all tokens

    def take(self, full: Tensor) -> Tensor:
        tokens = self.state.context.tokens
        return take_slice(full, self.row.hidden_size, self.state.grid_mesh, "y") if tokens.features else full


def output_of(state: ParallelState, linear: nn.Module, axes: tuple[str, ...]) -> OwnOutput:
    """The output of a layer by what is installed on it; `axes` outside of blocks."""
    layer = state.sharded_layers.get(linear)
    if isinstance(layer, ColumnParallel):
        return ColumnOutput(state, linear, layer)
    if isinstance(layer, Replicated) and "weight" in layer.own and not isinstance(layer, ChannelSum):
        return InnerOutput(state, linear, layer)
    return RowOutput(state, linear, layer) if isinstance(layer, RowParallel) else OwnOutput(state, linear, axes)


class PairLora(ABC):
    """A and B of a Linear in a block, whose forwards are `_down` and `_up`.

    Args:
        layer: what is installed on the Linear.
        output: what a rank has of the Linear's output.
    """

    def __init__(self, state: ParallelState, layer: Any, output: OwnOutput, a: nn.Linear, b: nn.Linear) -> None:
        self.state, self.layer, self.output = state, layer, output
        self.a, self.b = a, b
        patch_forward(a, self._down)
        patch_forward(b, self._up)

    @abstractmethod
    def _down(self, original: Callable, hidden: Tensor) -> Tensor:
        """A: this rank's part of the Linear's input -> [..., r]."""

    def _up(self, _original: Callable, down: Tensor) -> Tensor:
        """B: [..., r] -> this rank's part of the Linear's output."""
        bias = None if self.b.bias is None else self.output.parameter(self.b.bias)
        return F.linear(down, self.output.parameter(self.b.weight), bias)


class ColumnLora(PairLora):
    """A and B of a column layer. Collectives: all-reduce of [T, r] over y, forward and backward."""

    def _down(self, _original: Callable, hidden: Tensor) -> Tensor:
        mesh, axes = self.state.grid_mesh, self.layer.axes
        own, padded = feature_slice(self.a.in_features, mesh, "y")
        a_axes = ("x", "y") if "x" in axes else ("y",)
        weight = pad_dim(replicated_local(self.a.weight, mesh, a_axes)[:, own], 1, padded)
        if "x" not in axes:  # the same on all ranks of x, where the block's entrance takes a sum
            hidden = scale_gradient(hidden, 1 / mesh.size("x"))
        down = all_reduce(F.linear(hidden, weight), mesh.group("y"))
        return all_reduce_backward(down, mesh.group("y")) if "y" in axes else down


class LatentLora(PairLora):
    """A and B of a projection out of a latent. Collectives: all-reduce of d[T, r] over the axes of the heads."""

    def _down(self, _original: Callable, hidden: Tensor) -> Tensor:
        mesh, axes = self.state.grid_mesh, self.layer.axes
        down = F.linear(hidden, replicated_local(self.a.weight, mesh, ()))
        return all_reduce_backward(down, mesh.group(*axes)) if axes else down


class RowLora(PairLora):
    """A and B of a row layer. Collectives: all-reduce of [T, r] over the axes of its input; backward: over (x, y)."""

    def _down(self, _original: Callable, hidden: Tensor) -> Tensor:
        mesh, axes, tokens = self.state.grid_mesh, self.layer.axes, self.state.context.tokens
        assert tokens is not None  # Block has seen to that
        hidden = self.layer.take_positions(hidden)
        own, padded = feature_slice(self.a.in_features, mesh, *axes)
        weight = pad_dim(replicated_local(self.a.weight, mesh, axes)[:, own], 1, padded)
        down = F.linear(hidden, weight)
        if axes:
            down = all_reduce(down, mesh.group(*axes))
        return all_reduce_backward(down, mesh.group("x", "y")) if tokens.sharded else down

    def _up(self, original: Callable, down: Tensor) -> Tensor:
        mesh, tokens = self.state.grid_mesh, self.state.context.tokens
        assert tokens is not None  # Block has seen to that
        if tokens.sharded:
            axes = ("x",) if tokens.features else ("x", "y")
            flat = pad_dim(down.reshape(tokens.count, -1), 0, tokens.padded_count(mesh))
            down = flat.view(mesh.size(*axes), -1, flat.shape[-1])[mesh.index(*axes)]
            down = down.view(*self.layer.leading, -1)
        return super()._up(original, down)


class ChannelLora(PairLora):
    """A and B of a mixer's Linear of all channels. Collectives: all-reduce of [T, r] over (x, y), both ways."""

    def _down(self, _original: Callable, hidden: Tensor) -> Tensor:
        own = self.layer.own["weight"](replicated_local(self.a.weight, self.state.grid_mesh, ("x", "y")))
        return self.layer.add_up(F.linear(hidden, own))


class HeadLora:
    """A and B of a head: in training with labels what they add is left to the loss, as the logits are.

    No communication: the loss has it (losses/vocab_parallel.py). Else they are as before.
    """

    def __init__(self, state: ParallelState, a: nn.Linear, b: nn.Linear) -> None:
        self.state, self.a, self.b = state, a, b
        patch_forward(a, self._down)
        patch_forward(b, self._up)

    def _down(self, original: Callable, hidden: Tensor) -> Tensor:
        if not defers(hidden, self.state):
            return original(hidden)
        own, _ = own_tokens(hidden, self.state)
        return F.linear(own, replicated_local(self.a.weight, self.state.grid_mesh, ("x", "y")))

    def _up(self, original: Callable, down: Tensor) -> Tensor | LowRank:
        return LowRank(down, self.b.weight) if defers(down, self.state) else original(down)


def install_pair(
    state: ParallelState, linear: nn.Module, output: OwnOutput, a: nn.Linear, b: nn.Linear
) -> tuple[str, ...] | None:
    """Give A and B of a layer of a block their forwards.

    Returns the axes on which ranks drop different parts of the layer's input; None of a layer outside of blocks.
    """
    layer = state.sharded_layers.get(linear)
    if isinstance(layer, LatentColumnParallel):
        LatentLora(state, layer, output, a, b)
        return ()
    if isinstance(layer, ColumnParallel):
        ColumnLora(state, layer, output, a, b)
        return ("y",)  # it is full on x
    if isinstance(layer, RowParallel):
        RowLora(state, layer, output, a, b)
        return layer.axes
    if isinstance(layer, ChannelSum):
        ChannelLora(state, layer, output, a, b)
        return ("x", "y")
    return None
