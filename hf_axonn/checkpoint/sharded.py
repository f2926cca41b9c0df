"""Checkpoints that any grid can read: every rank writes its own shards, every rank reads its own slices.

    DIR/shard-0000R-model-*.safetensors    weights, one file a rank that writes any (partition.py)
    DIR/optimizer/shard-*.safetensors      optimizer state, likewise; DIR/optimizer/values.json its plain numbers
    DIR/config.json, generation_config.json, and the code of a model that came with its own
    DIR/matmul_layouts.json                what kernel tuning has chosen (engine/matmul_tuning.py), where it is on
    DIR/axonn_checkpoint.json              written last: the manifest (manifest.py), with a checksum of every file

Plain `AutoModelForCausalLM.from_pretrained(DIR)` reads such a directory on one process. The directory gets its name,
or its new content, when all of that is on disk (save.py, commit.py), and is read only when all of it is as it was
written. Nothing here is a pickle.
"""

from __future__ import annotations

import functools
import json
import operator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_axonn.checkpoint.adapter_files import load_adapters, save_adapters
from hf_axonn.checkpoint.commit import OPTIMIZER, recover
from hf_axonn.checkpoint.manifest import Manifest, find_problems, read_manifest, refuse, refuse_others
from hf_axonn.checkpoint.save import Save, finish_saves
from hf_axonn.checkpoint.shard_files import ShardReader
from hf_axonn.checkpoint.state_dicts import (
    flat_optimizer_state,
    fresh_optimizer_state,
    model_tensors,
    set_flat_optimizer_state,
)
from hf_axonn.compat.torch import default_device_type
from hf_axonn.distributed.collectives import world_rank
from hf_axonn.distributed.consistency import raise_on_all_ranks
from hf_axonn.engine.matmul_tuning import MatmulTuner
from hf_axonn.engine.stage_tensors import over_stages
from hf_axonn.engine.state import parallel_state


VALUES = "values.json"
LAYOUTS = "matmul_layouts.json"


def save_sharded(
    model: nn.Module,
    directory: str | Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    async_save: bool = False,
) -> None:
    """Write the weights of a parallelized model, and the state of its optimizer, without gathering them anywhere.

    Every rank must call it, with the same directory, which all ranks must see. Of a model with PEFT adapters only the
    adapters are written, in PEFT's own format. A checkpoint that the directory holds stays until the new one is.

    Args:
        model: parallelized, or PEFT's wrapper of such a model.
        directory: made if it is not there; an earlier checkpoint in it is replaced.
        optimizer: made on the model's parameters.
        async_save: copy the shards, and write them while the training goes on. `finish_saves`, the next save and the
            next load wait for that, and raise if it failed.
    Raises:
        ValueError: the model is not parallelized.
        SaveError: a rank could not write, or an earlier save in the background has failed; on every rank.
    Collectives: those of `Save`, over the world; of an optimizer that keeps more than moments, or of adapters, those
        that gather what is written.
    """
    save = begin_save(model, directory, async_save=async_save)
    add_model(save, model, optimizer=optimizer)
    save.close()


def begin_save(model: nn.Module, directory: str | Path, *, async_save: bool = False) -> Save:
    """Begin a save, for callers with files of their own to write into `Save.stage` before `close`."""
    state = parallel_state(model)
    if state is None:
        raise ValueError("this model is not sharded: save it with model.save_pretrained(DIR).")
    if not hasattr(model, "peft_config") and any(hasattr(parameter, "four_bit") for parameter in model.parameters()):
        raise ValueError(
            "the weights of 4 bits of this model cannot be saved in shards: train it with adapters (get_peft_model), "
            "which are saved alone, or write the whole model with model.save_pretrained(DIR)."
        )
    return Save(directory, state.grid, state.grid_mesh.device, background=async_save)


