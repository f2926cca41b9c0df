"""Checkpoints that any grid can read: every rank writes its own shards, every rank reads its own slices.

    DIR/shard-0000R-model-*.safetensors    weights, one file a rank that owns any (torch.distributed.checkpoint)
    DIR/optimizer/shard-*.safetensors      optimizer state, likewise; DIR/optimizer/values.json its plain numbers
    DIR/config.json, generation_config.json
    DIR/matmul_layouts.json                what kernel tuning has chosen (tuning.py), where it is on
    DIR/axonn_checkpoint.json              written last: the grid, and the size of every file above

Plain `AutoModelForCausalLM.from_pretrained(DIR)` reads such a directory on one process. The manifest is what makes a
directory a checkpoint: without it, or with a file of another size, loading is refused. Nothing here is a pickle.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_axonn import compat
from hf_axonn.collectives import barrier, world_rank
from hf_axonn.gradients import find_state
from hf_axonn.grid import Grid
from hf_axonn.install import shard_of
from hf_axonn.state import ModelState


MANIFEST = "axonn_checkpoint.json"
OPTIMIZER = "optimizer"
VALUES = "values.json"
SHARDS = "shard-*.safetensors"
LAYOUTS = "matmul_layouts.json"


def save_sharded(model: nn.Module, directory: str | Path, *, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write the weights of a parallelized model, and the state of its optimizer, without gathering them anywhere.

    Every rank must call it, with the same directory, which all ranks must see. Of a model with PEFT adapters only the
    adapters are written, in PEFT's own format.

    Args:
        model: parallelized, or PEFT's wrapper of such a model.
        directory: made if it is not there; an earlier checkpoint in it is replaced.
        optimizer: made on the model's parameters.
    Raises:
        ValueError: the model is not parallelized.
    Collectives: barriers and the planning of torch.distributed.checkpoint, over the world.
    """
    state = find_state(model)
    if state is None:
        raise ValueError("this model is not sharded: save it with model.save_pretrained(DIR).")
    directory = Path(directory)
    if world_rank() == 0:
        _clear(directory)
    barrier()
    tied: list[str] = []
    if hasattr(model, "peft_config"):
        _save_adapters(model, directory)
    else:
        tied = compat.save_model_shards(model, directory)
        if world_rank() == 0:
            model.config.save_pretrained(directory)
            if getattr(model, "generation_config", None) is not None:
                model.generation_config.save_pretrained(directory)
    if optimizer is not None:
        _save_optimizer(model, optimizer, directory / OPTIMIZER)
    barrier()
    if world_rank() == 0:
        if state.tuner is not None:
            (directory / LAYOUTS).write_text(state.tuner.to_json())
        _write_manifest(directory, state.grid.as_dict(), tied)
    barrier()


