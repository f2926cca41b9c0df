"""However many samples there are, no more of them are in memory than are being asked."""

import json
import tracemalloc

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_axonn_eval import Sample, extract
from hf_axonn_eval.samples import SampleFile, write_samples


BYTES_A_SAMPLE = 1500  # ids, places, what the summary needs; one sample and its result as objects are over 6000


def smallest() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval()


def made(count: int):
    for number in range(count):
        yield Sample(
            sample_id=f"sample {number}",
            document_id=f"document {number % 50}",
            bucket=number % 2,
            offset=0,
            prefix=tuple((number // 16**place) % 16 for place in range(30)),
            suffix=tuple((number + place) % 16 for place in range(30)),
        )


def peak(folder, count: int) -> int:
    """Bytes at the highest point while `count` samples are measured, from a file into a directory."""
    write_samples(made(count), folder / f"{count}.jsonl")
    options = {"model_record": {"fingerprint": "smallest"}, "batch_size": 256, "generate": False, "progress": False}
    tracemalloc.start()
    try:
        results = extract(
            smallest(), None, SampleFile(folder / f"{count}.jsonl"), output=folder / str(count), **options
        )
        highest = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(results) == count
    assert results[count - 1].sample_id == f"sample {count - 1}"
    summary = json.loads((folder / str(count) / "summary.json").read_text())
    assert summary["all"]["samples"] == count
    return highest


def test_memory_hardly_grows_with_the_samples(tmp_path):
    few, many = 1000, 4000
    grown = peak(tmp_path, many) - peak(tmp_path, few)
    assert grown < BYTES_A_SAMPLE * (many - few)


@pytest.mark.slow
def test_a_hundred_thousand_samples(tmp_path):
    assert peak(tmp_path, 100_000) < 100_000 * BYTES_A_SAMPLE
