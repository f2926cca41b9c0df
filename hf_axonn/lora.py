"""PEFT's LoRA on a sharded layer: A and B follow the layer that they adapt.

Both are small and stored whole on every rank; each rank multiplies with its own slice. For a column layer,

    h[T, r]{U_y} = x[T, K/y] @ A[:, K/y].T      reduced over y
    o[T, own features] = h @ B[own features].T

and for a row layer,

    h[T, r]{U_xy} = x[T, K/(x*y)] @ A[:, own].T  reduced over (x, y), or over x where heads are divided over x alone
    o[T/(x*y), N] = h[T/(x*y)] @ B.T

so that o has the layout of the layer's own output and PEFT's addition needs no change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from hf_axonn import compat
from hf_axonn.blocks import Column, Row
from hf_axonn.collectives import all_reduce, all_reduce_backward
from hf_axonn.heads import feature_slice
from hf_axonn.layouts import pad_dim
from hf_axonn.state import ModelState, replicated_local, scale_gradient
from hf_axonn.styles import take_slice, wrap_forward


def check_adapters(model: nn.Module) -> None:
    """Refuse what PEFT can put into or around a model and nobody here can shard. Changes nothing.

    Raises:
        ValueError: an adapter is not plain LoRA on a Linear, or parameters lie outside of the model itself.
    """
    inner = compat.without_peft(model)
    own = {id(parameter) for parameter in inner.parameters()}
    outside = [name for name, parameter in model.named_parameters() if id(parameter) not in own]
    if outside:
        raise ValueError(
            f"{outside[0]} lies outside of the model (PEFT's prompt or prefix tuning), which cannot be sharded over a "
            "grid: use LoRA."
        )
    for name, layer, kind in compat.adapter_layers(inner):
        if getattr(layer, "lora_magnitude_vector", None):
            kind = "DoRA"
        elif getattr(layer, "lora_variant", None):
            kind = type(next(iter(layer.lora_variant.values()))).__name__
        elif kind == "lora.Linear":
            biased = [adapter for adapter, b in layer.lora_B.items() if b.bias is not None]
            if biased:
                raise ValueError(f"LoRA adapter {biased[0]!r} has biases: set lora_bias=False in LoraConfig.")
            continue
        raise ValueError(
            f"{name}: PEFT's {kind} cannot be sharded over a grid: use plain LoRA or rsLoRA on Linear layers "
            "(LoraConfig without use_dora, trainable_token_indices and target_parameters), and modules_to_save for "
            "embeddings."
        )


def lora_parts(layer: nn.Module) -> list[tuple[nn.Linear, nn.Linear]]:
    """The (A, B) pairs of a layer that PEFT has wrapped, none of a plain layer."""
    if not hasattr(layer, "lora_A"):
        return []
    return [(layer.lora_A[adapter], layer.lora_B[adapter]) for adapter in layer.lora_A]


class ColumnLora:
    """A and B of a column layer. Collectives: all-reduce of [T, r] over y, forward and backward."""

    def __init__(
        self, state: ModelState, column: Column, linear: nn.Linear, pair: tuple[nn.Linear, nn.Linear]
    ) -> None:
        self.state, self.column, self.linear = state, column, linear
        self.a, self.b = pair
        self.a_axes = ("x", "y") if "x" in column.axes else ("y",)
        wrap_forward(self.a, functools.partial(ColumnLora._down, self))
        wrap_forward(self.b, functools.partial(ColumnLora._up, self))

    def _down(self, _original: Callable, hidden: Tensor) -> Tensor:
        mesh, axes = self.state.mesh, self.column.axes
        own, padded = feature_slice(self.a.in_features, mesh, "y")
        weight = pad_dim(replicated_local(self.a.weight, mesh, self.a_axes)[:, own], 1, padded)
        if "x" not in axes:  # the same on all ranks of x, where the block's entrance takes a sum
            hidden = scale_gradient(hidden, 1 / mesh.size("x"))
        down = all_reduce(F.linear(hidden, weight), mesh.group("y"))
        return all_reduce_backward(down, mesh.group("y")) if "y" in axes else down

    def _up(self, _original: Callable, down: Tensor) -> Tensor:
        weight = replicated_local(self.b.weight, self.state.mesh, self.column.axes)
        return F.linear(down, self.column.selection_of(self.linear).take(weight, dim=0))


class RowLora:
    """A and B of a row layer. Collectives: all-reduce of [T, r] over the axes of its input; backward: over (x, y)."""

    def __init__(self, state: ModelState, row: Row, pair: tuple[nn.Linear, nn.Linear]) -> None:
        self.state, self.row = state, row
        self.a, self.b = pair
        wrap_forward(self.a, functools.partial(RowLora._down, self))
        wrap_forward(self.b, functools.partial(RowLora._up, self))

    def _down(self, _original: Callable, hidden: Tensor) -> Tensor:
        mesh, axes = self.state.mesh, self.row.axes
        own, padded = feature_slice(self.a.in_features, mesh, *axes)
        weight = pad_dim(replicated_local(self.a.weight, mesh, axes)[:, own], 1, padded)
        down = F.linear(hidden, weight)
        if axes:
            down = all_reduce(down, mesh.group(*axes))
        return all_reduce_backward(down, mesh.group("x", "y"))

    def _up(self, _original: Callable, down: Tensor) -> Tensor:
        mesh, tokens = self.state.mesh, self.state.tokens
        weight = replicated_local(self.b.weight, mesh, ("x", "y"))
        if tokens.sharded:
            axes = ("x",) if tokens.features else ("x", "y")
            flat = pad_dim(down.reshape(tokens.count, -1), 0, tokens.padded(mesh))
            down = flat.view(mesh.size(*axes), -1, flat.shape[-1])[mesh.index(*axes)]
            down = down.view(*self.row.leading, -1)
            weight = take_slice(weight, self.b.out_features, mesh, "y") if tokens.features else weight
        return F.linear(down, weight)
