"""Train a model on rows of tokens, so that a run that is killed continues and ends as if it had not been.

A work directory keeps the settings that a run began with and its newest checkpoint, for as long as it lasts. When
it is done, the target holds the weights and the tokenizer, and

    trainer_state.json    Trainer's log: losses, and the held-out loss at several steps
    training.json         with which settings, by which versions, on which grid, and the seconds that it took

the latter written last, so that where it is, all is.
"""

import json
import math
import os
import shutil
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import Dataset
from transformers import TrainerCallback

import hf_axonn
from hf_axonn import AxonnConfig, GoldfishConfig, GoldfishTrainer, Grid
from hf_axonn_eval.data.jsonl import LineFile, write_json
from hf_axonn_eval.extraction.work_split import WorkSplit
from hf_axonn_scripts.demo.pipeline import read_if_there


TRAINING, STATE, SETTINGS = "training.json", "trainer_state.json", "settings.json"
IGNORED = -100
SAVE_SECONDS = 120.0  # of training, after which what was done is saved
SAVE_SHARE = 0.05  # saving may take so much of the time, where it takes long
STEPS_BETWEEN_LOOKS = 8  # at the clock: ranks have to agree, which is a broadcast
# Arguments that no recipe has to name. Small models are bound by what is done around their products.
DEFAULTS = {
    "num_train_epochs": 1,
    "optim": "adamw_torch_fused",
    "logging_steps": 0.05,
    "logging_nan_inf_filter": False,  # a loss that is no number is seen
    "dataloader_pin_memory": torch.cuda.is_available(),
    "report_to": "none",
}


