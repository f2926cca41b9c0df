"""Predictions of a step's cost, before anything runs: FLOPs, seconds, GPU hours, bytes on disk.

On `cpu` the seconds of a step are those of its launch, of its optimizer steps and of its FLOPs, at the speed that this
machine has in their precision: a fraction of a second of one MLP, forward and backward, measures it. On a machine of
the planner they are those of `hf-axonn plan`, on the model's grid or on the best one.

FLOPs: the planner's (`ModelShape.model_flops`), a third of them in a forward pass.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from functools import lru_cache

from hf_axonn import Grid
from hf_axonn_scripts.study.recipe.definition import MACHINE, Model, Recipe
from hf_axonn_scripts.study.recipe.planning import base_steps, grid_of, predict_step, run_steps, shape_of
from hf_axonn_scripts.study.recipe.steps import Step


WEIGHT_BYTES = 4  # models are trained and saved in fp32
# On `cpu`: the best fit of tests/benchmarks/planner/study_cost.py on two cores of a Xeon with AMX, two ranks of gloo,
# x=2. It misses steps by 1.27 to 0.77 of what they take, and asking 30M weights by 1.34; launches are the study's own.
EFFICIENCY = 0.57  # of the speed of an MLP, by the products of a pass, with attention, norms and the head
LAYER_SECONDS = 0.0041  # of one decoder layer in one pass: Python, small kernels, two collectives
STEP_SECONDS = 0.111  # of an optimizer step, without its passes
LAUNCH_SECONDS = 10.0  # of `accelerate launch` until the first step, and of saving and leaving
GPU_LAUNCH_SECONDS = 180.0  # the same on a cluster: an assumption
BASE_EVALUATIONS = 11  # on held-out text, as train.py does
EVALUATIONS = 2  # in a continuation: at its start and at its end, beside those on its way
PASSAGES_A_PASS = 64  # passages in a pass of one (data, z) position; an assumption about `batch_size="auto"`
CANARY_TEXTS, CANARY_TOKENS = 1024, 32  # among which a canary is ranked, and of each
TASK_TOKENS = 100_000  # of the questions of tasks.py, beside the held-out text
BYTES_A_TOKEN = 6.0  # of a token id as JSON
TEXT_BYTES_A_TOKEN = 4.0
RESULT_BYTES = 1500.0  # of a sample in results.jsonl, beside its tokens
DATA_SECONDS = {"texts": 60.0, "tokenizer": 10.0}  # downloads included
TOKENS_A_SECOND = 100_000.0  # tokenized, deduplicated and written
READ_SECONDS = 5.0  # of a model, by a process that asks it next
REPORT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Predicted cost of a step.

    Attributes:
        flops: of all its products.
        seconds: from start to end.
        gpu_hours: of all its ranks; 0 on `cpu` and for steps without a launch.
        disk_bytes: of the files that stay.
    """

    flops: float = 0.0
    seconds: float = 0.0
    gpu_hours: float = 0.0
    disk_bytes: float = 0.0


