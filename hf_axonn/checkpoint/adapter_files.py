"""PEFT adapters on disk, in the files that PEFT itself writes and reads: the grid does not show in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_axonn.distributed.collectives import world_rank
from hf_axonn.engine.dtensors import shard_of, whole
from hf_axonn.engine.stage_tensors import over_stages, whole_of_all_stages
from hf_axonn.engine.state import parallel_state


if TYPE_CHECKING:
    from peft import PeftModel


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
            save_file(weights, target / "adapter_model.safetensors", metadata={"format": "pt"})
            configs[name].save_pretrained(str(target))


def load_adapters(model: nn.Module, directory: Path) -> None:
    """Fill PEFT adapters, and modules saved with them, from the files that PEFT itself writes.

    Raises:
        ValueError: a file cannot be read, or holds other adapters than the model has.
    Collectives: with pipe one `gather_texts` over it, of names; else none.
    """
    from peft import get_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    configs = cast("PeftModel", model).peft_config
    adapters = {name: get_peft_model_state_dict(model, adapter_name=name) for name in configs}
    keys, state = {name: list(own) for name, own in adapters.items()}, parallel_state(model)
    stages = [keys] if state is None else over_stages(keys, state.grid_mesh)
    names = {name: {key for stage in stages for key in stage[name]} for name in keys}
    for name, own in adapters.items():
        source = directory if name == "default" else directory / name
        try:
            weights = load_file(source / "adapter_model.safetensors")
        except SafetensorError as problem:
            raise ValueError(f"{source / 'adapter_model.safetensors'} cannot be read: {problem}") from None
        if other := names[name] ^ weights.keys():
            raise ValueError(f"{source} holds other adapters than the model has: {sorted(other)[:3]}")
        with torch.no_grad():
            for key, value in own.items():
                if isinstance(value, DTensor):  # adapters are replicated, what is saved beside them may not be
                    assert state is not None
                    value.to_local().copy_(shard_of(weights[key], value.placements, state.grid_mesh))
                else:
                    value.copy_(weights[key])
