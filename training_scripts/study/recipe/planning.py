"""Models of a study as the planner of hf_axonn has them: sizes, steps on a machine, grids."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

from hf_axonn import Grid
from hf_axonn.planner.dense import DenseShape, load_shape, shape_from_config
from hf_axonn.planner.job import Job
from hf_axonn.planner.machine import load_machine
from hf_axonn.planner.predict import Prediction, predict
from hf_axonn.planner.search import plan
from hf_axonn.topology.axis_order import ORDER
from hf_axonn.topology.grid import divisors
from hf_axonn_scripts.study.recipe.definition import MACHINE, Model, Recipe


__all__ = ["ORDER", "load_machine"]  # the other modules of the study take the planner's names from here

MOST_DOUBLINGS = 12  # of GPUs, until a plan fits
HEADING = """\
**{machine}**

| model | GPUs | grid: data, z, y, x | s/step | MFU | GiB a GPU | hours a run | runs | GPU hours |
| --- | --: | --- | --: | --: | --: | --: | --: | --: |
"""


def shape_of(recipe: Recipe, model: Model, checkpoint: str | None = None) -> DenseShape:
    """Return the sizes of a model.

    Args:
        recipe, model: the study, and the model in it.
        checkpoint: directory of the model, where the recipe has neither a config nor a shape; None: the recipe's.
    Raises:
        ValueError: neither its config nor that of its checkpoint says the sizes.
    """
    if model.config is not None:
        return shape_from_config({"model_type": "llama", **model.config, "vocab_size": recipe.vocabulary})
    if model.shape is not None:
        return shape_from_config({"model_type": "llama", **model.shape})
    return load_shape(checkpoint or str(model.checkpoint))


def job_of(recipe: Recipe, model: Model, *, machine: str | None = None, base: bool = False) -> Job:
    """Return one step of a model's continuation, or of its base training, on a machine of the planner.

    Raises:
        ValueError: there is no such machine.
    """
    arguments = recipe.base_training if base else recipe.training
    return Job(
        shape=shape_of(recipe, model),
        machine=load_machine(machine or recipe.machine),
        sequences=recipe.base_batch_sequences if base else recipe.batch_sequences,
        seq=recipe.base_length if base else recipe.documents.length,
        checkpointing=bool(arguments.get("activation_checkpointing", arguments.get("gradient_checkpointing", False))),
        micro_batches=int(arguments.get("gradient_accumulation_steps", 1)),
    )


def predict_step(recipe: Recipe, model: Model, grid: Grid | None = None, *, base: bool = False) -> Prediction:
    """Predict a step of a continuation, or of the base training.

    Args:
        recipe, model: the study, and the model in it.
        grid: sizes of the axes; None: the model's, or the ones that the planner ranks first.
        base: whether it is a step of the base training.
    Raises:
        ValueError: the grid cannot be, or none fits.
    """
    job = job_of(recipe, model, base=base)
    if grid is None and model.grid is not None:
        grid = Grid(**model.grid)
    return _rank_first(job, model.processes) if grid is None else _predict(job, grid)


@lru_cache(maxsize=256)
def _rank_first(job: Job, processes: int) -> Prediction:
    return plan(job, processes, order=ORDER).best


_predict = lru_cache(maxsize=256)(predict)


def grid_of(recipe: Recipe, model: Model) -> Grid:
    """Return the grid of a model: that of the recipe, or the planner's choice.

    On `cpu`: as many ranks on data as divide the rows of a step, because a step then communicates once, and the rest
    on x. On two cores a step with data=2 takes 0.91 of one with x=2 for 30M weights, 0.77 for 3M and 0.66 for 0.3M.

    Raises:
        ValueError: no grid fits.
    """
    if model.grid is not None:
        return Grid(**model.grid)
    if recipe.machine != MACHINE:
        return predict_step(recipe, model).grid
    shape = shape_of(recipe, model)
    rows = math.gcd(recipe.batch_sequences, recipe.base_batch_sequences)
    for data in reversed(divisors(model.processes)):
        x = model.processes // data
        if rows % data == shape.heads % x == shape.intermediate % x == 0:
            return Grid(data=data, x=x)
    raise ValueError(
        f"no grid of {model.processes} ranks divides {rows} sequences over data and the {shape.heads} heads of "
        f"{model.name} over x: write its grid, or other processes."
    )


def plan_grid(recipe: Recipe, model: Model, machine: str) -> Prediction:
    """Predict a step of a continuation on the grid that the planner ranks first on a machine.

    Where the recipe's processes are too few for the machine's memory, or have no grid, they are doubled until a grid
    fits.

    Raises:
        ValueError: there is no such machine, or no grid fits however many GPUs there are.
    """
    job = job_of(recipe, model, machine=machine)
    for doubling in range(MOST_DOUBLINGS):
        try:
            return _rank_first(job, model.processes << doubling)
        except ValueError:
            continue
    return _rank_first(job, model.processes << MOST_DOUBLINGS)


def plans_markdown(recipe: Recipe, machines: Iterable[str]) -> str:
    """Return a table for each machine, as Markdown: the grid of each model, and the hours of its continuations.

    Hours are those of training alone, without reading the model and asking it.

    Raises:
        ValueError: as `plan_grid`.
    """
    parts = []
    for machine in machines:
        rows, total = [], 0.0
        for model in recipe.models:
            found, runs = plan_grid(recipe, model, machine), len(recipe.runs_of(model))
            grid, hours = found.grid, run_steps(recipe, model) * found.total / 3600
            total += runs * hours * grid.size
            more = "" if grid.size == model.processes else f" (of {model.processes} none fits)"
            rows.append(
                f"| {model.name} | {grid.size:,}{more} | {', '.join(map(str, grid.as_dict().values()))} "
                f"| {found.total:.2f} | {found.mfu:.1%} | {found.memory.total / 2**30:.1f} "
                f"of {found.job.machine.memory / 2**30:.0f} | {hours:.2f} | {runs} | {runs * hours * grid.size:,.0f} |"
            )
        rows.append(f"| all | | | | | | | {len(recipe.runs)} | {total:,.0f} |")
        parts.append(HEADING.format(machine=machine) + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


def base_steps(recipe: Recipe) -> int:
    """Return the optimizer steps of a base training."""
    epochs = float(recipe.base_training.get("num_train_epochs", 1))
    return math.ceil(epochs * (recipe.texts.base_tokens // recipe.base_length) / recipe.base_batch_sequences)


def run_steps(recipe: Recipe, model: Model) -> int:
    """Return the optimizer steps of a continuation: warm-up, every repetition, and those of the canaries."""
    buckets = sorted(recipe.documents.buckets, reverse=True)
    canaries = sum(buckets[index % len(buckets)] for index in range(recipe.evaluation.canaries))
    rows = recipe.per_bucket(model) * sum(buckets) + canaries + recipe.warm_up_sequences
    return math.ceil(rows / recipe.batch_sequences)
