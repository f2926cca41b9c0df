"""Files of torch.save that hold tensors and plain values only, so that reading one executes nothing."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch


def save_values(values: Any, path: Path, *, what: str) -> None:
    """Write a state. On one process.

    Args:
        values: tensors, numpy arrays, numbers, texts, and lists and dicts of them.
        path: of the file.
        what: whose state it is, for the message.
    Raises:
        ValueError: it holds anything else.
        OSError: it cannot be written.
    """
    torch.save(values, path)
    try:
        load_values(path)
    except ValueError as problem:
        path.unlink()
        raise ValueError(f"the state_dict() of {what} cannot be saved: {problem}") from None


def load_values(path: Path) -> Any:
    """Read what `save_values` wrote.

    Raises:
        ValueError: it holds anything but tensors and plain values, which is not executed.
    """
    from accelerate.utils.other import load  # Trainer's hooks import this file while accelerate is being imported

    try:
        return load(path, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError) as problem:
        reason = str(problem).partition("\n")[0]
        raise ValueError(f"{path.name} holds more than tensors and plain values: {reason}") from None
