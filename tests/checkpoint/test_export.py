"""Export to an ordinary directory: what comes out, one tensor in memory at a time, and nothing half done."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_axonn import Grid, export_hf, parallelize, save_sharded
from hf_axonn.checkpoint.commit import write_manifest
from hf_axonn.checkpoint.manifest import Manifest, is_sharded_checkpoint
from hf_axonn.checkpoint.shard_files import checksum_of, describe, file_name, write_shards
from tests.helpers.allocated import Peak, glibc
from tests.helpers.models import tiny_config, tiny_model
from tests.helpers.ranks import run_ranks


def save_all(folder: Path, cases: list) -> None:
    for index, (kind, grid, dtype) in enumerate(cases):
        model, _ = parallelize(tiny_model(kind, dtype=dtype), grid)
        save_sharded(model, folder / str(index))


def test_every_grid_gives_the_model_back(tmp_path):
    cases = [
        ("smollm2", Grid(z=2, x=2), torch.float32),  # tied
        ("qwen2", Grid(y=4), torch.bfloat16),  # biases
        ("gpt2", Grid(data=2, x=2), torch.float64),  # weights stored the other way round
    ]
    run_ranks(save_all, 4, tmp_path, cases)
    for index, (kind, _, dtype) in enumerate(cases):
        truth = tiny_model(kind, dtype=dtype)
        for most in (2**30, 15_000):
            output = tmp_path / f"{kind}-{most}"
            export_hf(tmp_path / str(index), output, shard_bytes=most)
            files = sorted(path.name for path in output.glob("*.safetensors"))
            assert files == ["model.safetensors"] if most == 2**30 else len(files) > 2
            assert not is_sharded_checkpoint(output)
            loaded, info = AutoModelForCausalLM.from_pretrained(output, dtype=dtype, output_loading_info=True)
            assert not info["missing_keys"] and not info["unexpected_keys"]
            for name, value in truth.state_dict().items():
                assert torch.equal(loaded.state_dict()[name], value), name
    assert not list(tmp_path.glob(".*"))


def test_what_cannot_be_exported(tmp_path):
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        export_hf(tmp_path, tmp_path / "out")
    write_manifest(tmp_path, Manifest("id", Grid(), {}))
    with pytest.raises(ValueError, match="holds adapters"):
        export_hf(tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match="is not empty: name a directory that is new"):
        export_hf(tmp_path / "absent", tmp_path)  # the output first: a checkpoint may take minutes to check


LAYERS, SIDE = 12, 2048


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A checkpoint of 12 matrices of 16 MiB, each in two pieces, and an empty one."""
    folder = tmp_path_factory.mktemp("large")
    model, files = {}, {}
    names = [f"layer.{index}" for index in range(LAYERS)]
    whole = describe(torch.empty(SIDE, SIDE))
    for rank in range(2):
        half = ((rank * SIDE // 2, (rank + 1) * SIDE // 2), (0, SIDE))
        pieces = {name: (torch.full((SIDE // 2, SIDE), float(place)), half) for place, name in enumerate(names)}
        files[file_name(rank)] = write_shards(folder / file_name(rank), pieces)
    for name in names:
        model[name] = type(whole)(whole.shape, whole.dtype, (None, 0, None))
    tiny_config("llama").save_pretrained(folder)
    files["config.json"] = checksum_of(folder / "config.json")
    write_manifest(folder, Manifest("id", Grid(x=2), files, [], model, {}))
    return folder


@glibc
def test_one_tensor_is_in_memory_at_a_time(large, tmp_path):
    """192 MiB of weights; the export needs room for one tensor and its pieces."""
    peak = Peak()
    export_hf(large, tmp_path / "out")
    tensors = peak.growth() / (4 * SIDE * SIDE)
    assert 1 < tensors < 2.5, tensors
    from safetensors import safe_open

    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert len(list(file.keys())) == LAYERS
        for place in range(LAYERS):
            assert (file.get_tensor(f"layer.{place}") == place).all()


def test_an_export_that_fails_leaves_nothing(large, tmp_path, monkeypatch):
    from hf_axonn.checkpoint import export

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "write_safetensors", full)
    with pytest.raises(OSError, match="No space left"):
        export_hf(large, tmp_path / "out")
    assert not list(tmp_path.iterdir())
