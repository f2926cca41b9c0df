"""MonitorCallback and ProfilerCallback under Trainer: numbers in every log and tracker, the same on every grid."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_axonn import GoldfishConfig, GoldfishTrainer, Grid, MonitorCallback, ProfilerCallback
from hf_axonn.distributed import collectives
from hf_axonn.monitoring import monitor as monitor_module
from hf_axonn.planner.dense import shape_from_config
from tests.helpers.event_files import scalars
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import collate, token_data, training_options


ROWS = 12  # two steps an epoch: of two micro-batches of four rows, and of one
PEAK = 1e-3


class Clock:
    """Goes on by a second a look."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        self.now += 1
        return self.now


class Dies(TrainerCallback):
    """Ends training in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def make(output: Path, grid: Grid | None, *callbacks: TrainerCallback, goldfish: bool = False, **changes) -> Trainer:
    rows = changes.pop("rows", ROWS)
    own = dict(num_train_epochs=2, save_strategy="no")
    options = training_options(output, grid, goldfish=goldfish, **own | changes)
    trainer_class, arguments = (GoldfishTrainer, GoldfishConfig) if goldfish else (Trainer, TrainingArguments)
    return trainer_class(
        model=tiny_model("qwen3", dtype=torch.float32),
        args=arguments(**options),
        train_dataset=token_data(rows, seed=0),
        eval_dataset=token_data(2, seed=1),
        data_collator=collate,
        callbacks=list(callbacks),
    )


def watched(output: Path, grid: Grid | None, *callbacks, now: float = 0.0, resume: Path | None = None, **changes):
    """The logs of a training with a clock that counts looks."""
    trainer = make(output, grid, MonitorCallback(peak_tflops=PEAK), *callbacks, **changes)
    with mock.patch.object(monitor_module, "clock", Clock(now)):
        trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer.state.log_history


OURS = ("tokens_per_second", "mfu", "goodput", "seconds_step", "seconds_data")


def ours(history: list[dict]) -> list[dict[str, float]]:
    return [{name: entry[name] for name in OURS if name in entry} for entry in history]


def equal(found: list[dict], truth: list[dict], devices: int) -> None:
    """That logs have the truth's numbers, a device its share."""
    assert len(found) == len(truth)
    for log, expected in zip(ours(found), ours(truth), strict=True):
        if "mfu" in expected:
            assert log.pop("mfu") == pytest.approx(expected.pop("mfu") / devices, rel=1e-12)
        assert log == expected
    for log in found[:-1]:
        assert log["tokens_per_second_per_device"] == log["tokens_per_second"] / devices


@pytest.fixture(scope="module")
def truths(tmp_path_factory) -> dict[int, list[dict]]:
    """By number of rows; of 10 the last step of an epoch has two."""
    return {rows: watched(tmp_path_factory.mktemp("one"), None, rows=rows) for rows in (ROWS, 10)}


def test_tokens_and_flops_are_those_of_the_rows(truths):
    """Rows have 20 and 15 tokens in turn, epochs two steps: of 8 rows and of the 4 or 2 that are left."""
    for rows, left in ((ROWS, 4), (10, 2)):
        first, second, third, fourth, last = truths[rows]
        # Three looks at the clock a step; over an epoch, for its order is shuffled.
        tokens = sum(log["tokens_per_second"] * 3 for log in (first, second))
        assert tokens == sum(log["tokens_per_second"] * 3 for log in (third, fourth)) == rows * 17.5
        assert 15 * left <= second["tokens_per_second"] * 3 <= 20 * left
        shape = shape_from_config(tiny_model("qwen3").config.to_dict())
        squares = rows // 2 * (20**2 + 15**2)
        flops = 3 * (tokens * (shape.weight_flops + 2 * shape.vocab * shape.hidden))
        flops += 3 * squares * shape.attention_flops(1000) / 1000
        assert sum(log["mfu"] * 3 for log in (first, second)) * PEAK * 1e12 == pytest.approx(
            flops, rel=1e-5
        )  # rounded a token
        assert "mfu" not in last and last["goodput"] == last["seconds_step"] / sum(
            value for name, value in last.items() if name.startswith("seconds_")
        )