class Clock:
    """Seconds of the parts of a program, from the start of its process on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = psutil.Process().create_time()
        self.lap("start")

    def lap(self, part: str) -> None:
        """Add the time since the last call to `part`."""
        now = time.time()
        self.seconds[part] = round(self.seconds.get(part, 0.0) + now - self._since, 3)
        self._since = now


def check_made(path: Path, step: str) -> Path:
    """Return a path of the study.

    Raises:
        ValueError: it is not there; the message names the step that makes it.
    """
    if not path.exists():
        raise ValueError(f"{path} is not there: the step {step} writes it, run that first")
    return path


class Rows(Dataset):
    """The rows of a file, in its order, each a document of its own; every token but the first is a target.

    Behind the last one stand rows without targets, so that every step has as many rows as it should on every grid, and
    no row is trained on again to fill one.

    Args:
        path: JSON lines with `input_ids`.
        step: of the study that writes the file, for the message.
        multiple: the number of rows is one of this.
    Raises:
        ValueError: no such file, or no rows in it.
    """

    def __init__(self, path: Path, *, step: str, multiple: int = 1) -> None:
        starts = array("Q")
        with open(check_made(path, step), "rb") as file:
            at = 0
            for line in file:
                if line.strip():
                    starts.append(at)
                at += len(line)
        if not starts:
            raise ValueError(f"{path} has no rows: the step {step} writes it, run that again")
        self._lines = LineFile(path, starts, _tokens)
        self.filled = -(-len(starts) // multiple) * multiple

    def __len__(self) -> int:
        return self.filled

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if index < len(self._lines):
            tokens = self._lines[index]
            return {"input_ids": tokens, "labels": tokens}
        if index >= self.filled:
            raise IndexError(index)
        tokens = self._lines[0]
        return {"input_ids": tokens, "labels": [IGNORED] * len(tokens)}


def _tokens(line: bytes) -> list[int]:
    return json.loads(line)["input_ids"]


def collate(rows: Sequence[Mapping[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Return rows as [rows, longest] tensors; with an attention mask only if their lengths differ."""
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    longest = int(lengths.max())

    def fill(name: str, filler: int) -> torch.Tensor:
        return torch.tensor([row[name] + [filler] * (longest - len(row[name])) for row in rows])

    batch = {"input_ids": fill("input_ids", 0), "labels": fill("labels", IGNORED)}
    if int(lengths.min()) < longest:
        batch["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
    return batch


def launched_grid() -> Grid | None:
    """Return the grid of the launch file, if it has more than one rank."""
    config = AxonnConfig.from_env()
    return config.grid if config is not None and config.grid.size > 1 else None


def make_arguments(
    training: Mapping[str, Any],
    loss: Mapping[str, Any],
    *,
    work: Path,
    sequences: int,
    seed: int,
    in_order: bool,
    evaluations: int,
) -> GoldfishConfig:
    """Return the arguments of the Trainer.

    Args:
        training: of the recipe; `gradient_accumulation_steps` among them divides a step.
        loss: of the recipe.
        work: directory for checkpoints.
        sequences: rows of a step, over all ranks.
        seed: of everything that is drawn.
        in_order: whether rows are trained on in the order of their file; else they are shuffled.
        evaluations: on held-out text during training, evenly spaced, beside that at the start; 0: none.
    Raises:
        ValueError: the ranks cannot share the rows of a step, or an argument is none of `GoldfishConfig`.
    """
    grid = launched_grid()
    ranks = grid.dp_size if grid is not None else int(os.environ.get("WORLD_SIZE", "1"))
    pieces = ranks * training.get("gradient_accumulation_steps", 1)
    if sequences % pieces:
        raise ValueError(
            f"a step has {sequences} rows, which {ranks} ranks with different rows (data * z) cannot share in "
            f"{pieces // ranks} part(s): change the batch or gradient_accumulation_steps of the recipe, or the grid"
        )
    fixed = {
        "output_dir": str(work),
        "per_device_train_batch_size": sequences // pieces,
        "per_device_eval_batch_size": sequences // pieces,
        "train_sampling_strategy": "sequential" if in_order else "random",
        **({"num_train_epochs": 1} if in_order else {}),  # a row stands there as often as it is to be seen
        "seed": seed,
        "eval_strategy": "steps" if evaluations else "no",
        "eval_steps": 1 / evaluations if evaluations else None,
        "save_strategy": "no",  # SaveByTime says when
        "save_total_limit": 1,
        "remove_unused_columns": False,
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),  # Transformers asks for it where bf16 is to be had on one
    }
    try:
        return GoldfishConfig(**{**DEFAULTS, **training, **loss, **fixed})
    except TypeError as error:
        raise ValueError(f"the recipe's training or loss does not suit GoldfishConfig: {error}") from error


class SaveByTime(TrainerCallback):
    """A callback that asks for a checkpoint after every SAVE_SECONDS of training, or more where saving takes long."""

    def __init__(self, work_split: WorkSplit) -> None:
        self._work_split = work_split
        self._between = SAVE_SECONDS
        self._last = self._decided = time.monotonic()

    def on_train_begin(self, args, state, control, **kwargs: Any) -> None:
        """Start the clock: the time before the first step does not count."""
        self._last = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs: Any) -> None:
        """Look at the clock of rank 0; all ranks do as it says."""
        if state.global_step % STEPS_BETWEEN_LOOKS == 0 and state.global_step < state.max_steps:
            control.should_save = self._work_split.on_rank_zero(lambda: time.monotonic() - self._last >= self._between)
            self._decided = time.monotonic()

    def on_save(self, args, state, control, **kwargs: Any) -> None:
        """Note when it was saved, and how long it took."""
        self._last = time.monotonic()
        self._between = max(SAVE_SECONDS, (self._last - self._decided) / SAVE_SHARE)


