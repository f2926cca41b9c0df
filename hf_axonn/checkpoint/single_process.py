"""Checkpoints of one process, read by a grid: Trainer's model.safetensors and optimizer.pt, slice by slice.

The way from one rank to many, and from the folders of others (torch_folders.py). The other way needs nothing: one
process reads sharded checkpoints as any grid does.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_axonn.checkpoint.adapter_files import load_adapters
from hf_axonn.checkpoint.hf_loader import fill, refuse_integers
from hf_axonn.checkpoint.manifest import refuse_others
from hf_axonn.checkpoint.torch_folders import (
    MODEL,
    OPTIMIZER_NAMES,
    Pieces,
    find_torch_folder,
    name_unread,
    read_torch_folder,
)
from hf_axonn.compat.low_bit_adam import is_adam
from hf_axonn.compat.torch import lie_as
from hf_axonn.distributed.mesh import GridMesh
from hf_axonn.engine.dtensors import local, local_slices, shard_of
from hf_axonn.engine.low_bit_adam import in_float32
from hf_axonn.engine.stage_tensors import over_stages
from hf_axonn.engine.state import parallel_state


WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.pt"


def load_plain_weights(model: nn.Module, directory: str | Path) -> None:
    """Fill a parallelized model from a checkpoint of one process, or of others (torch_folders.py); of a model with
    adapters, the adapters.

    Every rank reads its own slices. Collectives: with pipe one `gather_texts` over it, of names; else none.

    Raises:
        ValueError: the directory has no safetensors weights, lacks some of the model's, or has others beside them.
    """
    directory = Path(directory)
    if hasattr(model, "peft_config"):
        return load_adapters(model, directory)
    from transformers import PreTrainedModel

    mesh = _mesh_of(model)
    names = {name for stage in over_stages(list(model.state_dict()), mesh) for name in stage}
    with contextlib.ExitStack() as stack:
        stored = _read_weights(directory, stack)
        if isinstance(model, PreTrainedModel):
            missing, unexpected = fill(model, stored, lambda parameter: _slices(parameter, mesh))
            missing -= set(getattr(model, "all_tied_weights_keys", {}))
        else:
            missing, unexpected = _fill_by_name(model, stored, mesh)
    if missing:
        raise ValueError(
            f"{directory} lacks {len(missing)} weights of the model, among them {', '.join(sorted(missing)[:3])}."
        )
    refuse_others(directory, unexpected - names)


def _read_weights(directory: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Return slices of the weights in a directory by name; files stay open until the stack ends."""
    if (folder := find_torch_folder(directory)) is not None:
        return dict(read_torch_folder(folder, MODEL)[0])
    files = _file_of_each(directory)
    readers = {file: stack.enter_context(_open(file)) for file in sorted(set(files.values()))}
    for file, reader in readers.items():
        if absent := sorted({name for name in files if files[name] == file} - set(reader.keys())):
            raise ValueError(f"{file} lacks {len(absent)} weights that the index names, among them {absent[0]}.")
    return {name: readers[file].get_slice(name) for name, file in files.items()}


def _fill_by_name(model: nn.Module, stored: dict[str, Any], mesh: GridMesh) -> tuple[set[str], set[str]]:
    """Fill a module whose names are those of the checkpoint; returns as `fill`."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    missing = model.state_dict().keys() & tensors.keys() - stored.keys()
    if not missing:
        for name in tensors.keys() & stored.keys():
            own = tensors[name]
            refuse_integers(name, stored[name], own.dtype)
            shard = local(own)
            with torch.no_grad():
                shard.copy_(stored[name][_slices(own, mesh)])
    return missing, stored.keys() - tensors.keys()


def load_plain_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, directory: str | Path, *, name: str = OPTIMIZER
) -> None:
    """Give the optimizer of a parallelized model the state that one process saved, or others (torch_folders.py).

    `name` is that of the file: Trainer's, or another one.

    Raises:
        ValueError: there is none, or it is of other parameters.
    Collectives: with pipe one of `gather_texts` over it; else none.
    """
    file = Path(directory) / name
    if not file.is_file():
        if (folder := find_torch_folder(Path(directory), optimizer=True)) is not None:
            return _take_torch_optimizer(model, optimizer, folder)
        raise ValueError(
            f"{directory} has no optimizer state: it was saved without (save_only_model?)."
            f"{name_unread(Path(directory))}"
        )
    take_plain_optimizer(model, optimizer, torch.load(file, map_location="cpu", weights_only=True), file)


def take_plain_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any], file: str | Path
) -> None:
    """Give the optimizer of a parallelized model the `state_dict()` of one process's; `file` is where it comes from.

    Raises:
        ValueError: it is of other parameters.
    Collectives: with pipe one of `gather_texts` over it; else none.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    groups = optimizer.param_groups
    counts, places = _places(model, groups)
    mesh = _mesh_of(model)
    if counts != [len(group["params"]) for group in saved["param_groups"]]:
        raise ValueError(f"{file} is of other parameters than this run trains.")
    for group, before, own in zip(groups, saved["param_groups"], places, strict=True):
        group.update({key: value for key, value in before.items() if key != "params"})
        for parameter, place in zip(group["params"], own, strict=True):
            state = in_float32(saved["state"].get(before["params"][place], {}))
            dtype = None if is_adam(optimizer) else parameter.dtype
            optimizer.state[parameter] = {key: _like(value, parameter, mesh, dtype) for key, value in state.items()}


