"""The product as a user starts it: stock `accelerate launch --config GRID.yaml finetune.py`, processes and files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from hf_axonn import Grid
from hf_axonn.cli.main import main as hf_axonn_cli
from tests.helpers import ROOT
from tests.helpers.eval_support import documents, tiny_llama, topics_tokenizer
from tests.helpers.launching import assert_quiet, forked
from tests.helpers.launching import launch as launched
from tests.helpers.training import numbers, worst_difference


FINETUNE = ROOT / "training_scripts" / "finetune.py"
# float32 on both sides: rounding of 6e-8 grows to a few 1e-6 in six AdamW steps at this rate.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny model with its tokenizer, documents, and a launch file for a second grid."""
    folder = tmp_path_factory.mktemp("end-to-end")
    tiny_llama().save_pretrained(folder / "model")
    topics_tokenizer().save_pretrained(folder / "model")
    texts = [{"text": document["text"][:1500]} for document in documents()]
    (folder / "documents.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    settings = yaml.safe_load((ROOT / "training_scripts" / "grids" / "cpu_2_x2.yaml").read_text())
    settings["axonn_config"] = {"grid": {"y": 2}, "overlap": {"all_gather": False}}
    (folder / "y2.yaml").write_text(yaml.safe_dump(settings))
    return folder


def arguments(folder: Path, output: str, *, rows: int, **options) -> list[str]:
    """A finetune.py command line with 8 rows in a global step, of which each process takes `rows`."""
    settings = dict(
        model=folder / "model",
        data=folder / "documents.jsonl",
        output_dir=folder / output,
        sequence_length=48,
        held_out=0.2,
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=3,
        max_steps=6,
        save_steps=3,
        eval_steps=3,
        eval_strategy="steps",
        logging_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        goldfish_k=3,
        goldfish_context_width=4,
        report_to="none",
        use_cpu=True,
        seed=1,
    )
    return [str(FINETUNE), *(f"--{name}={value}" for name, value in {**settings, **options}.items())]


def launch(launch_file: Path, command: list[str]) -> list[str]:
    return [sys.executable, "-m", "accelerate.commands.launch", "--config", str(launch_file), *command]


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done


def history(folder: Path, output: str, checkpoint: int = 6) -> list[dict]:
    return numbers(
        json.loads((folder / output / f"checkpoint-{checkpoint}" / "trainer_state.json").read_text())["log_history"]
    )


@pytest.fixture(scope="module")
def one_process(folder) -> list[dict]:
    """Not started anew: what it logs is the truth here, and its start alone is what the launches do more often."""
    assert_quiet(forked(folder, None, *arguments(folder, "one", rows=8)))
    return history(folder, "one")


def assert_as_one_process(folder: Path, output: str, one_process: list[dict]) -> None:
    assert worst_difference(history(folder, output), one_process) < TOLERANCE
    # The final model, read by plain Transformers after conversion and straight from its shards.
    plain_folder = folder / f"{output}-plain"
    assert hf_axonn_cli(["convert", str(folder / output), str(plain_folder)]) == 0
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sharded = AutoModelForCausalLM.from_pretrained(folder / output).state_dict()
    plain = AutoModelForCausalLM.from_pretrained(plain_folder).state_dict()
    assert all((plain[name] == value).all() for name, value in sharded.items())
    assert AutoTokenizer.from_pretrained(plain_folder).vocab_size == topics_tokenizer().vocab_size


def test_a_grid_logs_what_one_process_logs(folder, one_process):
    """Run finetune in forks; README's blocks launch the same script, which trains and saves (test_tutorials.py)."""
    done = forked(folder, Grid(x=2), *arguments(folder, "forked", rows=8))
    assert_quiet(done)
    assert done.output.count("\nsaved ") == 1 and "100%" not in done.output  # no progress bars in a file
    assert_as_one_process(folder, "forked", one_process)


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "rows"), [("cpu_2_x2", 8), ("cpu_4_z2_x2", 4)])
def test_a_launch_logs_what_one_process_logs(folder, one_process, grid, rows):
    launch_file = ROOT / "training_scripts" / "grids" / f"{grid}.yaml"
    done = run(launch(launch_file, arguments(folder, grid, rows=rows)), folder)
    assert done.stdout.count("\nsaved ") == 1 and "100%" not in done.stderr  # no progress bars in a file
    assert_as_one_process(folder, grid, one_process)