def load_sharded(model: nn.Module, directory: str | Path, *, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Fill a model, and its optimizer, from a checkpoint of any grid. Every rank must call it.

    The model may be parallelized over any grid, or be a plain one on one process.

    Raises:
        ValueError: the directory is not a complete checkpoint of ours, or lacks the optimizer state that is asked for.
    """
    directory = Path(directory)
    manifest = check_complete(directory)
    state = find_state(model)
    if state is not None and state.tuner is not None and LAYOUTS in manifest["files"]:
        _load_layouts(state, directory / LAYOUTS, manifest["grid"])
    if hasattr(model, "peft_config"):
        load_adapters(model, directory)
    else:
        compat.load_model_shards(model, directory)
    if optimizer is not None:
        load_optimizer(model, optimizer, directory)


def _load_layouts(state: ModelState, path: Path, grid: dict[str, int]) -> None:
    """Go on with the matmul layouts of the run that was saved, so that it repeats to the bit. No communication."""
    try:
        state.tuner.adopt(path.read_text(), same_grid=grid == state.grid.as_dict())
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}. Remove tune_matmuls, or resume from another checkpoint.") from problem


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, directory: str | Path) -> None:
    """The optimizer's half of `load_sharded`, without its check of the files."""
    source = Path(directory) / OPTIMIZER
    if not (source / VALUES).is_file():
        raise ValueError(f"{directory} has no optimizer state: it was saved without (save_only_model?).")
    tensors, _ = compat.flat_optimizer_state(model, optimizer)
    compat.load_shards(tensors, source)
    values = json.loads((source / VALUES).read_text())
    compat.set_flat_optimizer_state(model, optimizer, tensors, values)


def is_sharded_checkpoint(directory: str | Path) -> bool:
    """Whether a directory holds weights or adapters that `save_sharded` wrote, complete or not."""
    directory = Path(directory)
    return (directory / MANIFEST).is_file() or any(directory.glob(SHARDS))


def check_complete(directory: str | Path) -> dict:
    """Return the manifest of a checkpoint.

    Raises:
        ValueError: there is none, or a file is missing or of another size; the message names it.
    """
    directory = Path(directory)
    if not (directory / MANIFEST).is_file():
        raise ValueError(
            f"{directory} is not a complete checkpoint: it has no {MANIFEST}, which is written last. If a run was "
            "stopped while it saved, resume from the checkpoint before."
        )
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        files, tied, grid = manifest["files"].items(), list(manifest["tied"]), Grid(**manifest["grid"])
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise ValueError(f"{directory / MANIFEST} is not a manifest of ours: {problem!r}") from problem
    for name, size in files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{directory / MANIFEST} names {name}, which lies outside of the checkpoint.")
        path = directory / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes and not {size}"
            raise ValueError(f"{directory} is a damaged checkpoint: {name} {what}. Resume from another one.")
    return {**manifest, "tied": tied, "grid": grid.as_dict()}


def export_hf(directory: str | Path, output: str | Path, *, shard_bytes: int = 5 * 2**30) -> None:
    """Turn a sharded checkpoint into an ordinary Hugging Face directory, on one process and tensor by tensor.

    Args:
        directory: what `save_sharded` or a Trainer run on a grid wrote.
        output: made if it is not there; config, generation config, tokenizer and chat template are copied.
        shard_bytes: most bytes of one safetensors file.
    Raises:
        ValueError: the directory is not a complete sharded checkpoint of a whole model, or output is not empty.
    """
    directory, output = Path(directory), Path(output)
    manifest = check_complete(directory)
    if not any(directory.glob(SHARDS)):
        raise ValueError(f"{directory} holds adapters, not a whole model: PEFT loads them as they are.")
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty: name a directory that is new.")
    output.mkdir(parents=True, exist_ok=True)
    compat.consolidate_shards(directory, output, shard_bytes=shard_bytes, leave_out=manifest["tied"])
    for path in directory.iterdir():
        if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja") and path.name not in NOT_EXPORTED:
            shutil.copy2(path, output / path.name)


NOT_CHECKED = {MANIFEST, "trainer_state.json"}
NOT_EXPORTED = {*NOT_CHECKED, LAYOUTS}


def _clear(directory: Path) -> None:
    """Take away what an earlier save left, the manifest first: half a checkpoint must not pass for one."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MANIFEST).unlink(missing_ok=True)
    (directory / LAYOUTS).unlink(missing_ok=True)
    for path in directory.glob(SHARDS):
        path.unlink()
    shutil.rmtree(directory / OPTIMIZER, ignore_errors=True)


def _write_manifest(directory: Path, grid: dict[str, int], tied: list[str]) -> None:
    files = [path for path in directory.rglob("*") if path.suffix in (".safetensors", ".json") and path.is_file()]
    written = [path for path in files if path.parent in (directory, directory / OPTIMIZER)]
    # Trainer writes its own state later; what it changes is not ours to check.
    sizes = {
        str(path.relative_to(directory)): path.stat().st_size
        for path in sorted(written)
        if path.name not in NOT_CHECKED
    }
    text = json.dumps({"version": 1, "grid": grid, "tied": tied, "files": sizes}, indent=1)
    partial = directory / (MANIFEST + ".partial")
    partial.write_text(text)
    partial.replace(directory / MANIFEST)


def _save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    tensors, values = compat.flat_optimizer_state(model, optimizer)
    compat.save_shards(tensors, directory)
    if world_rank() == 0:
        (directory / VALUES).write_text(json.dumps(values, indent=1))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def _save_adapters(model: nn.Module, directory: Path) -> None:
    from peft import get_peft_model_state_dict

    adapters = {}
    for name in model.peft_config:
        # Adapters lie whole on every rank, so nothing is gathered here.
        adapters[name] = {
            key: _whole(value) for key, value in get_peft_model_state_dict(model, adapter_name=name).items()
        }
    if world_rank() == 0:
        from safetensors.torch import save_file

        for name, weights in adapters.items():
            target = directory if name == "default" else directory / name
            target.mkdir(parents=True, exist_ok=True)
            save_file(weights, target / "adapter_model.safetensors", metadata={"format": "pt"})
            model.peft_config[name].save_pretrained(target)


def load_adapters(model: nn.Module, directory: Path) -> None:
    """Fill PEFT adapters, and modules saved with them, from the files that PEFT itself writes. No communication."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import load_file

    for name in model.peft_config:
        source = directory if name == "default" else directory / name
        weights = load_file(source / "adapter_model.safetensors")
        own = get_peft_model_state_dict(model, adapter_name=name)
        if own.keys() != weights.keys():
            raise ValueError(
                f"{source} holds other adapters than the model has: {sorted(own.keys() ^ weights.keys())[:3]}"
            )
        with torch.no_grad():
            for key, value in own.items():
                if isinstance(value, DTensor):  # adapters lie whole on every rank, what is saved beside them may not
                    value.to_local().copy_(shard_of(weights[key], value.placements, find_state(model).mesh))
                else:
                    value.copy_(weights[key])
