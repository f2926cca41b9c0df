"""The arithmetic of Monitor, by a clock that is given: tokens, FLOPs, seconds; and its use in Accelerate's loops."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from hf_axonn import Grid, Monitor
from hf_axonn.monitoring import monitor as monitor_module
from hf_axonn.monitoring.monitor import tokens_and_squares
from hf_axonn.planner.dense import shape_from_config
from hf_axonn.planner.job import Job
from hf_axonn.planner.machine import load_machine
from tests.helpers.event_files import scalars
from tests.helpers.models import tiny_config, tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import collate, new_accelerator, token_data


class Clock:
    """Goes on by `step` seconds a look."""

    def __init__(self, now: float = 100.0) -> None:
        self.now, self.step = now, 1.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture
def clock():
    clock = Clock()
    with mock.patch.object(monitor_module, "clock", clock):
        yield clock


NOTHING = dict.fromkeys(monitor_module.KINDS, 0.0)


def batch_of(*rows: list[int], **more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.ones(len(rows), len(rows[0]), dtype=torch.int64), **more}


def test_padding_is_no_token_and_sequences_are_rows_without_it():
    mask = torch.tensor([[0, 1, 1, 1], [1, 0, 0, 0]])
    assert tokens_and_squares(batch_of([0] * 4, [0] * 4, attention_mask=mask)).tolist() == [4, 9 + 1]
    assert tokens_and_squares(batch_of([0] * 4, [0] * 4)).tolist() == [8, 16 + 16]


def test_packed_rows_are_their_documents():
    """Of 3, 2 and 4 tokens, and one place of padding; a mask may number the documents."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 0]])
    numbers = torch.tensor([[1, 1, 1, 2, 2, 3, 3, 3, 3, 0]])
    batch = batch_of([0] * 10, attention_mask=numbers, position_ids=positions)
    assert tokens_and_squares(batch).tolist() == [9, 9 + 4 + 16]
    four_dims = torch.ones(1, 1, 10, 10)  # says nothing of padding
    assert tokens_and_squares(batch_of([0] * 10, attention_mask=four_dims)).tolist() == [10, 100]


def test_every_second_is_counted_once(clock):
    clock.step = 0.0
    monitor = Monitor(tiny_model("qwen3"))

    def loader():
        for _ in range(2):
            clock.now += 3
            yield batch_of([0] * 5, [0] * 5)
        clock.now += 0.5

    clock.now += 7  # before the loop
    for _ in monitor.batches(loader()):
        clock.now += 10
        with monitor.time("save"):
            clock.now += 100
    found = monitor.log()
    assert found["seconds_other"] == 7 and found["seconds_data"] == 6.5 and "seconds_restart" not in found
    assert found["seconds_step"] == 20 and found["seconds_save"] == 200
    assert found["goodput"] == 20 / 233.5
    assert found["tokens_per_second"] == found["tokens_per_second_per_device"] == 20 / 26.5
    for _ in monitor.batches([batch_of([0] * 8)]):
        clock.now += 4
    found = monitor.log()
    assert found["tokens_per_second"] == 2.0 and found["seconds_step"] == 24
    with pytest.raises(ValueError, match="kind is 'step', but it is one of save"), monitor.time("step"):
        pass


def test_goodput_goes_on_over_a_restart(clock):
    clock.step = 0.0
    monitor = Monitor(tiny_model("qwen3"))
    clock.now += 30
    monitor.lap("step")
    assert monitor.state_dict() == {"seconds": {**NOTHING, "step": 30.0}, "time": 130.0}
    with monitor.time("save"):
        clock.now += 60
        saved = monitor.state_dict()
        clock.now += 40
    assert saved == {"seconds": {**NOTHING, "step": 30.0, "save": 60.0}, "time": 190.0}
    assert monitor.goodput()["seconds_save"] == 100
    clock.now += 460  # steps that are lost, and time until it starts again
    again = Monitor(tiny_model("qwen3"))
    clock.now += 5
    again.load_state_dict(saved)
    clock.now += 15
    again.count(batch_of([0] * 30))
    found = again.log()
    assert found["seconds_restart"] == 505 and found["seconds_step"] == 45
    assert found["goodput"] == 45 / 610
    assert found["tokens_per_second"] == 2.0, "of the steps since the restart alone"


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gpt2", "mixtral"])
def test_mfu_has_the_planners_flops(clock, kind):
    """Of full rows; mistral has a sliding window, and mixtral is read from its modules."""
    clock.step = 0.0
    model = tiny_model(kind, dtype=torch.float32)
    monitor = Monitor(model, peak_tflops=1e-6)
    monitor.count(batch_of(*[[0] * 20] * 6))
    clock.now += 8
    config = tiny_config(kind).to_dict()
    shape = monitor_module.shape_of(config)
    job = Job(shape=shape, machine=load_machine("dgx-a100"), sequences=6, seq=20)
    assert monitor.log()["mfu"] == pytest.approx(job.model_flops() / 8 / 1e6, rel=1e-12)
    if kind == "qwen3":
        assert shape == shape_from_config(config)
        assert replace(job, lora=8).model_flops() < job.model_flops()


