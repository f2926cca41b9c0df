"""Whether shards are all of a checkpoint: whoever signed it, gaps, overlaps and other headers are refused by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_axonn import Grid, export_hf
from hf_axonn.checkpoint.commit import write_manifest
from hf_axonn.checkpoint.coverage import Coverage
from hf_axonn.checkpoint.manifest import MANIFEST, Manifest, check_complete, find_problems, read_manifest
from hf_axonn.checkpoint.partition import SavedTensor, Writers
from hf_axonn.checkpoint.shard_files import (
    SHARDING,
    ShardReader,
    byte_sizes,
    checksum_of,
    file_name,
    shards_of,
    write_shards,
)
from hf_axonn.cli.main import main
from tests.helpers.ranks import all_grids


GRID = Grid(x=2)
TENSORS = {
    "a": SavedTensor((4, 6), "F32", (1, 0, None)),
    "b": SavedTensor((3,), "F32", (None, None, None)),
    "c": SavedTensor((5,), "BF16", (None, 0, None)),
    "nothing": SavedTensor((0, 4), "F32", (1, 0, None)),
}
FIRST, SECOND = file_name(0), file_name(1)


def write(folder: Path, tensors: dict[str, SavedTensor], grid: Grid) -> None:
    """What all ranks write; each element is the number of its place."""
    writers = Writers(tensors, grid, byte_sizes(tensors))
    for rank in range(grid.size):
        shards = {}
        for name, box in shards_of(tensors, writers, rank).items():
            whole = torch.arange(tensors[name].numel).reshape(tensors[name].shape)
            dtype = torch.bfloat16 if tensors[name].dtype == "BF16" else torch.float32
            shards[name] = (whole[tuple(slice(*span) for span in box)].to(dtype), box)
        if shards:
            write_shards(folder / file_name(rank), shards)


def sign(folder: Path, tensors=TENSORS, grid: Grid = GRID, optimizer=None) -> None:
    """A manifest whose checksums fit whatever lies there."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    files = {path.relative_to(folder).as_posix(): checksum_of(path) for path in found}
    write_manifest(folder, Manifest("id", grid, files, [], tensors, optimizer or {}))


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write(folder, TENSORS, GRID)
    (folder / "config.json").write_text("{}")
    sign(folder)
    check_complete(folder)
    return folder


@pytest.mark.parametrize("size", [1, 2, 6])
def test_what_all_ranks_wrote_has_no_gap_and_any_missing_file_is_one(tmp_path, size):
    for number, grid in enumerate(all_grids(size)):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder, TENSORS, grid)
        coverage = Coverage(TENSORS, grid)
        files = sorted(path.name for path in folder.iterdir())
        assert coverage.missing(files) is None and not any(coverage.problem_of(folder / file) for file in files), grid
        for file in files:
            gap = coverage.missing(set(files) - {file})
            assert gap is not None and gap.startswith(f"{file} is missing, which holds"), (grid, file)
            # Ranks that divide the work find it, too.
            assert any(coverage.missing(set(files) - {file}, share=rank, shares=3) for rank in range(3))


def resave(path: Path, change, metadata=None) -> None:
    """The file with its tensors changed, as another program would write it."""
    tensors = load_file(path)
    save_file(change(tensors) or tensors, path, metadata)


def set_header(path: Path, header: bytes) -> None:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])


def changed_header(path: Path, change) -> None:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    set_header(path, json.dumps(header).encode())


def starts(value):
    return lambda header: header["__metadata__"].update({SHARDING: value})


