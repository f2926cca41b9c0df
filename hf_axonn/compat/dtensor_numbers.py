"""Numbers of DTensors on a grid's mesh beside plain tensors: sums, differences and products of both, and their norms;
and such numbers in texts.

torch treats a plain number as one that all ranks have, and makes a DTensor of the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from hf_axonn.compat.torch import grid_of


# What Python calls of the right operand's class first, too, where that is a subclass of the left one's.
OPERATORS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv")


@functools.cache
def meet_plain_tensors(whole: Callable[[DTensor], torch.Tensor]) -> None:
    """Let a number that was made of parameters on an `unnamed_mesh` be a plain one where an operator (+ - * /) has it
    and a plain tensor, as in `loss + penalty` or `loss += penalty`: torch would make a DTensor of both, which
    collectives refuse, and has an AssertionError for sums in place. With a format, as in `f"{norm:.3f}"`, too. Once.

    Args:
        whole: makes the plain number, in the graph.
    """

    def meeting(original: Callable) -> Callable:
        @functools.wraps(original)
        def operator(self: DTensor, other: Any) -> Any:
            plain = isinstance(other, torch.Tensor) and not isinstance(other, DTensor)
            if plain and self.dim() == 0 and grid_of(self.device_mesh):
                return original(whole(self), other)
            return original(self, other)

        return operator

    def format_number(self: DTensor, spec: str) -> str:  # torch's refuses every spec
        number = spec and self.dim() == 0 and grid_of(self.device_mesh)
        return torch.Tensor.__format__(self.full_tensor() if number else self, spec)

    setattr(DTensor, "__format__", format_number)  # noqa: B010 - a method of another class
    for name in OPERATORS:
        setattr(DTensor, f"__{name}__", meeting(getattr(DTensor, f"__{name}__")))
    handlers: dict = DTensor._op_dispatcher._custom_op_handlers
    for name in ("add_", "sub_"):
        operator = getattr(torch.ops.aten, name).Tensor
        handlers[operator] = functools.partial(_in_place, handlers)
    # Of each gradient, under torch.autograd.detect_anomaly: whether this rank's part has a NaN.
    handlers[torch.ops.aten._is_any_true.default] = lambda operator, args, kwargs: operator(args[0]._local_tensor)
    for operator in (torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList):
        handlers[operator] = functools.partial(_sum_of, handlers)


def _in_place(handlers: dict, operator: Any, args: tuple, kwargs: dict) -> Any:
    """`own += other` and `own -= other` where one is a DTensor; the sums of gradients come here, too.

    Raises:
        TypeError: `own` is a plain tensor. Python then makes it `own = own + other`, as of any other operands.
    """
    own, other = args[0], args[1]
    if not isinstance(own, DTensor):
        if own.dim():
            raise TypeError(
                f"{operator} would change a plain tensor of shape {tuple(own.shape)} in place by what was computed "
                "from sharded parameters: make an average of weights (EMA) of clones of the sharded parameters, not "
                "of those that the model had before."
            )
        raise TypeError(
            f"{operator} would change a plain tensor in place by a number that was computed from sharded parameters: "
            "use loss + penalty or loss += penalty."
        )
    alike = isinstance(other, DTensor) and own.shape == other.shape and own.placements == other.placements
    if alike and grid_of(own.device_mesh) and own.device_mesh is other.device_mesh:
        operator(own._local_tensor, other._local_tensor, *args[2:], **kwargs)
        return own
    return _by_torch(handlers, operator, args, kwargs)


def _by_torch(handlers: dict, operator: Any, args: tuple, kwargs: dict) -> Any:
    """Call an operator in torch's own way, without its handler here."""
    handler = handlers.pop(operator, None)
    try:
        return operator(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[operator] = handler


def _sum_of(handlers: dict, operator: Any, args: tuple, kwargs: dict) -> Any:
    """Sums of what ranks hold as parts of norms or as largest values: torch sums the parts."""
    summand = args[0]
    if grid_of(summand.device_mesh) and any(map(_is_no_sum, summand.placements)):
        with torch.no_grad():  # autograd is above
            whole = [Replicate() if placement.is_partial() else placement for placement in summand.placements]
            args = (summand.redistribute(placements=whole), *args[1:])
    return _by_torch(handlers, operator, args, kwargs)


def _is_no_sum(placement: Placement) -> bool:
    """Return whether ranks hold parts of something else than a sum; the class of parts of norms is another one."""
    return placement.is_partial() and (type(placement) is not Partial or placement.reduce_op != "sum")


@functools.cache
def draw_alike(shard_like: Callable[[torch.Tensor, DTensor], DTensor]) -> None:
    """Let random numbers for a DTensor on an `unnamed_mesh` of CPUs, as of `parameter.normal_()` and `randn_like`, be
    those of the full tensor by this rank's generator: torch has each rank draw for its own shard, the same numbers for
    all where generators are alike. On GPUs torch does so by itself. Once.

    Args:
        shard_like: makes this rank's shard of a full plain tensor.
    """
    handlers: dict = DTensor._op_dispatcher._custom_op_handlers

    def draw(operator: Any, args: tuple, kwargs: dict) -> Any:
        own = args[0]
        if not grid_of(own.device_mesh) or own._local_tensor.device.type != "cpu":
            return _by_torch(handlers, operator, args, kwargs)
        with torch.no_grad():
            full = operator(torch.empty(own.shape, dtype=own.dtype), *args[1:], **kwargs)
            drawn = shard_like(full, own)
        if not operator._schema.is_mutable:
            return drawn
        own._local_tensor.copy_(drawn._local_tensor)
        return own

    aten = torch.ops.aten
    in_place = (aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float)
    for operator in (*in_place, aten.rand_like.default, aten.randn_like.default, aten.randint_like.default):
        handlers[operator] = draw


# torch's own, whatever `total_norm_by` has put in their place
total_norm, clip_with_norm = torch.nn.utils.get_total_norm, torch.nn.utils.clip_grads_with_norm_


def total_norm_by(other: Callable[[list[torch.Tensor], float], torch.Tensor | None]) -> None:
    """Let `torch.nn.utils.clip_grad_norm_` and `get_total_norm` return what `other(tensors, norm_type)` returns, where
    that is not None, and clip DTensors and plain gradients together. For scripts that have imported `clip_grad_norm_`
    before, too."""
    from torch.nn.utils import clip_grad

    def norm_of(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        found = other(tensors, float(norm_type))
        if found is None:
            return total_norm(tensors, norm_type, error_if_nonfinite, foreach)
        # The norm of this one norm, which is the same, for the error that torch raises.
        return total_norm([found], norm_type, error_if_nonfinite, foreach)

    def clip(
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        total_norm: torch.Tensor,
        foreach: bool | None = None,
    ) -> None:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        sharded = [each for each in parameters if isinstance(each.grad, DTensor)]
        plain = [each for each in parameters if not isinstance(each.grad, DTensor)]
        if plain and isinstance(total_norm, DTensor):
            total_norm = total_norm.full_tensor()
        for group in (sharded, plain):  # one kernel does not take both
            clip_with_norm(group, max_norm, total_norm, foreach)

    setattr(clip_grad, "_get_total_norm", norm_of)  # noqa: B010
    setattr(clip_grad, "_clip_grads_with_norm_", clip)  # noqa: B010
    torch.nn.utils.get_total_norm, torch.nn.utils.clip_grads_with_norm_ = norm_of, clip
