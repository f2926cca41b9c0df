"""GGUF files: one process converts, all ranks read slices of the result, which is what plain loading gives."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from hf_axonn import Grid, from_pretrained
from hf_axonn.checkpoint import gguf as gguf_files
from tests.helpers.ranks import run_ranks


HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, VOCABULARY, LAYERS = 64, 4, 2, 96, 160, 2


def write_llama(file: Path, *, kind: gguf.GGMLQuantizationType) -> None:
    """A tiny Llama with random weights in blocks of a kind."""
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    random = numpy.random.default_rng(0)
    kv = HIDDEN * KV_HEADS // HEADS
    shapes = {"token_embd": (VOCABULARY, HIDDEN), "output": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        own = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN)}
        own |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INTERMEDIATE, HIDDEN), "ffn_up": (INTERMEDIATE, HIDDEN)}
        own |= {"ffn_down": (HIDDEN, INTERMEDIATE), "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    for name, shape in shapes.items():
        values = random.standard_normal(shape, dtype=numpy.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
        else:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_files, "cache_directory", lambda: tmp_path / "cache")
    (tmp_path / "model").mkdir()
    write_llama(tmp_path / "model" / "tiny.gguf", kind=gguf.GGMLQuantizationType.Q8_0)
    return tmp_path / "model"


def wait_until(condition: Callable[[], bool]) -> None:
    """`run_ranks` ends what waits for too long."""
    while not condition():
        time.sleep(0.01)


def _loads(folder: Path) -> tuple[list[str], int]:
    """What differs from plain loading, and how often this rank converted."""
    conversions = []
    stock = gguf_files._convert

    def counting(*args):
        conversions.append(args)
        begun.touch()
        wait_until(lambda: len(list(folder.parent.glob("arrived-*"))) == 4)  # what is converted is what all ask for
        stock(*args)

    gguf_files._convert = counting
    begun, rank = folder.parent / "begun", os.environ["RANK"]
    if rank == "0":
        wait_until(begun.exists)  # another rank is the first
    (folder.parent / f"arrived-{rank}").touch()
    wrong = []
    for options in ({}, {"dtype": torch.bfloat16}):
        plain = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file="tiny.gguf", quantization_config=GgufConfig(dequantize=True), **options
        )
        for grid in (Grid(z=2, x=2), Grid(y=2, x=2)):
            model = from_pretrained(folder, grid=grid, gguf_file="tiny.gguf", **options)
            assert model.name_or_path == model.config.name_or_path == str(folder)
            assert not getattr(model, "is_quantized", False) and not hasattr(model.config, "quantization_config")
            for name, parameter in plain.named_parameters():
                own = model.get_parameter(name)
                if own.dtype != parameter.dtype or not torch.equal(own.full_tensor(), parameter):
                    wrong.append(name)
    return wrong, len(conversions)


def test_ranks_read_slices_of_what_one_of_them_converted(folder):
    results = run_ranks(_loads, 4, folder)
    assert [wrong for wrong, _ in results] == [[]] * 4
    assert sum(count for _, count in results) == 2  # one for each dtype
    made = sorted(path for path in (folder.parent / "cache").iterdir() if path.is_dir())
    assert len(made) == 2 and all((path / "model.safetensors").is_file() for path in made)


def convert(folder: Path, **options) -> Path:
    return gguf_files.convert_once(
        str(folder), "tiny.gguf", auto_class=AutoModelForCausalLM, **{"dtype": "float32"} | options
    )


def test_a_file_is_converted_once_and_anew_when_it_changes(folder, monkeypatch):
    first = convert(folder)
    monkeypatch.setattr(gguf_files, "_convert", lambda *_: pytest.fail("converted again"))
    assert convert(folder) == first
    monkeypatch.undo()
    monkeypatch.setattr(gguf_files, "cache_directory", lambda: folder.parent / "cache")
    os.utime(folder / "tiny.gguf", ns=(1, 1))
    second = convert(folder)
    assert second != first and (second / "config.json").is_file()


def test_a_conversion_that_fails_leaves_nothing(folder, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedModel.save_pretrained", full)
        with pytest.raises(OSError, match="No space left"):
            convert(folder)
    assert [path for path in (folder.parent / "cache").iterdir() if path.is_dir()] == []
    assert (convert(folder) / "model.safetensors").is_file()
    with pytest.raises(OSError, match=r"absent\.gguf"):
        gguf_files.convert_once(str(folder), "absent.gguf", auto_class=AutoModelForCausalLM, dtype=None)


def test_a_node_that_the_lock_does_not_reach_may_be_faster(folder, monkeypatch):
    def slower(made, directory):
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        raise OSError(39, "Directory not empty")

    monkeypatch.setattr(os, "rename", slower)
    directory = convert(folder)
    assert [path for path in directory.parent.iterdir() if path.is_dir()] == [directory]


def test_one_process_dequantizes_too_and_blocks_are_refused(folder):
    model = from_pretrained(folder, grid=Grid(), gguf_file="tiny.gguf")
    assert type(model.lm_head) is torch.nn.Linear and model.dtype == torch.float32
    with pytest.raises(ValueError, match="omit quantization_config"):
        from_pretrained(folder, grid=Grid(x=2), gguf_file="tiny.gguf", quantization_config=GgufConfig())
