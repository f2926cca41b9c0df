"""Tests for an RMSNorm or a LayerNorm in substance, whatever a module's class is called.

A module is tried on random numbers on the CPU, on a copy whose parameters are random too: the weights of a model
may be sharded, or not be there yet. In float64, where two formulas that differ at all differ visibly, results and
gradients must be those of `norms.normalize`; then in low precision, what is rounded where. Every rank tries the same
numbers and finds the same.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from hf_axonn.architectures.trials import EXACT, Wide, close, isolate
from hf_axonn.layers.base import replaced
from hf_axonn.layers.mixer import GatedNormKind, GroupShards, normalize_gated
from hf_axonn.layers.norms import ROUNDINGS, FeatureShards, NormKind, normalize


ROWS = 8  # tokens of a trial
USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12, 0.0)  # of classes that keep theirs in the code
SCALES = (1e-4, 1.0, 1e4)  # of the input: eps counts for the first, cancellation shows for the last
SINGLE = 1e-5
_KNOWN_GATED: dict[tuple, GatedNormKind | None] = {}  # by what `_look` returns
DIFFERENT_BITS = 0.02  # of the elements in 16 bits: sums in another order seldom round otherwise, other places often


def norm_kind(module: nn.Module, size: int, known: dict[tuple, NormKind | None] | None = None) -> NormKind | None:
    """Return the kind of a norm (`_probe`); modules that look the same are probed once for each `known`."""
    known = {} if known is None else known
    look = _look(module)
    if look == (module,):  # it has something of its own
        return _probe(module, size)
    if (size, look) not in known:
        known[size, look] = _probe(module, size)
    return known[size, look]


def gated_norm_kind(module: nn.Module, size: int) -> GatedNormKind | None:
    """Return what a norm of `size` features computes with a gate, or None for a module that computes anything else."""
    look = _look(module)
    if look == (module,):
        return _probe_gated(module, size)
    if look not in _KNOWN_GATED:
        _KNOWN_GATED[look] = _probe_gated(module, size)
    return _KNOWN_GATED[look]


def _probe_gated(module: nn.Module, size: int) -> GatedNormKind | None:
    numbers = [value for value in vars(module).values() if type(value) is int and value > 0 and size % value == 0]
    own = [value for value in vars(module).values() if type(value) is float and 0 < value <= 1e-2]
    widths = dict.fromkeys((*numbers, *(size // each for each in numbers), size))
    generator = torch.Generator().manual_seed(size)
    values, gate, weight = torch.randn(3, 2, 3, size, generator=generator, dtype=torch.float64, device="cpu")
    for width, eps, gate_first, rounding in itertools.product(widths, own, (True, False), ROUNDINGS[:2]):
        kind = GatedNormKind(width, eps, gate_first, rounding)
        if _gates_alike(module, kind, values, gate, weight[0, 0]):
            return kind
    return None


def _gates_alike(module: nn.Module, kind: GatedNormKind, values: Tensor, gate: Tensor, weight: Tensor) -> bool:
    """Return whether a gated norm is of a kind: in float64, and by what it rounds in 16 bits."""
    size = weight.numel()
    shards = GroupShards((kind.width,), groups=tuple(range(size // kind.width)), total=size // kind.width)
    low = torch.bfloat16
    try:
        with isolate(), torch.no_grad():
            for scale in SCALES:
                with Wide(), replaced(vars(module), {"weight": weight}):
                    truth = module.forward(scale * values, gate)
                    ours = normalize_gated(scale * values, gate, weight, kind, shards)
                if truth.shape != ours.shape or not close(truth, ours, EXACT):
                    return False
            for own in (weight.to(low), weight.float()):
                with replaced(vars(module), {"weight": own}):
                    truth = module.forward(values.to(low), gate.to(low))
                ours = normalize_gated(values.to(low), gate.to(low), own, kind, shards)
                if truth.dtype != ours.dtype or (truth != ours).double().mean() > DIFFERENT_BITS:
                    return False
    except Exception:  # a module that takes no gate
        return False
    return True


def _look(module: nn.Module) -> tuple:
    """Return what modules that compute the same have in common: class, parameters and numbers."""
    own = {name: value for name, value in vars(module).items() if name not in _PLAIN}
    if all(isinstance(value, (int, float, str, tuple, torch.dtype, type(None))) for value in own.values()):
        shapes = tuple((name, None if each is None else each.shape) for name, each in module._parameters.items())
        return type(module), shapes, tuple(own.items())
    return (module,)


_PLAIN = frozenset(vars(nn.Module())) | {"training"}


def _probe(module: nn.Module, size: int) -> NormKind | None:
    """Return what a norm of `size` features computes, or None for a module that computes anything else."""
    parameters = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    if len(parameters) > 2 or {each.shape for each in parameters.values()} - {(size,)} or _has_more(module):
        return None
    generator = torch.Generator().manual_seed(size)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    try:
        with isolate():
            values = {name: 0.5 + random(size) for name in parameters}
            inputs = [scale * (random(1, ROWS, size) + 0.7) for scale in SCALES]
            return _first_kind(module, size, values, inputs)
    except Exception:  # a module that cannot be called with hidden states alone is no norm
        return None


def _first_kind(module: nn.Module, size: int, values: dict[str, Tensor], inputs: list[Tensor]) -> NormKind | None:
    for kind in _candidates(module, size):
        if all(_agrees(module, kind, values, sample) for sample in inputs):
            places = (replace(kind, rounding=place) for place in ROUNDINGS)
            return next((place for place in places if _rounds_alike(module, place, values, inputs[1])), None)
    return None


def _has_more(module: nn.Module) -> bool:
    """Return whether a module has buffers or children."""
    return any(True for _ in itertools.chain(module.buffers(), module.children()))


def _candidates(module: nn.Module, size: int) -> Iterator[NormKind]:
    """Yield every norm that a module could be, by its parameters and the small numbers among its attributes."""
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    own = [value for value in vars(module).values() if type(value) is float and 0 < value <= 1e-2]
    orders = [(None, None)] if not names else [(names[0], None)]
    if len(names) == 2:
        orders = [tuple(names), tuple(reversed(names))]
    every_eps = dict.fromkeys((*own, *USUAL_EPS))
    for centered, (weight, bias), eps in itertools.product((False, True), orders, every_eps):
        for offset in (0.0, 1.0) if weight else (0.0,):
            yield NormKind(size, centered, eps, weight, bias, offset, rounding="result")


def _trial(
    module: nn.Module, kind: NormKind, values: dict[str, Tensor], input_: Tensor, dtype: torch.dtype
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Yield leaves and result of the module, then of `normalize`, for the same input and parameters."""
    clone = {name: nn.Parameter(value.to(dtype)) for name, value in values.items()}
    memo = {id(module._parameters[name]): parameter for name, parameter in clone.items()}
    theirs = {**clone, "input": input_.clone().requires_grad_()}
    expected = copy.deepcopy(module, memo).eval()(theirs["input"])
    yield theirs, expected
    ours = {name: value.detach().clone().requires_grad_() for name, value in theirs.items()}
    weight, bias = (ours[name] if name else None for name in (kind.weight, kind.bias))
    yield ours, normalize(ours["input"], weight, bias, kind, FeatureShards((kind.size,)), expected.dtype)