@lru_cache(maxsize=2)
def cpu_speed(precision: str, seconds: float = 0.4) -> float:
    """Measure the FLOP/s of training on all cores that this process may use: those of an MLP, forward and backward,
    in the fastest of many passes on one core, which other programs disturb least, times the cores.

    Products alone would say too much: with matrix units (AMX) those in bfloat16 are 8 times as fast as in float32, and
    an MLP with the casts and sums between them is 2.7 times as fast.

    Args:
        precision: `float32`, or `bfloat16` by autocast.
        seconds: to measure for.
    """
    import torch
    from torch.nn import functional

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows, hidden, intermediate = 1024, 512, 1376
        tokens = torch.rand(rows, hidden, requires_grad=True)
        gate, up, down = (
            torch.rand(shape, requires_grad=True)
            for shape in ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
        )
        fastest, end = float("inf"), time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
                between = functional.silu(functional.linear(tokens, gate)) * functional.linear(tokens, up)
                output = functional.linear(between, down)
            output.float().mean().backward()
            fastest = min(fastest, time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return 3 * 6 * rows * hidden * intermediate / fastest * len(os.sched_getaffinity(0))


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Passes through a model, by the numbers that decide their seconds on `cpu`.

    Attributes:
        flops: of all products.
        layers: passes through a decoder layer; forward and backward are two.
        steps: of the optimizer.
        gathers: forward passes that generate a token, for each of which weights are gathered over z.
        precision: of the products.
    """

    flops: float
    layers: float
    steps: float = 0.0
    gathers: float = 0.0
    precision: str = "float32"

    def seconds(self) -> float:
        """Return the seconds on the cores of this machine."""
        speed = cpu_speed(self.precision)
        return self.flops / (EFFICIENCY * speed) + self.layers * LAYER_SECONDS + self.steps * STEP_SECONDS


def training(recipe: Recipe, model: Model, steps: float = 1, *, base: bool = False) -> Passes:
    """Return the passes of this number of steps of a continuation, or of the base training."""
    shape = shape_of(recipe, model)
    length, sequences = recipe.documents.length, recipe.batch_sequences
    if base:
        length, sequences = recipe.base_length, recipe.base_batch_sequences
    flops = steps * sequences * length * shape.model_flops(length)
    return Passes(flops=flops, layers=steps * 2 * shape.depth, steps=steps, precision=_precision(recipe, base))


def _precision(recipe: Recipe, base: bool) -> str:
    """Return that of the products of a training and of evaluations in it. Models are asked in float32."""
    return "bfloat16" if (recipe.base_training if base else recipe.training).get("bf16") else "float32"


def asking(recipe: Recipe, model: Model, passages: float, positions: int = 1) -> Passes:
    """Return the passes of asking for passages, dealt to `positions` of a grid: a pass over all tokens, and a greedy
    continuation of the prefixes, token by token."""
    shape, length = shape_of(recipe, model), recipe.documents.length
    gathers = math.ceil(passages / positions / PASSAGES_A_PASS) * (1 + recipe.longest_suffix)
    flops = 2 * passages * length * shape.model_flops(length) / 3
    return Passes(flops=flops, layers=gathers * shape.depth, gathers=gathers)


def scoring(
    recipe: Recipe, model: Model, tokens: float, length: int | None = None, precision: str = "float32"
) -> Passes:
    """Return one pass over this number of tokens, in batches as in training."""
    shape, length = shape_of(recipe, model), length or recipe.documents.length
    batches = math.ceil(tokens / length / recipe.batch_sequences)
    return Passes(flops=tokens * shape.model_flops(length) / 3, layers=batches * shape.depth, precision=precision)


def cost_of(step: Step, recipe: Recipe) -> Cost:
    """Predict the cost of a step; see the module.

    Raises:
        ValueError: no grid of its model fits.
    """
    if step.kind == "data":
        return _data(step, recipe)
    if step.model is None:
        return Cost(seconds=REPORT_SECONDS, disk_bytes=3e6)
    model = recipe.model(step.model)
    work = _Work(recipe, model, step)
    if step.kind == "base" and model.config is None:  # conversion of a model that a package brings
        return Cost(seconds=20 + work.weights / 20e6, disk_bytes=work.weights)
    if step.kind == "base":
        work.train(base_steps(recipe), base=True)
    elif step.kind == "pilot" and recipe.pilot is not None:
        for _ in recipe.pilot.learning_rates:
            work.train(run_steps(recipe, model), kept=False)
            work.ask(2)
    elif step.kind == "ask":
        work.ask()
    elif step.kind == "train":
        work.train(run_steps(recipe, model))
        work.read_outputs(run_steps(recipe, model))
        work.follow_curve()
        work.ask()
    elif step.kind == "utility":
        measured = 1 + len(recipe.runs_of(model)) + len(recipe.base_losses_of(model))
        held_out = recipe.texts.held_out_tokens
        for _ in range(measured):
            work.score(held_out + (held_out + TASK_TOKENS if recipe.evaluation.tasks else 0))
        work.seconds += measured * READ_SECONDS
        work.disk += 1e5 * measured
    return work.cost()


class _Work:
    """A sum over what a step does with a model."""

    def __init__(self, recipe: Recipe, model: Model, step: Step) -> None:
        self.recipe, self.model, self.step, self.processes = recipe, model, step, step.processes
        self.weights = float(WEIGHT_BYTES * shape_of(recipe, model).parameters())
        self.on_cpu = recipe.machine == MACHINE
        self.grid = Grid(**dict(step.run.grid)) if step.run and step.run.grid else grid_of(recipe, model)
        self.flops = self.disk = 0.0
        self.seconds = LAUNCH_SECONDS if self.on_cpu else GPU_LAUNCH_SECONDS

    def train(self, steps: float, *, base: bool = False, kept: bool = True) -> None:
        """Add optimizer steps, and evaluations on held-out text."""
        recipe, model = self.recipe, self.model
        evaluated = (BASE_EVALUATIONS if base else EVALUATIONS) * recipe.texts.held_out_tokens
        self.score(evaluated, recipe.base_length if base else None, _precision(recipe, base))
        work = training(recipe, model, steps, base=base)
        self.disk += self.weights if kept else 0
        if self.on_cpu:
            self._add(work)
        else:
            self.flops += work.flops
            self.seconds += steps * predict_step(recipe, model, self.grid, base=base).total

    def read_outputs(self, steps: float) -> None:
        """Add the forward passes of a loss that reads what models say of the labels of each step."""
        recipe, step = self.recipe, self.step
        options = recipe.losses[step.loss] if step.loss else {}
        sources = {"entrodrop": 1, "ngram": 2}.get(options.get("loss_strategy", ""), 0)
        tokens = steps * recipe.batch_sequences * recipe.documents.length
        for _ in range(sources):
            self.score(tokens, precision=_precision(recipe, False))

    def follow_curve(self) -> None:
        """Add what is measured on the way of a continuation: held-out text, and the passages in one pass each."""
        recipe, points = self.recipe, self.recipe.evaluation.curve_points
        passages = recipe.per_bucket(self.model) * len(recipe.documents.buckets)
        tokens = (points - 1) * recipe.texts.held_out_tokens + (points + 1) * passages * recipe.documents.length
        if points:
            self.score(tokens, precision=_precision(recipe, False))
            self.disk += (points + 1) * passages * (RESULT_BYTES + BYTES_A_TOKEN * recipe.longest_suffix)

    def ask(self, buckets: int | None = None) -> None:
        """Add the passages of this number of buckets, by default of all, and the canaries."""
        passages = self.recipe.per_bucket(self.model) * (buckets or len(self.recipe.documents.buckets))
        self._add(asking(self.recipe, self.model, passages, self.grid.dp_size))
        self.disk += passages * (RESULT_BYTES + 2 * BYTES_A_TOKEN * self.recipe.longest_suffix)
        if self.recipe.evaluation.canaries:
            self.score(CANARY_TEXTS * CANARY_TOKENS, CANARY_TOKENS)

    def score(self, tokens: float, length: int | None = None, precision: str = "float32") -> None:
        """Add forward passes over this number of tokens."""
        self._add(scoring(self.recipe, self.model, tokens, length, precision))

    def _add(self, work: Passes) -> None:
        self.flops += work.flops
        if self.on_cpu:
            self.seconds += work.seconds()
            return
        # At the speed of training, which is what the planner knows; a step of it moves weights over z three times.
        found = predict_step(self.recipe, self.model, self.grid)
        self.seconds += work.flops / (found.flops * self.grid.size)
        self.seconds += work.gathers * found.traffic.get("z", 0.0) / 3

    def cost(self) -> Cost:
        """Return the sum."""
        hours = 0.0 if self.on_cpu else self.seconds * self.processes / 3600
        return Cost(flops=self.flops, seconds=self.seconds, gpu_hours=hours, disk_bytes=self.disk)


def _data(step: Step, recipe: Recipe) -> Cost:
    documents, texts = recipe.documents, recipe.texts
    passages = documents.per_bucket * len(documents.buckets)
    base = texts.base_tokens + texts.held_out_tokens
    if step.name in DATA_SECONDS:
        tokens = base + passages * documents.length if step.name == "texts" else 0
        return Cost(seconds=DATA_SECONDS[step.name] + tokens / TOKENS_A_SECOND, disk_bytes=TEXT_BYTES_A_TOKEN * tokens)
    rows = documents.per_bucket * sum(documents.buckets) + recipe.warm_up_sequences
    tokens = len(recipe.seeds) * (rows + passages) * documents.length + texts.held_out_tokens
    tokens += 0 if step.model is not None else texts.base_tokens
    return Cost(seconds=10 + tokens / TOKENS_A_SECOND, disk_bytes=BYTES_A_TOKEN * tokens)
