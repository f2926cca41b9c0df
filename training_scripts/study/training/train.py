"""What a study does with a model on a grid of processes: base training, continuations, and asking.

A call that was killed goes on where it was if it is made again, on the same or on another grid; one that is done does
nothing.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import hf_axonn
from hf_axonn.checkpoint.shard_files import checksum_of
from hf_axonn_eval.extraction.load_model import load_model as load_to_ask
from hf_axonn_eval.extraction.work_split import WorkSplit
from hf_axonn_scripts.finetune import ModelArguments, load_model
from hf_axonn_scripts.study.recipe.definition import ORDINARY, Model, Recipe, Run
from hf_axonn_scripts.study.recipe.steps import STUDY, base_of, run_directory, tokenizer_of
from hf_axonn_scripts.study.training.asking import ask, ask_canaries, record_of
from hf_axonn_scripts.study.training.training import (
    TRAINING,
    Clock,
    Rows,
    is_trained,
    launched_grid,
    make_arguments,
    settings_of,
    train,
)


EVALUATIONS = 10  # of a base training: the curve of the held-out loss
WEIGHTS = "float32"  # of all models, in training and when they are asked; mixed precision is bf16 of the recipe


class Work:
    """What all commands need of a study.

    Args:
        recipe: the study.
        output: its directory.
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
        self.first_seed = min((which.seed for which in recipe.runs if which.model == model), default=recipe.seeds[0])

    def tokenizer(self):
        """The tokenizer of the model.

        Raises:
            ValueError: it is not there yet.
        """
        where = str(self.output / "tokenizer") if tokenizer_of(self.model) == STUDY else self.base_there()
        if not Path(where).is_dir() and tokenizer_of(self.model) == STUDY:
            raise ValueError(f"{where} is not there: the step tokenizer writes it, run that first")
        tokenizer = AutoTokenizer.from_pretrained(where)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def base_there(self) -> str:
        """Where the model is that continuations begin with.

        Raises:
            ValueError: it is to be made by a step, and was not yet.
        """
        made = Path(self.base).is_relative_to(self.output)
        if made and not (Path(self.base) / ("config.json" if self.model.config is None else TRAINING)).is_file():
            raise ValueError(
                f"{self.base} holds no trained model: the step base-{self.model.name} writes it, run that first"
            )
        return self.base

    def base_model(self):
        """The model that continuations begin with, on the grid."""
        model = load_model(ModelArguments(model=self.base_there(), dtype=WEIGHTS), self.grid)
        return model.train()

    def rows(self, name: str, sequences: int) -> Rows:
        """Rows to train on; see `Rows`."""
        return Rows(self.data / name, step=self.data_step, multiple=sequences)

    def held_out(self) -> Rows:
        """Rows that no model of the study was trained on."""
        return Rows(self.data / "held_out.jsonl", step=self.data_step)

    def samples(self, seed: int) -> Path:
        """The samples of a seed.

        Raises:
            ValueError: they are not there yet.
        """
        path = self.data / f"samples-s{seed}.jsonl"
        if not path.is_file():
            raise ValueError(f"{path} is not there: the step {self.data_step} writes it, run that first")
        return path

    def canaries(self) -> Path | None:
        """The directory of the canaries; None if the recipe has none.

        Raises:
            ValueError: they are not there yet.
        """
        path = self.data / "canaries"
        if not self.recipe.evaluation.canaries:
            return None
        if not path.is_dir():
            raise ValueError(f"{path} is not there: the step {self.data_step} writes it, run that first")
        return path

    def work_directory(self, name: str) -> Path:
        """Where a training keeps its checkpoints until it is done."""
        return self.output / "work" / self.model.name / name

    def settings(self, rows: str, **about: Any) -> dict[str, Any]:
        """What decides the weights: the base, the rows, and `about`."""
        base = settings_of(Path(self.base)) if self.model.config is not None else None
        return {
            **about,
            "base": base if base is not None else self.base,
            "rows_sha256": checksum_of(self.data / rows)[1],
        }


