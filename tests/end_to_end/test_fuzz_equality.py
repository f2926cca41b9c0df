"""Made-up models and batches: a grid has the loss and the gradients of one process in float64, or both refuse.

The examples are made up before the ranks start, and one launch for each grid runs them all: one that is refused leaves
the ranks ready for the next. The same ones are tried in every run; AXONN_FUZZ=500 tries as many others. They come from
numbers and not from hypothesis, which would begin with small and equal ones, and could not make them smaller anyway.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from random import Random, SystemRandom
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig

from hf_axonn import parallelize
from hf_axonn.engine.documents import separate_documents
from hf_axonn.engine.gradient_sync import sync_gradients
from hf_axonn.topology.grid import Grid
from tests.helpers.equality import Batch, exact, mean_over_world, model_loss
from tests.helpers.float64 import not_nan, relative_errors
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks


KINDS = ("llama", "gpt2", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "mixtral", "gpt_neox", "opt")
GRIDS = [Grid(z=2), Grid(x=2), Grid(y=2), Grid(data=2), Grid(z=2, x=2)]
QUICK, EXAMPLES = 16, 40
REFUSALS = (ValueError, IndexError, RuntimeError)  # any other error is a defect of the code, or of this test


@dataclass
class Example:
    """A model, a batch, and how a grid of two (data, z) positions divides its rows."""

    number: int
    kind: str
    attention: str
    sizes: dict[str, Any]
    batch: Batch
    first: int  # rows of the first position, the others are the second's
    trimmed: bool  # whether the second's rows are shorter by one token, of which they have no label
    fault: str = ""  # what is wrong with it, for the messages

    def model(self) -> nn.Module:
        return tiny_model(self.kind, attention=self.attention, **self.sizes).train()

    def rows(self, grid: Grid, rank: int) -> Batch:
        """What `rank` sees of the batch."""
        here = grid.coordinates(rank)
        if grid.dp_size == 1:
            return self.batch
        second = here["data"] + here["z"] == 1
        columns = -1 if second and self.trimmed else None
        own = slice(self.first, None) if second else slice(self.first)
        rows = len(self.batch["input_ids"])
        return {
            name: value if not value.dim() else value[own if len(value) == rows else slice(None), :columns]
            for name, value in self.batch.items()
        }


def made_up(number: int) -> Example:
    """Example `number`: sizes that nothing need divide, any labels, masks and positions, and sometimes a fault."""
    random = Random(number)
    generator = torch.Generator().manual_seed(number)

    def numbers(below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=generator)

    kind = random.choice(KINDS)
    sizes = made_up_sizes(random, kind)
    vocabulary = sizes["vocab_size"]
    rows, length = random.randint(2, 5), random.randint(1, 9)
    ids = numbers(vocabulary, rows, length)
    labels = random.choice([ids.clone(), numbers(vocabulary, rows, length)])
    places = torch.arange(length).expand(rows, length)
    ends = numbers(length + 1, rows, 1)  # of the text of each row; some rows are empty
    masks = [None, places < ends, places >= length - ends, numbers(4, rows, length) > 0, numbers(2, rows, 1) > places]
    mask = random.choice(masks)
    positions = [None, None, places[:1], places % random.randint(1, 9), places + numbers(50, rows, 1)]
    batch = {
        "input_ids": ids,
        "attention_mask": None if mask is None else random.choice([mask, mask.long()]),
        "position_ids": random.choice([*positions, numbers(60, rows, length)]),
    }
    if mask is not None and random.random() < 0.5:
        labels.masked_fill_(~mask, -100)
    labels.masked_fill_(torch.rand(rows, length, generator=generator) < random.choice([0, 0, 0, 0.5, 0.9]), -100)
    first = random.randint(1, rows - 1)
    trimmed = length > 1 and mask is None and random.random() < 0.5
    if trimmed:
        labels[first:, -1] = -100
    batch["labels"] = labels
    if random.random() < 0.5:
        batch["num_items_in_batch"] = (labels[:, 1:] != -100).sum()
    batch = {name: value.contiguous() for name, value in batch.items() if value is not None}
    attention = "eager" if kind == "gemma2" else random.choice(["sdpa", "eager"])
    example = Example(number, kind, attention, sizes, batch, first, trimmed)
    return with_fault(random, example) if random.random() < 0.25 else example


def made_up_sizes(random: Random, kind: str) -> dict[str, Any]:
    """What is changed in the config of a kind."""
    kv = random.randint(1, 4)
    known = AutoConfig.for_model(kind)
    heads = kv * random.randint(1, 3) if hasattr(known, "num_key_value_heads") else kv
    hidden, wide = heads * random.randint(1, 5), random.randint(1, 21)
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "n_inner": wide,
        "ffn_dim": wide,
        "word_embed_proj_dim": random.choice([hidden, random.randint(1, 9)]),
        "num_hidden_layers": random.randint(1, 2),
        "vocab_size": random.randint(4, 40),
        "tie_word_embeddings": random.random() < 0.5,
        "attention_bias": random.random() < 0.5,
        "mlp_bias": random.random() < 0.5,
        "sliding_window": random.randint(1, 8),
        "num_local_experts": random.randint(2, 5),
        "num_experts_per_tok": random.randint(1, 2),
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "hidden_dropout"), 0.0),
    }
    sizes = {name: value for name, value in sizes.items() if hasattr(known, name)}
    return sizes | {"head_dim": random.choice([2, 4, 6]), "experts_implementation": "eager"}


def with_fault(random: Random, example: Example) -> Example:
    """The example with something that one process refuses, as a rule."""
    sizes, batch = example.sizes, example.batch
    size, (rows, length) = sizes["vocab_size"], batch["input_ids"].shape
    place = random.randrange(rows), random.randrange(length)
    example.fault = fault = random.choice(["label", "id", "labels", "mask", "positions", "heads", "position", "float"])
    if fault == "label":
        batch["labels"][place] = random.choice([size, 10**6, -1, -5])
    elif fault == "id":
        batch["input_ids"][place] = random.choice([size, 10**6, -1, -5])
    elif fault == "labels":
        batch["labels"] = batch["labels"][:, 1:].contiguous()
    elif fault == "mask":
        batch["attention_mask"] = torch.ones(rows, length + random.choice([-1, 1]), dtype=torch.int64)
    elif fault == "positions":
        batch["position_ids"] = torch.arange(length + 1).expand(rows, -1).contiguous()
    elif fault == "heads":
        sizes["num_key_value_heads"] = sizes["num_attention_heads"] + 1  # GPT-2's kind do not read it
    elif fault == "position":
        batch["position_ids"] = torch.full((rows, length), random.choice([-5, 10**6]))
    else:
        batch["input_ids"] = batch["input_ids"].double()
    return example


Outcome = tuple[Tensor, dict[str, Tensor]]  # the loss, and gradients by name


def outcome(model: nn.Module, batch: Batch, dp_size: int = 1) -> Outcome:
    with exact():
        loss = model_loss(model, batch, dp_size)
        loss.backward()
    sync_gradients(model)
    return loss.detach(), {name: its.grad for name, its in model.named_parameters() if its.grad is not None}


def truth(example: Example) -> Outcome | None:
    """The outcome on one process, of documents that do not see each other; None where it refuses."""
    try:
        model = example.model()
        loss, gradients = outcome(model, separate_documents(model, example.batch))
    except REFUSALS:
        return None
    if not (example.batch["labels"][:, 1:] != -100).any():  # 0/0 there, 0 here: losses/causal_lm.py::CausalLMLoss
        assert loss.isnan()
        return torch.zeros_like(loss), {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
    return loss, gradients


def error_of(example: Example, expected: Outcome | None, grid: Grid) -> float | str:
    """The largest relative error of loss and gradients on this rank, or why it refused."""
    try:
        model, _ = parallelize(example.model(), grid)
        loss, gradients = outcome(model, example.rows(grid, dist.get_rank()), grid.dp_size)
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}"
    if expected is None:
        return 0.0
    of_loss = not_nan((mean_over_world(loss) - expected[0]).abs() / expected[0].abs().clamp(min=1e-3))
    return max(of_loss, *relative_errors(gradients, expected[1]).values())


def errors_of(made: list[tuple[Example, Outcome | None]], grid: Grid, at: Tensor) -> list[float | str]:
    found = []
    for index, (example, expected) in enumerate(made):
        at[dist.get_rank()] = index
        found.append(error_of(example, expected, grid))
    return found


def disagreements(made: list[tuple[Example, Outcome | None]], grid: Grid) -> list[str]:
    """Lines about the examples of which a grid has another outcome, the shortest first."""
    at = torch.zeros(grid.size, dtype=torch.int64).share_memory_()
    try:
        ranks = run_ranks(errors_of, grid.size, made, grid, at, timeout=560)
    except AssertionError as error:
        raise AssertionError(f"{grid}: the ranks stood at {[made[i][0] for i in at.tolist()]}\n{error}") from error
    wrong = []
    for (example, expected), *found in zip(made, *ranks, strict=True):
        refused = [isinstance(it, str) for it in found]
        if not all(refused) if expected is None else any(refused) or max(found) > 1e-10:
            alone = "refuses" if expected is None else f"has the loss {expected[0]}"
            wrong.append(f"{grid}: one process {alone}, the ranks {found}, of {example}")
    return sorted(wrong, key=len)


@functools.cache
def make_examples(count: int) -> list[tuple[Example, Outcome | None]]:
    """Make up examples, with their truth."""
    more = int(os.environ.get("AXONN_FUZZ", "0"))
    start = SystemRandom().randrange(2**32) if more else 0
    found = [(example, truth(example)) for example in map(made_up, range(start, start + (more or count)))]
    refused = [example.number for example, expected in found if expected is None]
    assert more or count // 20 < len(refused) < count // 3
    return found


@pytest.mark.parametrize(
    ("grid", "count"),
    [(GRIDS[0], QUICK), *(pytest.param(grid, EXAMPLES, marks=pytest.mark.slow) for grid in GRIDS)],
    ids=str,
)
def test_models_and_batches(grid, count):
    assert not (wrong := disagreements(make_examples(count), grid)), "\n".join(wrong)
