"""PEFT's LoRA of a parameter itself (lora.ParamWrapper): the weights of experts [E, ., .], and of routers.

PEFT adds scaling * B @ A to the parameter while its module runs. Here the sharded layer of the module does so, to what
it shows the module's code: this rank's experts, gathered over z or whole, or a replicated parameter. A and B are
replicated; each rank uses the part of its own experts. Autograd keeps the sum until backward: of each layer this
rank's experts, where they are gathered the memory that they take on a grid with z = 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hf_axonn.compat.peft import WHILE_ACTIVE, output_comes_first
from hf_axonn.engine.dtensors import replicated_local
from hf_axonn.engine.state import ParallelState
from hf_axonn.layers.base import Replicated
from hf_axonn.layers.moe import Experts


class ParameterLora:
    """The adapters of one parameter; `layer` is PEFT's wrapper around its module. No communication."""

    def __init__(self, state: ParallelState, layer: nn.Module, sharded: Experts | Replicated) -> None:
        self.state, self.layer, self.sharded = state, layer, sharded
        self.axes = ("x", "y") if isinstance(sharded, Experts) else sharded.partial_axes
        setattr(layer, WHILE_ACTIVE, self._active)

    @contextlib.contextmanager
    def _active(self, adapters: list[str]) -> Iterator[None]:
        """Let the module see the parameter with these adapters inside."""
        adapters = [adapter for adapter in adapters if adapter in self.layer.lora_A]
        added = self.sharded.added
        if adapters:
            added[self.layer.parameter_name] = lambda shown: self._add(shown, adapters)
        try:
            yield
        finally:
            added.pop(self.layer.parameter_name, None)

    def _add(self, shown: Tensor, adapters: list[str]) -> Tensor:
        own = self.sharded.range if isinstance(self.sharded, Experts) else None
        experts = slice(None) if own is None else slice(own.start, own.stop)
        for adapter in adapters:
            a, b = (
                replicated_local(part[adapter].weight, self.state.grid_mesh, self.axes)
                for part in (self.layer.lora_A, self.layer.lora_B)
            )
            left, right = factors(self.layer, a, b, experts)
            stack = shown.view(-1, *shown.shape[-2:])
            with torch.autocast(shown.device.type, enabled=False):  # the module is to find the dtype that it expects
                left, right = left.to(shown.dtype), right.to(shown.dtype)
                stack = torch.baddbmm(stack, left, right, alpha=self.layer.scaling[adapter])
            shown = stack.view(shown.shape)
        return shown


def factors(layer: nn.Module, a: Tensor, b: Tensor, experts: slice) -> tuple[Tensor, Tensor]:
    """(left [e, P, r], right [e, r, Q]) whose product is added to a parameter [e, P, Q] of some experts, or [P, Q].

    A is [E * r, in], numbered by expert first, and B [out, r * E], by expert last, as PEFT has them.
    """
    count = layer.num_experts
    a = a.view(count, -1, a.shape[-1])[experts]
    b = b.view(b.shape[0], -1, count).permute(2, 0, 1)[experts]
    return (b, a) if output_comes_first(layer) else (a.transpose(1, 2), b.transpose(1, 2))
