"""A sharded checkpoint becomes an ordinary Hugging Face directory, on one process and tensor by tensor."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Container, Mapping
from pathlib import Path

from hf_axonn.checkpoint.commit import commit, new_stage, recover, sync_directory
from hf_axonn.checkpoint.manifest import MANIFEST, check_complete
from hf_axonn.checkpoint.shard_files import ShardReader, byte_sizes, write_safetensors
from hf_axonn.checkpoint.sharded import LAYOUTS


COPIED = (".json", ".txt", ".model", ".jinja")
NOT_COPIED = (MANIFEST, LAYOUTS, "trainer_state.json")
INDEX = "model.safetensors.index.json"
ORDINARY = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


def export_hf(directory: str | Path, output: str | Path, *, shard_bytes: int = 5 * 2**30) -> None:
    """Turn a sharded checkpoint into an ordinary Hugging Face directory.

    One tensor is in memory at a time. The output has its name only when it is complete.

    Args:
        directory: what `save_sharded` or a Trainer run on a grid wrote.
        output: made if it is not there; config, generation config, tokenizer and chat template are copied.
        shard_bytes: most bytes of the tensors of one safetensors file, unless a single one is larger.
    Raises:
        ValueError: the directory is not a complete sharded checkpoint of a whole model, or output is not empty.
        OSError: the output cannot be written; nothing of it is left.
    """
    directory, output = Path(directory), Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} is not empty: name a directory that is new.")
    recover(directory)
    manifest = check_complete(directory)
    if not manifest.model:
        raise ValueError(f"{directory} holds adapters, not a whole model: PEFT loads them as they are.")
    tensors = {name: tensor for name, tensor in manifest.model.items() if name not in manifest.tied}
    sizes = byte_sizes(tensors)
    reader = ShardReader(directory, manifest.model, manifest.grid)
    if output.exists():
        output.rmdir()
    stage = new_stage(output)
    try:
        files = _divide(sizes, shard_bytes)
        for file, names in files.items():
            shapes = {name: (tensors[name].dtype, tensors[name].shape) for name in names}
            write_safetensors(stage / file, shapes, reader.read, {"format": "pt"})
        if len(files) > 1:
            weight_map = {name: file for file, names in files.items() for name in names}
            write_index(stage, sum(sizes.values()), weight_map)
        for name in manifest.files:
            if "/" not in name and Path(name).suffix in COPIED and name not in NOT_COPIED:
                shutil.copy2(directory / name, stage / name)
        sync_directory(stage)
        commit(stage, output)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


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
