"""Checkpoints of Lightning over a grid: sharded ones (checkpoint/sharded.py) that have one more file, lightning.pt.

It holds what is neither the model nor its optimizer: loops, callbacks, schedules and hyperparameters of the Trainer,
or the other objects that `fabric.save` was given. Tensors and plain values only, so reading it executes nothing.

Ordinary files, which Lightning writes on one process, are read on a grid too: every rank reads all of them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hf_axonn.checkpoint.manifest import Manifest
from hf_axonn.checkpoint.safe_pickle import load_values, save_values
from hf_axonn.checkpoint.sharded import add_model, begin_save, load_model, load_optimizer, verify_together
from hf_axonn.checkpoint.single_process import take_plain_optimizer
from hf_axonn.config import AxonnConfig
from hf_axonn.distributed.consistency import raise_on_all_ranks
from hf_axonn.engine.state import parallel_state


FILE = "lightning.pt"


def local_path(path: Any, options: Any) -> Path:
    """The directory that a checkpoint's path names.

    Raises:
        ValueError: it lies on another kind of file system, or has options for one.
    """
    if options is not None or re.match(r"[a-z][a-z0-9+.-]+://", str(path)):
        raise ValueError(
            f"{path}: checkpoints over a grid are directories that all ranks write to. Name a directory of a file "
            "system that they share, without storage_options, and copy it when it is complete."
        )
    return Path(path)


def save(
    directory: Path, model: nn.Module, optimizer: Optimizer | None, values: dict[str, Any], config: AxonnConfig
) -> None:
    """Write a sharded checkpoint. Every rank must call it; `values` are those of rank 0.

    Raises:
        SaveError: a rank cannot write, or there is something other than tensors and plain values; on every rank.
    Collectives: those of `save_sharded`.
    """
    under_way = begin_save(model, directory, async_save=config.async_save)
    add_model(under_way, model, optimizer=optimizer)
    with under_way.writing():
        if under_way.rank == 0:
            save_values(values, under_way.stage / FILE, what="the Trainer and its callbacks, or of what Fabric saves,")
    under_way.close()


def open_checkpoint(directory: Path, device: torch.device) -> tuple[Manifest, dict[str, Any]]:
    """Check a sharded checkpoint, and read its lightning.pt: empty where another program has written it.

    Raises:
        ValueError: it is not complete, or the file is damaged; on every rank.
    Collectives: those of `verify_together`, and of `raise_on_all_ranks`.
    """
    manifest = verify_together(directory)
    with raise_on_all_ranks(device):
        return manifest, load_values(directory / FILE) if FILE in manifest.files else {}
    raise AssertionError("raise_on_all_ranks raises what was raised")


def load(directory: Path, manifest: Manifest, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Fill a model, and its optimizer, from a sharded checkpoint. Raises and communicates as `load_sharded`."""
    load_model(model, directory, manifest)
    if optimizer is not None:
        load_optimizer(model, optimizer, directory, manifest)


def take_ordinary_optimizer(model: nn.Module, optimizer: Optimizer, saved: dict[str, Any], path: Path) -> None:
    """Give an optimizer the state that one process's had.

    Raises:
        ValueError: it is of other parameters.
    No communication.
    """
    if parallel_state(model) is None:
        optimizer.load_state_dict(saved)
    else:
        take_plain_optimizer(model, optimizer, saved, path)
