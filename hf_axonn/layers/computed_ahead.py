"""Modules that a mixture calls after its experts, as shared experts: they are computed before, while tokens travel.

The model's own code calls the experts, then the module beside them, whose input was there all the time. The experts
call that module in between, and the model's later call takes the result: the module runs once, with its hooks and
adapters. A call with any other input runs as ever (architectures/shared_experts.py finds such modules).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from hf_axonn.compat.torch import changes_of
from hf_axonn.layers.base import patch_forward, replaced, split_hidden_states


class ComputedAhead:
    """Modules of a mixture that can be computed ahead of their call.

    Args:
        mixture: the module whose forward calls the experts, and then these modules.
        inputs: names of these children of it; True for one whose input is that of the mixture, False for one whose
            input is that of the experts.
    """

    def __init__(self, mixture: nn.Module, inputs: Mapping[str, bool]) -> None:
        self._mixture = mixture
        self._inputs = inputs
        self._input: Tensor | None = None
        self._calls: dict[str, _Call] = {}
        patch_forward(mixture, self._forward)

    def compute(self, hidden: Tensor) -> None:
        """Compute the modules now. Collectives: those of the modules.

        Args:
            hidden: the input of the experts.
        """
        for name, call in self._calls.items():
            given = self._input if self._inputs[name] else hidden
            assert given is not None  # inside of the mixture
            call.run(given)

    def _forward(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        self._input, *_ = split_hidden_states(args, kwargs)
        self._calls = {name: _Call(self._mixture.get_submodule(name)) for name in self._inputs}
        try:
            # An entry of __dict__ is found before nn.Module looks among its modules.
            with replaced(self._mixture.__dict__, self._calls):
                return original(*args, **kwargs)
        finally:
            self._input, self._calls = None, {}


class _Call:
    """Stands for a module in the code of its mixture. A call takes what `run` has computed of the same tensor."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._computed: tuple[Tensor, int, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def run(self, hidden: Tensor) -> None:
        self._computed = hidden, changes_of(hidden), self._module(hidden)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        computed, self._computed = self._computed, None
        if computed is not None and len(args) == 1 and not kwargs:
            hidden, version, output = computed
            if args[0] is hidden and changes_of(hidden) == version:
                return output
        return self._module(*args, **kwargs)