def add_model(save: Save, model: nn.Module, *, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Add the model, its config and its optimizer to a save."""
    state = parallel_state(model)
    values: dict[str, Any] = {}
    if hasattr(model, "peft_config"):
        adapters_problem = None
        try:
            save_adapters(model, save.stage)
        except OSError as problem:  # rank 0 writes, after the last collective
            adapters_problem = problem
        with save.writing():
            if adapters_problem is not None:
                raise adapters_problem
    else:
        tensors, tied = model_tensors(model)
        save.tied = [name for names in save.over_stages(tied) for name in names]
        save.add("", tensors)
    if optimizer is not None:
        tensors, values = flat_optimizer_state(model, optimizer)
        values = functools.reduce(operator.or_, save.over_stages(values))
        save.add(OPTIMIZER, tensors)
    _describe(model)
    if save.rank != 0:
        return
    with save.writing():
        if not hasattr(model, "peft_config"):
            described: Any = model
            if hasattr(model, "is_remote_code") and described.is_remote_code():
                from transformers.dynamic_module_utils import custom_object_save

                custom_object_save(model, save.stage, config=described.config)
            for config in (getattr(model, name, None) for name in ("config", "generation_config")):
                if config is not None and hasattr(
                    config, "save_pretrained"
                ):  # a module that is not from Transformers has none
                    config.save_pretrained(save.stage)
        if optimizer is not None:
            (save.stage / OPTIMIZER).mkdir(exist_ok=True)
            (save.stage / OPTIMIZER / VALUES).write_text(json.dumps(values, indent=1))
        if state is not None and state.tuner is not None:
            (save.stage / LAYOUTS).write_text(state.tuner.to_json())


def _describe(model: nn.Module) -> None:
    """Let the config say in which dtype weights are written, and of which class, as `save_pretrained` does: it is what
    they will be read as, and a model may have another dtype than it was loaded with, or a class that its base has not.
    No communication."""
    if hasattr(model, "peft_config"):  # the base is not written
        return
    dtypes = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    config: Any = getattr(model, "config", None)
    if config is not None and dtypes:
        config.dtype = functools.reduce(torch.promote_types, dtypes)
    if hasattr(config, "architectures"):
        config.architectures = [type(model).__name__]


def load_sharded(model: nn.Module, directory: str | Path, *, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Fill a model, and its optimizer, from a checkpoint of any grid. Every rank must call it.

    The model may be parallelized over any grid, or be a plain one on one process. Every file is compared with its
    checksum first, each by one of the ranks.

    Raises:
        ValueError: the directory is not a complete checkpoint of ours, or of another model, or lacks the optimizer
            state that is asked for; on every rank, before anything is changed.
        SaveError: a save in the background has failed.
    Collectives: those of `verify_together`; `raise_on_all_ranks` for the model and for the optimizer; with pipe one
        of `gather_texts` over it, of names.
    """
    manifest = verify_together(directory)
    load_model(model, directory, manifest)
    if optimizer is not None:
        load_optimizer(model, optimizer, directory, manifest)


def verify_together(directory: str | Path) -> Manifest:
    """Check a checkpoint before it is read, every rank a part of its files; a commit that was cut off is finished.

    Raises:
        ValueError: it is not a complete checkpoint; on every rank.
        SaveError: a save in the background has failed.
    Collectives: those of `finish_saves`; two of `raise_on_all_ranks`.
    """
    finish_saves()
    directory = Path(directory)
    with raise_on_all_ranks(_device()):
        if world_rank() == 0:
            try:
                recover(directory)
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"{directory}: a save was interrupted at its last step, which cannot be finished: {error}"
                ) from error
    with raise_on_all_ranks(_device()):
        manifest = read_manifest(directory)
        refuse(directory, find_problems(directory, manifest, share=world_rank(), shares=_world_size()))
    return manifest


def _device() -> torch.device:
    return torch.device(default_device_type())


def _world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def load_model(model: nn.Module, directory: str | Path, manifest: Manifest) -> None:
    """Load the model as `load_sharded`, without its check of the files. Raises and communicates as it does."""
    directory = Path(directory)
    state = parallel_state(model)
    own = list(model_tensors(model)[0]) if manifest.model else []
    names = {name for stage in ([own] if state is None else over_stages(own, state.grid_mesh)) for name in stage}
    with raise_on_all_ranks(_device()):
        if state is not None and state.tuner is not None and LAYOUTS in manifest.files:
            _load_layouts(state.tuner, directory / LAYOUTS, same_grid=manifest.grid == state.grid)
        if hasattr(model, "peft_config"):
            load_adapters(model, directory)
            return
        if not manifest.model:
            raise ValueError(f"{directory} holds adapters, not a whole model: give the model its adapters first.")
        refuse_others(directory, manifest.model.keys() - names)
        read_weights(model, directory, manifest)


def read_weights(model: nn.Module, directory: str | Path, manifest: Manifest | None = None) -> None:
    """Fill a model from a checkpoint that has been verified. Only files that hold a part of this rank's are opened.

    Raises:
        ValueError: the checkpoint lacks a tensor of the model, has it with another shape, or cannot be read.
    No communication.
    """
    manifest = manifest or read_manifest(directory)
    tensors, _ = model_tensors(model)
    ShardReader(Path(directory), manifest.model, manifest.grid).fill(tensors)


def _load_layouts(tuner: MatmulTuner, path: Path, *, same_grid: bool) -> None:
    """Continue with the matmul layouts of the run that was saved, so that it repeats to the bit. No communication."""
    try:
        tuner.adopt(path.read_text(), same_grid=same_grid)
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}. Remove tune_matmuls, or resume from another checkpoint.") from problem


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, directory: str | Path, manifest: Manifest | None = None
) -> None:
    """Load the optimizer as `load_sharded`, without its check of the files. Raises and communicates as it does."""
    manifest = manifest or read_manifest(directory)
    source = Path(directory) / OPTIMIZER
    if f"{OPTIMIZER}/{VALUES}" not in manifest.files:
        raise ValueError(f"{directory} has no optimizer state: it was saved without (save_only_model?).")
    tensors = fresh_optimizer_state(model, optimizer)
    # A parameter that no sample had reached has no state yet, and must not get one: its first step is still to come.
    keys = {name: [key for key in tensors if key.startswith(f"state.{name}.")] for name in _list_trained(model)}
    without = {name for name, own in keys.items() if not any(key in manifest.optimizer for key in own)}
    skipped = {key for name in without for key in keys[name]}
    with raise_on_all_ranks(_device()):
        values = _read_values(source / VALUES)
        reader = ShardReader(source, manifest.optimizer, manifest.grid)
        reader.fill({key: tensor for key, tensor in tensors.items() if key not in skipped})
    try:
        set_flat_optimizer_state(model, optimizer, tensors, values, without)
    except (KeyError, TypeError, AttributeError) as problem:  # on all ranks alike: of a file that all have read
        raise ValueError(
            f"{source / VALUES} is of another optimizer: {type(problem).__name__}: {problem}"
        ) from problem


def _read_values(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path} is no JSON: {type(problem).__name__}: {problem}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no mapping of values.")
    return values


def _list_trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]
