"""Runs that are stopped and started again: a save before the end, and the same batches on fewer ranks.

`resume_from_checkpoint="last"` says that the command may be started again, and `enable_jit_checkpoint` of
TrainingArguments that a signal is to save. Either lets SIGTERM and SIGUSR1 save after the same step on every rank
(distributed/stopping.py) and end the process with exit code 75. Transformers' own callback saves on each rank at a
step of its own, and lets the script go on as if training were over.

`_maybe_log_save_evaluate` wraps the method of Trainer that has its name (hooks.py), which ends each step. Checked with
transformers 5.20 to 5.24.

A step has the same samples on any number of ranks, as ranks take batches in turn: only the number of batches that a
rank accumulates changes. Collectives: those of the save.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hf_axonn.compat.messages import get_logger
from hf_axonn.compat.replaced import replace_attributes
from hf_axonn.distributed.stopping import Agreement, Alone, stop_when_asked
from hf_axonn.distributed.watchdog.signals import EXIT_CODE
from hf_axonn.trainer.model_card import describe_batch
from hf_axonn.trainer.saving import BATCH, is_on_grid, wait_for_save


logger = get_logger(__name__)


def _maybe_log_save_evaluate(self, original: Callable, *args, **kwargs) -> None:
    """Save, and end the process, at the end of the step on which all ranks agree; evaluations would take time."""
    agreement: Agreement | Alone | None = getattr(self, "axonn_agreement", None)
    stops = agreement is not None and agreement.reaches_end()
    if stops:
        self.control.should_save, self.control.should_evaluate = True, False
    original(*args, **kwargs)
    if stops:
        wait_for_save(self)
        if self.args.process_index == 0:
            logger.warning(f"a signal asked to stop: step {self.state.global_step} is saved, exit code {EXIT_CODE}.")
        raise SystemExit(EXIT_CODE)


@contextlib.contextmanager
def save_when_stopped(trainer: Any) -> Iterator[None]:
    """Let SIGTERM and SIGUSR1 save and end the run inside."""
    from transformers.trainer_jit_checkpoint import JITCheckpointCallback

    stock = trainer.pop_callback(JITCheckpointCallback)
    if stock is not None:
        stock.on_train_end(trainer.args, trainer.state, trainer.control)  # gives SIGTERM back
    with stop_when_asked() as agreement, replace_attributes({(trainer, "axonn_agreement"): agreement}):
        yield


def keep_batch(trainer: Any, checkpoint: str) -> None:
    """Accumulate as many batches as keep the samples of a step, where a checkpoint was written by another number of
    ranks with the arguments that this run has. If the arguments are others, they hold.

    Raises:
        ValueError: no number of batches gives so many samples.
    """
    path = Path(checkpoint, BATCH)
    if not path.is_file():  # of an earlier release
        return
    saved, arguments = json.loads(path.read_text(encoding="utf-8")), trainer.args
    given = {"per_device": arguments.train_batch_size, "accumulation": arguments.gradient_accumulation_steps}
    if any(saved[name] != value for name, value in given.items()):
        return
    samples = saved["samples"]
    ranks = describe_batch(trainer)["samples"] // (given["per_device"] * given["accumulation"])
    accumulation, rest = divmod(samples, given["per_device"] * ranks)
    if rest or not accumulation:
        raise ValueError(
            f"{checkpoint} was trained with {samples} samples in a step, which {ranks} rank(s) with samples of their "
            f"own and batches of {given['per_device']} cannot make up: start as many ranks that "
            f"{given['per_device']} * ranks divides {samples}, or set per_device_train_batch_size and "
            "gradient_accumulation_steps yourself."
        )
    if accumulation != given["accumulation"]:
        trainer.axonn_accumulation = given["accumulation"]
        arguments.gradient_accumulation_steps = accumulation
        if arguments.process_index == 0:
            logger.warning(
                f"{accumulation} batches are accumulated in place of {given['accumulation']}, so that a step has the "
                f"{samples} samples that it had."
            )


def may_be_stopped(trainer: Any, *, restarted: bool) -> bool:
    """Return whether signals are to save: of a grid, be it of one rank, and in a run that may be started again."""
    return is_on_grid(trainer) and (restarted or trainer.args.enable_jit_checkpoint)


WRAPPERS = (_maybe_log_save_evaluate,)