@pytest.mark.slow
def test_a_run_killed_after_a_save_resumes_on_another_grid(folder, one_process):
    grid = ROOT / "training_scripts" / "grids" / "cpu_4_z2_x2.yaml"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        launch(grid, arguments(folder, "killed", rows=4, max_steps=100_000)),
        env=environment,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        following = folder / "killed" / "checkpoint-6"  # when it is begun, checkpoint-3 is whole
        end = time.monotonic() + 240
        while not following.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        assert following.exists() and process.poll() is None, "the run ended before it could be killed"
    finally:
        # torchrun starts each rank in a session of its own, so the launcher's group is not enough.
        family = [*psutil.Process(process.pid).children(recursive=True), process]
        for member in family:
            member.kill()
        process.wait()
    resume = folder / "killed" / "checkpoint-3"
    run(launch(folder / "y2.yaml", arguments(folder, "resumed", rows=8, resume_from_checkpoint=resume)), folder)
    assert worst_difference(history(folder, "resumed"), one_process) < TOLERANCE


# Rank 1 is killed in the fifth step, the first time.
DIES = """
import functools, os, signal
from transformers import TrainerCallback
from hf_axonn_scripts import finetune

class Dies(TrainerCallback):
    start = os.environ["TORCHELASTIC_RESTART_COUNT"]

    def on_train_begin(self, args, state, control, **kwargs):
        print(f"start {self.start}, rank {os.environ['RANK']}: step {state.global_step}", flush=True)

    def on_step_begin(self, args, state, control, **kwargs):
        if (self.start, os.environ["RANK"], state.global_step) == ("0", "1", 4):
            os.kill(os.getpid(), signal.SIGKILL)

finetune.GoldfishTrainer = functools.partial(finetune.GoldfishTrainer, callbacks=[Dies()])
finetune.main()
"""


@pytest.mark.slow
def test_a_killed_rank_is_started_anew_and_the_run_goes_on(folder, one_process):
    """`--max_restarts` of the launcher, and one command for both starts."""
    script = folder / "dies.py"
    script.write_text(DIES)
    _, *options = arguments(folder, "restarted", rows=8, resume_from_checkpoint="last")
    grid = ROOT / "training_scripts" / "grids" / "cpu_2_x2.yaml"
    done = run(launch(grid, ["--max_restarts", "1", str(script), *options]), folder)
    began = sorted(re.findall(r"start (\d), rank (\d): step (\d)", done.stdout))  # two ranks may write on one line
    assert began == [("0", "0", "0"), ("0", "1", "0"), ("1", "0", "3"), ("1", "1", "3")]
    assert worst_difference(history(folder, "restarted"), one_process) < TOLERANCE
    assert done.stderr.count("has no checkpoint: training starts at step 0") == 1


STOCK = """
import sys
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from datasets import Dataset

model, output, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
data = Dataset.from_list([{"input_ids": list(range(i, i + 20)), "labels": list(range(i, i + 20))} for i in range(64)])
arguments = TrainingArguments(
    output_dir=output, per_device_train_batch_size=rows, max_steps=4, save_steps=4, logging_steps=1,
    learning_rate=1e-3, report_to="none", use_cpu=True,
)
trainer = Trainer(model=AutoModelForCausalLM.from_pretrained(model), args=arguments, train_dataset=data)
trainer.train()
print("sharded" if hasattr(trainer.model, "axonn") else "whole")
"""


@pytest.mark.parametrize("start", [forked, pytest.param(launched, marks=pytest.mark.slow)])
def test_an_unmodified_script_of_stock_trainer(folder, start):
    """Launched, it imports Trainer before anything of ours, so our wrapping of Trainer comes while that import is
    under way; tests/launch/test_autoload.py sees that in a fork."""
    (folder / "stock.py").write_text(STOCK)
    command = [str(folder / "stock.py"), str(folder / "model")]
    one = forked(folder, None, *command, folder / "stock", 8)
    output = f"stock-{start.__name__}"
    grid = start(folder, Grid(y=2), *command, folder / output, 8)
    assert_quiet(one)
    assert_quiet(grid)
    assert "whole" in one.output and "sharded" in grid.output and "\nwhole" not in grid.output
    assert worst_difference(history(folder, output, 4), history(folder, "stock", 4)) < TOLERANCE
    if start is launched:  # pytest takes what is logged in a fork
        assert "hf_axonn.from_pretrained(name, grid=...)" in grid.output  # the advice of the warning
    assert (folder / output / "checkpoint-4" / "axonn_checkpoint.json").is_file()
