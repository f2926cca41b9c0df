"""Safetensors files of shards: written tensor by tensor with a checksum, read slice by slice.

Such a file is what torch.distributed.checkpoint would write (its sharding information stands in the header), so
Transformers and torch read such a directory as well.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from hf_axonn.checkpoint.partition import Box, SavedTensor, Writers, box_at, overlap, shards_in
from hf_axonn.compat.torch import grid_of
from hf_axonn.engine.dtensors import local_of, mesh_slices, weight_dims
from hf_axonn.topology.grid import WEIGHT_AXES, Grid


# Bytes of a file, and its SHA-256 as hex.
FileRecord = tuple[int, str]

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
CHUNK = 16 * 2**20
SHARDING = "DCP_SHARDING_INFO"  # in the header: where the shards of a file begin in their tensors


def file_name(rank: int) -> str:
    """Return the name of a rank's file of shards, by which Transformers knows a sharded checkpoint."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def describe(tensor: Tensor) -> SavedTensor:
    """Describe how a tensor, or a DTensor on the storage mesh of a grid, is saved.

    Raises:
        ValueError: its dtype or its placements cannot be saved.
    """
    if tensor.dtype not in NAMES:
        raise ValueError(f"a tensor of {tensor.dtype} cannot be saved: safetensors has no such type.")
    dims: tuple[int | None, ...] = (None,) * len(WEIGHT_AXES)
    if isinstance(tensor, DTensor):
        grid = grid_of(tensor.device_mesh)
        if grid is None or not all(type(placement) in (Shard, Replicate) for placement in tensor.placements):
            raise ValueError(
                f"a DTensor with the placements {tensor.placements} on {tensor.device_mesh} cannot be saved: "
                "redistribute it first."
            )
        dims = weight_dims(tensor.placements, grid)
    return SavedTensor(tuple(tensor.shape), NAMES[tensor.dtype], dims)


def byte_sizes(tensors: Mapping[str, SavedTensor]) -> dict[str, int]:
    """Return the bytes of each global tensor."""
    return {name: tensor.numel * DTYPES[tensor.dtype].itemsize for name, tensor in tensors.items()}


def shards_of(tensors: Mapping[str, SavedTensor], writers: Writers, rank: int) -> dict[str, Box]:
    """Return the shards in the file of a rank: the box of each."""
    here = writers.grid.coordinates(rank)
    boxes = {name: box_at(tensors[name], writers.grid, here) for name in writers.names_of(here)}
    # A rank beyond the end of a small tensor has nothing; a tensor without elements is the first rank's.
    return {
        name: box
        for name, box in boxes.items()
        if all(start < stop for start, stop in box) or (tensors[name].numel == 0 and rank == 0)
    }


def shards_to_write(
    tensors: Mapping[str, Tensor], saved: Mapping[str, SavedTensor], grid: Grid, rank: int
) -> dict[str, tuple[Tensor, Box]]:
    """Return the parts that a rank writes of a state that all ranks hold, and where they lie. No copies.

    Args:
        tensors: of this rank.
        saved: of all ranks.
    """
    boxes = shards_of(saved, Writers(saved, grid, byte_sizes(saved)), rank)
    return {name: (local_of(tensors[name]), box) for name, box in boxes.items()}


def write_shards(path: Path, shards: Mapping[str, tuple[Tensor, Box]]) -> FileRecord:
    """Write shards as one file of a sharded checkpoint; returns its bytes and checksum. It is on disk afterwards.

    Raises:
        OSError: the file cannot be written.
    """
    offsets = {name: {"saved_offsets": [start for start, _ in box]} for name, (_, box) in shards.items()}
    metadata = {SHARDING: json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    shapes = {name: (NAMES[tensor.dtype], tuple(tensor.shape)) for name, (tensor, _) in shards.items()}
    return write_safetensors(path, shapes, lambda name: shards[name][0], metadata)


def order_in_file(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[str]:
    """Sort names as safetensors orders them: the widest types first, so that every tensor is aligned."""
    return sorted(shapes, key=lambda name: (-DTYPES[shapes[name][0]].itemsize, name))


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[str, tuple[int, ...]]],
    make: Callable[[str], Tensor],
    metadata: Mapping[str, str],
) -> FileRecord:
    """Write a safetensors file one tensor after the other, so that only one of them need be in memory.

    Args:
        path: of the new file.
        shapes: dtype name and shape of each tensor.
        make: gives the tensor of a name, on any device, when its turn in `order_in_file` has come.
        metadata: of the header.
    Returns:
        Number of bytes, and the SHA-256 of the file as hex.
    Raises:
        OSError: the file cannot be written.
    """
    order = order_in_file(shapes)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        dtype, shape = shapes[name]
        begin, end = end, end + SavedTensor(shape, dtype, (None,) * 3).numel * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    checksum = hashlib.sha256()
    with open(path, "wb") as file:
        _put(file, checksum, struct.pack("<Q", len(text)) + text)
        for name in order:
            tensor = make(name).detach().to("cpu").contiguous()
            _put(file, checksum, tensor.reshape(-1).view(torch.uint8).numpy().data)
            del tensor
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    return size, checksum.hexdigest()