def base(work: Work, loss: str) -> None:
    """Train a Llama from nothing on the base text."""
    recipe, model = work.recipe, work.model
    if model.config is None:
        raise ValueError(f"{model.name} comes trained (checkpoint: {model.checkpoint}): it has no base training")
    target = work.output / "base" / (model.name if loss == ORDINARY else f"{model.name}-{loss}")
    sequences, seed = recipe.base_batch_sequences, recipe.base_training.get("seed", 0)
    arguments = make_arguments(
        recipe.base_training,
        recipe.losses[loss],
        work=work.work_directory(f"base-{loss}"),
        sequences=sequences,
        seed=seed,
        in_order=False,
        evaluations=EVALUATIONS,
    )
    rows, held_out, tokenizer = work.rows("base.jsonl", sequences), work.held_out(), work.tokenizer()
    settings = {
        "config": model.config,
        "training": recipe.base_training,
        "loss": recipe.losses[loss],
        "sequences": sequences,
        "rows_sha256": checksum_of(work.data / "base.jsonl")[1],
    }
    if not WorkSplit.of(None).on_rank_zero(lambda: is_trained(target, settings)):
        train(
            lambda: new_model(work, tokenizer, seed),
            tokenizer,
            rows,
            held_out,
            arguments,
            settings=settings,
            clock=work.clock,
            target=target,
        )


def new_model(work: Work, tokenizer, seed: int):
    """A Llama with random weights, the same ones on every grid."""
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
    """The learning rate of the model, or the one that the pilot chose; None if the recipe has neither.

    Raises:
        ValueError: the pilot was not run.
    """
    if model.learning_rate is not None or recipe.pilot is None:
        return model.learning_rate
    chosen = output / "pilot" / "chosen.json"
    if not chosen.is_file():
        raise ValueError(f"{chosen} is not there: the step pilot writes it, run that first")
    return json.loads(chosen.read_text(encoding="utf-8"))["learning_rate"]


def run(work: Work, which: Run) -> None:
    """Continue the model on documents, and ask it for them."""
    recipe, loss = work.recipe, work.recipe.losses[which.loss]
    directory = run_directory(which, work.output)
    target, rows_name = directory / "checkpoint", f"train-s{which.seed}.jsonl"
    training = dict(recipe.training)
    chosen = learning_rate(recipe, work.model, work.output)
    if chosen is not None:
        training["learning_rate"] = chosen
    arguments = make_arguments(
        training,
        loss,
        work=work.work_directory(which.name),
        sequences=recipe.batch_sequences,
        seed=which.seed,
        in_order=True,
        evaluations=0,
    )
    # What is missing is said before anything is loaded.
    work.base_there()
    samples, canaries, tokenizer = work.samples(which.seed), work.canaries(), work.tokenizer()
    rows, held_out = work.rows(rows_name, recipe.batch_sequences), work.held_out()
    settings = work.settings(
        rows_name, training=training, loss=loss, sequences=recipe.batch_sequences, seed=which.seed
    )
    work_split = WorkSplit.of(None)
    if work_split.on_rank_zero(lambda: is_trained(target, settings)):
        model = load_to_ask(target, grid=work.grid, dtype=WEIGHTS).model
        work.clock.lap("load")
    else:
        work_split.on_rank_zero(lambda: _forget(directory / "extraction", directory / "canaries.json"))
        model, _ = train(
            work.base_model,
            tokenizer,
            rows,
            held_out,
            arguments,
            settings=settings,
            clock=work.clock,
            target=target,
        )
    _ask(work, model, tokenizer, samples, canaries, directory, record_of(model, target))


def ask_base(work: Work) -> None:
    """Ask the model for the same documents, before any continuation."""
    samples, canaries = work.samples(work.first_seed), work.canaries()
    loaded = load_to_ask(work.base_there(), grid=work.grid, dtype=WEIGHTS)
    tokenizer = work.tokenizer()
    work.clock.lap("load")
    directory = work.output / "runs" / work.model.name / "base"
    _ask(work, loaded.model, tokenizer, samples, canaries, directory, loaded.record)


def _ask(
    work: Work,
    model,
    tokenizer,
    samples: Path,
    canaries: Path | None,
    directory: Path,
    record: Mapping[str, Any],
) -> None:
    """Ask for samples and canaries, in a directory of their own."""
    ask(model, tokenizer, samples, output=directory / "extraction", record=record, evaluation=work.recipe.evaluation)
    work.clock.lap("extract")
    if canaries is not None:
        ask_canaries(model, tokenizer, canaries, output=directory / "canaries.json", record=record)
        work.clock.lap("canaries")


def _forget(*paths: Path) -> None:
    """Remove what was asked of other weights."""
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
