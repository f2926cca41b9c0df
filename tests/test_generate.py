"""`generate` on a grid: token for token what one process generates, and no rank waits for one that is done."""

from __future__ import annotations

import pytest
import torch
from models import tiny_batch, tiny_model
from ranks import run_ranks

from hf_axonn import Grid, parallelize


# 12 and 9 query heads: divided over (x, y), over x alone, with kv heads gathered, and not divided at all.
CASES = [
    ("llama", Grid(z=2, x=2)),
    ("smollm2", Grid(z=2, y=2)),
    ("qwen3", Grid(y=2, x=2)),
    ("smollm2", Grid(x=4)),
    ("llama", Grid(data=2, y=2)),
    ("qwen2", Grid(z=4)),
]


def _generate() -> None:
    for kind, grid in CASES:
        truth = tiny_model(kind).eval()
        model, _ = parallelize(tiny_model(kind), grid)
        model.eval()
        place = model.axonn.coordinates
        # Ranks with other samples have another number of rows, other prompts and other lengths to go.
        sample = place["data"] * grid.z + place["z"]
        ids = tiny_batch(4, 6 + sample, seed=sample)["input_ids"][: 1 + sample % 3]
        mask = torch.ones_like(ids)
        mask[0, :2] = 0  # left padding
        options = {"attention_mask": mask, "max_new_tokens": 8 + 3 * sample}
        plain = truth.generate(ids, do_sample=False, **options)
        ends_early = int(plain[0, -5])
        for more in (
            {"do_sample": False},
            {"do_sample": False, "eos_token_id": ends_early},
            {"do_sample": False, "num_beams": 2},
            {"do_sample": True, "top_k": 5, "temperature": 2.0},
        ):
            torch.manual_seed(3)
            expected = truth.generate(ids, **options, **more)
            torch.manual_seed(3)
            assert torch.equal(model.generate(ids, **options, **more), expected), (kind, grid, more)


def _without_cache() -> None:
    ids = tiny_batch(2, 6)["input_ids"]
    expected = tiny_model("llama").generate(ids, max_new_tokens=5, use_cache=False)
    model, _ = parallelize(tiny_model("llama"), Grid(data=2, y=2))
    assert torch.equal(model.generate(ids, max_new_tokens=5, use_cache=False), expected)
    model, _ = parallelize(tiny_model("llama"), Grid(z=2, x=2))
    with pytest.raises(ValueError, match="use_cache=False"):
        model.generate(ids, max_new_tokens=5, use_cache=False)


def test_without_a_cache():
    run_ranks(_without_cache, 4)


def test_every_way_of_decoding_equals_one_process():
    run_ranks(_generate, 4)


def _after_training() -> None:
    """A step between two generations: weights that were gathered ahead must not be used again."""
    grid = Grid(z=2, x=2)
    truth, model = tiny_model("llama"), parallelize(tiny_model("llama"), grid)[0]
    batch = tiny_batch(2, 6)
    for which in (truth, model):
        optimizer = torch.optim.SGD(which.parameters(), lr=0.5)
        which.train()(**batch).loss.backward()
        optimizer.step()
        which.eval()
    ids = batch["input_ids"]
    assert torch.equal(model.generate(ids, max_new_tokens=6), truth.generate(ids, max_new_tokens=6))


def test_generation_after_a_step():
    run_ranks(_after_training, 4)
