"""Modules beside the experts of a mixture, as shared experts: they are computed while tokens travel.

The model's own code calls them after the experts with an input that was there all the time, or before and uses the
result after (architectures/shared_experts.py finds them). Once the tokens have left, the experts call them:

    called after     the model's later call takes the result; with any other input it runs as ever. So it is where the
                     code around the mixture calls it
    called before    the model's call returns a `Later`, and so does that of another such module of it, as a norm; code
                     that uses it before the experts computes it there

In each case a module runs once, with its hooks and adapters.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from hf_axonn.compat.later import Later, take_outputs
from hf_axonn.compat.torch import changes_of, is_view
from hf_axonn.layers.base import patch_forward, replaced, split_hidden_states


class Beside(enum.Enum):
    """The order in which the code of a mixture calls its experts and a module beside them, and with which input."""

    BEFORE = "before the experts, with any input"
    OF_MIXTURE = "after the experts, with the input of the mixture"
    OF_EXPERTS = "after the experts, with the input of the experts"


class ComputedAhead:
    """Modules beside the experts of a mixture that are computed while tokens travel.

    Args:
        mixture: the module whose forward calls the experts and these modules.
        beside: names of these children of it, and when it calls them.
        after: modules that are called after the mixture with the same input.
    """

    def __init__(self, mixture: nn.Module, beside: Mapping[str, Beside], after: Sequence[nn.Module] = ()) -> None:
        self._mixture = mixture
        self._beside = beside
        self._after = [_After(module) for module in after]
        self._input: Tensor | None = None
        self._calls: dict[str, _Call] = {}
        patch_forward(mixture, self.run)

    def keep_order(self) -> None:
        """Let the mixture's own code call these children in its order from now on, as in a graph of torch.compile, to
        which no tensor can be given that stands for another."""
        self._beside = {}

    def compute(self, hidden: Tensor) -> None:
        """Compute the modules now. Collectives: those of the modules.

        Args:
            hidden: the input of the experts.
        """
        assert self._input is not None  # inside of the mixture
        for name, call in self._calls.items():
            call.run(self._input if self._beside[name] is Beside.OF_MIXTURE else hidden)
        for module in self._after:
            module.run(self._input)

    def run(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        """Return `forward(*args, **kwargs)` of the mixture, with modules in it that can be computed ahead."""
        self._input, *_ = split_hidden_states(args, kwargs)
        self._calls = {
            name: _Call(self._mixture.get_submodule(name), waits=beside is Beside.BEFORE)
            for name, beside in self._beside.items()
        }
        try:
            # An entry of __dict__ is found before nn.Module looks among its modules.
            with replaced(self._mixture.__dict__, self._calls):
                return take_outputs(forward(*args, **kwargs))
        except BaseException:  # a layer that is recomputed may end in here
            for module in self._after:
                module.forget()
            raise
        finally:
            self._input, self._calls = None, {}


class _Computed(NamedTuple):
    """The output of a module for a tensor that had been changed so often."""

    hidden: Tensor
    changes: int
    output: Any

    def is_of(self, args: tuple, kwargs: dict) -> bool:
        """Return whether these are the arguments of a call that has this output."""
        return (
            len(args) == 1 and not kwargs and is_view(args[0], self.hidden) and changes_of(self.hidden) == self.changes
        )


class _Call:
    """Stands for a module in the code of its mixture.

    Args:
        waits: whether a call before `run` waits for it; else a call takes what `run` has computed of the same tensor.
    """

    def __init__(self, module: nn.Module, *, waits: bool) -> None:
        self._module = module
        self._before = self._waits = waits
        self._later: Later | None = None
        self._computed: _Computed | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def run(self, hidden: Tensor) -> None:
        """Compute what waits, or the module of `hidden`."""
        if not self._before:
            self._computed = _Computed(hidden, changes_of(hidden), self._module(hidden))
        elif self._later is not None:
            self._later.output()
        self._waits, self._later = False, None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._waits and len(args) == 1 and not kwargs:
            self._waits, self._later = False, Later(self._module, *args)
            return self._later
        args, kwargs = take_outputs((args, kwargs))
        computed, self._computed = self._computed, None
        return computed.output if computed and computed.is_of(args, kwargs) else self._module(*args, **kwargs)


class _After:
    """A module that is called after the mixture: it runs ahead without its hooks, which see its output at the call."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._runs_ahead = False
        self._computed: _Computed | None = None
        patch_forward(module, self._forward)

    def run(self, hidden: Tensor) -> None:
        """Compute the module of `hidden`."""
        self._runs_ahead = True
        try:
            self._computed = _Computed(hidden, changes_of(hidden), self._module.forward(hidden))
        finally:
            self._runs_ahead = False

    def forget(self) -> None:
        """Drop what has been computed."""
        self._computed = None

    def _forward(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        if self._runs_ahead:
            return original(*args, **kwargs)
        computed, self._computed = self._computed, None
        return computed.output if computed and computed.is_of(args, kwargs) else original(*args, **kwargs)
