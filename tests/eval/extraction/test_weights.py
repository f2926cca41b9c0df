"""Checkpoints on disk: shards that are missing or cut short, and hashes that tell models apart."""

import os
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hf_axonn import Grid, parallelize, save_sharded
from hf_axonn_eval import extract
from hf_axonn_eval.extraction import weights_on_disk as weights
from hf_axonn_eval.extraction.load_model import load_model
from tests.helpers.eval_support import LEARNT, samples, tiny_llama, topics_tokenizer, trained_llama
from tests.helpers.ranks import run_ranks


def save_shards(directory: str) -> None:
    """As a training run on two ranks does: matrices cut by columns or rows, the rest on both ranks."""
    mesh = init_device_mesh("cpu", (2,))
    state = {}
    for name, weight in trained_llama().state_dict().items():  # tied weights under both of their names
        dim = 1 if "o_proj" in name or "down_proj" in name else 0
        state[name] = distribute_tensor(weight, mesh, [Shard(dim)]) if weight.dim() == 2 else weight
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(path=directory, save_distributed=True))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A checkpoint of the trained model in two shards, with configuration and tokenizer beside it."""
    directory = tmp_path_factory.mktemp("sharded") / "checkpoint"
    trained_llama().config.save_pretrained(directory)
    topics_tokenizer().save_pretrained(directory)
    run_ranks(save_shards, 2, str(directory))
    assert sum(name.startswith("shard-") for name in os.listdir(directory)) == 2
    return directory


def copy_of(directory, target):
    shutil.copytree(directory, target)
    return target, sorted(file for file in target.iterdir() if file.name.startswith("shard-"))


def test_a_sharded_checkpoint_is_read_as_it_was_saved(sharded):
    assert weights.is_sharded(sharded)
    loaded = load_model(sharded)
    expected = dict(trained_llama().named_parameters())
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def ask(directory: str) -> dict:
    """Saved on one grid and measured on every one."""
    model, _ = parallelize(trained_llama(), Grid(y=2))
    save_sharded(model, directory)
    if dist.get_rank() == 0:
        trained_llama().config.save_pretrained(directory)
        topics_tokenizer().save_pretrained(directory)
    dist.barrier()
    answers = {}
    for axis in ("data", "z", "y", "x"):
        loaded = load_model(directory, grid=Grid(**{axis: 2}))
        answers[axis] = extract(loaded.model, loaded.tokenizer, samples(), batch_size=3, progress=False)
    return answers


def test_a_sharded_checkpoint_is_asked_on_any_grid(tmp_path):
    expected = extract(trained_llama(), topics_tokenizer(), samples(), batch_size=3, progress=False)
    assert sum(result.exact_match for result in expected) == LEARNT
    first, second = run_ranks(ask, 2, str(tmp_path))
    assert weights.is_sharded(tmp_path)
    for axis, results in first.items():
        assert second[axis] == []
        for field in ("generated", "exact_match", "rougeL"):
            assert [getattr(one, field) for one in results] == [getattr(one, field) for one in expected], axis


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_shard_is_an_error_and_not_noise(sharded, tmp_path, missing):
    directory, shards = copy_of(sharded, tmp_path / "copy")
    shards[missing].unlink()
    with pytest.raises(
        ValueError, match="is not complete: its 1 shard file.* of weight .*Copy the shard files of all"
    ):
        load_model(directory)


def test_a_shard_that_was_cut_short_is_named(sharded, tmp_path):
    directory, shards = copy_of(sharded, tmp_path / "copy")
    os.truncate(shards[1], shards[1].stat().st_size - 1)
    with pytest.raises(ValueError, match=f"{shards[1].name} has .* cut short"):
        load_model(directory)
    shards[1].write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_model(directory)


def test_a_fingerprint_follows_the_weights_and_not_the_files(tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path / "a")
    first = weights.fingerprint(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    os.utime(tmp_path / "b" / "model.safetensors", (0, 0))
    assert weights.fingerprint(tmp_path / "b") == first
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.norm.weight"):
        changed = tiny_llama()
        with torch.no_grad():
            changed.get_parameter(name).add_(0.001)
        changed.save_pretrained(tmp_path / name)
        assert weights.fingerprint(tmp_path / name) != first, name
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight")[-1, -1] += 1  # the last number of the largest tensor
    model.save_pretrained(tmp_path / "c")
    assert weights.fingerprint(tmp_path / "c") != first


def test_a_directory_without_weights_has_no_fingerprint(tmp_path):
    with pytest.raises(ValueError, match="no .*safetensors files"):
        weights.fingerprint(tmp_path)
