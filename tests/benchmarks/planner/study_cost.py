"""Measure the seconds of optimizer steps on this machine, and of asking: the constants of cost.py for `cpu`.

    accelerate launch --config training_scripts/grids/cpu_2_x2.yaml \
        -m tests.benchmarks.planner.study_cost training_scripts/study/recipes/cpu.yaml

Every model with a config trains for some steps on random tokens, in the shapes of its base training and of its
continuations, as train.py does, and is asked for random passages. Seconds are those of the processor of one rank, so
that other programs do not count; undisturbed, processors are busy for 92 to 98% of a step (docs/planning.md), with one
thread a rank and a rank a core.
"""

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy
from scipy.optimize import nnls
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

import hf_axonn
from hf_axonn import GoldfishTrainer
from hf_axonn_eval import Sample, extract
from hf_axonn_scripts.study.recipe.cost import asking, cpu_speed, training
from hf_axonn_scripts.study.recipe.definition import Model, Recipe
from hf_axonn_scripts.study.recipe.reader import read_recipe
from hf_axonn_scripts.study.training.training import collate, launched_grid, make_arguments


STEPS = 8
PASSAGES = 64
FOLDER = Path(tempfile.gettempdir()) / "calibrate"  # the same on all ranks; nothing stays in it


class StepTimes(TrainerCallback):
    """Processor seconds between the ends of steps: of reading rows, too."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_, **__) -> None:
        """Look at the clock."""
        self.ends.append(time.process_time())

    def seconds(self) -> float:
        """Return the seconds of the step in the middle."""
        return statistics.median(after - before for before, after in zip(self.ends, self.ends[1:], strict=False))


def model_of(recipe: Recipe, model: Model):
    """Return a model with random weights, on the grid of the launch."""
    made = LlamaForCausalLM(LlamaConfig(**{"vocab_size": recipe.vocabulary, **(model.config or {})}))
    grid = launched_grid()
    return made if grid is None else hf_axonn.parallelize(made, grid)[0]


def train_seconds(recipe: Recipe, model: Model, *, base: bool) -> float:
    """Measure the seconds of a step."""
    length, sequences = recipe.documents.length, recipe.batch_sequences
    if base:
        length, sequences = recipe.base_length, recipe.base_batch_sequences
    draw = random.Random(0)
    rows = [[draw.randrange(recipe.vocabulary or 1) for _ in range(length)] for _ in range(STEPS * sequences)]
    times = StepTimes()
    arguments = make_arguments(
        {**recipe.base_training, "num_train_epochs": 1},
        {"goldfish": False},
        work=FOLDER,
        sequences=sequences,
        seed=0,
        in_order=True,
        evaluations=0,
    )
    trainer = GoldfishTrainer(
        model=model_of(recipe, model),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        data_collator=collate,
        callbacks=[times],
    )
    trainer.train()
    return times.seconds()


def ask_seconds(recipe: Recipe, model: Model) -> float:
    """Measure the seconds of asking for PASSAGES passages, each of the length and with the suffix of the study."""
    suffix, draw = recipe.longest_suffix, random.Random(0)
    rows = [[draw.randrange(recipe.vocabulary or 1) for _ in range(recipe.documents.length)] for _ in range(PASSAGES)]
    samples = [
        Sample(
            sample_id=str(number),
            document_id=str(number),
            bucket=0,
            offset=0,
            prefix=tuple(row[:-suffix]),
            suffix=tuple(row[-suffix:]),
        )
        for number, row in enumerate(rows)
    ]
    loaded = model_of(recipe, model).eval()
    start = time.process_time()
    extract(loaded, None, samples, batch_size="auto", progress=False)
    return time.process_time() - start


def main() -> None:
    """Print a Markdown table with a row for every model and its work, and the constants that fit it best."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="with models that have a config, on the machine cpu")
    recipe = read_recipe(parser.parse_args().recipe)
    first = os.environ.get("RANK", "0") == "0"
    rows = []
    for model in (model for model in recipe.models if model.config is not None):
        for what in ("base", "continuation", "ask"):
            if what == "ask":
                seconds, work = ask_seconds(recipe, model), asking(recipe, model, PASSAGES)
            else:
                base = what == "base"
                seconds, work = train_seconds(recipe, model, base=base), training(recipe, model, base=base)
            rows.append((model.name, what, work, seconds))
            if first:
                print(f"{model.name} {what}: {seconds:.3f} s", flush=True)
    if not first:
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    speeds = {work.precision: cpu_speed(work.precision) for *_, work, _ in rows}
    print(
        "\nan MLP on all cores: " + ", ".join(f"{speed / 1e9:.0f} GFLOP/s in {name}" for name, speed in speeds.items())
    )
    print()
    print("| model | what | GFLOP | layer passes | seconds | predicted | share |")
    print("| --- | --- | --: | --: | --: | --: | --: |")
    for name, what, work, seconds in rows:
        predicted = work.seconds()
        print(
            f"| {name} | {what} | {work.flops / 1e9:.2f} | {work.layers} | {seconds:.3f} | {predicted:.3f} "
            f"| {predicted / seconds:.2f} |"
        )
    # In relative errors, so that small models count as much as large ones.
    system = numpy.array([[work.flops / speeds[work.precision], work.layers, work.steps] for *_, work, _ in rows])
    measured = numpy.array([seconds for *_, seconds in rows])
    (share, layer, step), _ = nnls(system / measured[:, None], numpy.ones(len(rows)))
    print(f"\nbest fit: EFFICIENCY {1 / share:.2f}, LAYER_SECONDS {layer:.4f}, STEP_SECONDS {step:.3f}")


if __name__ == "__main__":
    main()
