"""Saving of a Trainer on a grid: all that a resume needs is one save, under one manifest, by all ranks together.

Each function wraps the method of Trainer that has its name (hooks.py). Trainer's own order is kept: model,
optimizer and scheduler, random state, its own state, then the older checkpoints are removed. But all goes into the
stage of one `Save`, so that `checkpoint-N` is complete as soon as it has that name.

Checked with transformers 5.20 to 5.24 (trainer.py, `_save_checkpoint` and `rotate_checkpoints`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_axonn.checkpoint.commit import recover, remove_sharded
from hf_axonn.checkpoint.manifest import MANIFEST, STAGE, find_problems, read_manifest
from hf_axonn.checkpoint.save import Save, SaveError, finish_saves
from hf_axonn.checkpoint.sharded import add_model, begin_save
from hf_axonn.compat.messages import get_logger
from hf_axonn.config import AxonnConfig
from hf_axonn.engine.state import parallel_state
from hf_axonn.trainer.model_card import describe_batch


logger = get_logger(__name__)

TRAINER_STATE = "trainer_state.json"
SCHEDULER = "scheduler.pt"
SCALER = "scaler.pt"
BATCH = "step_batch.json"  # samples of a step, and the arguments that gave them (restarts.py)
REMOVED = ".axonn-removed"
CHECKPOINT = re.compile(r"^checkpoint-(\d+)$")


def checkpoints_in(folder: str | Path) -> list[Path]:
    """Return the directories checkpoint-N of a run, whatever they hold, the largest N first."""
    found = [path for path in Path(folder).glob("checkpoint-*") if CHECKPOINT.match(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: -int(CHECKPOINT.match(path.name)[1]))


def is_on_grid(trainer: Any) -> bool:
    """Return whether a Trainer was given a grid, be it of one rank."""
    return getattr(trainer.accelerator, "axonn_plugin", None) is not None


def _settings(self) -> AxonnConfig:
    config = getattr(getattr(self.accelerator, "parallelism_config", None), "config", None)
    return config if isinstance(config, AxonnConfig) else parallel_state(self.model).config


def _save_checkpoint(self, original: Callable, model, trial) -> None:
    """Save as Trainer does, all or nothing; `save_failure` decides what follows a failure."""
    if parallel_state(self.model) is None:
        original(model, trial)
        if is_on_grid(self) and self.args.should_save:  # of one rank, to which data: auto may have shrunk it
            _write_batch(self, Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}"))
        return
    if self.hp_search_backend is None and trial is None:
        self.store_flos()
    folder = Path(self._get_output_dir(trial=trial))
    directory = folder / f"checkpoint-{self.state.global_step}"
    wait_for_save(self)
    before = self.state.best_model_checkpoint
    try:
        save = begin_save(self.model, directory, async_save=_settings(self).async_save)
        self._axonn_save = save
        try:
            self.save_model(str(save.stage), _internal_call=True)
            _note_best(self, folder, directory)
            _save_trainer(self, save)
            save.close()
        finally:
            self._axonn_save = None
    except SaveError as problem:
        self.state.best_model_checkpoint = before
        _handle_failure(self, problem)
        return
    self._axonn_saved = (directory, before)
    if not save.background:
        _remove_older(self)
    if self.args.push_to_hub and wait_for_save(self):
        self._push_from_checkpoint(str(directory))


def _note_best(self, folder: Path, directory: Path) -> None:
    """Note the best checkpoint: an earlier one, or the one that is being saved."""
    if self.args.save_strategy in ("steps", "epoch", "best") and self.state.best_global_step:
        best = folder / f"checkpoint-{self.state.best_global_step}"
        if best == directory or best.is_dir():
            self.state.best_model_checkpoint = str(best)


def _save_trainer(self, save: Save) -> None:
    """Write Trainer's files beside the model: each rank its random state, rank 0 the rest."""
    from transformers.trainer_callback import ExportableState

    stage = str(save.stage)
    with save.writing():
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(stage)
            self._save_scaler(stage)
            self._save_rng_state(stage)
            save.claim(rng_file(self))
        if self.args.should_save:
            for part in [*self.callback_handler.callbacks, self.control]:
                if isinstance(part, ExportableState):
                    states, name = self.state.stateful_callbacks, type(part).__name__
                    if isinstance(states[name], list):
                        states[name].append(part.state())
                    else:
                        states[name] = part.state()
            self.state.save_to_json(os.path.join(stage, TRAINER_STATE))
            _write_batch(self, save.stage)


def _write_batch(self, folder: Path) -> None:
    """Write the samples of a step beside a checkpoint, which a resume on another number of ranks keeps."""
    batch = describe_batch(self)
    batch["accumulation"] = getattr(self, "axonn_accumulation", batch["accumulation"])
    (folder / BATCH).write_text(json.dumps(batch) + "\n", encoding="utf-8")


def rng_file(self) -> str:
    """Return the name of Trainer's file of this rank's random state."""
    return f"rng_state_{self.args.process_index}.pth" if self.args.world_size > 1 else "rng_state.pth"


