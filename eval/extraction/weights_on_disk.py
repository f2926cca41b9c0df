"""Check of weights on disk without loading them: are they complete, and which ones are they.

The loader does not notice a missing checkpoint shard: its part of a weight stays whatever the memory was, and the
model "does not memorize". So the headers of the safetensors files are checked here.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from hf_axonn_eval.extraction.work_split import WorkSplit


SHARD_NAME = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")  # of torch.distributed.checkpoint
# an index says which file a weight is read from where several hold one of its name
_OF_MODEL = re.compile(r"(adapter_)?config\.json|[^.].*\.safetensors(\.index\.json)?")
_TOGETHER = 8  # files that are read at the same time, 16 MiB of each


def is_sharded(directory: Path) -> bool:
    """Return whether the directory holds the shards of a distributed checkpoint."""
    return any(SHARD_NAME.fullmatch(file.name) for file in directory.iterdir())


def check_complete(directory: Path, shapes: Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]]) -> None:
    """Raise unless the shards together hold every number of every weight.

    Args:
        directory: of a distributed checkpoint.
        shapes: for each weight of the model all its names (tied weights have several) and its full shape.
    Raises:
        ValueError: a weight is missing or holds too few or too many numbers; the message names it and the files.
    """
    held: dict[str, int] = {}
    ends: dict[str, list[int]] = {}
    files = sorted(file for file in directory.iterdir() if SHARD_NAME.fullmatch(file.name))
    for file in files:
        header, _ = _header(file)
        places = json.loads(header.get("__metadata__", {}).get("DCP_SHARDING_INFO", "{}"))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            offsets = places.get(name, {}).get("saved_offsets", [0] * len(entry["shape"]))
            held[name] = held.get(name, 0) + math.prod(entry["shape"])
            here = [offset + size for offset, size in zip(offsets, entry["shape"], strict=True)]
            ends[name] = [max(pair) for pair in zip(ends.get(name, here), here, strict=True)]
    for names, shape in shapes.values():
        found = next((name for name in names if name in held), None)
        if found is None or held[found] != math.prod(shape) or tuple(ends[found]) != tuple(shape):
            numbers = f"{held[found]} of {math.prod(shape)} numbers" if found is not None else "nothing"
            raise ValueError(
                f"the checkpoint {directory} is not complete: its {len(files)} shard file(s) hold {numbers} of weight "
                f"{names[0]} {list(shape)}. Copy the shard files of all ranks into this directory."
            )


def fingerprint(directory: Path, work_split: WorkSplit | None = None) -> str:
    """Hash a model to the last bit: its configuration and all its safetensors files, by name.

    It is the sha256 of what the command sha256sum prints for these files, in the order of their names, so that it can
    be checked without this package. Rank 0 reads every byte; what a manifest says of the files is not believed. A copy
    has the same fingerprint, and file times do not enter.

    Args:
        directory: of the model.
        work_split: of processes that all call this; None: of one that is alone.
    Raises:
        ValueError: the directory holds no safetensors files, or one that was cut short.
    Collectives: over the world, one for every _TOGETHER files, so that no rank waits for all of them in one call: the
        time limit of a collective is that of training steps.
    """
    work_split = work_split or WorkSplit()
    files = work_split.on_rank_zero(lambda: _files_of_model(directory))
    lines: list[str] = []
    for start in range(0, len(files), _TOGETHER):
        some = files[start : start + _TOGETHER]
        lines += work_split.on_rank_zero(partial(_sums, some))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _files_of_model(directory: Path) -> list[Path]:
    files = sorted(file for file in directory.iterdir() if _OF_MODEL.fullmatch(file.name))
    weights = [file for file in files if file.suffix == ".safetensors"]
    if not weights:
        raise ValueError(f"{directory} holds no *.safetensors files; weights in other formats are not read.")
    for file in weights:
        _header(file)
    return files


def _sums(files: Sequence[Path]) -> list[str]:
    """Return the line of sha256sum for each file. Hashing takes longer than reading, so each has a thread."""
    from hf_axonn.checkpoint.shard_files import checksum_of

    with ThreadPoolExecutor(min(_TOGETHER, os.cpu_count() or 1)) as pool:
        return [
            f"{sha256}  {file.name}\n" for file, (_, sha256) in zip(files, pool.map(checksum_of, files), strict=True)
        ]


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """Read the JSON header of a safetensors file, and the position at which its data begin.

    Raises:
        ValueError: it is not a complete safetensors file.
    """
    size = file.stat().st_size
    with open(file, "rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{file} is not a safetensors file, or was cut short.")
        try:
            header = json.loads(handle.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise ValueError(f"{file} is not a safetensors file: its header is not JSON.") from None
    data = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    if size != 8 + length + data:
        raise ValueError(f"{file} has {size} bytes, but its header speaks of {8 + length + data}: it was cut short.")
    return header, 8 + length
