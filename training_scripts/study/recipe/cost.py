"""What the steps of a study cost, before anything runs: FLOPs, seconds, GPU hours, bytes on disk; and plans.

On `cpu` the seconds of a step are those of its launch, of its optimizer steps and of its FLOPs, at the speed that this
machine has in their precision: a fraction of a second of one MLP, forward and backward, measures it. On a machine of
the planner they are those of `hf-axonn plan`, on the model's grid or on the best one.

FLOPs: 6 a weight and token in training, 2 in asking, and full squares of attention (PaLM, arXiv 2204.02311,
appendix B).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from hf_axonn.planner.dense import DenseShape, load_shape, shape_from_config
from hf_axonn.planner.job import Job
from hf_axonn.planner.machine import load_machine
from hf_axonn.planner.predict import Prediction, predict
from hf_axonn.planner.search import plan
from hf_axonn.topology.axis_order import ORDER
from hf_axonn.topology.grid import Grid, divisors
from hf_axonn_scripts.study.recipe.definition import MACHINE, Model, Recipe
from hf_axonn_scripts.study.recipe.steps import Step


WEIGHT_BYTES = 4  # models are trained and saved in fp32
# On `cpu`: the best fit of calibrate.py on two cores of a Xeon with AMX, two ranks of gloo, x=2. It misses steps by
# 1.27 to 0.77 of what they take, and asking 30M weights by 1.34; launches are the study's own.
EFFICIENCY = 0.57  # of the speed of an MLP, by the products of a pass, with attention, norms and the head
LAYER_SECONDS = 0.0041  # of one decoder layer in one pass: Python, small kernels, two collectives
STEP_SECONDS = 0.111  # of an optimizer step, without its passes
LAUNCH_SECONDS = 10.0  # of `accelerate launch` until the first step, and of saving and leaving
GPU_LAUNCH_SECONDS = 180.0  # the same on a cluster: an assumption
BASE_EVALUATIONS = 11  # on held-out text, as train.py does
EVALUATIONS = 2  # in a continuation: at its start and at its end
ASKED = 64  # passages in a pass of one (data, z) position; an assumption about `batch_size="auto"`
CANARY_TEXTS, CANARY_TOKENS = 1024, 32  # among which a canary is ranked, and of each
TASK_TOKENS = 100_000  # of the questions of tasks.py, beside the held-out text
BYTES_A_TOKEN = 6.0  # of a token id as JSON
TEXT_BYTES_A_TOKEN = 4.0
RESULT_BYTES = 1500.0  # of a sample in results.jsonl, beside its tokens
DATA_SECONDS = {"texts": 60.0, "tokenizer": 10.0}  # downloads included
TOKENS_A_SECOND = 100_000.0  # tokenized, deduplicated and written
READ_SECONDS = 5.0  # of a model, by a process that asks it next
REPORT_SECONDS = 60.0
MOST_DOUBLINGS = 12  # of GPUs, until a plan fits


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a step is predicted to cost.

    Attributes:
        flops: Of all its products.
        seconds: From start to end.
        gpu_hours: Of all its ranks; 0 on `cpu` and for steps without a launch.
        disk_bytes: Of what stays.
    """

    flops: float = 0.0
    seconds: float = 0.0
    gpu_hours: float = 0.0
    disk_bytes: float = 0.0


def shape_of(recipe: Recipe, model: Model) -> DenseShape:
    """The sizes of a model.

    Raises:
        ValueError: Its config, or that of its checkpoint, does not say them.
    """
    if model.config is not None:
        return shape_from_config({"model_type": "llama", **model.config, "vocab_size": recipe.vocabulary})
    if model.shape is not None:
        return shape_from_config({"model_type": "llama", **model.shape})
    return load_shape(str(model.checkpoint))


def parameters_of(shape: DenseShape) -> int:
    """Weights of a model, a head that is the embedding counted once."""
    layers = sum(
        count * (sum(w.elements for w in layer.weights) + sum(layer.replicated)) for layer, count in shape.runs
    )
    return layers + sum(shape.final) + (1 if shape.tied else 2) * shape.vocab * shape.hidden


def forward_flops(shape: DenseShape, length: int) -> float:
    """FLOP of a token in one forward pass over rows of `length` tokens."""
    return shape.weight_flops + 2 * shape.vocab * shape.hidden + shape.attention_flops(length)


