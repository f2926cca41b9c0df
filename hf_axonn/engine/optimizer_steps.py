"""Elementwise optimizers step on this rank's shards.

What they make of an element depends on no other element, so a step on the shards as plain tensors is the step on the
DTensors, bit by bit. It has torch's foreach kernels where plain tensors have them, and leaves out DTensor's dispatch,
which takes the host longer than the layer's forward and backward pass (docs/results/host_time.md). So do the
elementwise parts of Muon (muon.py), and bitsandbytes' Adam and AdamW (low_bit_adam.py). Transformers' Adafactor adds
its means up over the ranks (adafactor.py).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
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
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_axonn.compat import low_bit_adam
from hf_axonn.compat.host_dtensor import asks_class
from hf_axonn.compat.messages import get_logger
from hf_axonn.compat.post_import import after_import
from hf_axonn.compat.torch import around_step, like_dtensor, placement_of, shard_in
from hf_axonn.distributed.collectives import world_rank
from hf_axonn.engine.adafactor import step_adafactor
from hf_axonn.engine.host_moments import HostMoments, is_moment
from hf_axonn.engine.host_weights import host_weight_of, to_host
from hf_axonn.engine.low_bit_adam import places_of, quantize_moments, shard_or_value
from hf_axonn.engine.master_weights import MIXED
from hf_axonn.engine.muon import find_mesh, orthogonalize_once
from hf_axonn.engine.sharded_weight import ShardedWeight, only_multiplied


logger = get_logger(__name__)

ADAFACTOR = "transformers.optimization"  # the module that has it
ELEMENTWISE = (ASGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop, SGD)


def step_on_shards() -> None:
    """Let elementwise optimizers of torch, Muon, bitsandbytes' Adam and AdamW, and Transformers' Adafactor step on
    shards, from now on, where their parameters are DTensors. No communication."""
    for optimizer in ELEMENTWISE:
        around_step(optimizer, step_elementwise)
    around_step(Muon, step_muon)
    around_step(torch.optim.Adafactor, _step_of_another)
    after_import(low_bit_adam.MODULE, _step_low_bit_on_shards)
    after_import(ADAFACTOR, lambda: around_step(vars(sys.modules[ADAFACTOR])["Adafactor"], step_factored))


def _step_low_bit_on_shards() -> None:
    for optimizer in low_bit_adam.classes_with_steps():
        around_step(optimizer, step_low_bit)


def step_elementwise(optimizer: Optimizer, step: Callable[[], object]) -> None:
    """Call an optimizer's own step on shards; moments that are kept in host memory come and go."""
    moments = _on_host.get(optimizer)
    with shards_of(optimizer):
        if moments is None:
            step()
        else:
            moments.take_step(optimizer, step)


def step_muon(optimizer: Optimizer, step: Callable[[], object]) -> None:
    """Call Muon's own step on shards. Collectives: those of `orthogonalize_once`."""
    with shards_of_matrices(optimizer):
        step()


def step_low_bit(optimizer: Optimizer, step: Callable[[], object]) -> None:
    """Call the own step of an optimizer of bitsandbytes on shards, after moments of a checkpoint were quantized.

    Raises:
        ValueError: those of `refuse_unserved`, `refuse_norms` and `quantize_moments`.
    """
    if not _is_sharded(optimizer):
        if low_bit_adam.is_adam(optimizer):
            quantize_moments(optimizer)
        step()
        return
    refuse_unserved(optimizer)
    low_bit_adam.note_overrides(optimizer)
    low_bit_adam.refuse_norms(optimizer)
    quantize_moments(optimizer)
    with shards_of(optimizer):
        low_bit_adam.skip_empty(optimizer)
        step()


def step_factored(optimizer: Optimizer, step: Callable[[], object]) -> None:
    """Take a step of Transformers' Adafactor. Collectives: those of `step_adafactor`."""
    if _is_sharded(optimizer):
        step_adafactor(optimizer)
    else:
        step()


def _step_of_another(optimizer: Optimizer, step: Callable[[], object]) -> None:
    if _is_sharded(optimizer):
        refuse_unserved(optimizer)
    step()


def _is_sharded(optimizer: Optimizer) -> bool:
    return any(isinstance(parameter, DTensor) for _, parameter in places_of(optimizer))


def refuse_unserved(optimizer: Optimizer) -> None:
    """Refuse optimizers that a step on shards would not be right for, by their class.

    Raises:
        ValueError: it is torch's Adafactor, one of torchao, or another one of bitsandbytes than Adam and AdamW.
    """
    if isinstance(optimizer, torch.optim.Adafactor):
        raise ValueError(
            "torch.optim.Adafactor is not supported over a grid: it takes norms of the rows and columns of full "
            "parameters. Use Transformers' Adafactor (transformers.optimization.Adafactor, optim=adafactor), whose "
            "means are added up over the ranks."
        )
    library = type(optimizer).__module__.partition(".")[0]
    if library in ("bitsandbytes", "torchao") and not low_bit_adam.is_adam(optimizer):
        raise ValueError(
            f"{library}'s {type(optimizer).__name__} is not supported over a grid: its state is of blocks of whole "
            "parameters, or was not compared with one process. Use bitsandbytes' AdamW in 8 bits (AdamW8bit, "
            "optim=adamw_bnb_8bit), or one of torch.optim: their state is divided by x * y * z."
        )


