"""Norms in the feature layout: RMSNorm and LayerNorm of tokens whose features are sharded over y.

Legend: T = tokens of this (data, z) position; H = hidden size; h = H/y, this rank's features.

    RMSNorm     s = sum of squares of own features [T/x, 1]            all-reduce over y of one number a token
    LayerNorm   (mean, M2) of own features [2, T/x, 1]                  all-gather over y, merged as Chan et al. do
    backward    sum of g * n (and of g) over own features               all-reduce over y of one (two) numbers a token

where n is the normalized input and g the gradient of n. Statistics are float32 or wider, and are all that travels.
Sums of squares would do for a LayerNorm too, but lose every digit where the mean is large.

Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from hf_axonn.distributed.collectives import reduce_, start_all_gather
from hf_axonn.engine.activation_layouts import bounds, pad_dim
from hf_axonn.engine.dtensors import replicated_local
from hf_axonn.engine.state import ParallelState
from hf_axonn.layers.base import patch_forward
from hf_axonn.layers.head_exchange import HeadExchange


# What is rounded to a 16-bit dtype: the result alone, n before it is multiplied, or offset + weight before that.
ROUNDINGS = ("result", "normal", "factor")


@dataclass(frozen=True)
class NormKind:
    """The function of a norm: n = (x - mean) / sqrt(mean square + eps), then n * (offset + weight) + bias.

    Args:
        size: H.
        centered: whether the mean is taken off first (LayerNorm) or not (RMSNorm).
        eps: added to the mean square.
        weight, bias: names of the module's parameters [H]; None where it has none.
        offset: 0, or 1 where the weight is stored as its difference from 1.
        rounding: one of ROUNDINGS.
    """

    size: int
    centered: bool
    eps: float
    weight: str | None
    bias: str | None
    offset: float
    rounding: str

    def __str__(self) -> str:
        return "LayerNorm" if self.centered else "RMSNorm"


@dataclass(frozen=True)
class FeatureShards:
    """The division of the features of a token among the ranks that share it.

    Args:
        counts: features of each rank of `group`, without padding.
        index: which of them this rank is.
        group: None where one rank has all of them.
    """

    counts: tuple[int, ...]
    index: int = 0
    group: ProcessGroup | None = None
    _counts: dict[tuple, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def counts_for(self, values: Tensor) -> Tensor:
        """`counts` [y, 1, ...] to be multiplied with [y, *values.shape]; brought to the device once."""
        key = values.dtype, values.device
        if key not in self._counts:
            self._counts[key] = torch.tensor(self.counts, dtype=values.dtype, device=values.device)
        return self._counts[key].view(-1, *[1] * values.dim())

    @property
    def own(self) -> slice:
        start = sum(self.counts[: self.index])
        return slice(start, start + self.counts[self.index])

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of a statistic [..., 1] of this rank's features over all of a token."""
        return value if self.group is None else reduce_(value, self.group)


def normalize(
    hidden: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: NormKind,
    shards: FeatureShards,
    dtype: torch.dtype,
) -> Tensor:
    """Normalize every token. Global [..., H], local [..., h] zero-padded at the end; `weight` and `bias` without pads.

    Args:
        dtype: of the result where it is rounded last.
    Collectives: those at the top of this file, over `shards.group`.
    """
    count = shards.counts[shards.index]
    result = _Normalize.apply(hidden[..., :count], weight, bias, kind, shards, dtype)
    return pad_dim(result, -1, hidden.shape[-1])


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, kind, shards, dtype):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        values, mean = hidden.to(wide), None
        if kind.centered:
            mean, square = _mean_and_square(values, kind.size, shards)
            values = values - mean
        else:
            square = shards.sum(values.square().sum(dim=-1, keepdim=True)) / kind.size
        inverse = torch.rsqrt(square + kind.eps)
        normal = values * inverse
        ctx.kind, ctx.shards = kind, shards
        # Not `normal`: the input is half as large in bfloat16, and often saved by others as well.
        ctx.save_for_backward(hidden, weight, bias, mean, inverse)
        if kind.rounding == "normal":
            result = normal.to(hidden.dtype)
            result = result if weight is None else _factor(weight, kind) * result
            return result if bias is None else result + bias
        result = normal if weight is None else normal * _wide_factor(weight, kind, wide)
        return (result if bias is None else result + bias.to(wide)).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        hidden, weight, bias, mean, inverse = ctx.saved_tensors
        kind, needs_input, needs_weight, needs_bias = ctx.kind, *ctx.needs_input_grad[:3]
        wide = inverse.dtype
        grad, normal = grad.to(wide), hidden.to(wide)
        normal = (normal if mean is None else normal - mean) * inverse
        dhidden = dweight = dbias = None
        tokens = tuple(range(grad.dim() - 1))
        if needs_bias:
            dbias = grad.sum(dim=tokens).to(bias.dtype)
        if needs_weight:
            dweight = (grad * normal).sum(dim=tokens).to(weight.dtype)
        if needs_input:
            grad = grad if weight is None else grad * _wide_factor(weight, kind, wide)
            sums = [(grad * normal).sum(dim=-1, keepdim=True)]
            if kind.centered:
                sums.append(grad.sum(dim=-1, keepdim=True))
            means = ctx.shards.sum(torch.stack(sums)) / kind.size
            dhidden = grad - normal * means[0]
            dhidden = ((dhidden - means[1] if kind.centered else dhidden) * inverse).to(hidden.dtype)
        return dhidden, dweight, dbias, None, None, None