def _save(self, original: Callable, output_dir: str | None = None, state_dict: dict | None = None) -> None:
    """Write this rank's shards, and on rank 0 the tokenizer and the arguments, as the stock method does.

    A Trainer with a method `save_training_record` (GoldfishMixin) writes that, too, with a plain model as well. A
    plain model takes the place of a sharded checkpoint.
    """
    output_dir = output_dir if output_dir is not None else self.args.output_dir
    save_record = getattr(self, "save_training_record", None)
    if parallel_state(self.model) is None:
        if self.args.should_save:
            remove_sharded(Path(output_dir))
        original(output_dir, state_dict=state_dict)
        if save_record is not None and self.args.should_save:
            save_record(output_dir)
        return
    save = getattr(self, "_axonn_save", None)
    part_of_checkpoint = save is not None and Path(output_dir) == save.stage
    if not part_of_checkpoint:
        wait_for_save(self)
        save = begin_save(self.model, output_dir)
    add_model(
        save, self.model, optimizer=None if self.args.save_only_model or not self.is_in_train else self.optimizer
    )
    with save.writing():
        if self.args.should_save:
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(str(save.stage))
            stage = save.stage
            torch.save(self.args, stage / "training_args.bin")
            if save_record is not None:
                save_record(stage)
    if not part_of_checkpoint:
        save.close()


def _save_optimizer_and_scheduler(self, original: Callable, output_dir: str) -> None:
    """Write the scheduler, on rank 0; the optimizer's shards were written with the weights."""
    if parallel_state(self.model) is None:
        return original(output_dir)
    if self.args.should_save:
        torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))


def _finalize_training(self, original: Callable, *args, **kwargs):
    """Wait for the last save in the background, before the best model is loaded and older ones are removed."""
    if parallel_state(self.model) is None:
        return original(*args, **kwargs)
    wait_for_save(self)
    best = self.state.best_model_checkpoint
    if best is not None and not self.args.load_best_model_at_end and not _looks_complete(Path(best)):
        self.state.best_model_checkpoint = None  # Trainer would remove every other one for it
    return original(*args, **kwargs)


def wait_for_save(self) -> bool:
    """Wait for a save in the background. Returns whether it is complete; False is a failure to be lived with.

    Raises:
        SaveError: it failed, and `save_failure` is stop.
    """
    try:
        finish_saves()
    except SaveError as problem:
        if getattr(self, "_axonn_saved", None) is not None:
            self.state.best_model_checkpoint = self._axonn_saved[1]
            self._axonn_saved = None
        _handle_failure(self, problem)
        return False
    _remove_older(self)
    return True


def _handle_failure(self, problem: SaveError) -> None:
    if _settings(self).save_failure == "stop":
        raise problem
    if self.args.process_index == 0:
        logger.warning(f"{problem} Training goes on (save_failure: continue).")


def _remove_older(self) -> None:
    """Remove older checkpoints, after one that is complete."""
    saved, self._axonn_saved = getattr(self, "_axonn_saved", None), None
    if saved is not None and self.args.should_save:
        try:
            rotate(saved[0], limit=self.args.save_total_limit, best=self.state.best_model_checkpoint)
        except OSError as problem:  # only this rank knows of it, and nothing is lost
            logger.warning(f"an older checkpoint cannot be removed: {problem}")


def rotate(newest: Path, *, limit: int | None, best: str | None) -> None:
    """Remove the oldest complete checkpoints of a run until `limit` are left; never `newest`, nor the best.

    What is not complete is not counted and not removed: someone may still want to look at it.
    """
    if not limit or limit < 1:
        return
    kept = {newest.resolve()} | ({Path(best).resolve()} if best else set())
    complete = [path for path in checkpoints_in(newest.parent) if path.resolve() in kept or _looks_complete(path)]
    for path in sorted(complete, key=lambda path: path.stat().st_mtime):
        if len(complete) <= max(limit, len(kept)):
            break
        if path.resolve() not in kept:
            complete.remove(path)
            remove_checkpoint(path)


def _looks_complete(directory: Path) -> bool:
    """Return whether nothing is missing, by names and sizes; for one process, whether Trainer finished it."""
    try:
        return not find_problems(directory, read_manifest(directory), contents=False)
    except ValueError:
        return not (directory / MANIFEST).exists() and (directory / TRAINER_STATE).is_file()


def remove_checkpoint(directory: Path) -> None:
    """Remove a checkpoint so that half of it is never taken for one."""
    removed = directory.with_name(f".{directory.name}{REMOVED}")
    shutil.rmtree(removed, ignore_errors=True)
    os.replace(directory, removed)
    shutil.rmtree(removed, ignore_errors=True)


def tidy(folder: Path) -> None:
    """Finish, before training, the saves of a run that were cut off at their last step, and remove those of others.

    Raises:
        OSError, ValueError: something cannot be finished or removed.
    """
    for path in sorted(folder.glob(".checkpoint-*")):
        name = path.name[1:].removesuffix(STAGE).removesuffix(REMOVED)
        if not CHECKPOINT.match(name) or path.is_symlink():
            continue
        if path.name.endswith(STAGE) and recover(folder / name):
            logger.warning(f"{folder / name}: its save was interrupted at the very end, and has been finished.")
        elif path.name.endswith((STAGE, REMOVED)):
            logger.warning(f"{path} is what an interrupted run left of a save, and is removed.")
            shutil.rmtree(path)
    for path in checkpoints_in(folder):
        recover(path)


WRAPPERS = (_save_checkpoint, _save, _save_optimizer_and_scheduler, _finalize_training)
