"""Folders that torch.distributed.checkpoint (DCP) wrote for others: FSDP2 under Accelerate, Transformers' optimizers.

A tensor lies in pieces, in files of several ranks. `Pieces` gives any part of it and reads no other piece; it stands
where a slice of safetensors would. Nothing is unpickled but torch's own descriptions, tensors and plain values.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from hf_axonn.checkpoint.shard_files import NAMES


METADATA = ".metadata"
MODEL, OPTIMIZER_NAMES = "model.", "optimizer."  # what names begin with
WEIGHT_FOLDERS = ("pytorch_model_fsdp_0", "")  # of Accelerate, or of a script's own dcp.save
OPTIMIZER_FOLDERS = ("optimizer_0", "optimizer", "")
# The classes that DCP's description is made of.
KNOWN = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "collections": ("OrderedDict",),
}
# What others leave that is read in no part, and what to write instead.
UNREAD = {
    "pytorch_model_fsdp.bin": "FSDP's FULL_STATE_DICT: save with SHARDED_STATE_DICT, or accelerator.save_model",
    "pytorch_model_fsdp_0_rank0.bin": "FSDP's shards of single ranks (use_dcp=False): save with use_dcp=True",
    "pytorch_model_fsdp_rank0.bin": "FSDP's LOCAL_STATE_DICT: save with SHARDED_STATE_DICT",
    "global_step*": "DeepSpeed's ZeRO: run its zero_to_fp32.py and load the weights",
    "latest_checkpointed_iteration.txt": "Megatron-LM: convert it to a Hugging Face directory first",
}


@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor: where it begins, its size, and what reads it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Pieces:
    """A tensor that lies in pieces, read where it is indexed by one (start, stop) for each dim, or by `...`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[Piece]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return NAMES.get(self.dtype, str(self.dtype))

    def __getitem__(self, region: tuple[slice, ...] | EllipsisType) -> Tensor:
        spans = [slice(0, size) for size in self.shape] if isinstance(region, EllipsisType) else list(region)
        bounds = [each.indices(size)[:2] for each, size in zip(spans, self.shape, strict=True)]
        result = torch.empty([stop - start for start, stop in bounds], dtype=self.dtype)
        covered = 0
        for piece in self.pieces:
            there = list(zip(bounds, piece.offsets, piece.sizes, strict=True))
            common = [(max(start, at), min(stop, at + size)) for (start, stop), at, size in there]
            if any(start >= stop for start, stop in common):
                continue
            value = piece.read()
            if tuple(value.shape) != piece.sizes:
                raise ValueError(f"{self.name} has a piece of shape {tuple(value.shape)}, not {piece.sizes}.")
            target = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(common, bounds, strict=True))
            source = tuple(slice(a - at, b - at) for (a, b), at in zip(common, piece.offsets, strict=True))
            result[target] = value[source]
            covered += math.prod(stop - start for start, stop in common)
        if covered != result.numel():
            raise ValueError(f"{self.name} lies in pieces that do not make up its shape {self.shape}.")
        return result


def find_torch_folder(directory: Path, *, optimizer: bool = False) -> Path | None:
    """Return the folder of a checkpoint in which DCP wrote weights, or an optimizer; None without one."""
    names = OPTIMIZER_FOLDERS if optimizer else WEIGHT_FOLDERS
    return next((directory / name for name in names if (directory / name / METADATA).is_file()), None)


def name_unread(directory: Path) -> str:
    """Return what lies in a folder that is read in no part, as the end of a message; empty without any."""
    found = next((f"{name}, {why}" for name, why in UNREAD.items() if any(directory.glob(name))), "")
    return f" It has {found}." if found else ""


def read_torch_folder(folder: Path, beginning: str) -> tuple[dict[str, Pieces], dict[str, Callable[[], Any]]]:
    """Return the tensors of a folder of DCP, and what reads its plain values, by the rest of names with a beginning.

    Raises:
        ValueError: the description is damaged, or holds something else than DCP writes, or no such name.
    """
    try:
        with open(folder / METADATA, "rb") as file:
            described = _Unpickler(file).load()
        entries = {name: entry for name, entry in described.state_dict_metadata.items() if name.startswith(beginning)}
        places = {(index.fqn, tuple(index.offset or ())): place for index, place in described.storage_data.items()}
        tensors: dict[str, Pieces] = {}
        values: dict[str, Callable[[], Any]] = {}
        for full, entry in entries.items():
            name = full.removeprefix(beginning)
            if hasattr(entry, "chunks"):
                pieces = [
                    Piece(offsets, tuple(chunk.sizes), _reader(folder, places[full, offsets]))
                    for chunk in entry.chunks
                    for offsets in (tuple(chunk.offsets),)
                ]
                tensors[name] = Pieces(full, tuple(entry.size), entry.properties.dtype, pieces)
            else:
                values[name] = _reader(folder, places[full, ()])
    except (pickle.UnpicklingError, AttributeError, EOFError, LookupError, TypeError) as problem:
        raise ValueError(f"{folder / METADATA} is no description of a checkpoint: {problem}") from None
    if not entries:
        raise ValueError(f"{folder} has no {beginning}* among what it names: it is of another kind.")
    return tensors, values


def _reader(folder: Path, place: Any) -> Callable[[], Any]:
    """Return what reads one tensor or value; `place` is where DCP has put it."""
    if getattr(place, "transform_descriptors", None):
        raise ValueError(f"{folder} is compressed ({place.transform_descriptors[0]}): save it without extensions.")
    path = folder / Path(place.relative_path).name  # DCP's files lie side by side

    def read() -> Any:
        with open(path, "rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as problem:
            reason = str(problem).partition("\n")[0]
            raise ValueError(f"{path} is damaged, or holds more than tensors and plain values: {reason}") from None

    return read


class _Unpickler(pickle.Unpickler):
    """Reads DCP's description, which is made of a few classes of torch, and imports nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "pathlib._local":  # what Python 3.13 calls it
            module = "pathlib"
        if name in KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
