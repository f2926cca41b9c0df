"""The batches of each step, and the logs before they are made, for a `Watcher` among a Trainer's callbacks.

Callbacks of Transformers see no batches, and logs only after Trainer's history and trackers that stand before them
have got theirs.

Each function wraps the method of Trainer that has its name (hooks.py). Checked with transformers 5.20 to 5.24.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Watcher:
    """A callback of Trainer that counts batches, or has numbers for the logs of training."""

    def see_batches(self, batches: list[Any]) -> None:
        """Look at the batches of an optimizer step, before it."""

    def numbers(self, *, last: bool) -> dict[str, float]:
        """Return the numbers for a log of training, on every rank; `last`: whether it is the one that sums up."""
        raise NotImplementedError


def is_training_log(trainer: Any, logs: dict[str, float], start_time: float | None) -> bool:
    """Return whether Trainer itself logs the losses of training, or their end: then every rank does."""
    return trainer.is_in_train and (("loss" in logs and start_time is not None) or "train_loss" in logs)


def _watchers(trainer: Any) -> list[Watcher]:
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Watcher)]


def get_batch_samples(self, original: Callable, *args, **kwargs):
    """Show the batches to the watchers."""
    batches, items = original(*args, **kwargs)
    for watcher in _watchers(self):
        watcher.see_batches(batches)
    return batches, items


def log(self, original: Callable, logs: dict[str, float], start_time: float | None = None, *args, **kwargs) -> None:
    """Add the watchers' numbers."""
    if is_training_log(self, logs, start_time):
        for watcher in _watchers(self):
            logs.update(watcher.numbers(last="train_loss" in logs))
    return original(logs, start_time, *args, **kwargs)


WRAPPERS = (get_batch_samples, log)
