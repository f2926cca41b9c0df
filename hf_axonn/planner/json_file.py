"""Read a JSON file of the planner, or say what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar


Made = TypeVar("Made")


def read_json(path: Path, kind: str, make: Callable[[Any], Made]) -> Made:
    """What `make` makes of the contents of a JSON file.

    Raises:
        ValueError: the file cannot be read, or `make` refuses it; the message names the kind of file and its path.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"the {kind} {path} cannot be read: {error}") from None
    try:
        return make(content)
    except ValueError as error:
        raise ValueError(f"the {kind} {path}: {error}") from None
