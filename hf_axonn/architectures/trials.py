"""Trials of a model's own code, on random numbers on the CPU: what is found out by running it, not by its name.

Every rank tries the same numbers and finds the same. No communication; the model is unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_axonn.engine.linears import linear_size


EXACT = 1e-12


@contextlib.contextmanager
def isolate() -> Iterator[None]:
    """Run on the CPU, even where models are built on meta, and leave no trace of random numbers or warnings."""
    with torch.device("cpu"), torch.random.fork_rng([]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def close(truth: Tensor, ours: Tensor, bound: float) -> bool:
    """Return whether the largest difference is within `bound`, a share of the largest value of `truth`."""
    return bool((truth - ours).abs().max() <= bound * truth.abs().max())


@contextlib.contextmanager
def replace_forwards(around: nn.Module, stubs: Mapping[nn.Module, Callable]) -> Iterator[None]:
    """Give modules another forward for a while, and take the module around them out of training mode:
    dropout is elementwise."""
    training = {module: module.training for module in around.modules()}
    before = {module: vars(module).get("forward") for module in stubs}
    try:
        for module in training:
            module.training = False
        for module, stub in stubs.items():
            module.forward = stub
        yield
    finally:
        for module, was in training.items():
            module.training = was
        for module, forward in before.items():
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def mixes_features(
    entry: nn.Module, columns: Mapping[nn.Module, int], row: nn.Module, elementwise: Sequence[nn.Module]
) -> bool:
    """Return whether code between the column layers and the row layer of an MLP mixes features, as a mean over them.

    It runs with elementwise functions in the place of the layers, on all features and on two parts of them. False too
    where it does not run so.

    Args:
        columns: each with the number of its packed parts.
        elementwise: other modules inside, of which it is known what they do.
    """
    stubs: dict[nn.Module, Callable] = {row: lambda hidden: hidden}
    stubs |= dict.fromkeys(elementwise, torch.cos)
    for place, (column, parts) in enumerate(columns.items()):
        stubs[column] = functools.partial(_stand_in, place, parts)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, 4, 6, generator=generator, dtype=torch.float64, device="cpu")
    try:
        with isolate(), replace_forwards(entry, stubs), torch.no_grad():
            full, shares = entry.forward(hidden), [entry.forward(part) for part in hidden.split((2, 4), dim=-1)]
            return not close(full, torch.cat(shares, dim=-1), EXACT)
    except Exception:  # code that takes more inputs, or gives other results
        return False


def expands_by_position(expand: Callable, around: nn.Module, up: nn.Module, rotary: int) -> bool:
    """Return whether a method that makes keys and values of latents and rotary keys makes those of each position by
    itself: it runs on four positions, and on parts of them. False too where it does not run so.

    Args:
        around: the module that has the method.
        up: the Linear that it calls on latents; a function of one feature takes its place.
        rotary: features of a rotary key.
    """
    made, latent = linear_size(up)
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(1, 1, 4, latent + rotary, generator=generator, dtype=torch.float64, device="cpu")
    scales = torch.arange(1, made + 1, device="cpu")
    stubs = {up: lambda hidden: torch.sin(hidden[..., :1] * scales)}

    def run(positions: Tensor) -> tuple[Tensor, Tensor]:
        return expand(*positions.split((latent, rotary), dim=-1))

    try:
        with isolate(), replace_forwards(around, stubs), torch.no_grad():
            whole, first, rest = (run(each) for each in (given, given[:, :, :1], given[:, :, 1:]))
            parts = (torch.cat(each, dim=2) for each in zip(first, rest, strict=True))
            return all(map(torch.equal, whole, parts))
    except Exception:  # code that takes other arguments, or gives other results
        return False


def _stand_in(place: int, parts: int, hidden: Tensor) -> Tensor:
    return torch.cat([torch.sin(hidden * (place + part + 1)) for part in range(parts)], dim=-1)


class Wide(TorchFunctionMode):
    """A mode in which casts of float64 to a smaller float type, as norms do, leave the tensor as it is."""

    small = (torch.float32, torch.float16, torch.bfloat16)
    casts = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(isinstance(arg, Tensor) and arg.dtype == torch.float64 for arg in args):
            if func in self.casts:
                return args[0]
            args = [torch.float64 if self._is_small(arg) else arg for arg in args]
            kwargs = {key: torch.float64 if self._is_small(value) else value for key, value in kwargs.items()}
        return func(*args, **kwargs)

    def _is_small(self, value: object) -> bool:
        return isinstance(value, torch.dtype) and value in self.small