def _take_torch_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Give the optimizer of a parallelized model the state that DCP wrote, by names of parameters. No communication.

    Raises:
        ValueError: the folder has no state of a parameter that this run trains, or moments of another shape.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    tensors, values = read_torch_folder(folder, OPTIMIZER_NAMES)
    settings = _group_settings(tensors, values)
    mesh = _mesh_of(model)
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        names = [name_of[id(parameter)] for parameter in group["params"]]
        if names:
            if names[0] not in settings:
                raise ValueError(f"{folder} has no settings of the group of {names[0]}, such as its learning rate.")
            group.update(settings[names[0]])
        for name, parameter in zip(names, group["params"], strict=True):
            beginning = f"state.{name}."
            state = {key.removeprefix(beginning): value for key, value in tensors.items() if key.startswith(beginning)}
            if not state:
                raise ValueError(f"{folder} has no state of {name}: it is of other parameters than this run trains.")
            dtype = None if is_adam(optimizer) else parameter.dtype
            optimizer.state[parameter] = {
                key: _read_like(value, parameter, mesh, dtype) for key, value in state.items()
            }


def _group_settings(tensors: dict[str, Pieces], values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of the group of each parameter by its name, learning rate and so on. DCP has them by the
    name, where the state was flattened, or by the number of a group, beside the names of its parameters."""
    owners: dict[str, dict[str, Any]] = {}
    for full in (name for name in (*tensors, *values) if name.startswith("param_groups.")):
        owner, _, key = full.removeprefix("param_groups.").rpartition(".")
        owners.setdefault(owner, {})[key] = values[full]() if full in values else tensors[full][...]
    settings: dict[str, dict[str, Any]] = {}
    for owner, own in owners.items():
        settings |= dict.fromkeys(own.pop("params", [owner]), own)
    return settings


def _read_like(value: Pieces, parameter: Tensor, mesh: GridMesh, dtype: torch.dtype | None) -> Tensor:
    """Read a moment of the parameter's shape as the parameter is sharded, in a dtype if one is given; a step count is
    read whole."""
    if value.shape != tuple(parameter.shape) or not isinstance(parameter, DTensor):
        return value[...]
    return _moment(value[_slices(parameter, mesh)], parameter, dtype)


def _places(model: nn.Module, groups: list[dict[str, Any]]) -> tuple[list[int], list[list[int]]]:
    """Count the parameters of each group of one process's optimizer, and find those of this rank among them.

    Raises:
        ValueError: over pipe, the order of one process is not known.
    """
    state = parallel_state(model)
    if state is None or state.grid.pipe == 1:
        counts = [len(group["params"]) for group in groups]
        return counts, [list(range(count)) for count in counts]
    inner = next(module for module in model.modules() if vars(module).get("axonn") is state)  # PEFT wraps it
    name_of = {id(parameter): name for name, parameter in inner.named_parameters()}
    own = [[name_of[id(parameter)] for parameter in group["params"]] for group in groups]
    known = {name: place for place, name in enumerate(state.names)}
    every = over_stages(own, state.grid_mesh)
    whole = [sorted({name for stage in every for name in stage[group]}) for group in range(len(groups))]
    if unknown := [name for names in whole for name in names if name not in known]:
        raise ValueError(
            "over a grid with pipe the optimizer of one process can only be read for what the model had before it was "
            f"divided, and {unknown[0]} came later: give the model its adapters before it is prepared."
        )
    order = [{name: place for place, name in enumerate(sorted(names, key=known.__getitem__))} for names in whole]
    return [len(names) for names in whole], [[order[group][name] for name in own[group]] for group in range(len(own))]


def _like(value: object, parameter: Tensor, mesh: GridMesh, dtype: torch.dtype | None) -> object:
    """Shard a moment of the parameter's shape as the parameter is, in a dtype if one is given; a step count stays what
    it is."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or not isinstance(parameter, DTensor):
        return value
    return _moment(shard_of(value, parameter.placements, mesh).clone(), parameter, dtype)


def _moment(shard: Tensor, parameter: DTensor, dtype: torch.dtype | None) -> DTensor:
    """Return this rank's part of a moment as a DTensor that lies as its parameter does; torch's `load_state_dict`
    gives moments the parameter's dtype."""
    return lie_as(shard.to(parameter.to_local().device, dtype).contiguous(), parameter)


def _mesh_of(model: nn.Module) -> GridMesh:
    state = parallel_state(model)
    assert state is not None, "a model of one process is loaded by Transformers itself"
    return state.grid_mesh


def _slices(tensor: Tensor, mesh: GridMesh) -> tuple[slice, ...]:
    if isinstance(tensor, DTensor):
        return local_slices(tensor.shape, tensor.placements, mesh)
    return tuple(slice(0, size) for size in tensor.shape)


def _file_of_each(directory: Path) -> dict[str, Path]:
    """Return the safetensors file of each tensor in an ordinary HF directory."""
    file, index = directory / WEIGHTS, directory / f"{WEIGHTS}.index.json"
    if file.is_file():  # Transformers, too, reads this one if there are both
        with _open(file) as reader:
            return dict.fromkeys(reader.keys(), file)
    if not index.is_file():
        raise ValueError(
            f"{directory} is no checkpoint: it has neither {WEIGHTS} nor shards that a grid wrote, nor a folder of "
            f"torch.distributed.checkpoint.{name_unread(directory)}"
        )
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: directory / Path(file).name for name, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise ValueError(f"{index} is no index of weights: {type(problem).__name__}: {problem}") from None


def _open(file: Path) -> Any:
    """Open a safetensors file, as a context.

    Raises:
        ValueError: it is not there, or not such a file.
    """
    from safetensors import SafetensorError, safe_open

    if not file.is_file():  # to open a pipe would wait for ever
        raise ValueError(f"{file} is no file: the checkpoint is not complete.")
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as problem:
        raise ValueError(f"{file} cannot be read: {problem}") from None
