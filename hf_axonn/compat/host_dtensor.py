"""DTensors whose shard lies in host memory, while they are on the device by what they say.

The gradient of a parameter has to lie on the device that the parameter names. torch's own operators take the device of
a DTensor for that of its shard, so here they get a DTensor that says what is true.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only


ON_DEVICE = (torch.ops.aten.zeros_like.default, torch.ops.aten._to_copy.default)


class HostDTensor(DTensor):
    """A DTensor whose shard lies in host memory (`move_shard`).

    Operators work in host memory and return ordinary DTensors, but for three: `detach()`, and so `data` and the values
    of a `state_dict()`, is one of these in the same memory; zeros like it, for gradients, and its values in another
    dtype are on the device. A change in place is counted on the shard, whoever makes it. What gathers goes by way of
    the device.
    """

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.detach.default:
            return args[0]._alias()
        if func in ON_DEVICE and kwargs.get("device") is None:
            kwargs["device"] = args[0].device
        given, named = tree_map_only(cls, lambda tensor: tensor._seen_as(tensor._local_tensor), (args, kwargs))
        result = func(*given, **named)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(value):
                    if isinstance(tensor, cls):
                        torch.autograd.graph.increment_version(tensor._local_tensor)
        return args[0] if given and result is given[0] else result

    def _seen_as(self, shard: torch.Tensor) -> DTensor:
        return cast(Any, DTensor)(shard, self._spec, requires_grad=False)

    def _alias(self) -> HostDTensor:
        """Return another one in the same memory, in no graph, with what hangs on this one."""
        outline = self._local_tensor.new_empty((), device=self.device).expand(self._local_tensor.shape)
        alias: Any = self._seen_as(outline)
        vars(alias).update({name: value for name, value in vars(self).items() if name != "_is_param"})
        move_shard(alias, self._local_tensor)
        return alias

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:  # as of others (compat/torch.py), but the shard stays where it is
        if value.shape != self.shape or value.dtype != self.dtype:
            raise ValueError(
                f"a weight in host memory (offload: optimizer) stays {self.dtype} of shape {tuple(self.shape)}, and "
                f"its data cannot become {value.dtype} of {tuple(value.shape)}: omit offload."
            )
        with torch.no_grad():
            self.copy_(value)

    def on_device(self) -> DTensor:
        """Return an ordinary DTensor on the device, outside of the graph: a copy."""
        return self._seen_as(self._local_tensor.detach().to(self.device))

    def full_tensor(self, **options: Any) -> torch.Tensor:
        """Return the full tensor, on the device. Collectives: as that of a DTensor."""
        return _OnDevice.apply(self).full_tensor(**options)

    def redistribute(self, *args: Any, **options: Any) -> DTensor:
        """Return one that lies otherwise, on the device. Collectives: as that of a DTensor."""
        return _OnDevice.apply(self).redistribute(*args, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._seen_as(self._local_tensor).__reduce_ex__(protocol)


class _OnDevice(torch.autograd.Function):
    """An ordinary DTensor on the device, in the graph: its gradient is the parameter's, which is there, too."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.on_device()

    @staticmethod
    def backward(ctx, grad):
        return grad


def move_shard(tensor: DTensor, home: torch.Tensor) -> None:
    """Let a DTensor have this shard, in host memory, of the shape and dtype of the one that it has. The object, and
    the device that it names, stay."""
    tensor._local_tensor = home
    tensor.__class__ = HostDTensor


def asks_class(parameter: DTensor) -> bool:
    """Return whether operators of this torch ask `HostDTensor`. Those of 2.11 take every DTensor alike."""
    probe = cast(DTensor, parameter.detach())
    move_shard(probe, probe._local_tensor)
    return type(probe.detach()) is HostDTensor
