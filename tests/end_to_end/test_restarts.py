"""Runs that a signal stops: saved after one step on all ranks, and gone on with by the same command on fewer ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers import ROOT
from tests.helpers.float64 import Float64, relative_errors
from tests.helpers.training import make_trainer


LAUNCH_FILE = """\
distributed_type: MULTI_GPU
use_cpu: true
num_processes: 4
mixed_precision: no
axonn_config:
  grid: {grid}
"""
# A step is longer than it takes threads to agree; who is signalled after which step is in STOP.
SCRIPT = """\
import os, signal, sys, time
from transformers import TrainerCallback
from tests.end_to_end.test_restarts import trainer_for
from tests.helpers.float64 import Float64

class Signal(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        time.sleep(0.3)
        if f"{state.global_step},{os.environ['RANK']}" in os.environ["STOP"]:
            launcher = os.environ["RANK"] == "0"
            os.kill(os.getppid() if launcher else os.getpid(), signal.SIGTERM if launcher else signal.SIGUSR1)

trainer = trainer_for(sys.argv[1])
trainer.add_callback(Signal())
with Float64():
    trainer.train(resume_from_checkpoint="last")
trainer.save_model()
"""


def trainer_for(output: Path | str, **changes):
    """Eight rows a step, in batches of two."""
    options = dict(per_device_train_batch_size=2, max_steps=14, save_steps=100, eval_strategy="no")
    return make_trainer(Path(output), None, stock=True, kind="llama", **options | changes)


class Runs:
    """Starts of one script on a grid, by accelerate's own command."""

    def __init__(self, folder: Path, grid: str) -> None:
        self.folder, self.out = folder, folder / "out"
        (folder / "axonn.yaml").write_text(LAUNCH_FILE.format(grid=grid))
        (folder / "script.py").write_text(SCRIPT)

    def start(self, ranks: int, stop: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config", str(self.folder / "axonn.yaml")]
        return subprocess.run(
            [*command, "--num_processes", str(ranks), str(self.folder / "script.py"), str(self.out)],
            env={**os.environ, "STOP": stop, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            cwd=self.folder, capture_output=True, text=True, timeout=420,
        )  # fmt: skip

    def steps(self) -> list[int]:
        return sorted(int(path.name.partition("-")[2]) for path in self.out.glob("checkpoint-*"))

    def check_equal(self) -> None:
        """Weights and losses are those of one process that was not stopped."""
        alone = trainer_for(self.folder / "alone", gradient_accumulation_steps=4, save_strategy="no")
        with Float64():
            alone.train()
        ours = dict(AutoModelForCausalLM.from_pretrained(self.out, dtype=torch.float64).named_parameters())
        errors = relative_errors(ours, dict(alone.model.named_parameters()))
        assert max(errors.values()) < 1e-10, errors
        state = json.loads((self.out / "checkpoint-14" / "trainer_state.json").read_text())
        losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
        assert losses == pytest.approx(
            [entry["loss"] for entry in alone.state.log_history if "loss" in entry], rel=1e-6
        )


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_fewer_ranks_and_with_more_again(tmp_path):
    runs = Runs(tmp_path, "{data: auto, x: 2}")
    out = runs.out
    stopped = runs.start(4, "2,0")  # the launcher is ended after two steps
    assert stopped.returncode == 75, stopped.stderr[-4000:]
    [first] = runs.steps()
    assert 3 <= first <= 7 and not (out / "config.json").exists()
    assert f"step {first} is saved" in stopped.stderr and "the ranks have saved and stopped" in stopped.stderr
    assert "data: auto is 2 on 4 process(es)" in stopped.stderr and "Traceback" not in stopped.stderr
    batch = json.loads((out / f"checkpoint-{first}" / "step_batch.json").read_text())
    assert batch == {"samples": 8, "per_device": 2, "accumulation": 2}

    fewer = runs.start(2, f"{first + 1},1")  # one rank of two is told of the time limit
    assert fewer.returncode == 75, fewer.stderr[-4000:]
    assert "4 batches are accumulated in place of 2" in fewer.stderr
    second = runs.steps()[-1]
    assert first + 2 <= second <= 13 and f"step {second} is saved" in fewer.stderr

    again = runs.start(4, "")
    assert again.returncode == 0, again.stderr[-4000:]
    assert "are accumulated" not in again.stderr
    runs.check_equal()

    refused = runs.start(3, "")
    assert refused.returncode == 2 and "start a multiple of 2" in refused.stderr


@pytest.mark.slow
def test_a_run_that_has_shrunk_to_one_rank_saves_too(tmp_path):
    runs = Runs(tmp_path, "{data: auto}")
    for ranks, stop, least in ((2, "2,1", 3), (1, "9,0", 10)):
        stopped = runs.start(ranks, stop)
        assert stopped.returncode == 75, stopped.stderr[-4000:]
        last = runs.steps()[-1]
        assert least <= last <= 13 and f"step {last} is saved" in stopped.stderr
        assert "the ranks have saved and stopped" in stopped.stderr and "Traceback" not in stopped.stderr
    assert "4 batches are accumulated in place of 2" in stopped.stderr
    again = runs.start(1, "")  # its own checkpoint says how many samples a step has
    assert again.returncode == 0, again.stderr[-4000:]
    assert "4 batches are accumulated in place of 2" in again.stderr
    runs.check_equal()
