"""Checkpoints on disk: shards that are missing or cut short, and hashes that tell models apart."""

import json
import os
import shutil
import subprocess
import tracemalloc
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hf_axonn import Grid, parallelize, save_sharded
from hf_axonn_eval import extract
from hf_axonn_eval.extraction import weights_on_disk as weights
from hf_axonn_eval.extraction.load_model import load_model
from tests.helpers import ROOT
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
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of torch, that one process reads them
        loaded = load_model(sharded)
    expected = dict(trained_llama().named_parameters())
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def ask(directory: str) -> dict:
    """Saved on one grid and measured on every one."""
    model, _ = parallelize(trained_llama(), Grid(y=2))
    save_sharded(model, directory)
    if dist.get_rank() == 0:
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


def shard(directory, number: int, offsets: dict[str, list[int]] | None = None, **tensors):
    """A shard as torch.distributed.checkpoint writes it; `offsets` says where in the weight its piece begins."""
    reported = {name: {"saved_offsets": begin} for name, begin in (offsets or {}).items()}
    directory.mkdir(exist_ok=True)
    save_file(
        {name: torch.zeros(shape) for name, shape in tensors.items()},
        directory / f"shard-0000{number}-model-00001-of-00001.safetensors",
        metadata={"DCP_SHARDING_INFO": json.dumps(reported)} if offsets is not None else None,
    )


def test_pieces_make_a_weight_where_they_end_where_it_ends(tmp_path):
    shapes = {"w": (("w", "tied"), (4, 3)), "b": (("b",), (3,)), "one": (("one",), ())}
    shard(tmp_path / "a", 1, {"w": [0, 0]}, w=(2, 3), b=(3,))
    shard(tmp_path / "a", 2, {"w": [2, 0]}, w=(2, 3), one=())
    weights.check_complete(tmp_path / "a", shapes)
    shard(tmp_path / "b", 1, None, tied=(4, 3), b=(3,), one=(), more=(9,))
    weights.check_complete(tmp_path / "b", shapes)
    for name, pieces, reported in (
        ("half", [({"w": [0, 0]}, {"w": (2, 3)})], "1 shard.* hold 6 of 12 numbers of weight w .4, 3."),
        ("none", [(None, {"b": (3,)})], "1 shard.* hold nothing of weight w"),
        ("twice the same half", [({"w": [0, 0]}, {"w": (2, 3)})] * 2, "2 shard.* hold 12 of 12 numbers"),
        ("too much", [({"w": [0, 0]}, {"w": (4, 3)}), ({"w": [2, 0]}, {"w": (2, 3)})], "hold 18 of 12 numbers"),
        ("another shape", [(None, {"w": (3, 4)})], "hold 12 of 12 numbers"),
        ("nothing", [], "0 shard"),
    ):
        directory = tmp_path / name
        directory.mkdir()
        for number, (offsets, tensors) in enumerate(pieces, start=1):
            shard(directory, number, offsets, **tensors)
        with pytest.raises(ValueError, match=reported):
            weights.check_complete(directory, {"w": shapes["w"]})
    assert weights.is_sharded(tmp_path / "a") and not weights.is_sharded(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a safetensors file, or was cut short"),
        (b"1234567", "not a safetensors file, or was cut short"),
        (bytes(8), "its header is not JSON"),
        ((2).to_bytes(8, "little") + b"{", "not a safetensors file, or was cut short"),
        ((2).to_bytes(8, "little") + b"{}x", "has 11 bytes, but its header speaks of 10"),
        ((2).to_bytes(8, "little") + b"\xff\xff", "its header is not JSON"),
    ],
)
def test_files_that_are_not_whole_are_named(tmp_path, content, message):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        weights._header(tmp_path / "model.safetensors")


def test_the_header_ends_where_the_numbers_begin(tmp_path):
    (tmp_path / "empty").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert weights._header(tmp_path / "empty") == ({}, 10)
    save_file({"a": torch.arange(3, dtype=torch.uint8)}, tmp_path / "one", metadata={"some": "thing"})
    header, start = weights._header(tmp_path / "one")
    assert set(header) == {"__metadata__", "a"} and (tmp_path / "one").read_bytes()[start:] == bytes([0, 1, 2])


def test_every_byte_of_a_tensor_enters_the_fingerprint(tmp_path):
    size = 20_000
    kept = torch.zeros(size, dtype=torch.uint8)
    small = torch.zeros(3, dtype=torch.uint8)

    def found(**tensors):
        save_file({"A": kept, "b": small, **tensors}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return weights.fingerprint(tmp_path)

    first = found()
    for place in (0, 4096, size // 2 - 1, size // 2, 15_903, size - 1):
        changed = kept.clone()
        changed[place] = 1
        assert found(A=changed) != first, place
    assert found(A=kept.view(2, -1)) != first and found(b=small.view(torch.int8)) != first
    assert found(C=small.clone()) != first
    assert found() == first and len(first) == 64
    for name in ("config.json", "adapter_config.json", "model.safetensors.index.json"):
        (tmp_path / name).write_text("{}")
        assert weights.fingerprint(tmp_path) != first
        (tmp_path / name).unlink()
    for name in ("axonn_checkpoint.json", "README.md", ".hidden.safetensors"):  # the last is no weight to anyone
        (tmp_path / name).write_text("{}")
        assert weights.fingerprint(tmp_path) == first
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    assert weights.fingerprint(tmp_path) != first


def test_zeroed_rows_in_the_middle_of_the_embedding_are_another_model(tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path / "whole")
    with torch.no_grad():
        model.get_input_embeddings().weight[150:350] = 0  # not the beginning, nor the very middle
    model.save_pretrained(tmp_path / "edited")
    assert weights.fingerprint(tmp_path / "edited") != weights.fingerprint(tmp_path / "whole")


def test_the_fingerprint_is_what_the_documented_command_says(tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > weights._TOGETHER, "files of more than one turn"
    topics_tokenizer().save_pretrained(tmp_path)
    documented = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    command = next(line for line in documented.splitlines() if line.endswith("| xargs sha256sum | sha256sum"))
    told = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert told.stdout.split()[0] == weights.fingerprint(tmp_path)


def test_files_are_read_piece_by_piece(tmp_path):
    """Of 64 MB in one file no more than a block is in memory."""
    save_file({"A": torch.zeros(64 * 2**20, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    weights.fingerprint(tmp_path)  # what is imported and made once
    tracemalloc.start()
    weights.fingerprint(tmp_path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 40 * 2**20


def read_on_each_rank(directory: str) -> tuple[str, int]:
    from hf_axonn.checkpoint import shard_files

    read, checksum_of = [], shard_files.checksum_of
    shard_files.checksum_of = lambda path: (read.append(path), checksum_of(path))[1]
    return load_model(directory).record["fingerprint"], len(read)


def test_one_rank_reads_for_all(tmp_path):
    tiny_llama().save_pretrained(tmp_path, max_shard_size="20KB")
    topics_tokenizer().save_pretrained(tmp_path)
    (first, read), (second, read_too) = run_ranks(read_on_each_rank, 2, str(tmp_path))
    assert first == second == weights.fingerprint(tmp_path)
    assert read_too == 0
    assert read == len(list(tmp_path.glob("*.safetensors"))) + 2  # and the configuration, and the index