def _refuse_whole(optimizer: Optimizer, *_: object) -> None:
    """Refuse a step of an optimizer that was made before its model was sharded, and does not follow it. No
    communication.

    Raises:
        ValueError: it holds whole parameters, which get no gradients any more, so nothing would be trained.
    """
    parameters = [parameter for _, parameter in places_of(optimizer)]
    left = [parameter for parameter in parameters if hasattr(parameter, "sharded_as") and parameter.grad is None]
    if left:
        raise ValueError(
            f"{type(optimizer).__name__} holds {len(left)} of {len(parameters)} parameters as they were before their "
            f"model was sharded over a grid, the first of shape {tuple(left[0].shape)}. They get no gradients, and "
            "would not be trained: make the optimizer after hf_axonn.parallelize, or give it to accelerator.prepare "
            "with the model. An optimizer that steps others has to share their param_groups."
        )


register_optimizer_step_pre_hook(_refuse_whole)


_on_host: weakref.WeakKeyDictionary[Optimizer, HostMoments] = weakref.WeakKeyDictionary()


def keep_moments_on_host(optimizer: Optimizer, device: torch.device) -> None:
    """Keep the moments of an optimizer in host memory from its next step on (host_moments.py). A second time does
    nothing. No communication.

    Args:
        device: that of the parameters.
    Raises:
        ValueError: it is not one of ELEMENTWISE.
    """
    if type(optimizer) not in ELEMENTWISE:
        library = type(optimizer).__module__.partition(".")[0]
        known = ", ".join(each.__name__ for each in ELEMENTWISE)
        raise ValueError(
            f"offload: optimizer is not possible with {library}'s {type(optimizer).__name__}, whose step needs more "
            f"than elements and their moments: take one of torch's {known}, or omit offload."
        )
    if optimizer in _on_host:
        return
    moments = _on_host[optimizer] = HostMoments(device)
    optimizer.register_state_dict_pre_hook(lambda _: moments.synchronize())
    optimizer.register_load_state_dict_post_hook(_send_home)


def keep_weights_on_host(weights: Sequence[ShardedWeight], optimizer: Optimizer, *, mixed_precision: str) -> None:
    """Move float32 shards that an optimizer trains to host memory, those that nothing but products read in 16 bits.

    A second time does nothing. With a torch that cannot have them there they stay, with a warning. No communication.

    Args:
        weights: of a model.
        optimizer: it has to keep its moments in host memory (`keep_moments_on_host`).
        mixed_precision: that of the run, as accelerate names it; nothing is moved under "no".
    """
    dtype = MIXED.get(mixed_precision)
    if dtype is None:
        return
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = []
    for weight in only_multiplied(weights):
        parameter = weight.parameter
        if id(parameter) in trained and parameter.requires_grad and parameter.dtype == torch.float32:
            if host_weight_of(parameter) is None:
                found.append(weight)
    if found and not asks_class(cast(DTensor, found[0].parameter)):
        _warn_that_weights_stay()
        return
    for weight in found:
        weight.keep_on_host(dtype)


@functools.cache
def _warn_that_weights_stay() -> None:
    if world_rank() == 0:
        logger.warning(
            f"offload: optimizer keeps moments in host memory, but with torch {torch.__version__} float32 weights "
            "stay on the device: torch 2.13 can have them in host memory, too."
        )


def _send_home(optimizer: Optimizer) -> None:
    """Move what torch has loaded onto the device of the parameters to host memory."""
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            if is_moment(name, value, parameter) and value.device.type != "cpu":
                home = to_host(shard_or_value(value)).copy_(shard_or_value(value))
                entries[name] = like_dtensor(home, placement_of(value)) if isinstance(value, DTensor) else home


@contextlib.contextmanager
def shards_of(optimizer: Optimizer) -> Iterator[None]:
    """Give an optimizer the shards of its DTensors for parameters, gradients and state inside; afterwards DTensors,
    also of state that is new. Parameters without a gradient stay what they are. Nothing is copied.

    Raises:
        ValueError: another optimizer keeps the weights in host memory.
    """
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
            entries = {name: shard_or_value(value) for name, value in entries.items()}
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
            host = host_weight_of(parameter)
            if host is not None and optimizer not in _on_host:
                raise ValueError(
                    f"{type(optimizer).__name__} got weights that offload: optimizer keeps in host memory for another "
                    f"optimizer, one of shape {list(parameter.shape)}: prepare this one with offload: optimizer, too, "
                    "or load the model again and omit offload for both."
                )
            found[parameter] = shard_in(parameter) if host is None else host.stand_in(parameter)
    return found


def _take_back(entries: dict, inside: dict, parameter: DTensor, shard: Tensor) -> None:
    """Put the state that a step has left of a shard into that of its parameter."""
    for name, value in inside.items():
        if shard_or_value(entries.get(name)) is value:
            continue
        entries[name] = like_dtensor(value, placement_of(parameter)) if is_moment(name, value, shard) else value
