"""A sharded model as one: its full state dict on rank 0, and `save_pretrained`, which writes an ordinary directory.

For a model that one machine can hold. Checkpoints (sharded.py) never gather anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_axonn.checkpoint.shard_files import DTYPES, NAMES
from hf_axonn.distributed.collectives import receive_, send_, world_rank
from hf_axonn.distributed.consistency import gather_json
from hf_axonn.engine.dtensors import whole
from hf_axonn.engine.state import ParallelState, parallel_state


def full_state_dict(model: nn.Module, state_dict: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The state dict of a sharded model with full tensors, on the CPU of rank 0; empty on the other ranks.

    Every rank must call it. Names that share a tensor share it in the result, too.

    Args:
        model: parallelized, or a wrapper of such a model.
        state_dict: its state dict or a part of it; all of it if None.
    Memory: the full model on the CPU of rank 0, one full tensor at a time on the others.
    Collectives: one gather of each sharded tensor over (y, x, z); with pipe `gather_texts` over it, and each full
        tensor of another stage is sent to the first.
    """
    state_dict = model.state_dict() if state_dict is None else state_dict
    state = parallel_state(model)
    if state is not None and state.pipeline is not None:
        return _of_all_stages(state, state_dict)
    first = world_rank() == 0
    owners = owners_of(model)
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
    return result if first else {}


def _of_all_stages(state: ParallelState, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """As `full_state_dict`, of a model that is divided into stages: each sends what it has to the first."""
    mesh, group = state.mesh, state.mesh.group("pipe")
    facts = [[name, list(tensor.shape), NAMES[tensor.dtype]] for name, tensor in state_dict.items()]
    here, result = mesh.index("pipe"), {}
    sent: set[str] = set()
    for stage, own in enumerate(gather_json(facts, mesh.device, group)):
        for name, shape, dtype in own:
            if name in sent:
                continue
            sent.add(name)
            full = None
            if here == stage:
                full = whole(state_dict[name]).detach().to(mesh.device).contiguous()
                if stage > 0:
                    send_(full, 0, group)
            elif here == 0:
                full = receive_(torch.empty(shape, dtype=DTYPES[dtype], device=mesh.device), stage, group)
            if mesh.rank == 0:
                assert full is not None
                result[name] = full.cpu()
            del full
    return result


def owners_of(model: nn.Module) -> dict[str, int]:
    """A mark of each parameter by each of its names.

    By the parameter, and not by memory, which of an empty shard is no mark: all ranks must gather the same.
    """
    return {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}


def is_sharded(state_dict: dict[str, Tensor]) -> bool:
    """Whether any tensor of a state dict is a DTensor."""
    return any(isinstance(tensor, DTensor) for tensor in state_dict.values())


def install_save_pretrained(model: nn.Module) -> None:
    """Let `model.save_pretrained` of a sharded Transformers model write what it writes on one process."""
    original = getattr(model, "save_pretrained", None)
    if callable(original):
        vars(model)["save_pretrained"] = functools.partial(_save_pretrained, model, original)


def _save_pretrained(
    model: nn.Module,
    original: Callable[..., None],
    save_directory: str,
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    **kwargs: Any,
) -> None:
    """`PreTrainedModel.save_pretrained`, called by all ranks; rank 0 writes. Collectives: `full_state_dict`.

    A given state dict is taken as it is on rank 0, if it holds full tensors.
    """
    if kwargs.get("distributed_checkpoint"):
        raise ValueError(
            "distributed_checkpoint=True is not for a model on a grid: hf_axonn.save_sharded(model, DIR) writes its "
            "shards."
        )
    if state_dict is None or is_sharded(state_dict):
        state_dict = full_state_dict(model, state_dict)
    if world_rank() == 0 and is_main_process:
        original(save_directory, is_main_process=True, state_dict=state_dict, **kwargs)
