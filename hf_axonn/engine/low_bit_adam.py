"""bitsandbytes' Adam and AdamW on shards: each rank quantizes the moments of its own shards, in blocks of 256 values.

Blocks begin with the shard, so the scales of a grid are not those of one process, and moments differ from its by the
error of the quantization, half the distance of two levels: 0.7% of the largest magnitude of a block at most. Whether a
moment is quantized (`min_8bit_size`) depends on the size of the shard.

What leaves an optimizer (`state_dict()`, a checkpoint) are the moments in float32, as torch's AdamW has them, in host
memory: no other form fits every grid. So a run may go on with either. What comes in like that is quantized before the
next step, a parameter at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hf_axonn.compat.low_bit_adam import MOMENTS, NESTED, moments_of, note_overrides, state_of
from hf_axonn.compat.torch import like_dtensor, placement_of, shard_in


FLOAT32 = {"step", *MOMENTS.values()}


def _write_in_float32(optimizer: Optimizer) -> None:
    """Let the `state_dict()` of an optimizer on shards hold moments in float32. A second time does nothing."""
    if optimizer not in _written_in_float32 and any(isinstance(each, DTensor) for _, each in places_of(optimizer)):
        _written_in_float32.add(optimizer)
        optimizer.register_state_dict_post_hook(_in_float32)


_written_in_float32: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _in_float32(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    return {**saved, "state": {key: in_float32(state) for key, state in saved["state"].items()}}


def in_float32(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter as torch's AdamW has it: of one process or of this rank's shards, quantized or
    not. Another optimizer's is returned as it is."""
    state = state.get(NESTED, {}) | {key: value for key, value in state.items() if key != NESTED}
    if not state.keys() >= MOMENTS.keys():
        return state
    moments = moments_of({key: shard_or_value(value) for key, value in state.items()})
    for key, name in MOMENTS.items():
        if isinstance(state[key], DTensor):
            moments[name] = like_dtensor(moments[name], placement_of(state[key]))
    return moments


def quantize_moments(optimizer: Optimizer) -> None:
    """Quantize moments that came in float32, from a checkpoint. Over a grid the `state_dict()` has them in
    float32 from now on. No communication.

    Raises:
        ValueError: the state of a parameter is neither that nor bitsandbytes' own.
    """
    _write_in_float32(optimizer)
    if any(entries.keys() == FLOAT32 for entries in optimizer.state.values()):
        note_overrides(optimizer)
    for place, parameter in places_of(optimizer):
        entries = optimizer.state.get(parameter)
        if not entries:
            continue
        if entries.keys() == FLOAT32:
            optimizer.state.pop(parameter)
            moments = {name: shard_or_value(value) for name, value in entries.items()}
            state = state_of(optimizer, shard_or_value(parameter), place, moments)
            if isinstance(parameter, DTensor):
                state |= {key: like_dtensor(state[key], placement_of(parameter)) for key in MOMENTS}
            optimizer.state[parameter] = state
        elif not all(isinstance(entries.get(key), Tensor) for key in MOMENTS):
            raise ValueError(
                f"the state of a parameter {tuple(parameter.shape)} has {', '.join(map(str, entries))}, and not step, "
                f"exp_avg and exp_avg_sq, from which {type(optimizer).__name__} could go on: load a checkpoint of "
                "AdamW or of bitsandbytes' AdamW, with hf_axonn.load_sharded or a state_dict that is not flattened."
            )


def places_of(optimizer: Optimizer) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Yield the parameters of an optimizer, each with the number of its group and its own in the group."""
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            yield (number, place), parameter


def empty_moments(parameter: Tensor) -> dict[str, Tensor]:
    """Return room for what a checkpoint holds of a parameter: moments in float32, in host memory."""
    moments = {"step": torch.zeros(())}
    for name in MOMENTS.values():
        room = torch.zeros(shard_or_value(parameter).shape)
        moments[name] = like_dtensor(room, placement_of(parameter)) if isinstance(parameter, DTensor) else room
    return moments


def shard_or_value(value: Any) -> Any:
    """Return this rank's part of a DTensor, and any other value itself. No communication."""
    return shard_in(value) if isinstance(value, DTensor) else value