def _put(file: BinaryIO, checksum: hashlib._Hash, data: bytes | memoryview) -> None:
    for start in range(0, len(data), CHUNK):
        part = data[start : start + CHUNK]
        file.write(part)
        checksum.update(part)


def checksum_of(path: Path) -> FileRecord:
    """Return bytes and SHA-256 of a file."""
    checksum, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while part := file.read(CHUNK):
            checksum.update(part)
            size += len(part)
    return size, checksum.hexdigest()


def box_of(tensor: Tensor) -> Box:
    """Return the box of this rank's part of a DTensor; all of it for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return tuple((0, size) for size in tensor.shape)
    slices = mesh_slices(tensor.shape, tensor.placements, tensor.device_mesh)
    return tuple((part.start, part.stop) for part in slices)


class ShardReader:
    """Reads boxes of the tensors of one sharded checkpoint. No communication.

    Args:
        directory: holds the files.
        tensors: what was saved.
        grid: on which it was saved.
    """

    def __init__(self, directory: Path, tensors: Mapping[str, SavedTensor], grid: Grid) -> None:
        self.directory, self.tensors, self.grid = directory, tensors, grid
        self._writers = Writers(tensors, grid, byte_sizes(tensors))

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors, and the local parts of DTensors, in place. Each file is opened once.

        Raises:
            ValueError: the checkpoint lacks one of them, or has it with another shape.
        """
        self.check(targets)
        from safetensors import SafetensorError, safe_open

        plan = self.plan({name: box_of(target) for name, target in targets.items()})
        with torch.no_grad():
            for rank, parts in sorted(plan.items()):
                path = self.directory / file_name(rank)
                try:
                    with safe_open(path, framework="pt") as file:
                        for name, shard, box in parts:
                            common = overlap(shard, box)
                            assert common is not None  # the plan names only shards that overlap
                            local_of(targets[name])[_inside(common, box)].copy_(
                                file.get_slice(name)[_inside(common, shard)] if common else file.get_tensor(name)
                            )
                except (SafetensorError, OSError) as problem:
                    raise ValueError(f"{path} cannot be read: {problem}") from problem

    def plan(self, boxes: Mapping[str, Box]) -> dict[int, list[tuple[str, Box, Box]]]:
        """Return the files to open for these boxes, by the rank that wrote them.

        Args:
            boxes: the part of each tensor to read.
        Returns:
            For each such rank (name, the box of the shard in its file, the box to read) of all that it has.
        """
        found: dict[int, list[tuple[str, Box, Box]]] = {}
        for name, box in boxes.items():
            if all(start < stop for start, stop in box):
                for place, shard in shards_in(self.tensors[name], self.grid, box):
                    found.setdefault(self._writers.rank(name, place), []).append((name, shard, box))
        return found

    def read(self, name: str) -> Tensor:
        """Return one global tensor, in full."""
        tensor = self.tensors[name]
        full = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
        self.fill({name: full})
        return full

    def check(self, targets: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless the checkpoint has each of these tensors, with its shape and kind of number."""
        missing = [name for name in targets if name not in self.tensors]
        if missing:
            raise ValueError(f"{self.directory} lacks {len(missing)} tensors, among them {', '.join(missing[:3])}.")
        for name, target in targets.items():
            if tuple(target.shape) != self.tensors[name].shape:
                raise ValueError(
                    f"{self.directory} holds {name} with the shape {self.tensors[name].shape}, and not "
                    f"{tuple(target.shape)}: it is a checkpoint of another model."
                )
            dtype = DTYPES[self.tensors[name].dtype]
            if dtype.is_floating_point != target.dtype.is_floating_point:
                raise ValueError(f"{self.directory} holds {name} as {dtype}, which cannot be read as {target.dtype}.")


def _inside(box: Box, outer: Box) -> tuple[slice, ...]:
    """A box as slices of a tensor that is `outer`."""
    return tuple(slice(start - o, stop - o) for (start, stop), (o, _) in zip(box, outer, strict=True))
