"""Trainer and GoldfishTrainer over pipe: every logged number and all parameters equal one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from transformers import Trainer

from hf_axonn import AxonnPlugin, Grid
from hf_axonn.distributed.consistency import gather_texts
from hf_axonn.parallel.pipeline.pipeline import Pipeline
from hf_axonn.trainer.accumulation import AccumulatedStep, pad_alike
from hf_axonn.trainer.trl import check_trainer
from tests.helpers.float64 import Float64, relative_errors
from tests.helpers.models import tiny_model
from tests.helpers.ranks import refused, run_ranks
from tests.helpers.training import make_trainer, numbers, worst_difference


TOLERANCE = 1e-10
SHORT = dict(max_steps=2, eval_steps=2, save_strategy="no")
# Four batches of a step, whose lengths differ, are the micro-batches of one schedule.
ACCUMULATED = dict(gradient_accumulation_steps=4, per_device_train_batch_size=2)

GOLDFISH = ("goldfish", "rows", "short")


class OwnLoss(Trainer):
    """A trainer whose loss is its own: what it computes may need all ranks."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + 0 * self.accelerator.gather(loss.detach()).mean()
        return (loss, outputs) if return_outputs else loss


def run(output: Path, grid: Grid | None, case: str) -> tuple[list[dict], dict[str, torch.Tensor], list[int]]:
    """The history of a case, the parameters of this rank, and the micro-batches of each schedule."""
    options = dict(SHORT, **ACCUMULATED, kind="smollm2" if case == "tied" else "qwen3")
    if grid:
        options["per_device_train_batch_size"] //= grid.dp_size
    if case == "rows":
        options |= dict(gradient_accumulation_steps=1, per_device_train_batch_size=4)
    if case == "short":
        options |= dict(gradient_accumulation_steps=1, per_device_train_batch_size=1)
    if case == "smoothed":
        options["label_smoothing_factor"] = 0.1
    trainer = make_trainer(output, grid, stock=case not in GOLDFISH, **options)
    if case == "mean":  # of each batch, without a count of its items
        trainer.model_accepts_loss_kwargs = False
    if case == "own loss":
        trainer.__class__ = OwnLoss
    with mock.patch.object(Pipeline, "train", autospec=True, side_effect=Pipeline.train) as pipelines, Float64():
        trainer.train()
    history = numbers(trainer.state.log_history)
    if case not in GOLDFISH:  # a mean over batches, which are cut differently on one process
        history = [{key: value for key, value in entry.items() if key != "eval_loss"} for entry in history]
    parameters = {name: value.detach() for name, value in trainer.model.named_parameters()}
    return history, parameters, [len(call.args[1]) for call in pipelines.call_args_list]


TWO = ("goldfish", "stock", "tied", "mean", "smoothed")


@pytest.fixture(scope="module")
def truths(tmp_path_factory) -> dict[str, tuple]:
    return {case: run(tmp_path_factory.mktemp("one"), None, case) for case in (*TWO, "rows", "short", "own loss")}


def _equal(folder: Path, grid: Grid, truths: dict[str, tuple], cases: tuple[str, ...], expected: list[int]) -> None:
    for case in cases:
        history, parameters, micro_batches = run(folder, grid, case)
        truth = {name: truths[case][1][name] for name in parameters}
        assert worst_difference(history, truths[case][0]) < TOLERANCE, (grid, case, history, truths[case][0])
        errors = relative_errors(parameters, truth)
        assert max(errors.values()) < TOLERANCE, (grid, case, errors)
        assert micro_batches == expected, (grid, case)


def _bf16(folder: Path, grid: Grid | None) -> list[float]:
    model = tiny_model("qwen3", dtype=torch.float32)
    plugin = {"parallelism_config": AxonnPlugin(grid=grid, residual_dtype="bfloat16")} if grid else {}
    trainer = make_trainer(folder, grid, model=model, bf16=True, **SHORT, **ACCUMULATED, **plugin)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _two(folder: Path, truths: dict[str, tuple], bf16: list[float]) -> None:
    assert _bf16(folder, Grid(pipe=2)) == pytest.approx(bf16, rel=5e-3)
    _equal(folder, Grid(pipe=2), truths, TWO, [4, 4])
    _equal(folder, Grid(pipe=2), truths, ("rows",), [4, 4])
    _equal(folder, Grid(pipe=2), truths, ("own loss",), [2] * 8)
    _equal(folder, Grid(pipe=2), truths, ("short",), [2, 2])
    _dropout(folder)
    refused_fp16 = refused(make_trainer, folder, Grid(pipe=2), fp16=True)
    assert "fp16" in refused_fp16


def test_trainers_over_two_stages_equal_one_process(truths, tmp_path):
    run_ranks(_two, 2, tmp_path, truths, _bf16(tmp_path, None))


def _dropout(folder: Path) -> None:
    """Stages of other layers draw, and the generators of ranks that share samples stay alike."""
    model = tiny_model("llama", num_hidden_layers=3, attention_dropout=0.1)
    trainer = make_trainer(folder, Grid(pipe=2), model=model, **SHORT, **ACCUMULATED)
    before = torch.get_rng_state()
    trainer.train()
    assert not torch.equal(before, torch.get_rng_state())
    stages = trainer.model.axonn.pipeline.stages
    seeds = stages.seeds(training=True)
    assert seeds(stages.own[0], 0) != seeds(stages.own[0], 1)
    of_stage = gather_texts(str(seeds(stages.own[0], 0)), "cpu")
    assert of_stage[0] != of_stage[1]
    states = gather_texts(str(torch.get_rng_state().tolist()), "cpu")
    assert states[0] == states[1]


def _four(folder: Path, truths: dict[str, tuple]) -> None:
    _equal(folder, Grid(pipe=2, z=2), truths, ("goldfish", "stock"), [4, 4])


def test_trainers_on_four_ranks_equal_one_process(truths, tmp_path):
    run_ranks(_four, 4, tmp_path, truths)


def test_other_batches_than_have_run_are_refused():
    step = AccumulatedStep(SimpleNamespace(pipeline=object()), [{}, {}])
    assert step.begins_with(step.batches[0]) and not step.begins_with({})
    step.losses = torch.zeros(2)
    with pytest.raises(ValueError, match="another batch 0 .* in the data collator"):
        step.next(None, step.batches[1])


def test_trl_is_refused():
    with pytest.raises(ValueError, match="SFTTrainer of TRL is not supported over a grid with pipe"):
        check_trainer(type("SFTTrainer", (), {"__module__": "trl.trainer.sft_trainer"})(), Grid(pipe=2))


def test_batches_of_a_step_get_one_shape():
    ids = torch.arange(1, 7)
    wide = {"input_ids": ids.view(1, 6), "labels": ids.view(1, 6), "weight": torch.ones(())}
    tall = {"input_ids": ids.view(2, 3), "labels": ids.view(2, 3), "weight": torch.ones(())}
    first, second = pad_alike([wide, tall], 9)
    assert first["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6]] * 2
    assert first["labels"].tolist() == [[1, 2, 3, 4, 5, 6], [-100] * 6]
    assert second["input_ids"].tolist() == [[1, 2, 3, 9, 9, 9], [4, 5, 6, 9, 9, 9]]
    assert second["labels"].tolist() == [[1, 2, 3, -100, -100, -100], [4, 5, 6, -100, -100, -100]]
    assert second["weight"] is tall["weight"]
    with pytest.raises(ValueError, match=r"scores of shape \[2, 3\].*\[1, 6\], \[2, 3\] tokens.*max_length"):
        pad_alike([wide, tall | {"scores": torch.ones(2, 3)}], 9)