def test_grids_of_two_count_as_one_process_does(truths, tmp_path):
    run_ranks(_grids, 2, tmp_path, truths)
    shown = scalars(next((tmp_path / "x=2" / "runs").iterdir()))
    for name in OURS:
        logged = [entry[name] for entry in truths[10] if name in entry]
        if name != "mfu":
            assert [value for _, value in shown[f"train/{name}"]] == pytest.approx(logged, rel=1e-6)
    assert len(shown["train/mfu"]) == 4 and len(shown["train/exposed_communication"]) == 3


def _grids(folder: Path, truths: dict[int, list[dict]]) -> None:
    for grid in (Grid(x=2), Grid(pipe=2), Grid(data=2)):
        # Over data the last batch of 10 rows is filled up with rows again, which are trained on.
        rows = ROWS if grid.data > 1 else 10
        name = next(f"{axis}=2" for axis, size in grid.as_dict().items() if size > 1)
        options = dict(report_to="tensorboard") if grid.x > 1 else {}
        found = watched(folder / name, grid, rows=rows, **options)
        equal(found, truths[rows], 2)
        assert ["exposed_communication" in log for log in found] == [False, True, True, True, False], grid
        assert all(0 < log["exposed_communication"] < 1 for log in found[1:4]), (grid, found)
        assert not collectives._watches


def test_a_real_run_has_the_numbers_in_tensorboard(tmp_path, caplog):
    """By the clock of the machine, of GoldfishTrainer, and without a peak: no mfu, which is said once."""
    with caplog.at_level(logging.WARNING):
        trainer = make(tmp_path, None, MonitorCallback(), goldfish=True, report_to="tensorboard")
        trainer.train()
    said = [record.getMessage() for record in caplog.records if "mfu" in record.getMessage()]
    assert said == ["the logs have no mfu: there is no known peak of cpu; give peak_tflops."]
    shown = scalars(next((tmp_path / "runs").iterdir()))
    for name in ("tokens_per_second", "tokens_per_second_per_device", "peak_memory_gib"):
        assert [step for step, _ in shown[f"train/{name}"]] == [1, 2, 3, 4]
        assert all(value > 0 for _, value in shown[f"train/{name}"])
    assert [step for step, _ in shown["train/goodput"]] == [1, 2, 3, 4, 4]
    assert all(0 < value < 1 for _, value in shown["train/goodput"])
    assert not {"train/mfu", "train/exposed_communication"} & set(shown)
    assert "train/loss_kept" in shown, "with the goldfish loss' own"


def test_seconds_go_where_they_were_spent_and_a_second_training_begins_anew(tmp_path):
    """Each event is one look at the clock, and so one second; a save has one more, for what it keeps."""
    options = dict(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=4)
    trainer = make(tmp_path, None, MonitorCallback(), **options)
    for now in (0.0, 5000.0):
        trainer.state.log_history.clear()
        with mock.patch.object(monitor_module, "clock", Clock(now)):
            trainer.train()
        last = trainer.state.log_history[-1]
        assert (last["seconds_evaluation"], last["seconds_save"], last["seconds_data"]) == (2, 2, 4)
        assert last["seconds_step"] == 8, "four steps, and the time until each log"
        assert last["seconds_other"] == 1 and "seconds_restart" not in last


@pytest.fixture(scope="module")
def died(tmp_path_factory) -> Path:
    """The output of a run on one process that has saved at step 2, and died before its fourth step had ended."""
    output = tmp_path_factory.mktemp("died")
    with pytest.raises(KeyboardInterrupt):
        watched(output, None, Dies(3), save_strategy="steps", save_steps=2)
    return output / "checkpoint-2"


