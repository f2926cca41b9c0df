"""However many samples there are, no more of them are in memory than are being asked."""

import json
import resource
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_axonn_eval import Sample, extract
from hf_axonn_eval.data.samples import SampleFile, write_samples


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


def measure(folder, count: int) -> None:
    """From a file into a directory."""
    write_samples(made(count), folder / f"{count}.jsonl")
    options = {"model_record": {"fingerprint": "smallest"}, "batch_size": 32, "generate": False, "progress": False}
    results = extract(smallest(), None, SampleFile(folder / f"{count}.jsonl"), output=folder / str(count), **options)
    assert len(results) == count
    assert results[count - 1].sample_id == f"sample {count - 1}"
    summary = json.loads((folder / str(count) / "summary.json").read_text())
    assert summary["all"]["samples"] == count


def peak(folder, count: int) -> int:
    """Bytes at the highest point while `count` samples are measured."""
    tracemalloc.start()
    try:
        measure(folder, count)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_memory_hardly_grows_with_the_samples(tmp_path):
    few, many = 500, 1500  # more than a unit of batches, both
    grown = peak(tmp_path, many) - peak(tmp_path, few)
    assert grown < BYTES_A_SAMPLE * (many - few)


def resident(folder, count: int) -> int:
    """Bytes at the highest point that a fresh process holds, measuring `count` samples."""
    measure(folder, count)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.slow
def test_a_hundred_thousand_samples_need_hardly_more_than_ten_thousand(tmp_path):
    few, many = 10_000, 100_000
    held = {}
    for count in (few, many):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            held[count] = pool.submit(resident, tmp_path, count).result(timeout=600)
    print({count: f"{size / 2**20:.0f} MiB" for count, size in held.items()})
    assert held[many] - held[few] < BYTES_A_SAMPLE * (many - few)
    assert held[many] < 1.3 * held[few]
