"""State of models and optimizers as flat dictionaries of tensors, and back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Adam, AdamW

from hf_axonn.compat.low_bit_adam import is_adam
from hf_axonn.engine.dtensors import local
from hf_axonn.engine.low_bit_adam import FLOAT32, empty_moments, quantize_moments


def model_tensors(model: nn.Module) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return parameters and persistent buffers by their names in the plain model, and the second names of tied ones.

    The tensors are the model's own: what is written into them is in the model. A second name of a tied tensor is saved
    like any other, because Transformers' loader of sharded checkpoints asks for every name.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    tensors = cast("dict[str, torch.Tensor]", get_model_state_dict(model))
    seen: set[tuple[object, ...]] = set()
    tied = []
    for name, tensor in tensors.items():
        shard = local(tensor)
        key = (shard.untyped_storage().data_ptr(), shard.storage_offset(), shard.shape)
        if shard.numel() and key in seen:
            tied.append(name)
        seen.add(key)
    return tensors, tied


@contextlib.contextmanager
def _without_empty_groups(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizer under accelerate's wrapper, without groups of no parameters, which torch cannot flatten."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    empty = [(place, group) for place, group in enumerate(optimizer.param_groups) if not group["params"]]
    for _, group in empty:
        optimizer.param_groups.remove(group)
    try:
        yield optimizer
    finally:
        for place, group in empty:
            optimizer.param_groups.insert(place, group)


@contextlib.contextmanager
def _leave_unstepped(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep torch from making the state of an optimizer that has not stepped by a step, which AdamW would count: it
    makes none beside a gradient."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    first = next((parameter for parameter in parameters if parameter.requires_grad), None)
    if first is None or optimizer.state or any(parameter.grad is not None for parameter in parameters):
        yield
        return
    first.grad = first.detach()
    try:
        yield
    finally:
        first.grad = None


def flat_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return an optimizer's state by parameter name: (tensors, numbers and other plain values). Of one that has not
    stepped yet these are the settings of its groups.

    Raises:
        ValueError: what its `state_dict()` returns is not the state and the groups of its parameters.
    """
    with _leave_unstepped(getattr(optimizer, "optimizer", optimizer)):
        return _flatten(model, optimizer)


def _flatten(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    options = StateDictOptions(flatten_optimizer_state_dict=True)
    with _without_empty_groups(optimizer) as inner:
        try:
            flat = cast("dict[str, Any]", get_optimizer_state_dict(model, inner, options=options))
        except KeyError as problem:
            if problem.args not in (("state",), ("param_groups",)):
                raise
            raise ValueError(
                f"the state_dict() of {type(inner).__name__} has no {problem}, and so cannot be saved by parameters: "
                "give an optimizer that steps others one state and all their groups (Both in docs/trainer.md)."
            ) from None
    tensors = {key: value for key, value in flat.items() if isinstance(value, torch.Tensor)}
    return tensors, {key: value for key, value in flat.items() if key not in tensors}


def fresh_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the tensors of `flat_optimizer_state` with a state for every parameter, to be overwritten: torch makes it
    by a step that changes no parameter."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if is_adam(inner):
        return {
            f"state.{name}.{key}": value
            for name, parameter in _trained_by(model, inner)
            for key, value in empty_moments(parameter).items()
        }
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    if any(parameter.requires_grad and parameter not in inner.state for parameter in parameters):
        inner.state.clear()  # torch makes all of it or nothing, by a step
        for group in inner.param_groups:
            if "train_mode" in group:  # schedule-free optimizers refuse a step without
                group["train_mode"] = True
    for parameter in parameters:
        parameter.grad = None  # torch makes no state beside gradients
    tensors, _ = _flatten(model, optimizer)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return tensors


def set_flat_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, torch.Tensor],
    values: dict[str, Any],
    without: set[str],
) -> None:
    """Give an optimizer what `flat_optimizer_state` returned; the parameters named in `without` get no state."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    inner = getattr(optimizer, "optimizer", optimizer)
    _add_own_settings(model, inner, values)
    if is_adam(inner):
        _set_low_bit(model, inner, tensors, values, without)
        return
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    with _without_empty_groups(optimizer) as inner:
        for name, parameter in model.named_parameters():
            if name in without:  # torch asks for what the state of others of its kind has
                values |= {f"state.{name}.{key}": value for key, value in inner.state.get(parameter, {}).items()}
        flat: dict[str, Any] = {**values, **tensors}
        set_optimizer_state_dict(model, inner, flat, options=options)
        for name, parameter in model.named_parameters():
            if name in without:
                inner.state.pop(parameter, None)


def _trained_by(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that an optimizer trains, with their names."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [each for each in model.named_parameters() if id(each[1]) in own and each[1].requires_grad]


def _add_own_settings(model: nn.Module, optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> None:
    """Add what torch's AdamW or bitsandbytes' alone has in its groups, such as `amsgrad`: each can go on with the
    moments of the other."""
    if type(optimizer) not in (Adam, AdamW) and not is_adam(optimizer):
        return
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key in group.keys() - {"params", "lr", "betas", "eps", "weight_decay"}:
                values.setdefault(f"param_groups.{name_of[id(parameter)]}.{key}", group[key])


def _set_low_bit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, torch.Tensor],
    values: dict[str, Any],
    without: set[str],
) -> None:
    """Give an Adam of bitsandbytes moments in float32. Its own `load_state_dict` would round them to the dtype of the
    parameter."""
    names = {id(parameter): name for name, parameter in _trained_by(model, optimizer)}
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                continue
            for key in group.keys() - {"params"}:
                group[key] = values[f"param_groups.{name}.{key}"]
            if name not in without:
                optimizer.state[parameter] = {key: tensors[f"state.{name}.{key}"] for key in FLOAT32}
    quantize_moments(optimizer)