def _agrees(module: nn.Module, kind: NormKind, values: dict[str, Tensor], input_: Tensor) -> bool:
    """Return whether result and gradients are those of `kind`, in float64."""
    results = []
    with Wide():
        for leaves, result in _trial(module, kind, values, input_, torch.float64):
            if not isinstance(result, Tensor) or result.shape != input_.shape:
                return False
            # A cotangent that is neither constant nor the result itself: both have special gradients.
            cotangent = torch.linspace(-1, 2, result.numel(), dtype=torch.float64).view_as(result)
            gradients = torch.autograd.grad(result, list(leaves.values()), cotangent)
            results.append((result, *gradients))
    return all(close(theirs, ours, EXACT) for theirs, ours in zip(*results, strict=True))


def _rounds_alike(module: nn.Module, kind: NormKind, values: dict[str, Tensor], input_: Tensor) -> bool:
    """Return whether results have the dtype and the rounding of `kind` with inputs or parameters of low precision."""
    low, single = torch.bfloat16, torch.float32
    for input_dtype, dtype in ((single, single), (low, low), (low, single)):
        try:
            (_, truth), (_, ours) = _trial(module, kind, values, input_.to(input_dtype), dtype)
        except RuntimeError:
            if input_dtype != dtype:  # a class that does not take two dtypes is not given two
                continue
            raise
        if truth.dtype != ours.dtype:
            return False
        if truth.dtype == low and (truth != ours).double().mean() > DIFFERENT_BITS:
            return False
        if truth.dtype == single and not close(truth, ours, SINGLE):
            return False
    return True
