"""PEFT's DoRA on a sharded layer: LoRA whose sum with the weight is scaled, row by row, to a learned magnitude m.

    n[N] = sqrt(sum over K of (W + s B A)^2)     every rank squares its own shard; one reduction over (y, x) and z
    o    = m / n * (x W.T + s x A.T B.T) + bias

n counts as a constant in backward, as in the paper. m is replicated; each rank takes the features that it continues
with. W is never gathered for n.

Source: Liu et al. 2024 (arXiv 2402.09353), sections 4.2 and 4.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_axonn.distributed.collectives import reduce_
from hf_axonn.engine.dtensors import local_of, local_slices
from hf_axonn.engine.linears import is_conv1d
from hf_axonn.engine.state import ParallelState
from hf_axonn.layers.base import patch_forward
from hf_axonn.layers.latent_attention import shared_hooks
from hf_axonn.parallel.adapters.lora import OwnOutput


@dataclass(frozen=True)
class ShardPlace:
    """The place of this rank's shard in the weight [N, K] of a layer that is adapted.

    Attributes:
        rows, cols: of [N, K]; size: N.
        transposed: whether it is stored as [K, N] (an embedding, Conv1D).
    """

    rows: slice
    cols: slice
    size: int
    transposed: bool

    @classmethod
    def in_weight(cls, base: nn.Module, state: ParallelState) -> ShardPlace:
        """Return the place in the weight of a Linear or an embedding."""
        weight = base.weight
        slices = local_slices(weight.shape, weight.placements, state.grid_mesh)
        transposed = is_conv1d(base) or isinstance(base, nn.Embedding)
        rows, cols = reversed(slices) if transposed else slices
        return cls(rows, cols, weight.shape[1 if transposed else 0], transposed)

    def delta(self, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        """This rank's shard of scaling * B @ A, [rows, cols], in the dtype of B; A is [r, K] and B is [N, r].

        What a CPU multiplies slowly is multiplied in float32, as PEFT does.
        """
        wide = torch.promote_types(b.dtype, torch.float32) if b.device.type == "cpu" else b.dtype
        product = b[self.rows].to(wide) @ a[:, self.cols].to(wide)
        return (product * scaling).to(b.dtype)


def row_norms(block: Tensor, place: ShardPlace, state: ParallelState) -> Tensor:
    """The norms [N] of all rows of a matrix [N, K] of which this rank has `block`. Two all-reduces of [N], over (x, y)
    and z; no gradient."""
    squares = block.new_zeros(place.size, dtype=torch.promote_types(block.dtype, torch.float32))
    squares[place.rows] = block.detach().to(squares.dtype).square().sum(dim=1)
    for axes in (("x", "y"), ("z",)):
        squares = reduce_(squares, state.grid_mesh.group(*axes))
    return squares.sqrt()


class Dora:
    """The magnitude of one adapter of a layer, in place of PEFT's forward of it. Collectives: `row_norms`."""

    def __init__(self, state: ParallelState, magnitude: nn.Module, base: nn.Module, output: OwnOutput) -> None:
        self.state, self.magnitude, self.base, self.output = state, magnitude, base, output
        self.place = ShardPlace.in_weight(base, state)
        self.hooks = shared_hooks(base)
        magnitude.get_weight_norm = self._weight_norm
        patch_forward(magnitude, self._embedding if isinstance(base, nn.Embedding) else self._linear)

    def norms(self, a: Tensor, b: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
        """[N] of W + scaling * B @ A."""
        weight = local_of(self.base.weight)
        weight = weight.t() if self.place.transposed else weight
        delta = self.place.delta(local_of(a), local_of(b), scaling)
        return row_norms(weight.to(dtype) + delta.to(dtype), self.place, self.state).to(dtype)

    def measure(self, a: Tensor, b: Tensor, scaling: float) -> None:
        """Set the magnitude to what the norms are now, as for a new adapter."""
        own = local_of(self.magnitude.weight)
        own.copy_(self.norms(a, b, scaling, own.dtype))

    def _linear(self, _original: Callable, x: Tensor, *, lora_A, lora_B, scaling, base_layer, base_result=None, **_):
        norms = self.norms(lora_A.weight, lora_B.weight, scaling, x.dtype)
        scale = self._parameter(self.magnitude.weight) / self._own(norms)
        if base_result is None:  # x has been dropped
            base_result = base_layer(x)
        if base_layer.bias is not None:
            base_result = base_result - self._parameter(base_layer.bias)
        return (scale - 1) * base_result + scale * lora_B(lora_A(x)) * scaling

    def _embedding(self, _original: Callable, x: Tensor, *, lora_A, lora_B, scaling, base_layer, embed_fn, **_):
        """Return, as PEFT's method, what the embedding's own output is multiplied by, and what is added to that."""
        norms = self.norms(lora_A.t(), lora_B.t(), scaling, base_layer.weight.dtype)
        scale = self.output.parameter(self.magnitude.weight) / self._own(norms)
        return scale, scale * (embed_fn(x, lora_A) @ lora_B) * scaling

    def _parameter(self, parameter: nn.Parameter) -> Tensor:
        """This rank's rows of a parameter [N], whose gradient is summed as that of the base's output is."""
        value = self.output.parameter(parameter)
        for hook in self.hooks:
            value = hook(self.base, (), value)
        return value

    def _own(self, norms: Tensor) -> Tensor:
        """Norms of the features that this rank continues with; 1 for padding, whose magnitude is 0."""
        own = self.output.take(norms)
        return torch.where(own == 0, 1, own)

    def _weight_norm(self, weight: Tensor, lora_weight: Tensor, scaling: float, **_) -> Tensor:
        """Return what PEFT needs to merge: norms of this rank's rows; all is this rank's shard."""
        weight = weight.t() if self.place.transposed else weight
        norms = row_norms(weight + scaling * lora_weight, self.place, self.state)
        return norms[self.place.rows].to(weight.dtype)