def job_of(recipe: Recipe, model: Model, *, machine: str | None = None, base: bool = False) -> Job:
    """One step of a model's continuation, or of its base training, as the planner has it.

    Args:
        recipe: Of the model.
        model: Of the recipe.
        machine: Of the planner; None: the recipe's.
        base: Whether it is a step of the base training.

    Raises:
        ValueError: No such machine.
    """
    arguments = recipe.base_training if base else recipe.training
    return Job(
        shape=shape_of(recipe, model),
        machine=load_machine(recipe.machine if machine is None else machine),
        sequences=recipe.base_batch_sequences if base else recipe.batch_sequences,
        seq=recipe.base_length if base else recipe.documents.length,
        checkpointing=bool(arguments.get("activation_checkpointing", arguments.get("gradient_checkpointing", False))),
        micro_batches=int(arguments.get("gradient_accumulation_steps", 1)),
    )


def planned(recipe: Recipe, model: Model) -> Prediction:
    """A step of a continuation on the model's grid, or on the one that the planner ranks first.

    Raises:
        ValueError: The grid cannot be, or none fits.
    """
    job = job_of(recipe, model)
    if model.grid is not None:
        return _on(job, Grid(**model.grid))
    return _best(job, model.processes)


@lru_cache(maxsize=256)
def _best(job: Job, processes: int) -> Prediction:
    return plan(job, processes, order=ORDER).best


@lru_cache(maxsize=256)
def _on(job: Job, grid: Grid) -> Prediction:
    return predict(job, grid)


