"""Elementwise optimizers step on this rank's shards.

What they make of an element depends on no other element, so a step on the shards as plain tensors is the step on the
DTensors, bit by bit. It has torch's foreach kernels where plain tensors have them, and leaves out DTensor's dispatch,
which takes the host longer than the layer's forward and backward pass (docs/results/host_time.md). So do the
elementwise parts of Muon (muon.py).
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from hf_axonn.compat.torch import around_step, like_dtensor, placement_of, shard_in
from hf_axonn.engine.muon import find_mesh, orthogonalize_once


ELEMENTWISE = (ASGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop, SGD)


def step_on_shards() -> None:
    """Let elementwise optimizers of torch, and Muon, step on shards, from now on, where their parameters are DTensors.
    Steps with a closure stay as they are: it runs the model, whose gradients are DTensors. No communication."""
    for optimizer in ELEMENTWISE:
        around_step(optimizer, shards_of)
    around_step(Muon, shards_of_matrices)


@contextlib.contextmanager
def shards_of(optimizer: Optimizer) -> Iterator[None]:
    """Give an optimizer the shards of its DTensors for parameters, gradients and state inside; afterwards DTensors,
    also of state that is new. Parameters without a gradient stay what they are. Nothing is copied."""
    shards = _shards(optimizer)
    if not shards:
        yield
        return
    groups, state = [group["params"] for group in optimizer.param_groups], optimizer.state
    for parameter, shard in shards.items():
        shard.grad = shard_in(cast(DTensor, parameter.grad))
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [shards.get(parameter, parameter) for parameter in parameters]
    inside: defaultdict[Any, dict] = defaultdict(dict)
    for key, entries in state.items():
        if key in shards:
            entries = {name: _shard(value) for name, value in entries.items()}
        inside[shards.get(key, key)] = entries
    optimizer.state = inside
    try:
        yield
    finally:
        optimizer.state = state
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = parameters
        for parameter, shard in shards.items():
            shard.grad = None
            if shard in inside:
                _take_back(state[parameter], inside.pop(shard), cast(DTensor, parameter), shard)
        state.update(inside)  # of parameters that are plain


@contextlib.contextmanager
def shards_of_matrices(optimizer: Optimizer) -> Iterator[None]:
    """Give Muon shards as `shards_of` inside, and orthogonalize each matrix once. Collectives: those of
    `orthogonalize_once`."""
    parameters = _with_gradients(optimizer)
    mesh = find_mesh(parameters)
    with contextlib.ExitStack() as stack:
        if mesh is not None:
            stack.enter_context(shards_of(optimizer))
            shards = _with_gradients(optimizer)
            if not any(isinstance(shard, DTensor) for shard in shards):
                stack.enter_context(orthogonalize_once(parameters, shards, mesh))
        yield


def _with_gradients(optimizer: Optimizer) -> list[Tensor]:
    return [
        parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None
    ]


def _shards(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """The shards of parameters with gradients; empty if a gradient does not lie as its parameter does, or if the step
    is to be part of a graph."""
    found: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return {}
        for parameter in group["params"]:
            grad = parameter.grad
            if not isinstance(parameter, DTensor) or grad is None:
                continue
            if not isinstance(grad, DTensor) or grad.placements != parameter.placements:
                return {}
            found[parameter] = shard_in(parameter)
    return found


def _shard(value: Any) -> Any:
    return shard_in(value) if isinstance(value, DTensor) else value


def _take_back(entries: dict, inside: dict, parameter: DTensor, shard: Tensor) -> None:
    """Put the state that a step has left of a shard into that of its parameter."""
    for name, value in inside.items():
        if _shard(entries.get(name)) is value:
            continue
        elementwise = name != "step" and isinstance(value, torch.Tensor) and value.shape == shard.shape
        entries[name] = like_dtensor(value, placement_of(parameter)) if elementwise else value
