"""PEFT adapters on disk, in the files that PEFT itself writes and reads: the grid does not show in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_axonn.checkpoint.torch_folders import MODEL, find_torch_folder, read_torch_folder
from hf_axonn.distributed.collectives import world_rank
from hf_axonn.engine.dtensors import shard_of, whole
from hf_axonn.engine.stage_tensors import over_stages, whole_of_all_stages
from hf_axonn.engine.state import parallel_state


if TYPE_CHECKING:
    from peft import PeftModel

FILE = "adapter_model.safetensors"


def full_tensors(tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return full tensors of a model with adapters, on the CPU; of a pipeline those of all stages, on rank 0.

    Collectives: an all-gather of each that is sharded; with pipe those of `whole_of_all_stages`.
    """
    state = parallel_state(model)
    if state is not None and state.grid.pipe > 1:
        return whole_of_all_stages(tensors, state.grid_mesh)
    return {name: whole(tensor).detach().cpu() for name, tensor in tensors.items()}


def adapter_base(directory: str | Path) -> str | None:
    """Return the model that the adapters in a directory are for; None where there are none, or it is not recorded.

    Raises:
        ValueError: adapter_config.json is not a mapping in JSON.
    """
    path = Path(directory) / "adapter_config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(f"{path} is not JSON: {problem}.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no mapping of settings.")
    base = config.get("base_model_name_or_path")
    return base if isinstance(base, str) else None


def save_adapters(model: nn.Module, directory: Path) -> None:
    """Write every adapter of a PeftModel, the one named default into `directory` itself, as PEFT does.

    Collectives: those of `full_tensors`, for each adapter.
    """
    from peft import get_peft_model_state_dict

    configs = cast("PeftModel", model).peft_config
    adapters = {name: full_tensors(get_peft_model_state_dict(model, adapter_name=name), model) for name in configs}
    if world_rank() == 0:
        from safetensors.torch import save_file

        for name, weights in adapters.items():
            target = directory if name == "default" else directory / name
            target.mkdir(parents=True, exist_ok=True)
            save_file(weights, target / FILE, metadata={"format": "pt"})
            configs[name].save_pretrained(str(target))


def load_adapters(model: nn.Module, directory: Path) -> None:
    """Fill PEFT adapters, and modules saved with them, from the files that PEFT itself writes, or from a folder of
    FSDP2 (torch_folders.py).

    Raises:
        ValueError: a file cannot be read, or holds other adapters than the model has, or of other shapes.
    Collectives: with pipe one `gather_texts` over it, of names; else none.
    """
    from peft import get_peft_model_state_dict

    configs = cast("PeftModel", model).peft_config
    adapters = {name: get_peft_model_state_dict(model, adapter_name=name) for name in configs}
    keys, state = {name: list(own) for name, own in adapters.items()}, parallel_state(model)
    stages = [keys] if state is None else over_stages(keys, state.grid_mesh)
    names = {name: {key for stage in stages for key in stage[name]} for name in keys}
    for name, own in adapters.items():
        source = directory if name == "default" else directory / name
        folder = None if (source / FILE).exists() else find_torch_folder(directory)
        weights = _read_file(source) if folder is None else _read_folder(folder, model, name)
        if other := names[name] ^ weights.keys():
            raise ValueError(f"{folder or source} holds other adapters than the model has: {sorted(other)[:3]}")
        for key, value in own.items():
            if weights[key].shape != value.shape:
                raise ValueError(
                    f"{folder or source} holds {key} with the shape {tuple(weights[key].shape)}, and the model's is "
                    f"{tuple(value.shape)}: adapters of another rank, or of another model."
                )
        with torch.no_grad():
            for key, value in own.items():
                if isinstance(value, DTensor):  # adapters are replicated, what is saved beside them may not be
                    assert state is not None
                    value.to_local().copy_(shard_of(weights[key], value.placements, state.grid_mesh))
                else:
                    value.copy_(weights[key])


def _read_file(directory: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(directory / FILE)
    except SafetensorError as problem:
        raise ValueError(f"{directory / FILE} cannot be read: {problem}") from None


def _read_folder(folder: Path, model: nn.Module, adapter: str) -> dict[str, Tensor]:
    """Read an adapter from a folder of FSDP2, by the names of PEFT's files.

    Trainer writes the adapter alone, by these names; `accelerator.save_state` the whole model, by its own.
    """
    from peft import get_peft_model_state_dict

    tensors, _ = read_torch_folder(folder, MODEL)
    whole = {name: name for name in model.state_dict()}
    places = get_peft_model_state_dict(cast("PeftModel", model), state_dict=whole, adapter_name=adapter)
    if not any(name in tensors for key, name in places.items() if key != name):
        return {key: pieces[...] for key, pieces in tensors.items()}
    state = parallel_state(model)
    if state is not None and state.grid.pipe > 1:
        raise ValueError(
            f"{folder} holds the whole model beside its adapters, which is not read over a grid with pipe: resume "
            "on a grid without, and save there."
        )
    if unknown := sorted(tensors.keys() - whole.keys()):
        raise ValueError(f"{folder} holds {unknown[0]}, and {len(unknown)} in all that the model does not have.")
    return {key: tensors[name][...] for key, name in places.items() if name in tensors}
