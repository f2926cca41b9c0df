"""A real run with MonitorCallback, for the picture of docs/monitoring.md: what tensorboard has of it.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.monitoring --output docs/pictures/monitoring.json
    python -m tests.tools.pictures

GoldfishTrainer over x=2 on the processor of this machine. It evaluates and saves every 20 steps, is stopped after step
47 as a crash would stop it, and goes on from step 40 in new processes. `peak_tflops` is what a large product reaches
on one core here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, LlamaConfig, TrainerCallback

from hf_axonn import AxonnPlugin, GoldfishConfig, GoldfishTrainer, Grid, MonitorCallback
from hf_axonn_scripts.study.recipe.cost import cpu_speed
from tests.helpers.event_files import scalars
from tests.helpers.ranks import run_ranks
from tests.helpers.training import collate, token_data


GRID = Grid(x=2)
STEPS, EVERY, CRASH = 80, 20, 47
PREFIX = "train/"
KEPT = ("tokens_per_second", "mfu", "exposed_communication", "goodput", "peak_memory_gib", "seconds_")


class _Stops(TrainerCallback):
    """Ends a training after a step, without saving."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        control.should_training_stop = state.global_step == self.step


def train(folder: Path, hidden: int, layers: int, steps: int, every: int, stop: int, peak: float) -> None:
    """On a rank, up to step `stop`; it goes on from the last checkpoint."""
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        vocab_size=512,
        max_position_embeddings=128,
    )
    options = GoldfishConfig(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        learning_rate=1e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=every,
        save_steps=every,
        report_to="tensorboard",
        use_cpu=True,
        disable_tqdm=True,
        parallelism_config=AxonnPlugin(grid=GRID),
    )
    trainer = GoldfishTrainer(
        model=AutoModelForCausalLM.from_config(config),
        args=options,
        train_dataset=token_data(8 * steps, seed=0, length=128),
        eval_dataset=token_data(32, seed=1, length=128),
        data_collator=collate,
        callbacks=[MonitorCallback(peak_tflops=peak), _Stops(stop)],
    )
    trainer.train(resume_from_checkpoint="last")


def run(*, hidden: int = 256, layers: int = 4, steps: int = STEPS, every: int = EVERY, crash: int = CRASH) -> dict:
    """Two launches; by tag the [step, value] of both, of a step that was done again the later ones."""
    peak = cpu_speed("float32") / len(os.sched_getaffinity(0)) / 1e12
    found: dict[str, dict[int, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for launch, stop in enumerate((crash, steps)):
            # Tensorboard names folders and files by the second, and two launches may begin in the same one.
            os.environ["TENSORBOARD_LOGGING_DIR"] = str(Path(scratch, "runs", str(launch)))
            run_ranks(train, GRID.size, Path(scratch), hidden, layers, steps, every, stop, peak, timeout=1500)
        del os.environ["TENSORBOARD_LOGGING_DIR"]
        for runs in sorted(Path(scratch, "runs").iterdir()):
            for tag, points in scalars(runs).items():
                name = tag.removeprefix(PREFIX)
                if name != tag and name.startswith(KEPT) and not name.endswith("device"):
                    found.setdefault(name, {}).update(points)
    return {tag: [[step, round(value, 6)] for step, value in sorted(points.items())] for tag, points in found.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A run for the picture of docs/monitoring.md.")
    parser.add_argument("--output", type=Path, required=True, help="JSON of what tensorboard has")
    options = parser.parse_args(arguments)
    options.output.write_text(json.dumps(run(), indent=None, separators=(",", ":")).replace('],"', '],\n"') + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