def test_frozen_weights_cost_two_passes(clock):
    clock.step = 0.0
    model = tiny_model("qwen3", dtype=torch.float32).requires_grad_(False)
    frozen = Monitor(model, peak_tflops=1.0)
    frozen.count(batch_of([0] * 20))
    clock.now += 1
    shape = shape_from_config(model.config.to_dict())
    job = Job(shape=shape, machine=load_machine("dgx-a100"), sequences=1, seq=20, lora=8)
    assert frozen.log()["mfu"] == pytest.approx(job.model_flops() / 1e12, rel=1e-12)


def test_what_is_not_known_is_absent_and_said_once(clock, caplog):
    with caplog.at_level(logging.WARNING):
        monitor = Monitor(tiny_model("qwen3"))
        first, second = monitor.log(), monitor.log()
    texts = [record.getMessage() for record in caplog.records]
    assert [text for text in texts if "mfu" in text] == [
        "the logs have no mfu: there is no known peak of cpu; give peak_tflops."
    ]
    assert len([text for text in texts if "no tokens were counted" in text]) == 1
    for found in (first, second):
        assert not {"mfu", "tokens_per_second", "exposed_communication", "peak_reserved_gib"} & set(found)
        assert found["peak_memory_gib"] > 0.01
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        monitor = Monitor(torch.nn.Linear(2, 2), peak_tflops=1.0)
        monitor.count(batch_of([0]))
        assert "mfu" not in monitor.log()
    assert "the planner does not know the FLOPs of this model" in caplog.records[0].getMessage()


def test_ranks_that_share_samples_in_a_way_that_is_not_known_are_refused():
    with mock.patch.object(monitor_module, "ranks_sharing_samples", return_value=2):
        with pytest.raises(ValueError, match="2 ranks have the same samples"):
            Monitor(tiny_model("qwen3"))


def loop(folder: Path, grid: Grid | None, resume: Path | None = None) -> list[dict[str, float]]:
    """Six batches of four rows of unequal length, two a step; what is logged after each step."""
    with mock.patch.object(monitor_module, "clock", Clock(1000.0 if resume else 0.0)):
        accelerator = new_accelerator(
            grid, gradient_accumulation_steps=2, log_with="tensorboard", project_dir=str(folder)
        )
        accelerator.init_trackers("loop")
        model = tiny_model("qwen3").train()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loader = DataLoader(
            list(token_data(24, seed=0)), batch_size=4 // accelerator.num_processes, collate_fn=collate
        )
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        monitor = Monitor(model, peak_tflops=1e-3)
        accelerator.register_for_checkpointing(monitor)
        if resume:
            accelerator.load_state(str(resume))
        found = []
        for number, batch in enumerate(monitor.batches(loader)):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                found.append(monitor.log())
                accelerator.log(found[-1], step=number)
        with monitor.time("save"):
            accelerator.save_state(str(folder / "saved"))
        for tracker in accelerator.trackers:
            tracker.finish()
    return found


TIMED = ("peak_memory_gib", "exposed_communication")


def by_seconds(found: list[dict[str, float]]) -> list[dict[str, float]]:
    """Without what depends on time and machine."""
    return [{name: value for name, value in log.items() if name not in TIMED} for log in found]


def test_a_loop_of_accelerate_counts_as_one_process_does(tmp_path):
    truth = loop(tmp_path / "one", None)
    seconds = truth[0]["seconds_step"] + truth[0]["seconds_data"]
    assert truth[0]["tokens_per_second"] == 8 * 17.5 / seconds, "rows of 20 and of 15 tokens"
    assert all("exposed_communication" not in log for log in truth)
    run_ranks(_loops, 2, tmp_path, truth)
    shown = scalars(tmp_path / "data=2" / "loop")
    assert [value for _, value in shown["tokens_per_second"]] == pytest.approx(
        [log["tokens_per_second"] for log in truth], rel=1e-6
    )
    resumed = loop(tmp_path / "again", None, resume=tmp_path / "one" / "saved")
    assert resumed[0]["seconds_restart"] > 900 and resumed[0]["seconds_step"] > truth[-1]["seconds_step"]


def _loops(folder: Path, truth: list[dict[str, float]]) -> None:
    for name, grid in {"data=2": Grid(data=2), "x=2": Grid(x=2), "context=2": Grid(z=2, context=2)}.items():
        found = loop(folder / name, grid)
        for log, expected in zip(by_seconds(found), by_seconds(truth), strict=True):
            assert log.pop("tokens_per_second_per_device") == expected["tokens_per_second"] / 2
            assert log.pop("mfu") == pytest.approx(expected["mfu"] / 2, rel=1e-12)
            assert log == {name: value for name, value in expected.items() if name in log}, grid
            assert set(expected) - set(log) == {"tokens_per_second_per_device", "mfu"}
        assert ["exposed_communication" in log for log in found] == [False, True, True]
        assert all(0 < log["exposed_communication"] < 1 for log in found[1:])
    resumed = loop(folder / "resumed", Grid(x=2), resume=folder / "data=2" / "saved")
    assert resumed[0]["seconds_restart"] > 900
