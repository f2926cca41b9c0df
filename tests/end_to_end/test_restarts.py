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
  grid: {data: auto, x: 2}
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


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_fewer_ranks_and_with_more_again(tmp_path):
    (tmp_path / "axonn.yaml").write_text(LAUNCH_FILE)
    (tmp_path / "script.py").write_text(SCRIPT)
    out = tmp_path / "out"

    def start(ranks: int, stop: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config", str(tmp_path / "axonn.yaml")]
        return subprocess.run(
            [*command, "--num_processes", str(ranks), str(tmp_path / "script.py"), str(out)],
            env={**os.environ, "STOP": stop, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            cwd=tmp_path, capture_output=True, text=True, timeout=240,
        )  # fmt: skip

    def steps() -> list[int]:
        return sorted(int(path.name.partition("-")[2]) for path in out.glob("checkpoint-*"))

    stopped = start(4, "2,0")  # the launcher is ended after two steps
    assert stopped.returncode == 75, stopped.stderr[-4000:]
    [first] = steps()
    assert 3 <= first <= 7 and not (out / "config.json").exists()
    assert f"step {first} is saved" in stopped.stderr and "the ranks have saved and stopped" in stopped.stderr
    assert "data: auto is 2 on 4 process(es)" in stopped.stderr and "Traceback" not in stopped.stderr
    batch = json.loads((out / f"checkpoint-{first}" / "step_batch.json").read_text())
    assert batch == {"samples": 8, "per_device": 2, "accumulation": 2}

    fewer = start(2, f"{first + 1},1")  # one rank of two is told of the time limit
    assert fewer.returncode == 75, fewer.stderr[-4000:]
    assert "4 batches are accumulated in place of 2" in fewer.stderr
    second = steps()[-1]
    assert first + 2 <= second <= 13 and f"step {second} is saved" in fewer.stderr

    again = start(4, "")
    assert again.returncode == 0, again.stderr[-4000:]
    assert "are accumulated" not in again.stderr
    alone = trainer_for(tmp_path / "alone", gradient_accumulation_steps=4, save_strategy="no")
    with Float64():
        alone.train()
    ours = dict(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64).named_parameters())
    errors = relative_errors(ours, dict(alone.model.named_parameters()))
    assert max(errors.values()) < 1e-10, errors
    state = json.loads((out / "checkpoint-14" / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert losses == pytest.approx([entry["loss"] for entry in alone.state.log_history if "loss" in entry], rel=1e-6)

    refused = start(3, "")
    assert refused.returncode == 2 and "start a multiple of 2" in refused.stderr
