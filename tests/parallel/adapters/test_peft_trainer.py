"""Trainer with adapters in a model that every rank has read its own slices of: as on one process, and resumed."""

from __future__ import annotations

import functools

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hf_axonn import Grid, from_pretrained
from tests.helpers.adapting import adapt
from tests.helpers.float64 import Float64
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import make_trainer, numbers, worst_difference


GRID = Grid(z=2, x=2)
OPTIONS = {"use_rslora": True, "modules_to_save": ["norm"]}


def run(folder, model, grid=None, resume=None, **changes):
    if changes["stock"]:  # its evaluation loss depends on how batches are cut
        changes["eval_strategy"] = "no"
    trainer = make_trainer(folder, grid, model=adapt(model, **OPTIONS), save_steps=2, eval_steps=2, **changes)
    with Float64():
        trainer.train(resume_from_checkpoint=resume)
    return numbers(trainer.state.log_history)


def _train(folder, stock):
    model = from_pretrained(str(folder / "base"), grid=GRID, dtype=torch.float64)
    history = run(folder / "grid", model, GRID, stock=stock)
    model = from_pretrained(str(folder / "base"), grid=Grid(y=2, x=2), dtype=torch.float64)
    resumed = run(folder / "again", model, Grid(y=2, x=2), str(folder / "grid" / "checkpoint-4"), stock=stock)
    return history, resumed


@pytest.mark.parametrize(
    "stock", [pytest.param(False, marks=pytest.mark.slow), True], ids=["GoldfishTrainer", "Trainer"]
)
def test_a_run_with_adapters_is_as_on_one_process(tmp_path, stock):
    tiny_model("qwen3").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    truth = run(tmp_path / "one", base, stock=stock)
    history, resumed = run_ranks(functools.partial(_train, tmp_path, stock), 4)[0]
    assert worst_difference(history, truth) < 1e-9
    # The last entry is Trainer's mean over the steps since it was started.
    assert worst_difference(resumed[:-1], truth[:-1]) < 1e-9
    plain = PeftModel.from_pretrained(tiny_model("qwen3"), tmp_path / "grid" / "checkpoint-6")
    expected = PeftModel.from_pretrained(tiny_model("qwen3"), tmp_path / "one" / "checkpoint-6")
    for (name, ours), its in zip(plain.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, its, rtol=1e-8, atol=1e-9, msg=name)
