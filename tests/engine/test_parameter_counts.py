"""What libraries ask of a model's size is answered for the whole model, as on one process, on every rank alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from peft import LoraConfig, get_model_status, get_peft_model
from torch import nn
from transformers import trainer_pt_utils

from hf_axonn import Grid, parallelize
from hf_axonn.engine.parameter_counts import num_parameters
from tests.helpers.equality import rows_of
from tests.helpers.four_bit import quantized_model
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import make_trainer
from tests.layers.test_moe import moe


TWO = [Grid(x=2), Grid(y=2), Grid(z=2), Grid(data=2), Grid(pipe=2)]
FOUR = [Grid(pipe=2, x=2), Grid(pipe=2, z=2), Grid(pipe=2, data=2), Grid(z=2, x=2), Grid(data=2, y=2), Grid(pipe=4)]
LAYERS = dict(num_hidden_layers=4)


def adapted(**options) -> nn.Module:
    model = tiny_model("smollm2", **LAYERS)  # whose embedding and head share their weight
    return get_peft_model(model, LoraConfig(r=3, init_lora_weights=False, **options))


MODELS = {
    "tied": lambda: tiny_model("smollm2", **LAYERS),
    "experts": lambda: moe("qwen3_moe", **LAYERS),
    "adapters": lambda: adapted(target_modules=["q_proj", "embed_tokens"]),
    "a saved module": lambda: adapted(target_modules=["down_proj"], modules_to_save=["norm"]),
}


def answers(folder: Path, model: nn.Module, grid: Grid | None) -> dict[str, int]:
    """By who asks."""
    trainer = make_trainer(folder, grid, model=model, stock=True)
    batch = rows_of(tiny_batch(8, 6), grid, dist.get_rank()) if grid else tiny_batch(8, 6)
    model = trainer.model
    found = {"trainer.floating_point_ops": trainer.floating_point_ops(batch)}
    if grid:
        every: list[int] = [0] * grid.size
        dist.all_gather_object(every, found["trainer.floating_point_ops"])
        found["trainer.floating_point_ops"] = sum(every)
    for trains in (False, True):
        found[f"get_model_param_count {trains}"] = trainer_pt_utils.get_model_param_count(model, trains)
        for without in (False, True):
            found[f"num_parameters {trains} {without}"] = model.num_parameters(trains, exclude_embeddings=without)
    for buffers in (False, True):
        found[f"get_memory_footprint {buffers}"] = model.get_memory_footprint(return_buffers=buffers)
    if hasattr(model, "peft_config"):
        found["trainable"], found["all"] = model.get_nb_trainable_parameters()
        found["status"] = get_model_status(model).total_params
    found["trainer.get_num_trainable_parameters"] = trainer.get_num_trainable_parameters()
    for name, parameter in model.named_parameters():
        if "layers.3." in name and ("lora_A" in name or "k_proj" in name):  # a stage with nothing to train is refused
            parameter.requires_grad_(False)
    trainer.accelerator.prepare_model(model)
    found["frozen since"] = trainer.get_num_trainable_parameters()
    return found


def _equal(folder: Path, grids: list[Grid], truths: dict) -> None:
    for grid in grids:
        for kind, truth in truths.items():
            ours = answers(folder, MODELS[kind](), grid)
            assert ours == truth, (str(grid), kind, {key: (ours[key], truth[key]) for key in ours})


def check(folder: Path, grids: list[Grid]) -> None:
    truths = {kind: answers(folder, make(), None) for kind, make in MODELS.items()}
    assert all(truth["num_parameters False True"] < truth["num_parameters False False"] for truth in truths.values())
    run_ranks(_equal, grids[0].size, folder, grids, truths)


def test_two_ranks_answer_as_one_process(tmp_path) -> None:
    check(tmp_path, TWO)


@pytest.mark.slow
def test_four_ranks_answer_as_one_process(tmp_path) -> None:
    check(tmp_path, FOUR)


def _four_bit(truth: tuple) -> None:
    model, _ = parallelize(quantized_model(), Grid(x=2))
    assert (model.num_parameters(), model.num_parameters(exclude_embeddings=True), *_trained(model)) == truth


def _trained(model: nn.Module) -> tuple[int, int]:
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"])).get_nb_trainable_parameters()


def test_a_weight_of_four_bits_counts_its_numbers() -> None:
    model = quantized_model()
    assert num_parameters(model) == model.num_parameters() > 1.5 * sum(its.numel() for its in model.parameters())
    truth = (model.num_parameters(), model.num_parameters(exclude_embeddings=True), *_trained(model))
    run_ranks(_four_bit, 2, truth)
