"""One sharded parameter, and the node of its shard in the graph.

Optimizers change DTensors below the level at which torch counts changes, so each of their steps is counted here. What
autograd saved of a parameter is then refused after the step, as that of a plain parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_axonn.compat.torch import backward_pass, like_dtensor, placement_of, shard_has_changed, shard_in, version_of
from hf_axonn.engine.dtensors import shard_of_parameter
from hf_axonn.engine.host_weights import HostWeight, host_weight_of
from hf_axonn.engine.weight_layout import WeightLayout


def _count_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, DTensor) and parameter.grad is not None:
                shard_has_changed(parameter)
                if (host := host_weight_of(parameter)) is not None:
                    host.count_step(version_of(parameter))


register_optimizer_step_post_hook(_count_step)


def _as_stored(grad: Tensor, shape: torch.Size, transposed: bool) -> Tensor:
    """[rows / z, cols] -> as the shard is stored."""
    grad = grad.t() if transposed else grad
    return grad if grad.shape == shape else grad.view(shape)


def _take_finished(slot: GradientSlot, shape: torch.Size, transposed: bool, grad: Tensor) -> Tensor:
    """Return what later nodes have left in the slot in place of `grad`, a placeholder, as the shard is stored."""
    return _as_stored(slot.take_or(grad), shape, transposed)


class GradientSlot:
    """Finished gradients of one weight shard, which wait for the node that hands them to autograd.

    Each pass of autograd takes its own: one that is asked for other gradients (`torch.autograd.grad`, `inputs=`) does
    not come to the node, and what it has left is nobody's.
    """

    def __init__(self) -> None:
        self._parts: defaultdict[int, list[Callable[[], Tensor]]] = defaultdict(list)

    def add(self, part: Callable[[], Tensor]) -> None:
        self._parts[backward_pass()].append(part)

    def clear(self) -> None:
        self._parts.clear()

    def take(self) -> Tensor | None:
        """Return the sum of all that this pass has left here, None if that is nothing. Waits."""
        total = None
        for part in self._parts.pop(backward_pass(), ()):
            total = part() if total is None else total + part()
        return total

    def take_or(self, grad: Tensor) -> Tensor:
        """Return what was left here in place of `grad`, a placeholder; `grad` itself if nothing was. Waits."""
        arrived = self.take()
        return grad if arrived is None else arrived


def placeholder(like: Tensor) -> Tensor:
    """A gradient of the right shape that holds no memory, for the node that will replace it."""
    return like.new_zeros(()).expand(like.shape)


def only_multiplied(weights: Sequence[ShardedWeight]) -> list[ShardedWeight]:
    """Return the weights whose parameter nothing but products read, in their dtype: not an embedding's, nor that of a
    head that was tied to one later, as the loader does."""
    looked_up = {id(weight.parameter) for weight in weights if not weight.only_multiplied}
    return [weight for weight in weights if id(weight.parameter) not in looked_up]


class ShardedWeight:
    """One parameter [N, K] that is sharded over (y, x, z); the modules that share the parameter share this.

    A `transposed` one is stored as [K, N] (Transformers' Conv1D) and seen as [N, K], a `flat` one as [N, ...].

    The node of the shard in the graph is made some way ahead of its use (`GradientSchedule`), so autograd comes to it
    some way behind: until then the reduction of its gradient may be under way (ORS).

    Attributes:
        keep_gathered: whether the gathered weight is kept from forward to backward.
        stays: whether each rank uses its own shard alone, and nothing is gathered.
        only_multiplied: whether nothing but products read it here, in their dtype; else it is read in its own, too.
    """

    def __init__(
        self, module: nn.Module, name: str, *, transposed: bool = False, flat: bool = False, stays: bool = False
    ) -> None:
        self.module = module
        self.keep_gathered = False
        self.stays = stays
        self.only_multiplied = not flat
        self._name = name
        self._transposed = transposed
        self._flat = flat
        self._current: Tensor | None = None
        self._view_as_block: tuple[Tensor, WeightLayout, Tensor] | None = None
        self._placeholder: tuple[Tensor, Tensor] | None = None
        self._others: list[tuple[nn.Module, str]] = []
        self.slot = GradientSlot()

    @property
    def parameter(self) -> nn.Parameter:
        return self.module._parameters[self._name]

    @property
    def shard(self) -> Tensor:
        """This rank's shard [rows / z, cols] as it now is, outside the graph."""
        return self._view(self._on_device().detach())

    @property
    def dtype(self) -> torch.dtype:
        return self.parameter.dtype

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype that the weight's products ask for outside of autocast; None: that of their input."""
        return None

    @property
    def elements(self) -> int:
        """Numbers of the full weight."""
        return self.parameter.numel()

    def travels_as(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of what is gathered over z for products in `dtype`."""
        return dtype

    def to_gather(self, dtype: torch.dtype) -> Tensor:
        """Return what this rank sends of its shard, as `travels_as`."""
        return self._view(self._on_device(dtype).detach()).to(dtype)

    def from_gathered(self, gathered: Tensor, layout: WeightLayout, dtype: torch.dtype) -> Tensor:
        """Unpack what all ranks of z have sent, [z, elements] -> the [Q, n, P, k] of the product."""
        return layout.block(gathered)

    def block(self, layout: WeightLayout, dtype: torch.dtype) -> Tensor:
        """The [Q, n, P, k] of the product where nothing is gathered (z is 1)."""
        local, seen = self._on_device(dtype), self._view_as_block
        if seen is not None and seen[0] is local and seen[1] is layout and local.dtype == dtype:
            return seen[2]
        block = layout.block(self._view(local.detach()).to(dtype))
        if local.dtype == dtype and layout.divides and local.is_contiguous() and not self._transposed:
            self._view_as_block = (local, layout, block)  # a view: as the shard changes, so does it
        return block

    def as_parameter(self, grad: Tensor) -> DTensor:
        """A gradient [rows / z, cols] of this rank's shard as one of the parameter."""
        parameter = cast(DTensor, self.parameter)
        return like_dtensor(_as_stored(grad, shard_in(parameter).shape, self._transposed), placement_of(parameter))

    def add_gradient(self, grad: Tensor) -> None:
        """Add a gradient, as the parameter is stored, to that of the parameter, as a backward pass does."""
        parameter = self.parameter
        if parameter.grad is None:
            parameter.grad = grad
        else:
            shard_in(cast(DTensor, parameter.grad)).add_(shard_in(cast(DTensor, grad)))

    def placeholder(self) -> Tensor:
        """A gradient of the shard that holds no memory."""
        local = shard_in(cast(DTensor, self.parameter))
        if self._placeholder is None or self._placeholder[0] is not local:
            self._placeholder = (local, placeholder(self._outline()))
        return self._placeholder[1]

    @property
    def version(self) -> int:
        """A number that changes whenever the values change in place, or the module has another parameter."""
        parameter = self.module._parameters[self._name]
        return version_of(parameter) + id(parameter)

    def note_look_ups(self) -> None:
        """Note that rows are looked up in it, in its own dtype."""
        self.only_multiplied = False

    def keep_on_host(self, dtype: torch.dtype) -> None:
        """Move this rank's shard, in float32, to host memory; products in `dtype` read a copy on the device."""
        parameter = cast(DTensor, self.parameter)
        parameter.host_weight = HostWeight(parameter, dtype)  # type: ignore[attr-defined]  # as `sharded_as` is
        self._view_as_block = self._placeholder = None

    def _on_device(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return this rank's shard as stored, in `dtype` if there is a copy in it, else in its own."""
        parameter = cast(DTensor, self.parameter)
        host = host_weight_of(parameter)
        return shard_in(parameter) if host is None else host.values(version_of(parameter), dtype)

    def _outline(self) -> Tensor:
        """Return a tensor like the shard [rows / z, cols], which has no values where those lie in host memory."""
        parameter = cast(DTensor, self.parameter)
        host = host_weight_of(parameter)
        return self._view((shard_in(parameter) if host is None else host.outline).detach())

    def _view(self, local: Tensor) -> Tensor:
        local = local.t() if self._transposed else local
        return local.flatten(1) if self._flat else local

    def _in_graph(self) -> Tensor:
        parameter = self.parameter
        if not (torch.is_grad_enabled() and parameter.requires_grad):
            return self._outline()
        # Without `self`: what a graph holds must not hold the graph.
        finish = partial(_take_finished, self.slot, shard_in(cast(DTensor, parameter)).shape, self._transposed)
        host = host_weight_of(parameter)
        view = self._view if host is None else lambda _: self._outline()
        return shard_of_parameter(parameter, view, finish)

    def share_with(self, module: nn.Module, name: str) -> None:
        """Note another module that has the parameter."""
        self._others.append((module, name))

    def begin_forward(self) -> None:
        """Forget the pass before; what a broken backward pass left behind is dropped.

        Raises:
            ValueError: a module that shared the parameter has another one now.
        """
        for module, name in self._others:
            if module._parameters[name] is not self.parameter:
                raise ValueError(
                    f"{type(self.module).__name__} and {type(module).__name__} had one weight, of shape "
                    f"{list(self.parameter.shape)}, when the model was sharded, and have two now: untie them before "
                    "(tie_word_embeddings=False), or call model.tie_weights()."
                )
        self.slot.clear()
        self._current = None

    def make_node(self) -> None:
        """Make the node of this pass, if that has not been done."""
        if self._current is None and torch.is_grad_enabled():
            self._current = self._in_graph()

    def local(self) -> Tensor:
        """This rank's shard [rows / z, cols], in the graph where gradients are wanted, for its gradient: where its
        values lie in host memory it has none (NaN)."""
        if not torch.is_grad_enabled():
            return self._outline()
        self.make_node()
        return self._current