def _factor(weight: Tensor, kind: NormKind) -> Tensor:
    return kind.offset + weight if kind.offset else weight


def _wide_factor(weight: Tensor, kind: NormKind, wide: torch.dtype) -> Tensor:
    return _factor(weight.to(wide), kind) if kind.rounding == "result" else _factor(weight, kind).to(wide)


def _mean_and_square(values: Tensor, size: int, shards: FeatureShards) -> tuple[Tensor, Tensor]:
    """Mean and mean squared deviation [..., 1] of full tokens, from the moments of each rank's features."""
    # A rank may have no features at all where y does not divide H.
    mean = values.sum(dim=-1, keepdim=True) / max(values.shape[-1], 1)
    square = (values - mean).square().sum(dim=-1, keepdim=True)
    if shards.group is None:
        return mean, square / size
    means, squares = start_all_gather(torch.stack([mean, square]), shards.group).wait().unbind(dim=1)
    counts = shards.counts_for(values)
    mean = (means * counts).sum(dim=0) / size
    return mean, (squares + (means - mean).square() * counts).sum(dim=0) / size


class FeatureNorm:
    """A norm on the residual stream, in either of its layouts. Local [1, T/x, H/y] -> the same; or as the module does.

    Its parameters are replicated, and each rank has the gradient of its own features and tokens: partial on (x, y).
    Collectives: see the top of this file; none where the residual stream is replicated.
    """

    def __init__(self, state: ParallelState, module: nn.Module, kind: NormKind) -> None:
        self.state = state
        self.module = module
        self.kind = kind
        mesh, y = state.grid_mesh, state.grid_mesh.size("y")
        spans = [bounds(kind.size, y, index) for index in range(y)]
        self.shards = FeatureShards(tuple(stop - start for start, stop in spans), mesh.index("y"), mesh.group("y"))
        self._dtypes: dict[tuple, torch.dtype] = {}
        patch_forward(module, self._forward)

    def _forward(self, original: Callable, *args, **kwargs) -> Tensor:
        tokens = self.state.context.tokens
        if tokens is None or not tokens.features:
            return original(*args, **kwargs)
        (hidden,) = (*args, *kwargs.values())
        weight, bias = self._own(self.kind.weight), self._own(self.kind.bias)
        return normalize(hidden, weight, bias, self.kind, self.shards, self._dtype(original, hidden, weight))

    def _own(self, name: str | None) -> Tensor | None:
        if name is None:
            return None
        return replicated_local(self.module._parameters[name], self.state.grid_mesh, ("x", "y"))[self.shards.own]

    def _dtype(self, original: Callable, hidden: Tensor, weight: Tensor | None) -> torch.dtype:
        return result_dtype(original, hidden, weight, self.kind, self._dtypes)


def result_dtype(
    original: Callable, hidden: Tensor, weight: Tensor | None, kind: NormKind, known: dict[tuple, torch.dtype]
) -> torch.dtype:
    """The dtype that a norm itself would return here: autocast decides for some classes, on some devices."""
    if kind.rounding == "normal":
        return hidden.dtype
    device_type = hidden.device.type
    autocast = torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type)
    key = (hidden.dtype, None if weight is None else weight.dtype, autocast)
    if key not in known:
        with torch.no_grad():
            known[key] = original(hidden.new_zeros(1, 1, kind.size)).dtype
    return known[key]


class InnerNorm:
    """A norm over features that a block divides, as those of all heads. Local [B, S, own features] -> the same.

    A kv head that several ranks work on counts as often on every rank, and so do all others: means over the repeated
    features are means over the heads, and the gradients of the copies add up to that of the head.

    Args:
        exchange: the features that this rank works on, of the projection before it or for the one after it.
    Collectives: those at the top of this file, over the axes that divide the features.
    """

    def __init__(self, state: ParallelState, module: nn.Module, kind: NormKind, exchange: HeadExchange) -> None:
        self.state, self.module, self.kind, self.exchange = state, module, kind, exchange
        mesh, self.axes = state.grid_mesh, exchange.axes
        self.shards = FeatureShards(exchange.counts, mesh.index(*self.axes), mesh.group(*self.axes))
        self.repeated = replace(kind, size=sum(exchange.counts))
        self._dtypes: dict[tuple, torch.dtype] = {}
        patch_forward(module, self._forward)

    def _forward(self, original: Callable, hidden: Tensor) -> Tensor:
        weight, bias = self._own(self.kind.weight), self._own(self.kind.bias)
        full = None if self.kind.weight is None else self.module._parameters[self.kind.weight]
        dtype = result_dtype(original, hidden, full, self.kind, self._dtypes)
        return normalize(hidden, weight, bias, self.repeated, self.shards, dtype)

    def _own(self, name: str | None) -> Tensor | None:
        if name is None:
            return None
        full = replicated_local(self.module._parameters[name], self.state.grid_mesh, self.axes)
        return self.exchange.take(full)[: self.shards.counts[self.shards.index]]
