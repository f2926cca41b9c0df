"""Work of a study on one model, on a grid of processes: base training, continuations, and asking.

A call that was killed continues where it was if it is made again, on the same or on another grid; one that is done
does nothing.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback

import hf_axonn
from hf_axonn import GoldfishTrainer
from hf_axonn.checkpoint.shard_files import checksum_of
from hf_axonn_eval import ExtractionCallback, read_samples
from hf_axonn_eval import load_model as load_to_ask
from hf_axonn_eval.extraction.work_split import WorkSplit
from hf_axonn_scripts.demo.pipeline import digest
from hf_axonn_scripts.finetune import ModelArguments, load_model
from hf_axonn_scripts.study.recipe.definition import ORDINARY, Model, Recipe, Run
from hf_axonn_scripts.study.recipe.steps import STUDY, base_of, curve_directory, run_directory, tokenizer_of
from hf_axonn_scripts.study.training.asking import ask, ask_canaries, record_of
from hf_axonn_scripts.study.training.training import (
    TRAINING,
    Clock,
    Rows,
    check_made,
    is_trained,
    launched_grid,
    make_arguments,
    settings_of,
    train,
)


EVALUATIONS = 10  # of a base training: the curve of the held-out loss
AT_ONCE = 32  # passages in one pass, on the way of a continuation
WEIGHTS = "float32"  # of all models, in training and when they are asked; mixed precision is bf16 of the recipe


class Work:
    """A model of a study with its inputs, the grid of the launch, and a clock.

    Args:
        recipe, output: the study and its directory.
        model: name of the model.
    """

    def __init__(self, recipe: Recipe, output: Path, model: str) -> None:
        self.recipe = recipe
        self.output = output
        self.model: Model = recipe.model(model)
        self.data = output / "data" / tokenizer_of(self.model)
        self.data_step = f"data-{tokenizer_of(self.model)}"
        self.base = base_of(self.model, output)
        self.grid = launched_grid()
        self.clock = Clock()
        # Data are written for the seeds of the runs of the models that share a tokenizer.
        self.first_seed = min((run.seed for run in recipe.runs_of(self.model)), default=recipe.seeds[0])

    @cached_property
    def tokenizer(self):
        """Tokenizer of the model.

        Raises:
            ValueError: it is not there yet.
        """
        of_study = tokenizer_of(self.model) == STUDY
        where = str(check_made(self.output / "tokenizer", "tokenizer")) if of_study else self.find_base()
        tokenizer = AutoTokenizer.from_pretrained(where)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def find_base(self) -> str:
        """Return the place of the model that continuations begin with.

        Raises:
            ValueError: a step has to make it, and did not yet.
        """
        made = Path(self.base).is_relative_to(self.output)
        if made and not (Path(self.base) / ("config.json" if self.model.config is None else TRAINING)).is_file():
            raise ValueError(
                f"{self.base} holds no trained model: the step base-{self.model.name} writes it, run that first"
            )
        return self.base

    def base_model(self):
        """Load the model that continuations begin with, on the grid."""
        model = load_model(ModelArguments(model=self.find_base(), dtype=WEIGHTS), self.grid)
        return model.train()

    def samples(self, seed: int) -> Path:
        """Return the file of the samples of a seed.

        Raises:
            ValueError: it is not there yet.
        """
        return check_made(self.data / f"samples-s{seed}.jsonl", self.data_step)

    def canaries(self) -> Path | None:
        """Return the directory of the canaries; None if the recipe has none.

        Raises:
            ValueError: they are not there yet.
        """
        return check_made(self.data / "canaries", self.data_step) if self.recipe.evaluation.canaries else None

    def prepare(
        self,
        name: str,
        rows: str,
        training: Mapping[str, Any],
        loss: str,
        *,
        seed: int,
        base: bool = False,
        evaluations: int = 0,
    ) -> Callable[..., Any]:
        """Return `train` with its inputs; a call of it gives it the model, the settings and the target.

        Args:
            name: of the directory that keeps its checkpoints until it is done.
            rows: file in the data.
            training: arguments of the Trainer.
            loss: name in the recipe.
            seed: of everything that is drawn.
            base: whether it is a base training, whose rows are shuffled.
            evaluations: on held-out text on the way; 0: at the start and at the end.
        Raises:
            ValueError: an input is not there yet, or as `make_arguments`.
        """
        recipe = self.recipe
        sequences = recipe.base_batch_sequences if base else recipe.batch_sequences
        arguments = make_arguments(
            training,
            recipe.losses[loss],
            work=self.output / "work" / self.model.name / name,
            sequences=sequences,
            seed=seed,
            in_order=not base,
            evaluations=evaluations,
        )
        return partial(
            train,
            tokenizer=self.tokenizer,
            rows=Rows(self.data / rows, step=self.data_step, multiple=sequences),
            held_out=Rows(self.data / "held_out.jsonl", step=self.data_step),
            arguments=arguments,
            clock=self.clock,
        )

    def settings(self, rows: str, training: Mapping[str, Any], loss: str, **about: Any) -> dict[str, Any]:
        """Return the settings that decide the weights of a continuation; `about` are more of them."""
        base = settings_of(Path(self.base)) if self.model.config is not None else None
        return {
            "training": training,
            "loss": self.recipe.losses[loss],
            "sequences": self.recipe.batch_sequences,
            "base": base if base is not None else self.base,
            "rows_sha256": checksum_of(self.data / rows)[1],
            **about,
        }


def train_base(work: Work, loss: str) -> None:
    """Train a Llama from nothing on the base text."""
    recipe, model, training = work.recipe, work.model, work.recipe.base_training
    target = work.output / "base" / (model.name if loss == ORDINARY else f"{model.name}-{loss}")
    seed = training.get("seed", 0)
    about = {"seed": seed, "base": True, "evaluations": EVALUATIONS}
    start = work.prepare(f"base-{loss}", "base.jsonl", training, loss, **about)
    settings = {
        "config": model.config,
        "training": training,
        "loss": recipe.losses[loss],
        "sequences": recipe.base_batch_sequences,
        "rows_sha256": checksum_of(work.data / "base.jsonl")[1],
    }
    if not WorkSplit.for_model(None).on_rank_zero(lambda: is_trained(target, settings)):
        start(lambda: new_model(work, seed), settings=settings, target=target)


def new_model(work: Work, seed: int):
    """Return a Llama with random weights, the same ones on every grid."""
    tokenizer = work.tokenizer
    sizes = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": max(work.recipe.base_length, work.recipe.documents.length),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(**{**sizes, **work.model.config})
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    if work.grid is not None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        model, _ = hf_axonn.parallelize(model.to(device), work.grid)
    return model


def learning_rate(recipe: Recipe, model: Model, output: Path) -> float | None:
    """Return the learning rate of the model, or the one that the pilot chose; None if the recipe has neither.

    Raises:
        ValueError: the pilot was not run.
    """
    if model.learning_rate is not None or recipe.pilot is None:
        return model.learning_rate
    chosen = check_made(output / "pilot" / "chosen.json", "pilot")
    return json.loads(chosen.read_text(encoding="utf-8"))["learning_rate"]


def continue_base(work: Work, run: Run) -> None:
    """Continue the model on documents, and ask it for them."""
    directory, rows = run_directory(run, work.output), f"train-s{run.seed}.jsonl"
    target, training = directory / "checkpoint", dict(work.recipe.training)
    rate = learning_rate(work.recipe, work.model, work.output)
    if rate is not None:
        training["learning_rate"] = rate
    # What is missing is said before anything is loaded.
    work.find_base()
    samples, canaries = work.samples(run.seed), work.canaries()
    points = work.recipe.evaluation.curve_points
    start = work.prepare(run.name, rows, training, run.loss, seed=run.seed, evaluations=points)
    about = {"seed": run.seed} | ({"curve_points": points} if points else {})
    settings = work.settings(rows, training, run.loss, **about)
    work_split = WorkSplit.for_model(None)
    if work_split.on_rank_zero(lambda: is_trained(target, settings)):
        model = load_to_ask(target, grid=work.grid, dtype=WEIGHTS).model
        work.clock.lap("load")
    else:
        work_split.on_rank_zero(lambda: _remove(directory / "extraction", directory / "canaries.json"))
        watch = _follow_curve(work, run, samples, settings) if points else None
        model, _ = start(work.base_model, settings=settings, target=target, watch=watch)
    _ask(work, model, samples, canaries, directory, record_of(model, target))


def _follow_curve(
    work: Work, run: Run, samples: Path, settings: Mapping[str, Any]
) -> Callable[[GoldfishTrainer], TrainerCallback]:
    """Return the callback of a trainer that asks for every passage with each evaluation, in one pass each."""
    return partial(
        ExtractionCallback,
        samples=read_samples(samples),
        batch_size=AT_ONCE,
        output=curve_directory(run, work.output),
        fingerprint=digest(settings),
    )


def ask_base(work: Work) -> None:
    """Ask the model for the same documents, before any continuation."""
    samples, canaries = work.samples(work.first_seed), work.canaries()
    loaded = load_to_ask(work.find_base(), grid=work.grid, dtype=WEIGHTS)
    work.clock.lap("load")
    _ask(work, loaded.model, samples, canaries, work.output / "runs" / work.model.name / "base", loaded.record)


def _ask(work: Work, model, samples: Path, canaries: Path | None, directory: Path, record: Mapping[str, Any]) -> None:
    """Ask for samples and canaries, in a directory of their own."""
    evaluation, tokenizer = work.recipe.evaluation, work.tokenizer
    ask(model, tokenizer, samples, output=directory / "extraction", record=record, evaluation=evaluation)
    work.clock.lap("extract")
    if canaries is not None:
        ask_canaries(model, tokenizer, canaries, output=directory / "canaries.json", record=record)
        work.clock.lap("canaries")


def _remove(*paths: Path) -> None:
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
