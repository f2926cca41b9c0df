"""ExtractionCallback: it measures what `extract` measures, and training goes on as if it had not, to the bit."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_axonn import Grid
from hf_axonn_eval import ExtractionCallback, Sample, extract, read_run
from hf_axonn_eval.extraction.callback import LOGGED, PREFIX
from tests.helpers.eval_support import topics_tokenizer
from tests.helpers.float64 import Float64
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import collate, make_trainer, token_data, training_options


RUNS = [(Grid(x=2), True), (Grid(z=2), False)]  # a grid, and whether the trainer is the stock one


def probe() -> list[Sample]:
    """Six rows that are trained on (bucket 1) and three that are not, in two lengths."""
    rows = [(row["input_ids"], 1) for row in token_data(6, seed=0)] + [
        (row["input_ids"], 0) for row in token_data(3, 9)
    ]
    return [
        Sample(sample_id=str(place), document_id=str(place), bucket=bucket, offset=0, prefix=ids[:6], suffix=ids[6:])
        for place, (ids, bucket) in enumerate(rows)
    ]


class Modes(TrainerCallback):
    """Draws after each step from every source of chance, and notes the mode of every module."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen.append((random.random(), torch.rand(1).item(), [module.training for module in model.modules()]))


def trained(output: Path, grid: Grid | None, *, stock: bool, measured: bool) -> dict:
    """Three steps with dropout; measured before the first and after the second, or not."""
    model = tiny_model("qwen3", attention_dropout=0.2)
    trainer = make_trainer(output, grid, stock=stock, model=model, max_steps=3, save_strategy="no", eval_strategy="no")
    modes = Modes()
    if measured:
        trainer.add_callback(ExtractionCallback(trainer, probe(), every=2, at_start=True, batch_size=4))
    trainer.add_callback(modes)
    torch.manual_seed(1)
    with Float64():
        trainer.train()
    history = trainer.state.log_history
    keys = ("loss", "grad_norm", "eval_loss", "loss_kept")
    return {
        "training": [{key: entry[key] for key in keys if key in entry} for entry in history if "loss" in entry],
        "modes": modes.seen,
        "parameters": {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()},
        "measured": [entry for entry in history if f"{PREFIX}seconds" in entry],
    }


def on_grids(folder: Path, wanted: list[tuple[Grid, bool]]) -> list[dict]:
    """A trainer on a grid of two ranks, with and without the callback."""
    runs = []
    for grid, stock in wanted:
        pair = [trained(folder / f"{stock}{yes}", grid, stock=stock, measured=yes) for yes in (True, False)]
        runs.append({"measured": pair[0]["measured"], "equal": undisturbed(*pair), "stock": stock})
    return runs


def undisturbed(one: dict, other: dict) -> bool:
    same = one["training"] == other["training"] and one["modes"] == other["modes"] and not other["measured"]
    pairs = zip(one["parameters"].values(), other["parameters"].values(), strict=True)
    return same and all(torch.equal(mine, true) for mine, true in pairs)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return {
        stock: [trained(folder / f"{stock}{yes}", None, stock=stock, measured=yes) for yes in (True, False)]
        for stock in (True, False)
    }


@pytest.mark.parametrize("stock", [True, False], ids=["Trainer", "GoldfishTrainer"])
def test_training_is_not_disturbed(alone, stock):
    one, other = alone[stock]
    assert undisturbed(one, other) and len(one["training"]) == 3
    assert [entry["step"] for entry in one["measured"]] == [0, 2]


@pytest.mark.parametrize("wanted", [RUNS[:1], pytest.param(RUNS[1:], marks=pytest.mark.slow)], ids=["x=2", "z=2"])
def test_two_ranks_measure_the_same_and_are_not_disturbed(alone, tmp_path, wanted):
    ranks = run_ranks(on_grids, 2, tmp_path, wanted)
    for runs in ranks:
        for run in runs:
            assert run["equal"]
            truth = alone[run["stock"]][0]["measured"]
            # dropout is drawn otherwise on a grid, so only what was measured before the first step is comparable
            assert [entry["step"] for entry in run["measured"]] == [0, 2]
            for key, value in truth[0].items():
                if not key.endswith("seconds"):
                    assert run["measured"][0][key] == pytest.approx(value, rel=1e-10), key
    without_time = [
        [
            {key: value for key, value in entry.items() if "seconds" not in key}
            for run in runs
            for entry in run["measured"]
        ]
        for runs in ranks
    ]
    assert without_time[0] == without_time[1], "the ranks logged different numbers"


