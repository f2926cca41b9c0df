"""The rounding of a step: the same step on one process, in the run's own dtype, many times with other sums.

Ranks take sums apart. Who holds a part of a weight multiplies a part of the inner dimension, rounds what comes out,
and adds it to what others have; gradients of micro-batches and of ranks are added in some order. Each replica here
does so in a way of its own: in a share of the matrix products, forward and backward, the inner dimension is in another
order and in other parts, whose results are rounded before they are added (`OtherSums`), and the gradients of the
micro-batches of all positions are added in another order. The share is drawn too, as data-parallel ranks take no
product apart and others half of them. So a replica is rounded as a rank might be, in places that are drawn.

The error of a tensor is the length of its difference from float64 over its own length. Its logarithm is compared, by
Student's t for one more drawing from a normal distribution whose mean and deviation are estimated from the replicas:
a length is never below zero and its spread grows with it, so its logarithm is nearer to normal. The error of a number
has a sign, of which a logarithm says nothing; it is compared with Student's t times the largest of those of the
replicas. Their root mean square about zero would hold what all replicas are off by, as weights in bf16 make them; but
replicas with a small share of products have small errors, so that it is too low for a run whose share is large.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_axonn.compat.torch import OperatorMode


RUNS = 16
ALARMS = 0.01  # of one certificate, over all its comparisons
SPREAD = 0.1  # of logarithms, at least: errors that are nearer together than a tenth are not told apart
PRODUCTS = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1, torch.ops.aten.bmm.default: 0}
Batch = Mapping[str, Tensor]
Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Precision:
    """The way that a run computes in its own dtype.

    Args:
        dtype: of matrix products.
        weights: of parameters in forward and backward: float32 under autocast, and `dtype` where FSDP2 or DeepSpeed
            casts them.
        sums: in which the gradients of ranks are added.
        casts: whether autocast is around forward.
        scale: by which a loss scaler of fp16 multiplies the loss, and divides the gradients.
    """

    dtype: torch.dtype
    weights: torch.dtype = torch.float32
    sums: torch.dtype = torch.float32
    casts: bool = True
    scale: float = 1.0

    def autocast(self) -> torch.autocast:
        """Return the autocast that Accelerate has around forward, and DeepSpeed has not."""
        return torch.autocast("cpu", self.dtype, enabled=self.casts and self.dtype != torch.float32)

    @property
    def unit(self) -> float:
        """The root mean square of what is lost when a number is rounded: a quarter of its last place."""
        return torch.finfo(self.dtype).eps / 4

    @property
    def number_unit(self) -> float:
        """Loss when a loss or a norm, which have the dtype of parameters, is added up and rounded."""
        return torch.finfo(self.weights).eps / 2


class OtherSums(OperatorMode):
    """Inside, a share of the matrix products add up in another order, in up to `parts` parts that are rounded."""

    def __init__(self, generator: torch.Generator, parts: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator, self.parts = generator, parts
        self.share = self.draw()

    def draw(self) -> float:
        """Draw a number between 0 and 1."""
        return float(torch.rand((), generator=self.generator))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = PRODUCTS.get(func)
        if first is None or not args[first].is_floating_point() or kwargs or self.draw() > self.share:
            return func(*args, **kwargs)
        before, left, right = args[:first], args[first], args[first + 1]
        inner = left.shape[-1]
        order = torch.randperm(inner, generator=self.generator)
        # the scores of heads, which have three dimensions, are not taken apart by ranks
        most = max(1, min(self.parts, inner)) if left.dim() == 2 else 1
        parts = [
            (left.index_select(-1, some), right.index_select(-2, some))
            for some in order.chunk(int(torch.randint(1, most + 1, (), generator=self.generator)))
        ]
        total = func(*before, *parts[0])
        for part in parts[1:]:
            total = total + torch.mm(*part)
        return total


@dataclass
class Step:
    """The loss and the gradients before clipping of a step on one process."""

    loss: float
    gradients: dict[str, Tensor]

    @property
    def norm(self) -> float:
        """The norm of all gradients, added up in float32 where they are no float64."""
        exact = any(gradient.dtype == torch.float64 for gradient in self.gradients.values())
        dtype = torch.float64 if exact else torch.float32
        return float(torch.stack([gradient.to(dtype).norm() for gradient in self.gradients.values()]).norm())

    def distance(self, gradients: Mapping[str, Tensor]) -> float:
        """Return how far other gradients are: the length of the difference over the norm."""
        off = {name: gradients[name].double() - gradient for name, gradient in self.gradients.items()}
        return Step(0.0, off).norm / self.norm


def compute_step(
    model: nn.Module,
    batches: Sequence[tuple[Batch, float]],
    *,
    context: Context,
    weights: torch.dtype,
    sums: torch.dtype,
    scale: float = 1.0,
    order: Sequence[int] | None = None,
) -> Step:
    """Compute losses and gradients of micro-batches, each times a number, added in an order."""
    total: dict[str, Tensor] = {}
    loss = 0.0
    for index in order if order is not None else range(len(batches)):
        batch, by = batches[index]
        model.zero_grad()
        with context():
            mean = model(**batch).loss
        (mean * (by * scale)).backward()
        loss += float(mean.detach().to(weights)) * by
        for name, weight in model.named_parameters():
            if weight.grad is not None:
                part = weight.grad.to(sums) / scale
                total[name] = total[name] + part if name in total else part
    model.zero_grad()
    return Step(loss, total)


def replicate(
    model: nn.Module, batches: Sequence[tuple[Batch, float]], precision: Precision, *, parts: int, seed: int, runs: int
) -> Iterator[Step]:
    """Yield steps that differ by how they are added up.

    Args:
        model: with parameters in `precision.weights`, those before the step.
        batches: the micro-batches of all positions, with what each loss is multiplied by.
        precision: of the run.
        parts: the most parts of a sum: the number of ranks.
        seed: of the first one.
        runs: the number of steps.
    """
    for run in range(runs):
        generator = torch.Generator().manual_seed(seed + run)
        order = torch.randperm(len(batches), generator=generator).tolist()
        with OtherSums(generator, parts):
            yield compute_step(
                model,
                batches,
                context=precision.autocast,
                weights=precision.weights,
                sums=precision.sums,
                scale=precision.scale,
                order=order,
            )


def length_error(values: Tensor, truth: Tensor, floor: float) -> float:
    """Return how far a tensor is from its truth: the length of the difference over that of the truth.

    Args:
        values, truth: of the same shape.
        floor: the least root mean square of the truth.
    """
    if not values.numel():
        return 0.0
    least = floor * math.sqrt(values.numel())
    error = float((values.double() - truth).norm()) / max(float(truth.norm()), least)
    return math.inf if math.isnan(error) else error


def length_bound(errors: Sequence[float], tail: float, unit: float) -> float:
    """Return the size above which one more error of a tensor is no rounding, but for a share `tail` of them."""
    logs = [0.5 * math.log(error**2 + unit**2) for error in errors]
    mean = sum(logs) / len(logs)
    spread = math.sqrt(sum((log - mean) ** 2 for log in logs) / (len(logs) - 1))
    away = student(tail, len(logs) - 1) * math.sqrt(1 + 1 / len(logs))
    return math.exp(mean + away * max(spread, SPREAD))


def number_bound(errors: Sequence[float], tail: float, unit: float) -> float:
    """Return the size above which an error of a number, of either sign, is no rounding, but for a share `tail`."""
    largest = max(abs(error) for error in errors)
    return student(tail / 2, len(errors)) * math.hypot(largest, unit)


@functools.cache
def student(tail: float, freedom: int) -> float:
    """Return the number above which Student's t is with the probability `tail`, below a half.

    With t = sqrt(freedom) / tan(u), the density over u is proportional to sin(u) ** (freedom - 1).
    """
    angles = np.linspace(0.0, math.pi / 2, 100_001)
    density = np.sin(angles) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) / math.tan(float(np.interp(tail, below / below[-1] / 2, angles)))
