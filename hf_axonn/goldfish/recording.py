"""The training record (record.py) of a Trainer: it counts the labels of its batches, and writes their sum.

Each rank counts the batches that it draws. The counts are summed over ranks where all of them meet anyway: at a log of
training, at a checkpoint, at the end. The record follows the weights: a resumed run continues that of its
checkpoint, and a best model that is loaded at the end brings its own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Trainer

from hf_axonn.goldfish.card import add_record
from hf_axonn.goldfish.record import RECORD, Data, TrainingRecord
from hf_axonn.losses.causal_lm import widest_float
from hf_axonn.trainer.accumulation import from_last_stage
from hf_axonn.trainer.model_card import CARD


if TYPE_CHECKING:
    _MixedInto = Trainer  # whose methods the mixin calls
else:
    _MixedInto = object


class RecordingMixin(_MixedInto):
    """The training record of a `Trainer`, mixed in before it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._training_record = TrainingRecord(self._start_of_training())
        self._label_counts: Tensor | None = None  # counted on this rank since the last sum: all, and dropped

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer.train` does; what is counted is a part of the record of its own."""
        self._label_counts = None
        self._training_record.end()
        if self.model_init is not None:  # makes a new model
            self._training_record = TrainingRecord(self._start_of_training())
        return super().train(*args, **kwargs)

    def save_training_record(self, directory: str | os.PathLike[str]) -> None:
        """Write the training record into a directory; saves of the trainer do that by themselves, on rank 0.

        It counts up to the last log, checkpoint or end of training. The first time it reads the training rows, for
        their checksum.
        """
        self._training_record.write(directory)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the model card as the Trainer does, and add the training record."""
        super().create_model_card(*args, **kwargs)
        directory = str(self.args.output_dir)
        if self.is_world_process_zero() and Path(directory, CARD).is_file():
            add_record(self._training_record.as_dict(), directory)

    def count_labels(self, loss: Mapping[str, Any], labels: Tensor, dropped: Tensor) -> None:
        """Count a batch that will be trained on. No communication.

        Args:
            loss: its settings, for the record.
            labels: 0-d, how many labels the batch has.
            dropped: 0-d, how many of these the loss leaves out.
        """
        self._training_record.begin(loss, Data(self.train_dataset), step=self.state.global_step)
        counts = torch.stack([labels, dropped])
        self._label_counts = counts if self._label_counts is None else self._label_counts + counts

    def over_ranks(self, own: list[float]) -> list[float]:
        """Sum numbers, and the counts of labels, over ranks with different samples.

        Collectives: one sum over the world, with pipe one more.
        """
        device = self.accelerator.device
        labels, self._label_counts = [0, 0] if self._label_counts is None else self._label_counts.tolist(), None
        tensor: Tensor | None = torch.tensor([*own, *labels], dtype=widest_float(device), device=device)
        tensor = from_last_stage(self.model, tensor)  # which has the record of the loss
        world: list[float] = self.accelerator.reduce(tensor, reduction="sum").tolist()
        *found, tokens, dropped = world
        self._training_record.add(step=self.state.global_step, tokens=round(tokens), dropped=round(dropped))
        return found

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.over_ranks([])
        super()._save_checkpoint(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # The stock method copies files that it knows by name.
        record = Path(checkpoint_folder, RECORD)
        if self.is_world_process_zero() and self.args.hub_strategy != "end" and record.is_file():
            shutil.copy2(record, Path(str(self.args.output_dir), RECORD))
        super()._push_from_checkpoint(checkpoint_folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._training_record.load(checkpoint, step=self.state.global_step)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        best = self.state.best_global_step or self.state.global_step
        self._training_record.load(str(self.state.best_model_checkpoint), step=best)

    def _start_of_training(self) -> str | None:
        """Return name or path of the model as it was before."""
        return getattr(getattr(self.model, "config", None), "_name_or_path", None)
