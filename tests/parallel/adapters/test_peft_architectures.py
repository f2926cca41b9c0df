"""LoRA on every Linear, and on experts, of architectures that are cut in different ways: as on one process."""

from __future__ import annotations

import copy

import pytest
import torch.distributed as dist

from hf_axonn import parallelize
from hf_axonn.engine.gradient_sync import sync_gradients
from hf_axonn.topology.grid import Grid
from tests.benchmarks.architectures.survey import BOUND, MODEL_TYPES, in_float64
from tests.benchmarks.architectures.tiny_configs import UNTRAINABLE, tiny_batch, tiny_model
from tests.helpers.adapting import adapt
from tests.helpers.equality import mean_over_world, model_loss, rows_of
from tests.helpers.float64 import relative_errors
from tests.helpers.ranks import run_ranks


# One type of each kind of structure.
KINDS = {
    "deepseek_v3": {},  # latent attention, shared and routed experts
    "gemma3_text": {"target_modules": ["embed_tokens", "q_proj"]},  # a scaled embedding
    "gpt2": {"use_dora": True},  # Conv1D with packed q, k and v
    "longcat_flash": {},  # a router that reads the weight of a Linear
    "mixtral": {},  # routed experts, whose parameters PEFT adapts by themselves, and those of routers
    "opt": {"modules_to_save": ["fc1"], "target_modules": ["fc2", "q_proj"]},  # a block that is a lone Linear
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
BEFORE_AND_AFTER = ("before", "after")
# PEFT alone cannot train these, or refuses their Linears.
NOT_IN_PEFT = {"deepseek_v4", "gemma3n", "llama4", "llama4_text", "phimoe", "reformer"} | {
    "falcon_h1",
    "falcon_mamba",
    "mamba",
    "mamba2",
    "nemotron_h",
}


def run(model, batch, samples=1):
    with in_float64():
        loss = model_loss(model.train(), batch, samples)
        loss.backward()
    sync_gradients(model)
    return loss.detach(), {name: its.grad for name, its in model.named_parameters() if its.grad is not None}


def _errors(specimens, grid, orders):
    errors = {}
    for name, (base, options, batch, loss, truth) in specimens.items():
        for when in orders:
            model = copy.deepcopy(base)
            if when == "before":
                model, _ = parallelize(adapt(model, **options), grid)
            else:
                model = adapt(parallelize(model, grid)[0], **options)
            ours, gradients = run(model, rows_of(batch, grid, dist.get_rank()), grid.dp_size)
            ours = float((mean_over_world(ours) - loss).abs() / loss.abs())
            errors[name, when] = max(ours, *relative_errors(gradients, truth).values())
    return errors


def compare(kinds, grids):
    specimens = {}
    for kind, options in kinds.items():
        base = tiny_model(kind)
        batch = tiny_batch(base)
        specimens[kind] = (base, options, batch, *run(adapt(copy.deepcopy(base), **options), batch))
    for grid, orders in grids.items():
        for errors in run_ranks(_errors, grid.size, specimens, grid, orders):
            assert len(errors) == len(orders) * len(kinds)
            assert not {where: error for where, error in errors.items() if not error <= BOUND}, grid


def test_one_of_each_kind():
    compare(KINDS, {Grid(y=2, x=2): ("after",), Grid(z=2, x=2): ("before",)})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "gpt_neox", "gemma2", "phi3", "mixtral", "afmoe"])
def test_dora_on_every_kind_of_grid(kind):
    """Of a mixture of experts the attention only: PEFT has no DoRA of experts' parameters."""
    options = {"use_dora": True} | ({"target_modules": ATTENTION} if kind in ("mixtral", "afmoe") else {})
    grids = [Grid(x=2), Grid(y=2), Grid(z=2), Grid(data=2), Grid(y=2, x=2), Grid(z=2, x=2), Grid(z=2, y=2)]
    compare({kind: options}, dict.fromkeys(grids, BEFORE_AND_AFTER))


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(set(MODEL_TYPES) - set(UNTRAINABLE) - NOT_IN_PEFT))
def test_every_type(kind):
    compare({kind: {}}, {Grid(y=2, x=2): ("after",), Grid(z=2, x=2): ("before",)})