def grid_of(recipe: Recipe, model: Model) -> Grid:
    """The grid of a model: that of the recipe, or the planner's choice.

    On `cpu`: as many ranks on data as divide the rows of a step, because a step then communicates once, and the rest
    on x. On two cores a step with data=2 takes 0.91 of one with x=2 for 30M weights, 0.77 for 3M and 0.66 for 0.3M.

    Raises:
        ValueError: No grid fits.
    """
    if model.grid is not None:
        return Grid(**model.grid)
    if recipe.machine != MACHINE:
        return planned(recipe, model).grid
    shape = shape_of(recipe, model)
    rows = math.gcd(recipe.batch_sequences, recipe.base_batch_sequences)
    fitting = [
        size
        for size in divisors(model.processes)
        if rows % size == 0
        and shape.heads % (model.processes // size) == 0
        and shape.intermediate % (model.processes // size) == 0
    ]
    if not fitting:
        raise ValueError(
            f"no grid of {model.processes} ranks divides {rows} sequences over data and the {shape.heads} heads of "
            f"{model.name} over x: write its grid, or other processes."
        )
    return Grid(data=fitting[-1], x=model.processes // fitting[-1])


@lru_cache(maxsize=2)
def cpu_speed(precision: str, seconds: float = 0.4) -> float:
    """FLOP/s of training on all cores that this process may use: those of an MLP, forward and backward, in the fastest
    of many passes on one core, which other programs disturb least, times the cores.

    Products alone would say too much: with matrix units (AMX) those in bfloat16 are 8 times as fast as in float32, and
    an MLP with the casts and sums between them is 2.7 times as fast.

    Args:
        precision: `float32`, or `bfloat16` by autocast.
        seconds: To measure for.
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
    """Passes through a model: what decides their seconds on `cpu`.

    Attributes:
        flops: Of all products.
        layers: How often a decoder layer runs; forward and backward are two.
        steps: Of the optimizer.
        gathers: Forward passes that generate a token, for each of which weights are gathered over z.
        precision: Of the products.
    """

    flops: float
    layers: float
    steps: float = 0.0
    gathers: float = 0.0
    precision: str = "float32"

    def seconds(self) -> float:
        """On the cores of this machine."""
        speed = cpu_speed(self.precision)
        return self.flops / (EFFICIENCY * speed) + self.layers * LAYER_SECONDS + self.steps * STEP_SECONDS


def depth(shape: DenseShape) -> int:
    """Decoder layers of a model."""
    return sum(count for _, count in shape.runs)


def suffix_of(recipe: Recipe) -> int:
    """Tokens that samples ask for: the longest of the pilot's, because it counts the shorter ones in the same pass."""
    return recipe.documents.suffix or max(recipe.pilot.suffixes if recipe.pilot else (1,))


def training(recipe: Recipe, model: Model, steps: float = 1, *, base: bool = False) -> Passes:
    """So many steps of a continuation, or of the base training."""
    shape = shape_of(recipe, model)
    length, sequences = recipe.documents.length, recipe.batch_sequences
    if base:
        length, sequences = recipe.base_length, recipe.base_batch_sequences
    flops = 3 * sequences * length * forward_flops(shape, length)
    precision = precision_of(recipe, base=base)
    return Passes(flops=steps * flops, layers=steps * 2 * depth(shape), steps=steps, precision=precision)


def precision_of(recipe: Recipe, *, base: bool) -> str:
    """Of the products of a training, and of evaluations in it. Models are asked in float32."""
    return "bfloat16" if (recipe.base_training if base else recipe.training).get("bf16") else "float32"


def asking(recipe: Recipe, model: Model, passages: float, positions: int = 1) -> Passes:
    """So many passages, dealt to `positions` of a grid: a pass over all tokens, and a greedy continuation of the
    prefixes, token by token."""
    shape, length, suffix = shape_of(recipe, model), recipe.documents.length, suffix_of(recipe)
    batches = math.ceil(passages / positions / ASKED)
    flops = 2 * passages * length * forward_flops(shape, length)
    return Passes(flops=flops, layers=batches * (1 + suffix) * depth(shape), gathers=batches * (1 + suffix))


def scoring(
    recipe: Recipe, model: Model, tokens: float, length: int | None = None, precision: str = "float32"
) -> Passes:
    """One pass over so many tokens, in batches as in training."""
    shape, length = shape_of(recipe, model), length or recipe.documents.length
    batches = math.ceil(tokens / length / recipe.batch_sequences)
    flops = tokens * forward_flops(shape, length)
    return Passes(flops=flops, layers=batches * depth(shape), precision=precision)


def cost_of(step: Step, recipe: Recipe) -> Cost:
    """What a step costs; see the module.

    Raises:
        ValueError: No grid of its model fits.
    """
    model = recipe.model(step.model) if step.model is not None else None
    if step.kind == "data":
        return _data(step, recipe)
    if step.kind == "report" or model is None:
        return Cost(seconds=REPORT_SECONDS, disk_bytes=3e6)
    work = _Work(recipe, model, step)
    if step.kind == "base" and model.config is None:  # conversion of a model that a package brings
        return Cost(seconds=20 + work.weights / 20e6, disk_bytes=work.weights)
    if step.kind == "base":
        work.train(base_steps(recipe), base=True)
    elif step.kind == "pilot" and recipe.pilot is not None:
        for _ in recipe.pilot.learning_rates:
            work.train(run_steps(recipe, model), kept=False)
            work.ask(2 * work.per_bucket)
    elif step.kind == "ask":
        work.ask(work.passages)
    elif step.kind == "train":
        work.train(run_steps(recipe, model))
        work.ask(work.passages)
    elif step.kind == "utility":
        runs = 1 + sum(run.model == model.name for run in recipe.runs)
        runs += sum(name == model.name for name, _ in recipe.base_losses)
        for _ in range(runs):
            held_out = recipe.texts.held_out_tokens
            work.score(held_out + (held_out + TASK_TOKENS if recipe.evaluation.tasks else 0))
            work.seconds += READ_SECONDS
        work.disk += 1e5 * runs
    return work.cost()


def base_steps(recipe: Recipe) -> int:
    """Optimizer steps of a base training."""
    epochs = float(recipe.base_training.get("num_train_epochs", 1))
    return math.ceil(epochs * (recipe.texts.base_tokens // recipe.base_length) / recipe.base_batch_sequences)


def run_steps(recipe: Recipe, model: Model) -> int:
    """Optimizer steps of a continuation: warm-up, every repetition, and those of the canaries."""
    buckets = sorted(recipe.documents.buckets, reverse=True)
    count = recipe.documents.per_bucket if model.per_bucket is None else model.per_bucket
    canaries = sum(buckets[index % len(buckets)] for index in range(recipe.evaluation.canaries))
    return math.ceil((count * sum(buckets) + canaries + recipe.warm_up_sequences) / recipe.batch_sequences)


class _Work:
    """Adds up what a step does with a model."""

    def __init__(self, recipe: Recipe, model: Model, step: Step) -> None:
        self.recipe, self.model = recipe, model
        self.weights = float(WEIGHT_BYTES * parameters_of(shape_of(recipe, model)))
        self.per_bucket = recipe.documents.per_bucket if model.per_bucket is None else model.per_bucket
        self.passages = self.per_bucket * len(recipe.documents.buckets)
        self.on_cpu = recipe.machine == MACHINE
        self.processes = step.processes if step.command else 1
        own = step.run is not None and step.run.grid
        self.grid = Grid(**dict(step.run.grid)) if own else grid_of(recipe, model)  # type: ignore[union-attr]
        self.flops = self.disk = 0.0
        self.seconds = LAUNCH_SECONDS if self.on_cpu else GPU_LAUNCH_SECONDS

    def train(self, steps: float, *, base: bool = False, kept: bool = True) -> None:
        """So many steps, and evaluations on held-out text."""
        recipe, model = self.recipe, self.model
        evaluations = BASE_EVALUATIONS if base else EVALUATIONS
        self.score(
            evaluations * recipe.texts.held_out_tokens,
            recipe.base_length if base else None,
            precision_of(recipe, base=base),
        )
        work = training(recipe, model, steps, base=base)
        self.disk += self.weights if kept else 0
        if self.on_cpu:
            self._add(work)
        else:
            self.flops += work.flops
            self.seconds += steps * _on(job_of(recipe, model, base=base), self.grid).total

    def ask(self, passages: float) -> None:
        """So many passages, and the canaries."""
        self._add(asking(self.recipe, self.model, passages, self.grid.dp_size))
        self.disk += passages * (RESULT_BYTES + 2 * BYTES_A_TOKEN * suffix_of(self.recipe))
        if self.recipe.evaluation.canaries:
            self.score(CANARY_TEXTS * CANARY_TOKENS, CANARY_TOKENS)

    def score(self, tokens: float, length: int | None = None, precision: str = "float32") -> None:
        """So many tokens of forward passes."""
        self._add(scoring(self.recipe, self.model, tokens, length, precision))

    def _add(self, work: Passes) -> None:
        self.flops += work.flops
        if self.on_cpu:
            self.seconds += work.seconds()
            return
        # At the speed of training, which is what the planner knows; a step of it moves weights over z three times.
        found = _on(job_of(self.recipe, self.model), self.grid)
        self.seconds += work.flops / (found.flops * self.grid.size)
        self.seconds += work.gathers * found.traffic.get("z", 0.0) / 3

    def cost(self) -> Cost:
        """The sum."""
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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A continuation of a model on a machine, as `hf-axonn plan` has it.

    Attributes:
        model: Its name.
        machine: Of the planner.
        asked: Processes of the recipe.
        prediction: A step on the grid that the planner ranks first.
        steps: Of one continuation.
        runs: How many continuations the recipe has.
    """

    model: str
    machine: str
    asked: int
    prediction: Prediction
    steps: int
    runs: int

    @property
    def hours(self) -> float:
        """Of one continuation, without reading the model and asking it."""
        return self.steps * self.prediction.total / 3600

    @property
    def gpu_hours(self) -> float:
        """Of all continuations of the model."""
        return self.runs * self.hours * self.prediction.grid.size


def plans(recipe: Recipe, machine: str) -> list[Plan]:
    """A plan for each model of the recipe.

    Where the recipe's processes are too few for the machine's memory, or have no grid, they are doubled until a grid
    fits.

    Raises:
        ValueError: No such machine, or no grid fits however many GPUs there are.
    """
    made = []
    for model in recipe.models:
        job = job_of(recipe, model, machine=machine)
        for doubling in range(MOST_DOUBLINGS + 1):
            try:
                found = _best(job, model.processes << doubling)
                break
            except ValueError:
                if doubling == MOST_DOUBLINGS:
                    raise
        runs = sum(run.model == model.name for run in recipe.runs)
        steps = run_steps(recipe, model)
        made.append(
            Plan(model=model.name, machine=machine, asked=model.processes, prediction=found, steps=steps, runs=runs)
        )
    return made


def plans_markdown(recipe: Recipe, machines: Iterable[str]) -> str:
    """Tables of `plans`, one for each machine, as Markdown."""
    parts = []
    for machine in machines:
        lines = [
            f"**{machine}**",
            "",
            "| model | GPUs | grid: data, z, y, x | s/step | MFU | GiB a GPU | hours a run | runs | GPU hours |",
            "| --- | --: | --- | --: | --: | --: | --: | --: | --: |",
        ]
        made = plans(recipe, machine)
        for each in made:
            found, grid = each.prediction, each.prediction.grid
            more = "" if grid.size == each.asked else f" (of {each.asked} none fits)"
            lines.append(
                f"| {each.model} | {grid.size:,}{more} | {', '.join(map(str, grid.as_dict().values()))} "
                f"| {found.total:.2f} | {found.mfu:.1%} | {found.memory.total / 2**30:.1f} "
                f"of {found.job.machine.memory / 2**30:.0f} | {each.hours:.2f} | {each.runs} | {each.gpu_hours:,.0f} |"
            )
        total = sum(each.gpu_hours for each in made)
        lines.append(f"| all | | | | | | | {sum(each.runs for each in made)} | {total:,.0f} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"