def test_what_is_logged_is_what_extract_measures(tmp_path):
    trainer = make_trainer(tmp_path, None, stock=True, max_steps=1, save_strategy="no", eval_strategy="no")
    callback = ExtractionCallback(trainer, probe(), every=1, generate=True, tokenizer=topics_tokenizer())
    trainer.add_callback(callback)
    trainer.train()
    (logged,) = [entry for entry in trainer.state.log_history if f"{PREFIX}seconds" in entry]
    results = extract(trainer.model, topics_tokenizer(), probe(), progress=False)
    assert {key for key in logged if key.startswith(PREFIX)} == {f"{PREFIX}seconds"} | {
        f"{PREFIX}{metric}{suffix}" for metric in LOGGED for suffix in ("", "_0x", "_1x")
    }
    of_control = [result.token_accuracy for result in results if result.bucket == 0]
    assert logged[f"{PREFIX}token_accuracy_0x"] == sum(of_control) / 3
    rouge = [result.rougeL for result in results if result.rougeL is not None]
    assert logged[f"{PREFIX}rougeL"] == pytest.approx(sum(rouge) / len(rouge), rel=1e-12)
    assert logged[f"{PREFIX}nll"] == pytest.approx(
        sum(-result.logprob / result.suffix_length for result in results) / len(results), rel=1e-12
    )


def test_results_stay_as_runs_and_those_of_another_training_are_refused(tmp_path):
    trainer = make_trainer(tmp_path, None, stock=True, max_steps=2, save_strategy="no", eval_strategy="no")
    kept = {"every": 1, "output": tmp_path / "curve", "tokenizer": topics_tokenizer()}
    trainer.add_callback(ExtractionCallback(trainer, probe(), at_start=True, fingerprint="this one", **kept))
    trainer.train()
    logged = {entry["step"]: entry[f"{PREFIX}nll"] for entry in trainer.state.log_history if f"{PREFIX}nll" in entry}
    runs = {step: read_run(tmp_path / "curve" / f"step-{step}") for step in logged}
    assert set(logged) == {0, 1, 2} and len(list((tmp_path / "curve").iterdir())) == 3
    for step, (record, results) in runs.items():
        assert record["identity"]["model_fingerprint"] == f"this one, step {step}"
        of_each = [-result.logprob / result.suffix_length for result in results]
        assert logged[step] == pytest.approx(sum(of_each) / len(of_each), rel=1e-12)
    with pytest.raises(ValueError, match="another one, step 2"):
        ExtractionCallback(trainer, probe(), fingerprint="another one", **kept).measure()


def test_with_every_evaluation_it_can_choose_the_best_checkpoint(tmp_path):
    options = training_options(
        tmp_path,
        None,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model=f"{PREFIX}nll_1x",
        greater_is_better=False,
        save_total_limit=1,
    )
    trainer = Trainer(
        model=tiny_model("qwen3"),
        args=TrainingArguments(**options),
        train_dataset=token_data(64, seed=0),
        eval_dataset={"one": token_data(2, seed=1), "two": token_data(2, seed=2)},
        data_collator=collate,
    )
    trainer.add_callback(ExtractionCallback(trainer, probe()))
    trainer.train()
    measured = {
        entry["step"]: entry[f"{PREFIX}nll_1x"] for entry in trainer.state.log_history if f"{PREFIX}nll_1x" in entry
    }
    assert len([entry for entry in trainer.state.log_history if f"{PREFIX}seconds" in entry]) == 2, (
        "once an evaluation"
    )
    assert set(measured) == {2, 4} and trainer.state.best_metric == min(measured.values())
    assert json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["best_metric"] == min(
        measured.values()
    )
    assert PREFIX + "nll" in trainer.evaluate()


def test_what_cannot_be_is_named(tmp_path):
    trainer = make_trainer(tmp_path, None, stock=True, max_steps=1, save_strategy="no", eval_strategy="no")
    for options, message in [
        ({"every": 0}, "every is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"at_start": True}, "eval_on_start"),
        ({"output": tmp_path}, "needs fingerprint"),
    ]:
        with pytest.raises(ValueError, match=message):
            ExtractionCallback(trainer, probe(), **options)
    with pytest.raises(ValueError, match="probe set is empty"):
        ExtractionCallback(trainer, [], every=1)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(ValueError, match="DeepSpeed"):
        ExtractionCallback(trainer, probe(), every=1)
