"""tests/benchmarks/traffic/models.py: what the planner finds in a model is what the engine sends."""

from __future__ import annotations

import pytest
import torch

from hf_axonn import Grid
from hf_axonn.planner.shapes import ExpertsShape, UnshardedModule, gathers_latents
from tests.benchmarks.architectures.tiny_configs import MODEL_TYPES, tiny_config
from tests.benchmarks.traffic import models as traffic_models


# One for each way in which a model can differ from a Llama.
KINDS = {
    "gpt2": "learned positions, dropout, a last norm on whole tokens",
    "bloom": "packed projections, a norm after the embedding",
    "gemma2": "norms after blocks",
    "olmo2": "norms over all heads",
    "cohere": "one norm for attention and MLP, without bias",
    "qwen3_moe": "experts",
    "qwen2_moe": "shared experts with a gate",
    "llama4_text": "experts that get all tokens",
    "deepseek_v3": "latent attention, layers that differ",
    "deepseek_v32": "an index without gradients",
    "codegen": "attention on full sequences",
    "bamba": "Mamba 2 by heads, the groups of whose norm lie on several ranks",
    "mamba": "Mamba 1 by channels, with sums over the ranks",
    "qwen3_5": "gated delta nets, whose keys are repeated",
    "lfm2_moe": "short convolutions",
    "bitnet": "norms over the features that row layers get",
    "rwkv": "Linear by Linear",
    "bert": "a head with a Linear of its own",
}


# kinds of layers that no other of these has
REPRESENTATIVES = ("gpt2", "olmo2", "qwen3_moe", "deepseek_v3", "codegen", "bitnet", "rwkv")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind", [kind if kind in REPRESENTATIVES else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_the_engine_sends_what_the_planner_found(kind):
    config = tiny_config(kind)
    shape = traffic_models.shape_of(config)
    assert not traffic_models.differences(config, shape, traffic_models.GRID)


@pytest.mark.filterwarnings("ignore")
def test_sizes_that_do_not_divide_and_a_shape_that_is_not_the_model_s():
    config, grid = tiny_config("deepseek_v3"), Grid(z=3, y=2)
    shape = traffic_models.shape_of(config)
    assert any(isinstance(part, ExpertsShape) for layer, _ in shape.runs for part in layer.parts)
    assert not traffic_models.differences(config, shape, grid)
    wrong = traffic_models.differences(config, traffic_models.shape_of(tiny_config("bitnet")), grid)
    assert "forward all_gather over z: counted" in "\n".join(wrong)


LATENT = ("deepseek_v3", "deepseek_v2", "minicpm3", "longcat_flash")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "grid"),
    [
        ("deepseek_v3", Grid(z=4, x=2, context=2)),
        *(pytest.param(kind, Grid(z=4, context=4), marks=pytest.mark.slow) for kind in LATENT),
        *(pytest.param(kind, Grid(z=2, y=2, context=2), marks=pytest.mark.slow) for kind in LATENT),
    ],
    ids=str,
)
def test_gathered_latents_are_sent_as_the_planner_says(kind, grid):
    config = tiny_config(kind)
    shape = traffic_models.shape_of(config)
    assert not traffic_models.differences(config, shape, grid, attention="keys")
    every = (block for layer, _ in shape.kinds for block in layer.blocks)
    assert any(gathers_latents(shape, block, grid, "keys") for block in every) == (grid.y == 1)


@pytest.mark.filterwarnings("ignore")
def test_a_model_is_as_it_was_after_it_was_looked_at():
    with torch.device("meta"):
        model = traffic_models.AutoModelForCausalLM.from_config(tiny_config("codegen"))
    before, loss = [*model.modules()], model.loss_function
    shape = traffic_models.trace_shape(model.eval())
    assert any(isinstance(part, UnshardedModule) for layer, _ in shape.runs for part in layer.parts)
    assert [*model.modules()] == before and model.loss_function is loss and not model.training
    assert not any(
        module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module) for module in before
    )
    assert all(parameter.grad is None and parameter.is_meta for parameter in model.parameters())


@pytest.mark.slow  # four minutes; KINDS are looked at ordinarily
@pytest.mark.filterwarnings("ignore")
def test_every_type(tmp_path):
    output = tmp_path / "table.md"
    assert traffic_models.main(["--output", str(output)]) == 0
    text = output.read_text()
    assert all(f"| {kind} |" in text for kind in MODEL_TYPES) and text.count("| equal |") > 110
