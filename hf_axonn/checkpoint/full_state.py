"""A sharded model as one: its full state dict on rank 0, and `save_pretrained`, which writes an ordinary directory.

For a model that one machine can hold. Checkpoints (sharded.py) never gather anything.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_axonn.compat.bitsandbytes import saved_form
from hf_axonn.compat.replaced import replace_attributes
from hf_axonn.distributed.collectives import world_rank
from hf_axonn.distributed.consistency import raise_on_all_ranks
from hf_axonn.engine.dtensors import whole
from hf_axonn.engine.four_bit import FourBit
from hf_axonn.engine.stage_tensors import whole_of_all_stages
from hf_axonn.engine.state import ParallelState, parallel_state


def full_state_dict(model: nn.Module, state_dict: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the state dict of a sharded model with full tensors, on the CPU of rank 0; empty on the other ranks.

    Every rank must call it. Names that share a tensor share it in the result, too. Weights of 4 bits are as
    bitsandbytes saves them.

    Args:
        model: parallelized, or a wrapper of such a model.
        state_dict: its state dict or a part of it; all of it if None.
    Raises:
        ValueError: weights of 4 bits over a grid with pipe.
    Memory: the full model on the CPU of rank 0, one full tensor at a time on the others.
    Collectives: one gather of each sharded tensor over (y, x, z); with pipe those of `whole_of_all_stages`.
    """
    state_dict = model.state_dict() if state_dict is None else state_dict
    state = parallel_state(model)
    if state is not None and state.grid.pipe > 1:
        if any(hasattr(parameter, "four_bit") for parameter in model.parameters()):
            raise ValueError(
                "a model of 4-bit weights cannot be saved whole over a grid with pipe: save its adapters alone, with "
                "save_pretrained of the PeftModel."
            )
        return whole_of_all_stages(state_dict, state.grid_mesh)
    first = world_rank() == 0
    owners = owners_of(model)
    named = model.named_parameters(remove_duplicate=False)
    bits: dict[str, FourBit] = {name: each.four_bit for name, each in named if hasattr(each, "four_bit")}
    result: dict[str, Any] = {}
    gathered: dict[object, Tensor | None] = {}
    for name, tensor in state_dict.items():
        if not isinstance(tensor, Tensor):
            result[name] = tensor
            continue
        owner = owners.get(name, name)
        if owner not in gathered:
            full = whole(tensor).detach()
            gathered[owner] = full.cpu().contiguous() if first else None
            del full
        result[name] = gathered[owner]
        if name in bits and first:
            stored = saved_form(bits[name].parts(result.pop(name)), (bits[name].rows, bits[name].cols))
            result |= {name + key: value for key, value in stored.items()}
    return result if first else {}


def owners_of(model: nn.Module) -> dict[str, int]:
    """Return a mark of each parameter by each of its names.

    It is of the parameter, not of its memory, which does not mark an empty shard: all ranks must gather the same.
    """
    return {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}


def is_sharded(state_dict: dict[str, Tensor]) -> bool:
    """Return whether any tensor of a state dict is a DTensor."""
    return any(isinstance(tensor, DTensor) for tensor in state_dict.values())


def install_save_pretrained(model: nn.Module) -> None:
    """Let `model.save_pretrained` of a sharded Transformers model write what it writes on one process, and its
    `push_to_hub` upload that once."""
    original = getattr(model, "save_pretrained", None)
    if callable(original):
        vars(model)["save_pretrained"] = functools.partial(_save_pretrained, model, original)
    if callable(push := getattr(model, "push_to_hub", None)):
        vars(model)["push_to_hub"] = functools.partial(push_to_hub, model, push)


def _divided_state(model: nn.Module) -> ParallelState | None:
    """Return how a model lies on its grid, where ranks have parts of it and must call together; None for copies."""
    state = parallel_state(model)
    return state if state is not None and state.grid.size > state.grid.data else None


def _save_pretrained(
    model: nn.Module,
    original: Callable[..., None],
    save_directory: str,
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    **kwargs: Any,
) -> None:
    """Write as `PreTrainedModel.save_pretrained`, called by all ranks, on rank 0, for which the others wait.

    A given state dict is taken as it is on rank 0, if it holds full tensors; then nobody waits.

    Raises:
        ValueError: rank 0 cannot write, on every rank that waits.
    Collectives: `full_state_dict`, and those of `raise_on_all_ranks`; none on a grid of data alone.
    """
    if kwargs.get("distributed_checkpoint"):
        raise ValueError(
            "distributed_checkpoint=True is not for a model on a grid: hf_axonn.save_sharded(model, DIR) writes its "
            "shards."
        )
    state = None
    if state_dict is None or is_sharded(state_dict):
        state_dict = full_state_dict(model, state_dict)
        state = _divided_state(model)
    with contextlib.nullcontext() if state is None else raise_on_all_ranks(state.grid_mesh.device):
        if world_rank() == 0 and is_main_process:
            quantizer = getattr(model, "hf_quantizer", None)  # which would put the model's own in its place
            own: dict[tuple[Any, str], Any] = {}
            if quantizer is not None:
                own = {(quantizer, "get_state_dict_and_metadata"): lambda *_: (state_dict, {})}
            with replace_attributes(own):
                original(save_directory, is_main_process=True, state_dict=state_dict, **kwargs)


def push_to_hub(model: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Upload what `model.save_pretrained` writes, on rank 0; the others return None. Every rank must call it.

    Args:
        model: sharded, or PEFT's around one.
        original: Transformers' method, which every rank would run for itself.
    Raises:
        ValueError: rank 0 cannot write or upload; on every rank.
    Collectives: those of `model.save_pretrained`, and of `raise_on_all_ranks`; none on a grid of data alone, where
        each rank uploads, as in Transformers.
    """
    state = _divided_state(model)
    if state is None:
        return original(*args, **kwargs)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, **{key: kwargs[key] for key in ("max_shard_size",) if key in kwargs})

        def move(target: str, **_: Any) -> None:
            for name in os.listdir(folder):
                shutil.move(os.path.join(folder, name), target)

        with raise_on_all_ranks(state.grid_mesh.device):
            if world_rank() == 0:
                with replace_attributes({(model, "save_pretrained"): move}):
                    return original(*args, **kwargs)
