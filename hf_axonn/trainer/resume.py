"""Resuming a Trainer from a checkpoint: the newest complete one, on whatever grid it runs now.

Each function wraps the method of Trainer that has its name (hooks.py). With a plain model and a plain
checkpoint the stock method does it, after engine/master_weights.py.

Checked with transformers 5.20 to 5.24 (trainer.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from hf_axonn.checkpoint.manifest import Manifest, find_problems, is_sharded_checkpoint, read_manifest
from hf_axonn.checkpoint.run_folder import hold_folder
from hf_axonn.checkpoint.safe_pickle import load_values
from hf_axonn.checkpoint.sharded import load_model, load_optimizer, load_sharded, verify_together
from hf_axonn.checkpoint.single_process import load_plain_optimizer, load_plain_weights
from hf_axonn.compat.messages import get_logger
from hf_axonn.compat.torch import default_device_type
from hf_axonn.distributed.collectives import broadcast_text, world_rank
from hf_axonn.distributed.consistency import raise_on_all_ranks
from hf_axonn.engine.master_weights import make_masters
from hf_axonn.engine.state import parallel_state
from hf_axonn.trainer.restarts import keep_batch, may_be_stopped, save_when_stopped
from hf_axonn.trainer.saving import (
    SCALER,
    SCHEDULER,
    TRAINER_STATE,
    checkpoints_in,
    is_on_grid,
    rng_file,
    tidy,
)


logger = get_logger(__name__)
LAST = "last"


def train(self, original: Callable, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
    """Take the newest complete checkpoint for `resume_from_checkpoint=True`; others are skipped, with a warning.

    Over a grid one run at a time trains into `output_dir` (`hold_folder`).

    "last" is the same, and starts at step 0 where `output_dir` has no checkpoint: a job that is restarted by the
    command that started it has none the first time. Such a run is saved when it is stopped, and keeps the samples of a
    step on another number of ranks (restarts.py).
    """
    restarted = resume_from_checkpoint == LAST
    with contextlib.ExitStack() as stack:
        if is_on_grid(self):
            with raise_on_all_ranks(self.args.device):
                if world_rank() == 0 and Path(self.args.output_dir).is_dir():
                    stack.enter_context(hold_folder(Path(self.args.output_dir)))
        if _is_parallel(self) or resume_from_checkpoint in (True, LAST):
            resume_from_checkpoint = _choose(self, resume_from_checkpoint)
        if restarted and isinstance(resume_from_checkpoint, str):
            keep_batch(self, resume_from_checkpoint)
        if may_be_stopped(self, restarted=restarted):
            stack.enter_context(save_when_stopped(self))
        return original(resume_from_checkpoint, *args, **kwargs)


def _is_parallel(trainer) -> bool:
    """Return whether a Trainer's model lies over a grid, or will: in a search for hyperparameters rank 0 has none
    between trials."""
    ranks = trainer.accelerator.axonn_plugin.grid.size if is_on_grid(trainer) else 1
    return ranks > 1 or parallel_state(trainer.model) is not None


def _choose(self, requested: str | bool | None) -> str | bool | None:
    """Find the checkpoint to resume from. Collectives: a broadcast over the world; for True and "last" those of
    `verify_together`."""
    folder, newest = Path(self.args.output_dir), requested in (True, LAST)
    plan = {"problem": "", "candidates": []}
    if world_rank() == 0:
        try:
            if folder.is_dir() and _is_parallel(self):
                tidy(folder)
        except (OSError, ValueError) as problem:
            logger.warning(f"{folder} cannot be tidied up: {problem}")
        if newest and folder.is_dir():
            plan["candidates"] = [(str(path), is_sharded_checkpoint(path)) for path in checkpoints_in(folder)]
    if dist.is_initialized():
        plan = json.loads(broadcast_text(json.dumps(plan), torch.device(default_device_type())))
    if not newest:
        return requested
    if requested == LAST and not plan["candidates"]:
        if world_rank() == 0:
            logger.warning(f"{folder} has no checkpoint: training starts at step 0.")
        return None
    if not any(sharded for _, sharded in plan["candidates"]):
        return True
    for path, sharded in plan["candidates"]:
        try:
            if sharded:
                manifest = verify_together(path)
                _require(path, manifest, TRAINER_STATE)
                self._axonn_verified = (path, manifest)
            elif not Path(path, TRAINER_STATE).is_file():
                raise ValueError(f"{path} has no {TRAINER_STATE}.")
        except ValueError as problem:
            if world_rank() == 0:
                logger.warning(f"skipped: {problem}")
            continue
        return path
    raise ValueError(
        f"{folder} has no complete checkpoint to resume from; {', '.join(path for path, _ in plan['candidates'])} are "
        "damaged (hf-axonn verify DIR says how)."
    )


def get_last_checkpoint(original: Callable, folder: str) -> str | None:
    """Wrap Transformers' function of this name, so that it passes over sharded checkpoints that are not complete.

    Names and sizes are compared; checksums when it is loaded. On one process, no communication.
    """
    found = checkpoints_in(folder)
    if not any(map(is_sharded_checkpoint, found)):
        return original(folder)
    for path in found:
        try:
            if is_sharded_checkpoint(path):
                problems = find_problems(path, read_manifest(path), contents=False)
                if problems:
                    raise ValueError(f"{path} is a damaged checkpoint: {problems[0]}.")
            return os.path.join(folder, path.name)
        except ValueError as problem:
            logger.warning(f"skipped: {problem}")
    return None


def _require(checkpoint: str | Path, manifest: Manifest, name: str) -> None:
    if name not in manifest.files:
        raise ValueError(f"{checkpoint} has no {name}: it is not a checkpoint of a Trainer run that can be resumed.")


def make_trained_weights_float32(trainer) -> None:
    """Make what this Trainer trains float32, under mixed precision; DeepSpeed and FSDP see to that themselves."""
    if not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled):
        make_masters(trainer.model.parameters(), mixed_precision=trainer.accelerator.mixed_precision)


def _load_from_checkpoint(
    self, original: Callable, resume_from_checkpoint: str, model: nn.Module | None = None
) -> None:
    """Read a sharded checkpoint on all ranks, of whatever grid; a plain one is sharded while it is read."""
    model = self.model if model is None else model
    if self.is_in_train:  # in bfloat16 the float32 weights that were saved would be rounded
        make_trained_weights_float32(self)
    verified, self._axonn_verified = getattr(self, "_axonn_verified", None), None
    if verified is not None and verified[0] == resume_from_checkpoint:
        return load_model(model, resume_from_checkpoint, verified[1])
    if is_sharded_checkpoint(resume_from_checkpoint):
        manifest = verify_together(resume_from_checkpoint)
        if self.is_in_train:
            _require(resume_from_checkpoint, manifest, TRAINER_STATE)
        return load_model(model, resume_from_checkpoint, manifest)
    if parallel_state(model) is not None:
        return load_plain_weights(model, resume_from_checkpoint)
    return original(resume_from_checkpoint, model=model)


def _load_best_model(self, original: Callable) -> None:
    """Read the best checkpoint, sharded or plain, on all ranks."""
    if is_sharded_checkpoint(self.state.best_model_checkpoint):
        return load_sharded(self.model, self.state.best_model_checkpoint)
    if parallel_state(self.model) is not None:  # training began on one process
        return load_plain_weights(self.model, self.state.best_model_checkpoint)
    return original()


def _load_optimizer_and_scheduler(self, original: Callable, checkpoint: str | None) -> None:
    """Read the optimizer of a sharded or plain checkpoint, and on every rank the scheduler."""
    if checkpoint is None or not (is_sharded_checkpoint(checkpoint) or parallel_state(self.model) is not None):
        return original(checkpoint)
    if is_sharded_checkpoint(checkpoint):
        manifest = read_manifest(checkpoint)
        load_optimizer(self.model, self.optimizer, checkpoint, manifest)
        _require(checkpoint, manifest, SCHEDULER)
    else:
        load_plain_optimizer(self.model, self.optimizer, checkpoint)
    with raise_on_all_ranks(self.args.device):
        self.lr_scheduler.load_state_dict(load_values(Path(checkpoint, SCHEDULER)))


def _load_scaler(self, original: Callable, checkpoint: str | None) -> None:
    """Read the scale of fp16 on every rank; a checkpoint of bf16 has none."""
    if checkpoint is None or parallel_state(self.model) is None:
        return original(checkpoint)
    path, scaler = Path(checkpoint, SCALER), self.accelerator.scaler
    here = SCALER in read_manifest(checkpoint).files if is_sharded_checkpoint(checkpoint) else path.is_file()
    if scaler is not None and here:
        with raise_on_all_ranks(self.args.device):
            scaler.load_state_dict(load_values(path))


def _load_rng_state(self, original: Callable, checkpoint: str | None) -> None:
    """Read the random state; a rank without a file of its own takes that of rank 0, as all started from one seed."""
    if checkpoint is None or not (is_sharded_checkpoint(checkpoint) or parallel_state(self.model) is not None):
        return original(checkpoint)
    known = read_manifest(checkpoint).files if is_sharded_checkpoint(checkpoint) else None
    names = [rng_file(self), "rng_state_0.pth", "rng_state.pth"]
    found = [name for name in names if (name in known if known is not None else Path(checkpoint, name).is_file())]
    with raise_on_all_ranks(self.args.device), tempfile.TemporaryDirectory() as folder:
        if not found:
            return
        Path(folder, names[0]).symlink_to(Path(checkpoint, found[0]).resolve())
        try:
            original(folder)
        except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError, ValueError) as problem:
            reason = str(problem).partition("\n")[0]
            raise ValueError(
                f"{Path(checkpoint, found[0])} does not hold a random state, and nothing else is loaded: {reason}"
            ) from None


WRAPPERS = (
    train,
    _load_from_checkpoint,
    _load_best_model,
    _load_optimizer_and_scheduler,
    _load_scaler,
    _load_rng_state,
)
