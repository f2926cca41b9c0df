"""A sharded model becomes ordinary safetensors files, one full tensor at a time: `accelerator.save_model`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn

from hf_axonn.checkpoint.export import remove_ordinary, write_index
from hf_axonn.checkpoint.full_state import owners_of
from hf_axonn.checkpoint.save import SaveError
from hf_axonn.checkpoint.shard_files import describe, order_in_file, write_safetensors
from hf_axonn.distributed.collectives import world_rank
from hf_axonn.distributed.consistency import first_problem
from hf_axonn.engine.stage_tensors import outline_all_stages, whole_at_first
from hf_axonn.engine.state import parallel_state


PATTERN = "model{suffix}.safetensors"


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
    Collectives: those of `outline_all_stages`; one gather of each sharded tensor over (y, x, z), which another stage
        than the first sends there; and `first_problem`.
    """
    state = parallel_state(model)
    assert state is not None, "of a parallelized model"
    tensors = _once_each(model)
    staged = outline_all_stages(tensors, state.grid_mesh)
    outlines = {name: each.outline for name, each in staged.items()}
    plan = split_torch_state_dict_into_shards(outlines, filename_pattern=PATTERN, max_shard_size=max_shard_size)
    shapes = {name: (describe(each).dtype, tuple(each.shape)) for name, each in outlines.items()}
    files = {file: {name: shapes[name] for name in names} for file, names in plan.filename_to_tensors.items()}
    left = [name for of_file in files.values() for name in order_in_file(of_file)]

    def full(name: str) -> Tensor:
        left.remove(name)
        return whole_at_first(name, tensors, staged[name], state.grid_mesh)

    problem = ""
    if world_rank() == 0:
        try:
            os.makedirs(directory, exist_ok=True)
            for file, of_file in files.items():
                write_safetensors(Path(directory, file), of_file, full, {"format": "pt"})
            remove_ordinary(Path(directory), keep=files)
            if plan.is_sharded:
                write_index(Path(directory), plan.metadata["total_size"], plan.tensor_to_filename)
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
    for name in list(left):  # of other ranks, and of one that can write no more: the gathers need all
        full(name)
    problem = first_problem(problem, state.grid_mesh.device)
    if problem:
        raise SaveError(f"{directory} was not saved: {problem}")


def _once_each(model: nn.Module) -> Mapping[str, Tensor]:
    """Return the tensors of a state dict, each by the first of its names."""
    owners = owners_of(model)
    found: dict[object, str] = {}
    state = model.state_dict()
    for name in state:
        found.setdefault(owners.get(name, name), name)
    return {name: state[name] for name in found.values()}
