"""A sharded checkpoint, of a grid or of DCP, becomes an ordinary Hugging Face directory, on one process, tensor by
tensor."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Container, Mapping
from pathlib import Path

from torch import Tensor

from hf_axonn.checkpoint.commit import commit, new_stage, recover, sync_directory
from hf_axonn.checkpoint.manifest import MANIFEST, check_complete, is_sharded_checkpoint
from hf_axonn.checkpoint.partition import SavedTensor
from hf_axonn.checkpoint.shard_files import ShardReader, byte_sizes, write_safetensors
from hf_axonn.checkpoint.sharded import LAYOUTS
from hf_axonn.checkpoint.torch_folders import MODEL, find_torch_folder, read_torch_folder


COPIED = (".json", ".txt", ".model", ".jinja")
NOT_COPIED = (MANIFEST, LAYOUTS, "trainer_state.json", "step_batch.json")
INDEX = "model.safetensors.index.json"
ORDINARY = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


def export_hf(directory: str | Path, output: str | Path, *, shard_bytes: int = 5 * 2**30) -> None:
    """Turn a sharded checkpoint into an ordinary Hugging Face directory.

    One tensor is in memory at a time. The output has its name only when it is complete.

    Args:
        directory: what `save_sharded` or a Trainer run on a grid wrote, or FSDP2 under Accelerate (torch_folders.py).
        output: made if it is not there; config, generation config, tokenizer and chat template are copied.
        shard_bytes: most bytes of the tensors of one safetensors file, unless a single one is larger.
    Raises:
        ValueError: the directory is not a complete sharded checkpoint of a whole model, or output is not empty.
        OSError: the output cannot be written; nothing of it is left.
    """
    directory, output = Path(directory), Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} is not empty: name a directory that is new.")
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory.")
    tensors, read, names = _find_tensors(directory)
    sizes = byte_sizes(tensors)
    if output.exists():
        output.rmdir()
    stage = new_stage(output)
    try:
        files = _divide(sizes, shard_bytes)
        for file, own in files.items():
            shapes = {name: (tensors[name].dtype, tensors[name].shape) for name in own}
            write_safetensors(stage / file, shapes, read, {"format": "pt"})
        if len(files) > 1:
            weight_map = {name: file for file, own in files.items() for name in own}
            write_index(stage, sum(sizes.values()), weight_map)
        for name in names:
            if "/" not in name and Path(name).suffix in COPIED and name not in NOT_COPIED:
                shutil.copy2(directory / name, stage / name)
        sync_directory(stage)
        commit(stage, output)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


def _find_tensors(directory: Path) -> tuple[dict[str, SavedTensor], Callable[[str], Tensor], list[str]]:
    """Return the tensors of a checkpoint, what reads one in full, and the names of the files beside them."""
    folder = None if is_sharded_checkpoint(directory) else find_torch_folder(directory)
    if folder is not None:
        pieces, _ = read_torch_folder(folder, MODEL)
        if adapted := [name for name in pieces if name.startswith("base_model.")]:
            raise ValueError(
                f"{folder} holds adapters ({adapted[0]} ...), not a whole model: resume from {directory} on a grid "
                "(resume_from_checkpoint, accelerator.load_state), and save there."
            )
        tensors = {name: SavedTensor(each.shape, each.get_dtype(), (None,) * 3) for name, each in pieces.items()}
        return tensors, lambda name: pieces[name][...], [path.name for path in directory.iterdir() if path.is_file()]
    recover(directory)
    manifest = check_complete(directory)
    if not manifest.model:
        raise ValueError(f"{directory} holds adapters, not a whole model: PEFT loads them as they are.")
    tensors = {name: tensor for name, tensor in manifest.model.items() if name not in manifest.tied}
    return tensors, ShardReader(directory, manifest.model, manifest.grid).read, list(manifest.files)


def write_index(directory: Path, total_size: int, weight_map: Mapping[str, str]) -> None:
    """Write which file has which tensor, and how many bytes all of them have."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def remove_ordinary(directory: Path, *, keep: Container[str]) -> None:
    """Remove the ordinary files of an earlier model, which would be read instead of what is there now."""
    for path in directory.iterdir():
        if path.name not in keep and (path.name == INDEX or ORDINARY.fullmatch(path.name)):
            path.unlink()


def _divide(sizes: Mapping[str, int], most: int) -> dict[str, list[str]]:
    """Names by file, in order, each file up to `most` bytes; one file is called model.safetensors."""
    groups: list[list[str]] = []
    used = 0
    for name, size in sizes.items():
        if not groups or used + size > most:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{place:05d}-of-{len(groups):05d}.safetensors": names for place, names in enumerate(groups, 1)}
