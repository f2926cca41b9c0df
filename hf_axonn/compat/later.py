"""The output of a module that is computed at the first use of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hf_axonn.compat.torch import autocast_settings, changes_of


T = TypeVar("T")


class Later(Tensor):
    """Stands for the output, one tensor, of a module: every use of it is one of that, which is computed as it was
    called, with or without gradients and autocast.

    Args:
        module: what is computed.
        hidden: its input, a tensor or the `Later` of a module before it.
    """

    REFUSED = (
        "uses the output of a module beside the experts without gradients or past torch's functions, as an "
        "autograd.Function does, but with experts: move it is computed while tokens travel. Use experts: gather for "
        "this model."
    )
    _compute: Callable[[], Tensor] | None
    _output: Tensor
    _changes: int  # of the output when it was computed
    _first: Tensor  # the input of the first module

    @staticmethod
    def __new__(cls, module: nn.Module, hidden: Tensor) -> Later:
        first = hidden._first if isinstance(hidden, Later) else hidden
        later = Tensor._make_wrapper_subclass(cls, (0,), dtype=first.dtype, device=first.device)
        changes, gradients, autocast = changes_of(first), torch.is_grad_enabled(), autocast_settings(first.device.type)

        def compute() -> Tensor:
            given, before = (hidden.output(), hidden._changes) if isinstance(hidden, Later) else (hidden, changes)
            if changes_of(given) != before:
                raise RuntimeError(
                    f"the input of a {type(module).__name__} was changed in place after the call, but with experts: "
                    "move it is computed while tokens travel. Use experts: gather for this model."
                )
            again = autocast_settings(first.device.type) != autocast
            with torch.set_grad_enabled(gradients), torch.autocast(**autocast) if again else contextlib.nullcontext():
                return module(given)

        later._compute, later._first = compute, first
        return later

    def output(self) -> Tensor:
        """Return the output of the module. Collectives: those of the module, at the first call.

        Raises:
            RuntimeError: the input has been changed in place.
        """
        if self._compute is not None:
            compute, self._compute = self._compute, None
            self._output = compute()
            self._changes = changes_of(self._output)
        return self._output

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        def take(value: Any) -> Any:
            if not isinstance(value, Later):
                return value
            output = value.output()
            if output.requires_grad and not torch.is_grad_enabled():
                raise RuntimeError(f"{func} {cls.REFUSED}")  # an autograd.Function would cut the graph here
            return output

        return func(*tree_map(take, args), **tree_map(take, kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, *call: Any, **_: Any) -> Any:
        raise RuntimeError(f"{call[0]} {cls.REFUSED}")


def take_outputs(value: T) -> T:
    """Return what a module returned, with the outputs of others in place of each `Later`."""
    return tree_map(lambda each: each.output() if isinstance(each, Later) else each, value)