DAMAGES = {
    "a rank did not save": (
        lambda folder: (folder / SECOND).unlink(),
        rf"{SECOND} is missing, which holds a\[2:4, 0:6\]: 2 of 4 tensors have gaps, because not every rank saved",
    ),
    "integers of the same size": (
        lambda folder: resave(folder / FIRST, lambda its: its.update(a=its["a"].view(torch.int32))),
        f"{FIRST} holds a as I32 and not as F32",
    ),
    "less of a tensor": (
        lambda folder: resave(folder / SECOND, lambda its: its.update(a=its["a"][:1].clone())),
        rf"{SECOND} holds a part of a of the shape \(1, 6\) and not a\[2:4, 0:6\]",
    ),
    "a tensor less": (
        lambda folder: resave(folder / SECOND, lambda its: {"a": its["a"]}),
        rf"{SECOND} lacks 1 of its 2 tensors, the first c\[3:5\]",
    ),
    "a tensor twice": (
        lambda folder: resave(folder / SECOND, lambda its: its.update(b=torch.ones(3))),
        f"{SECOND} holds b, of which it has to hold nothing",
    ),
    "another place": (
        lambda folder: changed_header(folder / SECOND, starts('{"a": {"saved_offsets": [0, 0]}, "c": 1}')),
        rf"{SECOND} says that a\[2:4, 0:6\] lies at .*\[0, 0\]",
    ),
    "no place": (
        lambda folder: changed_header(folder / SECOND, starts('{"c": 1}')),
        f"{SECOND} does not hold the shards that it has to: KeyError",
    ),
    "places without end": (
        lambda folder: changed_header(folder / SECOND, starts("[" * 100_000)),
        f"{SECOND} does not hold the shards that it has to",
    ),
    "no header": (lambda folder: (folder / SECOND).write_bytes(b"0123456789"), f"{SECOND} does not hold the shards"),
    "a header without end": (lambda folder: set_header(folder / SECOND, b"[" * 100_000), f"{SECOND} does not hold"),
    "a file too many": (
        lambda folder: save_file({"a": torch.ones(4, 6)}, folder / file_name(2)),
        f"{file_name(2)} is no file that the grid data=1,z=1,y=1,x=2 writes",
    ),
    "another name": (
        lambda folder: (folder / SECOND).rename(folder / SECOND.replace("00001-of-00001", "00002-of-00002")),
        "shard-00002-model-00002-of-00002.safetensors is no file that the grid",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_signed_shards_that_do_not_fit_are_refused(checkpoint, tmp_path, capsys, kind):
    damage, words = DAMAGES[kind]
    damage(checkpoint)
    sign(checkpoint)
    with pytest.raises(ValueError, match=words):
        check_complete(checkpoint)
    with pytest.raises(ValueError, match="is a damaged checkpoint"):
        export_hf(checkpoint, tmp_path / "plain")
    assert main(["verify", str(checkpoint)]) == 1
    assert f"{checkpoint} is damaged" in capsys.readouterr().out
    by_names = find_problems(checkpoint, read_manifest(checkpoint), contents=False)
    assert bool(by_names) == (kind in ("a rank did not save", "another name")), "no header is read for that"


@pytest.mark.parametrize(
    ("tensors", "grid"),
    [
        (TENSORS, Grid(x=10**12)),
        ({**TENSORS, "a": SavedTensor((10**12, 6), "F32", (1, 0, None))}, Grid(x=10**12)),
        ({**TENSORS, "a": SavedTensor((10**15, 10**15), "F32", (1, 0, 0))}, Grid(x=10**9, y=10**9, z=10**9)),
        ({**TENSORS, "a": SavedTensor((10**15, 6), "F32", (1, 0, None))}, GRID),
    ],
    ids=["an axis", "an axis and a tensor", "all axes", "a tensor"],
)
@pytest.mark.timeout(60)
def test_signed_sizes_beyond_all_bounds_take_no_time(checkpoint, tmp_path, tensors, grid):
    sign(checkpoint, tensors, grid)
    with pytest.raises(ValueError, match="is a damaged checkpoint"):
        export_hf(checkpoint, tmp_path / "plain")


def test_integers_are_not_read_as_weights(tmp_path):
    """The manifest and the file agree; the model has other numbers."""
    whole = ((0, 3),)
    write_shards(tmp_path / FIRST, {"b": (torch.arange(3, dtype=torch.int32), whole)})
    tensors = {"b": SavedTensor((3,), "I32", (None, None, None))}
    sign(tmp_path, tensors, Grid())
    reader = ShardReader(tmp_path, check_complete(tmp_path).model, Grid())
    assert reader.read("b").tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="holds b as torch.int32, which cannot be read as torch.float32"):
        reader.fill({"b": torch.empty(3)})


def test_optimizer_states_are_looked_at_as_well(checkpoint):
    (checkpoint / "optimizer").mkdir()
    write(checkpoint / "optimizer", TENSORS, GRID)
    sign(checkpoint, optimizer=TENSORS)
    check_complete(checkpoint)
    (checkpoint / "optimizer" / SECOND).unlink()
    sign(checkpoint, optimizer=TENSORS)
    with pytest.raises(ValueError, match=f"optimizer/{SECOND} is missing, which holds a"):
        check_complete(checkpoint)
