"""One sharded parameter, and the node of its shard in the graph.

Optimizers change DTensors below the level at which torch counts changes, so each of their steps is counted here. What
autograd saved of a parameter is then refused after the step, as that of a plain parameter.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_axonn.compat.torch import shard_has_changed, version_of
from hf_axonn.engine.overlap import GradientSlot, wait_gradient


def _count_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, DTensor) and parameter.grad is not None:
                shard_has_changed(parameter)


register_optimizer_step_post_hook(_count_step)


class ShardedWeight:
    """One parameter [N, K] that is sharded over (y, x, z); the modules that share the parameter share this.

    A `transposed` one is stored as [K, N] (Transformers' Conv1D) and seen as [N, K], a `flat` one as [N, ...].

    The node of the shard in the graph is made some way ahead of its use (`GradientSchedule`), so autograd comes to it
    some way behind: until then the reduction of its gradient may be under way (ORS).

    Attributes:
        keep_gathered: whether the gathered weight is kept from forward to backward.
    """

    def __init__(self, module: nn.Module, name: str, *, transposed: bool = False, flat: bool = False) -> None:
        self.module = module
        self.keep_gathered = False
        self._name = name
        self._transposed = transposed
        self._flat = flat
        self._current: Tensor | None = None
        self.slot = GradientSlot()

    @property
    def parameter(self) -> nn.Parameter:
        return self.module._parameters[self._name]

    @property
    def shard(self) -> Tensor:
        """This rank's shard [rows / z, cols] as it now is, outside the graph."""
        return self._view(self.parameter.to_local()).detach()

    @property
    def version(self) -> int:
        """Another number whenever the values have changed in place."""
        return version_of(cast(DTensor, self.parameter))

    def _view(self, local: Tensor) -> Tensor:
        local = local.t() if self._transposed else local
        return local.flatten(1) if self._flat else local

    def _in_graph(self) -> Tensor:
        parameter = self.parameter
        if not (torch.is_grad_enabled() and parameter.requires_grad):
            return self.shard
        return wait_gradient(self._view(parameter.to_local()), self.slot)

    def begin_forward(self) -> None:
        """Forget the pass before; what a broken backward pass left behind is dropped."""
        self.slot.clear()
        self._current = None

    def make_node(self) -> None:
        """Make the node of this pass, if that has not been done."""
        if self._current is None and torch.is_grad_enabled():
            self._current = self._in_graph()

    def local(self) -> Tensor:
        """This rank's shard [rows / z, cols], in the graph where gradients are wanted."""
        if not torch.is_grad_enabled():
            return self.shard
        self.make_node()
        return self._current
