"""The training record (record.py) in a model card, and the record of a model from either of the two files.

The section is for readers. The metadata has the record itself, without `earlier`, as `training_record` of the entry
`hf_axonn` (trainer/model_card.py): a folder that has lost `training_record.json` still says how it was trained. No
communication.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import metadata_load

from hf_axonn.compat.messages import get_logger
from hf_axonn.goldfish.record import (
    MOST_BYTES,
    RECORD,
    describe_counts,
    describe_loss,
    is_record,
    loss_of,
    read_or_none,
    trained_with_goldfish,
)
from hf_axonn.trainer.model_card import CARD, ENTRY, extend_card


TAG = "goldfish-loss"
IN_CARD = "training_record"
FILES = (RECORD, CARD)  # that `find_record` reads


def add_record(record: Mapping[str, Any], directory: str | os.PathLike[str]) -> None:
    """Add a training record to the card of a directory; nothing if nothing was trained."""
    if record["parts"]:
        tags = [TAG] if any(map(trained_with_goldfish, record["parts"])) else []
        extend_card(Path(directory), section(record), {IN_CARD: {**record, "earlier": None}}, tags)


def section(record: Mapping[str, Any]) -> str:
    """Write the section of a model card, as Markdown."""
    lines = ["## Training record", "", f"From `{RECORD}`, which lies beside the weights.", ""]
    lines += ["| loss | steps | tokens | dropped | rows | SHA-256 of the rows |", "|" + " --- |" * 6]
    for part in record["parts"]:
        data = part.get("data") or {}
        cells = [describe_loss(part), *(describe_counts(part))]
        cells += ["unknown" if data.get("rows") is None else f"{data['rows']:,}"]
        cells += [data.get("rows_sha256") or f"unknown: {data.get('why', 'no record')}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def find_record(directory: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the training record of a model: of `training_record.json`, or else of its card; None without both.

    A damaged one is warned of and counts as none. The counts of the card may be older: it is not written at each save.

    Raises:
        ValueError: both are there, and name other losses; the message has both.
    """
    record, in_card = read_or_none(directory), _read_card(directory)
    if record is None or in_card is None:
        return record or in_card
    for part, other in zip(record["parts"], in_card["parts"], strict=False):
        if loss_of(part) != loss_of(other):
            raise ValueError(
                f"{directory}: by {RECORD} the model was trained with {describe_loss(part)}, by {CARD} with "
                f"{describe_loss(other)}: remove the entry {ENTRY} of the card, or the file, whichever is of other "
                "weights."
            )
    return record


def _read_card(directory: str | os.PathLike[str]) -> dict[str, Any] | None:
    path = Path(directory, CARD)
    try:
        if not path.is_file():
            return None
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        entry = (metadata_load(path) or {}).get(ENTRY)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as problem:
        get_logger(__name__).warning(f"{path} is no model card that can be read ({problem}), and counts as none.")
        return None
    record = entry.get(IN_CARD) if isinstance(entry, dict) else None
    if record is not None and not is_record(record):
        get_logger(__name__).warning(f"{path}: its {IN_CARD} is no training record, and counts as none.")
        return None
    return record
