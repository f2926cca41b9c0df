"""A sharded model becomes ordinary safetensors files, one full tensor at a time: `accelerator.save_model`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_axonn.checkpoint.save import SaveError
from hf_axonn.checkpoint.shard_files import describe, order_in_file, write_safetensors
from hf_axonn.distributed.collectives import world_rank
from hf_axonn.distributed.consistency import first_problem
from hf_axonn.engine.state import parallel_state


PATTERN = "model{suffix}.safetensors"
INDEX = "model.safetensors.index.json"
OLDER = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def save_whole(model: nn.Module, directory: str | os.PathLike[str], max_shard_size: int | str) -> None:
    """Write a parallelized model as `accelerator.save_model` does on one process. Every rank must call it.

    Files of an earlier save that would be read with these, or in their place, are removed.

    Args:
        model: its state dict has the global tensors that are written. One of several names of a tensor is written.
        directory: of rank 0, made if it is not there.
        max_shard_size: most bytes of the tensors of one file, as a number or a text such as "10GB".
    Memory: one full tensor on each rank.
    Raises:
        SaveError: rank 0 cannot write; on every rank.
        ValueError: safetensors has no such dtype.
    Collectives: one gather of each sharded tensor over (y, x, z), and `first_problem`.
    """
    state = parallel_state(model)
    assert state is not None, "of a parallelized model"
    tensors = _once_each(model)
    outlines = {name: torch.empty(its.shape, dtype=its.dtype, device="meta") for name, its in tensors.items()}
    plan = split_torch_state_dict_into_shards(outlines, filename_pattern=PATTERN, max_shard_size=max_shard_size)
    writes, problem = world_rank() == 0, ""
    for file, names in plan.filename_to_tensors.items():
        shapes = {name: (describe(tensors[name]).dtype, tuple(tensors[name].shape)) for name in names}
        left = order_in_file(shapes)

        def full(name: str, left: list[str] = left) -> Tensor:
            left.remove(name)
            tensor = tensors[name].detach()
            return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

        if writes and not problem:
            try:
                os.makedirs(directory, exist_ok=True)
                write_safetensors(Path(directory, file), shapes, full, {"format": "pt"})
            except OSError as error:
                problem = f"{type(error).__name__}: {error}"
        for name in list(left):  # of other ranks, and of one that can write no more: the gathers need all
            full(name)
    if writes and not problem:
        try:
            _finish(Path(directory), plan)
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
    problem = first_problem(problem, state.mesh.device)
    if problem:
        raise SaveError(f"{directory} was not saved: {problem}")


def _once_each(model: nn.Module) -> Mapping[str, Tensor]:
    """The tensors of a state dict, each by the first of its names."""
    # By the parameter, and not by memory, which of an empty shard is no mark.
    owners = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    found: dict[object, str] = {}
    state = model.state_dict()
    for name in state:
        found.setdefault(owners.get(name, name), name)
    return {name: state[name] for name in found.values()}


def _finish(directory: Path, plan: StateDictSplit) -> None:
    """Remove files of an earlier save, and write the index."""
    for path in directory.iterdir():
        if path.name not in plan.filename_to_tensors and (OLDER.fullmatch(path.name) or path.name == INDEX):
            path.unlink()
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
