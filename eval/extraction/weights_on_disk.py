"""Weights on disk, without loading them: are they complete, and which ones are they.

A checkpoint shard that is missing is not noticed by the loader: the part of a weight that it held stays whatever the
memory was, and the model "does not memorize". So it is looked for here, in the headers of the safetensors files.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


SHARD_NAME = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")  # of torch.distributed.checkpoint
_SAMPLE_BYTES = 4096  # bytes read of a tensor's beginning, middle and end


def is_sharded(directory: Path) -> bool:
    """Whether the directory holds the shards of a distributed checkpoint."""
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
        name = next((name for name in names if name in held), None)
        if name is None or held[name] != math.prod(shape) or tuple(ends[name]) != tuple(shape):
            numbers = f"{held[name]} of {math.prod(shape)} numbers" if name is not None else "nothing"
            raise ValueError(
                f"the checkpoint {directory} is not complete: its {len(files)} shard file(s) hold {numbers} of weight "
                f"{names[0]} {list(shape)}. Copy the shard files of all ranks into this directory."
            )


def fingerprint(directory: Path) -> str:
    """A hash that tells models apart: of the configuration, and of samples of every tensor.

    Three samples of each tensor are read, not full files, so that a model of hundreds of gigabytes takes seconds;
    training changes every sample. File times do not enter: a copy has the same fingerprint.

    Raises:
        ValueError: the directory holds no safetensors files.
    """
    digest = hashlib.sha256()
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory} holds no *.safetensors files; weights in other formats are not read.")
    for file in (directory / "config.json", directory / "adapter_config.json"):
        if file.is_file():
            digest.update(file.read_bytes())
    for file in files:
        header, start = _header(file)
        digest.update(json.dumps([file.name, header], sort_keys=True).encode())
        with open(file, "rb") as handle:
            for name, entry in sorted(header.items()):
                if name == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                for place in (begin, (begin + end) // 2, max(begin, end - _SAMPLE_BYTES)):
                    handle.seek(start + place)
                    digest.update(handle.read(min(_SAMPLE_BYTES, end - place)))
    return digest.hexdigest()


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The JSON header of a safetensors file and the position at which its data begin.

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
