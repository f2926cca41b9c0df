"""Trainer and GoldfishTrainer on a grid: every logged number equals one process, and checkpoints resume anywhere."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hf_axonn import Grid, parallelize
from hf_axonn.checkpoint.export import export_hf
from hf_axonn.checkpoint.manifest import MANIFEST, check_complete, is_sharded_checkpoint
from hf_axonn.layers.vocabulary import Head
from tests.helpers import training
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import make_trainer, numbers, worst_difference


GRIDS = [Grid(x=2), Grid(z=2, context=2)]
RESUMED = [*GRIDS, Grid(data=2)]
MORE = [Grid(y=2, x=2), Grid(z=4, context=2), Grid(z=2, x=2), Grid(data=2, y=2), Grid(data=2, z=2), Grid(x=4)]
MORE += [Grid(z=2, x=2, context=2)]
# The truth and the grids sum in different orders; four AdamW steps carry 1e-16 to well below this.
TOLERANCE = 1e-9
SHORT = dict(max_steps=4, save_steps=2, eval_steps=2)
train = functools.partial(training.train, **SHORT)


@pytest.fixture(scope="module")
def truth(tmp_path_factory) -> tuple[Path, list[dict]]:
    output = tmp_path_factory.mktemp("truth")
    return output, train(output)


@pytest.fixture(scope="module")
def runs(truth, tmp_path_factory) -> Path:
    """One folder for each grid with the checkpoints of an unbroken run, and its history beside it."""
    folder = tmp_path_factory.mktemp("runs")
    run_ranks(_train_all, 2, folder, truth[1], GRIDS)
    return folder


def _train_all(folder: Path, truth: list[dict], grids: list[Grid]) -> None:
    for index, grid in enumerate(grids):
        history = train(folder / str(index), grid)
        assert worst_difference(history, truth) < TOLERANCE, (grid, history, truth)


def test_goldfish_training_logs_what_one_process_logs(runs):
    for index in range(len(GRIDS)):
        assert check_complete(runs / str(index) / "checkpoint-4").grid == GRIDS[index]


@pytest.mark.slow
@pytest.mark.usefixtures("way")
def test_goldfish_training_on_more_grids(truth, tmp_path):
    run_ranks(_train_all, 4, tmp_path, truth[1], MORE)
    check_plain_transformers_reads(tmp_path, truth[0], MORE)


def test_the_logs_are_of_a_goldfish_run(truth):
    first = truth[1][0]
    assert 0.1 < first["goldfish_dropped_fraction"] < 0.5
    assert first["loss"] == pytest.approx(first["loss_kept"], rel=3e-7)
    assert abs(first["loss_kept"] - first["loss_all"]) > 1e-3


# What the first saved is resumed on one process below, and on a third grid, of data, with the slow tests.
@pytest.mark.parametrize("places", [[0, 1], pytest.param([2], marks=pytest.mark.slow)], ids=["two", "the third"])
def test_a_broken_run_resumes_on_another_grid(runs, truth, places):
    run_ranks(_resume_all, 2, runs, truth[0] / "checkpoint-2", truth[1], places)


def _resume_all(folder: Path, plain: Path, truth: list[dict], places: list[int]) -> None:
    for index, grid in ((place, RESUMED[place]) for place in places):
        # The second, with context, goes on with what one process saved, and the first with what it saved.
        other = plain if index == 1 else folder / str((index + 1) % len(GRIDS)) / "checkpoint-2"
        history = train(folder / f"resumed-{index}", grid, resume=other)
        # The last entry of a run sums up its own steps only.
        assert worst_difference(history[:-1], truth[:-1]) < TOLERANCE, (grid, history)


@pytest.mark.slow
@pytest.mark.usefixtures("way")
def test_a_broken_run_resumes_with_another_context(runs, truth):
    run_ranks(_resume, 4, runs, Grid(z=4, context=4), runs / "1" / "checkpoint-2", truth[1])


def _resume(folder: Path, grid: Grid, source: Path, truth: list[dict]) -> None:
    history = train(folder / "another context", grid, resume=source)
    assert worst_difference(history[:-1], truth[:-1]) < TOLERANCE, (grid, history)


def test_a_run_of_a_grid_resumes_on_one_process(runs, truth, tmp_path):
    history = train(tmp_path, resume=runs / "0" / "checkpoint-2")
    assert worst_difference(history[:-1], truth[1][:-1]) < TOLERANCE


def check_plain_transformers_reads(runs: Path, plain: Path, grids: list[Grid]) -> None:
    expected = AutoModelForCausalLM.from_pretrained(plain / "checkpoint-4", dtype=torch.float64).state_dict()
    for index in range(len(grids)):
        sharded = AutoModelForCausalLM.from_pretrained(runs / str(index) / "checkpoint-4", dtype=torch.float64)
        for name, value in sharded.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-8, atol=1e-9)


def test_plain_transformers_reads_a_sharded_checkpoint(runs, truth, tmp_path):
    check_plain_transformers_reads(runs, truth[0], GRIDS)
    export_hf(runs / "1" / "checkpoint-4", tmp_path / "plain", shard_bytes=20_000)
    assert not is_sharded_checkpoint(tmp_path / "plain")
    assert len(list((tmp_path / "plain").glob("*.safetensors"))) > 2
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float64)
    sharded = AutoModelForCausalLM.from_pretrained(runs / "1" / "checkpoint-4", dtype=torch.float64)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, sharded.state_dict()[name]), name


def test_damaged_checkpoints_are_refused_by_name(runs, tmp_path):
    import shutil

    broken = tmp_path / "checkpoint-2"
    shutil.copytree(runs / "0" / "checkpoint-2", broken)
    victim = next(broken.glob("shard-*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{victim.name} has"):
        train(tmp_path / "a", resume=broken)
    victim.unlink()
    with pytest.raises(ValueError, match=f"{victim.name} is missing"):
        train(tmp_path / "b", resume=broken)
    (broken / MANIFEST).unlink()
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        train(tmp_path / "c", resume=broken)


# Recomputation runs outside of Float64, so this is in float32: AdamW steps at this rate make 2e-5 of 1e-7.
CHECKPOINTED = dict(stock=True, activation_checkpointing=True, max_steps=2, save_steps=2, eval_steps=2)
FLOAT32_TOLERANCE = 1e-4


def _checkpointed(output: Path, grid: Grid | None) -> list[dict]:
    trainer = make_trainer(output, grid, model=tiny_model("smollm2", dtype=torch.float32), **CHECKPOINTED)
    trainer.train()
    # The stock Trainer's evaluation loss is a mean over batches, which are cut differently on one process.
    return [
        {key: value for key, value in entry.items() if key != "eval_loss"}
        for entry in numbers(trainer.state.log_history)
    ]


def test_stock_trainer_and_options(tmp_path):
    stock = _checkpointed(tmp_path / "one", None)
    run_ranks(_options, 2, tmp_path, stock)


def _options(folder: Path, stock: list[dict]) -> None:
    grid = Grid(z=2)
    history = _checkpointed(folder / "grid", grid)
    assert worst_difference(history, stock) < FLOAT32_TOLERANCE, (history, stock)
    with pytest.raises(ValueError, match="is no checkpoint"):
        train(folder / "a", grid, resume=folder)
    with pytest.raises(ValueError, match="fp16"):
        make_trainer(folder / "c", grid, fp16=True)
    with pytest.raises(ValueError, match="data \\* z \\* y \\* x = 1 \\* 1 \\* 1 \\* 4 = 4, but 2 process"):
        make_trainer(folder / "d", Grid(x=4))
    model, _ = parallelize(tiny_model("qwen3"), grid)
    before = [parameter.to_local().data_ptr() for parameter in model.parameters()]
    model = make_trainer(folder / "e", grid, model=model).model
    assert [parameter.to_local().data_ptr() for parameter in model.parameters()] == before, "nothing was copied"
    trainer = make_trainer(folder / "f", grid, max_steps=1, eval_strategy="no", save_strategy="no")
    trainer.model_init = lambda: tiny_model("qwen3")
    if dist.get_rank() == 0:  # Transformers does so between the trials of a search for hyperparameters
        trainer.model = trainer.model_wrapped = None
    assert trainer.train().global_step == 1


@pytest.mark.parametrize("stock", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["goldfish", "stock"])
def test_an_evaluation_gathers_logits_only_for_who_wants_them(tmp_path, stock):
    one = make_trainer(tmp_path / "one", None, stock=stock, per_device_eval_batch_size=7)
    truth = one.evaluate()["eval_loss"], torch.from_numpy(one.predict(one.eval_dataset).predictions)
    run_ranks(_evaluated, 2, tmp_path, truth, stock)


def _evaluated(folder: Path, truth: tuple[float, torch.Tensor], stock: bool) -> None:
    for grid in (Grid(x=2), Grid(y=2), Grid(z=2, context=2)):
        trainer = make_trainer(folder / str(grid), grid, stock=stock, per_device_eval_batch_size=7)
        with mock.patch.object(Head, "full_logits", autospec=True, side_effect=Head.full_logits) as gathered:
            loss = trainer.evaluate()["eval_loss"]
            assert gathered.call_count == 0, grid
            predicted = trainer.predict(trainer.eval_dataset)
            assert gathered.call_count > 0, grid
        assert loss == pytest.approx(predicted.metrics["test_loss"], rel=1e-14), grid
        # Norms are computed in float32, and over y in another order.
        assert loss == pytest.approx(truth[0], rel=3e-7 if stock else TOLERANCE), grid  # Transformers' is float32
        torch.testing.assert_close(torch.from_numpy(predicted.predictions), truth[1], rtol=1e-6, atol=1e-6)
    dispatched = make_trainer(folder, Grid(x=2), stock=stock, accelerator_config={"dispatch_batches": True})
    assert dispatched.evaluation_loop(dispatched.get_eval_dataloader(), "rows").num_samples == 7
    assert dispatched.num_examples(dispatched.get_train_dataloader()) == 64


@pytest.mark.parametrize(
    "grid",
    [
        Grid(x=2),
        *(
            pytest.param(grid, marks=pytest.mark.slow)
            for grid in (Grid(z=2, x=2), Grid(y=2, x=2), Grid(z=4, context=2))
        ),
    ],
    ids=str,
)
def test_bf16_autocast_is_close_to_one_process(tmp_path, grid):
    """bf16 has 8 bits: products of one process and of a grid differ by rounding, a few parts in 1e3."""
    options = dict(bf16=True, max_steps=2, eval_strategy="no", save_strategy="no")
    one = make_trainer(tmp_path / "one", None, **options)
    one.model.float()
    one.train()
    truth = [entry["loss"] for entry in one.state.log_history if "loss" in entry]
    run_ranks(_bf16, grid.size, tmp_path, grid, options, truth)


def _bf16(folder: Path, grid: Grid, options: dict, truth: list[float]) -> None:
    trainer = make_trainer(folder / "grid", grid, model=tiny_model("qwen3", dtype=torch.float32), **options)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == pytest.approx(truth, rel=5e-3), (losses, truth)  # bfloat16 rounds to 4e-3
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())


@pytest.mark.slow
def test_lora_trains_saves_and_resumes_on_another_grid(tmp_path):
    one = _lora_run(tmp_path / "one", None)
    run_ranks(_lora, 4, tmp_path, one)


def _lora_run(output: Path, grid: Grid | None, resume: Path | None = None) -> list[dict]:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    lora = LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(tiny_model("qwen3"), lora).to(torch.float64)
    return train(output, grid, resume=resume, model=model)


def _lora(folder: Path, truth: list[dict]) -> None:
    from peft import PeftModel

    saved_by = {"0": None, "1": folder / "0" / "checkpoint-2", "2": folder / "one" / "checkpoint-2"}
    for output, resume in saved_by.items():
        grid = Grid(y=2, x=2) if resume else Grid(z=2, x=2)
        history = _lora_run(folder / output, grid, resume)
        assert worst_difference(history[:-1], truth[:-1]) < TOLERANCE, (grid, history)
    saved = PeftModel.from_pretrained(tiny_model("qwen3"), folder / "0" / "checkpoint-4")
    expected = PeftModel.from_pretrained(tiny_model("qwen3"), folder / "one" / "checkpoint-4")
    values = {name: value for name, value in expected.named_parameters() if "lora" in name}
    assert values
    for name, value in saved.named_parameters():
        if "lora" in name:
            torch.testing.assert_close(value, values[name], rtol=1e-6, atol=1e-7)


def test_the_history_is_json(truth):
    assert json.loads(json.dumps(truth[1])) == truth[1]