def is_trained(target: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether `target` holds a model that was trained to the end with these settings."""
    return settings_of(target) == _as_read(settings)


def settings_of(target: Path) -> dict[str, Any] | None:
    """Return the settings with which a study trained the model in `target`; None if none did."""
    content = read_if_there(target / TRAINING)
    return content["settings"] if content is not None else None


def train(
    make_model: Callable[[], Any],
    *,
    tokenizer,
    rows: Rows,
    held_out: Rows,
    arguments: GoldfishConfig,
    settings: Mapping[str, Any],
    clock: Clock,
    target: Path | None = None,
    watch: Callable[[GoldfishTrainer], TrainerCallback] | None = None,
):
    """Train, or continue a training that was stopped, and save.

    Args:
        make_model: gives the model that training begins with, sharded if there is a grid; called by all ranks.
        tokenizer: saved with the model.
        rows: to train on.
        held_out: to evaluate on, before the first step, at the end, and as the arguments say.
        arguments: of `make_arguments`.
        settings: what decides the weights, as JSON. A training is continued only with the same.
        clock: has the parts load, train, evaluate and save.
        target: directory for the model; None: it is not saved.
        watch: gives one more callback.
    Returns:
        The trained model, without what was only for training, and its held-out loss, in nats a token.
    Raises:
        ValueError: the held-out loss is not a finite number at the end.
    Collectives: those of Trainer.
    """
    work_split, work = WorkSplit.for_model(None), Path(arguments.output_dir)
    resume = work_split.on_rank_zero(lambda: _begin(work, settings))
    arguments.eval_on_start = not resume
    model = make_model()
    clock.lap("load")
    rival = arguments.make_rival()
    trainer = GoldfishTrainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=held_out,
        data_collator=collate,
        processing_class=tokenizer,
        callbacks=[SaveByTime(work_split)],
        frozen_model=make_model() if rival is not None and "frozen" in rival.sources else None,
    )
    if watch is not None:
        trainer.add_callback(watch(trainer))
    trainer.train(resume_from_checkpoint=True if resume else None)
    clock.lap("train")
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    if not evaluations or evaluations[-1]["step"] < trainer.state.global_step:
        trainer.evaluate()
        evaluations.append(trainer.state.log_history[-1])
    clock.lap("evaluate")
    last = evaluations[-1]["eval_loss"]
    if not math.isfinite(last):
        raise ValueError(
            f"after {trainer.state.global_step} steps the held-out loss is {last}: training diverged at a learning "
            f"rate of {arguments.learning_rate:g}. Lower it in the recipe."
        )
    if target is not None:
        work_split.on_rank_zero(lambda: (target / TRAINING).unlink(missing_ok=True))
        trainer.save_model(str(target))
        clock.lap("save")
        work_split.on_rank_zero(lambda: _finish(target, trainer, settings, clock))
    work_split.on_rank_zero(lambda: shutil.rmtree(work))
    # Without the autocast of training, and without the memory of optimizer and gradients.
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    trainer.accelerator.free_memory()
    trainer.optimizer = trainer.lr_scheduler = None
    model.zero_grad(set_to_none=True)
    return model.eval(), last


def _begin(work: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether the work directory holds a checkpoint of a training with these settings; if not, empty it."""
    file = work / SETTINGS
    if read_if_there(file) != _as_read(settings):
        shutil.rmtree(work, ignore_errors=True)
        write_json(file, settings)
        return False
    # On one process Trainer saves under the last name from the start, and its state at the very end.
    for path in work.glob("checkpoint-*"):
        try:
            json.loads((path / STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            shutil.rmtree(path)
    return any(work.glob("checkpoint-*"))


def _finish(target: Path, trainer: GoldfishTrainer, settings: Mapping[str, Any], clock: Clock) -> None:
    trainer.state.save_to_json(str(target / STATE))
    grid = launched_grid()
    about = {
        "settings": settings,
        "grid": str(grid) if grid is not None else None,
        "processes": trainer.args.world_size,
        "threads": torch.get_num_threads(),
        "versions": {"hf_axonn": hf_axonn.__version__, "torch": torch.__version__, "python": sys.version.split()[0]},
        "seconds": clock.seconds,
    }
    write_json(target / TRAINING, about)


def _as_read(settings: Mapping[str, Any]) -> Any:
    """Return settings as they are when they were written and read."""
    return json.loads(json.dumps(settings))