def test_a_restart_adds_to_goodput(died, tmp_path):
    kept = json.loads((died / "trainer_state.json").read_text())["stateful_callbacks"]["MonitorCallback"]
    assert kept["args"] == {"peak_tflops": PEAK}
    kept = kept["attributes"]["kept"]
    assert sum(kept["seconds"].values()) == kept["time"] - 1 and kept["seconds"]["save"] == 1, "none is lost"
    history = watched(tmp_path, None, now=1000.0, resume=died)
    check_resumed(history, kept)
    run_ranks(_resumed, 2, tmp_path, died, kept)


def check_resumed(history: list[dict], kept: dict) -> None:
    first = next(entry for entry in history if entry["step"] == 3)
    assert first["seconds_restart"] == 1002 - kept["time"]
    assert first["seconds_step"] == kept["seconds"]["step"] + 2
    whole = sum(value for name, value in first.items() if name.startswith("seconds_"))
    assert whole == 1002 - kept["time"] + sum(kept["seconds"].values()) + 3
    assert first["goodput"] == first["seconds_step"] / whole


def _resumed(folder: Path, died: Path, kept: dict) -> None:
    """On a grid from one process; then from a sharded checkpoint, with callbacks restored by Trainer itself.

    How often a run that is resumed saves is as its checkpoint says.
    """
    history = watched(folder / "x", Grid(x=2), now=1000.0, resume=died, save_strategy="steps", save_steps=2)
    check_resumed(history, kept)
    saved = folder / "x" / "checkpoint-4"
    state = json.loads((saved / "trainer_state.json").read_text())["stateful_callbacks"]["MonitorCallback"]
    kept = state["attributes"]["kept"]
    options = dict(num_train_epochs=3, restore_callback_states_from_checkpoint=True)
    history = watched(folder / "z", Grid(z=2), now=3000.0, resume=saved, **options)
    (fifth,) = (entry for entry in history if entry["step"] == 5)
    assert fifth["seconds_restart"] == 3002 - kept["time"] + kept["seconds"]["restart"]
    assert fifth["seconds_step"] == kept["seconds"]["step"] + 2


def names_in(path: Path) -> set[str]:
    with gzip.open(path, "rt") as file:
        return {event.get("name", "") for event in json.load(file)["traceEvents"]}


def test_a_trace_names_layers_and_collectives(tmp_path):
    run_ranks(_traced, 2, tmp_path, Grid(x=2), None)
    for rank in range(2):
        names = names_in(tmp_path / "profile" / f"rank-{rank}.json.gz")
        wanted = {"model.layers.0", "model.layers.1.mlp", "model.layers.0 backward", "model.layers.1 backward"}
        wanted |= {"wait: all_gather over x", "wait: reduce_scatter over x"}
        assert wanted <= names, names
        assert any(name.startswith("all_gather over x, 0.0 MiB") for name in names)


@pytest.mark.slow
def test_a_trace_of_a_pipeline_names_its_stage_and_what_is_sent(tmp_path):
    run_ranks(_traced, 2, tmp_path, Grid(pipe=2), tmp_path / "pipe")
    for rank in range(2):
        names = names_in(tmp_path / "pipe" / f"rank-{rank}.json.gz")
        assert {f"model.layers.{rank}", f"model.layers.{rank} backward", "wait: send over pipe"} <= names, names


def _traced(folder: Path, grid: Grid, where: Path | None) -> None:
    callback = ProfilerCallback(where, wait=1, warmup=1, active=1)
    trainer = make(folder, grid, callback, MonitorCallback(), activation_checkpointing=where is None)
    trainer.train()
    assert not collectives._watches and len(collectives._observers) <= 1
    assert not any(module._forward_pre_hooks for module in trainer.model.modules())


def test_a_training_that_is_too_short_for_the_profiler_says_so(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        make(tmp_path, None, ProfilerCallback(wait=3, warmup=1, active=4)).train()
    (said,) = (record.getMessage() for record in caplog.records if "profiler was to" in record.getMessage())
    assert said == (
        "the profiler was to record steps 5 to 8, but this training had 4: the trace is missing. Lower wait or active."
    )
