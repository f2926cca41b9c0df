"""Manifests: what a checkpoint says of itself, and every way in which it can be wrong, refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from hf_axonn import Grid
from hf_axonn.checkpoint.commit import recover, write_manifest
from hf_axonn.checkpoint.manifest import (
    MANIFEST,
    STAGE,
    Manifest,
    check_complete,
    find_problems,
    is_sharded_checkpoint,
    other_weights,
    read_manifest,
)
from hf_axonn.checkpoint.partition import SavedTensor
from hf_axonn.checkpoint.shard_files import checksum_of, write_shards
from hf_axonn.cli.main import main


SIZE = 192  # of the shard
SHARD = "shard-00001-model-00001-of-00001.safetensors"
CONTENT = {"config.json": b"{}", "optimizer/values.json": b"[]"}


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """Three files and a manifest that fits them; test_coverage.py looks into the shards."""
    folder = tmp_path / "checkpoint-3"
    for name, content in CONTENT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    tensors = {"w": SavedTensor((4, 2), "BF16", (1, None, None))}
    write_shards(folder / SHARD, {"w": (torch.ones(4, 2, dtype=torch.bfloat16), ((0, 4), (0, 2)))})
    files = {name: checksum_of(folder / name) for name in (SHARD, *CONTENT)}
    write_manifest(folder, Manifest("an id", Grid(x=2), files, ["v"], tensors, {}))
    return folder


def test_a_manifest_is_read_as_it_was_written(checkpoint):
    manifest = check_complete(checkpoint)
    assert (manifest.save, manifest.grid, manifest.tied) == ("an id", Grid(x=2), ["v"])
    assert manifest.model["w"] == SavedTensor((4, 2), "BF16", (1, None, None)) and manifest.nbytes == SIZE + 4
    assert manifest == Manifest.from_json(manifest.to_json())


def damage(checkpoint: Path, kind: str) -> None:
    shard = checkpoint / SHARD
    outside = checkpoint.parent / "outside"
    if kind == "flipped":
        shard.write_bytes(shard.read_bytes()[:-1] + b"1")
    elif kind == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif kind == "missing":
        shard.unlink()
    elif kind == "directory":
        shard.unlink()
        shard.mkdir()
    elif kind == "pipe":  # reading it would wait for ever
        shard.unlink()
        os.mkfifo(shard)
    elif kind == "foreign":
        (checkpoint / "shard-00002-model-00001-of-00001.safetensors").write_bytes(b"1")
    elif kind == "foreign optimizer":
        (checkpoint / "optimizer" / "shard-00009-model-00001-of-00001.safetensors").write_bytes(b"1")
    elif kind == "other weights":
        (checkpoint / "model-00001-of-00002.safetensors").write_bytes(b"1")
    elif kind == "other pickled weights":
        (checkpoint / "pytorch_model.bin.index.json").write_bytes(b"{}")
    elif kind == "link":
        shard.rename(outside)
        shard.symlink_to(outside)
    elif kind == "linked folder":
        (checkpoint / "optimizer").rename(outside)
        (checkpoint / "optimizer").symlink_to(outside)


DAMAGES = {
    "flipped": f"{SHARD} has other content than was written",
    "truncated": f"{SHARD} has {SIZE - 1} bytes and not {SIZE}",
    "missing": f"{SHARD} is missing",
    "directory": f"{SHARD} is not a file",
    "pipe": f"{SHARD} is not a file",
    "foreign": "shard-00002-model-00001-of-00001.safetensors is of another save",
    "foreign optimizer": "optimizer/shard-00009-model-00001-of-00001.safetensors is of another save",
    "other weights": "model-00001-of-00002.safetensors holds other weights",
    "other pickled weights": "pytorch_model.bin.index.json holds other weights",
    "link": f"{SHARD} is reached by a symbolic link",
    "linked folder": "optimizer/values.json is reached by a symbolic link",
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_named(checkpoint, capsys, kind):
    assert main(["verify", str(checkpoint)]) == 0
    assert f"3 files, {SIZE + 4} bytes, written on data=1,z=1,y=1,x=2" in capsys.readouterr().out
    damage(checkpoint, kind)
    with pytest.raises(ValueError, match="is a damaged checkpoint") as refusal:
        check_complete(checkpoint)
    assert DAMAGES[kind] in str(refusal.value)
    assert main(["verify", str(checkpoint)]) == 1
    assert DAMAGES[kind] in capsys.readouterr().out
    # Each damage is seen by exactly one of the ranks that divide the work.
    manifest = read_manifest(checkpoint)
    shares = [find_problems(checkpoint, manifest, share=rank, shares=3) for rank in range(3)]
    assert sorted(len(share) for share in shares) == [0, 0, 1]


def test_files_that_are_no_weights_of_the_model_may_lie_beside_it(checkpoint):
    for name in ("adapter_model.safetensors", "model_1.safetensors", "model.py", "optimizer.bin", "training_args.bin"):
        (checkpoint / name).write_bytes(b"1")
    check_complete(checkpoint)
    # A checkpoint of adapters says nothing of the weights of their base.
    (checkpoint / "model.safetensors").write_bytes(b"1")
    assert other_weights(checkpoint, read_manifest(checkpoint)) == ["model.safetensors"]
    assert other_weights(checkpoint, Manifest("id", Grid(), {})) == []


def test_a_commit_removes_the_weights_that_it_supersedes_and_no_other(checkpoint):
    directory = checkpoint.parent / "plain"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"1")
    (directory / "adapter_model.safetensors").write_bytes(b"1")
    manifest = read_manifest(checkpoint)
    manifest.supersedes.extend(other_weights(directory, manifest))
    write_manifest(checkpoint, manifest)
    assert read_manifest(checkpoint) == manifest and manifest.supersedes == ["model.safetensors"]
    checkpoint.rename(directory / STAGE)
    (directory / "model.fp16.safetensors").write_bytes(b"written since, by somebody else")
    assert recover(directory)
    assert not (directory / "model.safetensors").exists() and (directory / "adapter_model.safetensors").exists()
    with pytest.raises(ValueError, match="model.fp16.safetensors holds other weights"):
        check_complete(directory)
    (directory / "model.fp16.safetensors").unlink()
    check_complete(directory)


def test_sizes_only_reads_nothing(checkpoint):
    damage(checkpoint, "flipped")
    assert check_complete(checkpoint, contents=False).nbytes == SIZE + 4


def changed(text: str, kind: str) -> str:
    body = json.loads(text)
    if kind == "another save":  # every part of it is right, but it is not the manifest of these files
        files = {name: (size, "0" * 64) for name, (size, _) in body["files"].items()}
        return Manifest("other", Grid(x=2), files).to_json()
    if kind == "edited":
        body["tied"] = []
        return json.dumps(body)
    if kind == "flipped":
        place = text.index('"an id"') + 1
        return text[:place] + "b" + text[place + 1 :]
    if kind == "older":
        return json.dumps({"version": 1, "grid": {"x": 2}, "tied": [], "files": {SHARD: 10}})
    return text[: len(text) // 2]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("another save", "has other content than was written"),
        ("edited", "its checksum does not fit it"),
        ("flipped", "its checksum does not fit it"),
        ("older", "version 1, but this program reads version 2"),
        ("truncated", "is not a manifest of ours"),
    ],
)
def test_a_manifest_that_does_not_belong_is_refused(checkpoint, capsys, kind, words):
    path = checkpoint / MANIFEST
    path.write_text(changed(path.read_text(), kind))
    with pytest.raises(ValueError, match=words):
        check_complete(checkpoint)
    assert main(["verify", str(checkpoint)]) == 1
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/../../b", "", ".", "a\0b", "a\nb", "..\\a"])
def test_a_manifest_cannot_point_outside(tmp_path, name):
    text = Manifest("id", Grid(), {name: (3, "0" * 64)}).to_json()
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ValueError, match="lies outside"):
        check_complete(tmp_path)


def test_a_manifest_that_is_a_link_is_refused(checkpoint):
    (checkpoint / MANIFEST).rename(checkpoint.parent / "elsewhere.json")
    (checkpoint / MANIFEST).symlink_to(checkpoint.parent / "elsewhere.json")
    with pytest.raises(ValueError, match="symbolic link"):
        check_complete(checkpoint)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["a pipe", "a folder", "without end"])
def test_a_manifest_that_cannot_be_read_to_its_end_is_refused(checkpoint, capsys, kind):
    path = checkpoint / MANIFEST
    if kind == "without end":
        os.truncate(path, 2**40)  # a hole, which takes no room on the disk
    else:
        path.unlink()
        os.mkfifo(path) if kind == "a pipe" else path.mkdir()
    with pytest.raises(ValueError, match=f"{MANIFEST} cannot be read: it is"):
        check_complete(checkpoint)
    assert main(["verify", str(checkpoint)]) == 1
    assert f"{MANIFEST} cannot be read: it is" in capsys.readouterr().out


NONSENSE = ["", "{", "[]", "{}", "null", "1e999", '{"version": 2}', "[" * 100_000, '{"version": [2]}', "\ud800"]


@pytest.mark.parametrize("text", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_is_refused(tmp_path, capsys, text):
    (tmp_path / MANIFEST).write_bytes(text.encode(errors="surrogatepass"))
    assert main(["verify", str(tmp_path)]) == 1
    assert MANIFEST in capsys.readouterr().out


# Each of these has a checksum that fits, as someone who means harm would see to.
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("files", [1]),
        ("files", {"a": 3}),
        ("files", {"a": [True, "x"]}),
        ("files", {"a": [1, 2]}),
        ("files", {"a" * 5000: [1, "x"]}),
        ("grid", {"x": -1}),
        ("grid", {"q": 1}),
        ("grid", 3),
        ("model", {"w": ["F33", [1], [0, 0, 0]]}),
        ("model", {"w": ["F32", [1], [0, 0, 4]]}),
        ("model", {"w": ["F32", "ab", [0, 0, 0]]}),
        ("model", {"w": [["F32"], [1], [0, 0, 0]]}),
        ("model", []),
        ("tied", 7),
        ("supersedes", 7),
        ("supersedes", ["config.json"]),
        ("supersedes", ["sub/model.safetensors"]),
    ],
)
def test_values_of_another_kind_are_refused(tmp_path, key, value):
    from hf_axonn.checkpoint.manifest import _checksum

    body = json.loads(Manifest("id", Grid(), {}).to_json())
    del body["checksum"]
    body[key] = value
    (tmp_path / MANIFEST).write_text(json.dumps({**body, "checksum": _checksum(body)}))
    with pytest.raises(ValueError, match=str(tmp_path)):
        check_complete(tmp_path)


def test_what_is_no_checkpoint(tmp_path, capsys):
    assert not is_sharded_checkpoint(tmp_path) and not is_sharded_checkpoint("a-model/of-the-hub")
    assert main(["verify", str(tmp_path)]) == 1
    assert f"has no {MANIFEST}" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "nothing")]) == 2
    assert "is not a directory" in capsys.readouterr().err
    (tmp_path / SHARD).write_bytes(b"")
    assert is_sharded_checkpoint(tmp_path)
