"""The training record: what a model was trained on and with which loss, as a file beside its weights.

    format      "hf_axonn training record 1"
    steps       optimizer steps, of all parts
    tokens      labels in their batches, those that the goldfish loss left out among them; null if a part has none
    dropped     of these, what it left out; null likewise
    parts       one for each setting of loss or data, in their order; resumed runs add to the last one. Each has
        strategy        of the goldfish loss, or another loss; "none" for the ordinary one, "unknown" where a
                        checkpoint has no record
        k, context_width, start_position, seed, as_reference, ignored_token, table_sha256     as far as they matter;
                        of another loss its settings
        steps, tokens, dropped
        data            `rows`, and `rows_sha256`, of their input_ids (`Data`), or `why` there is none
        started         when the part began
    saved       when this file was written
    model       name of the model that training started from, of a path the last part
    earlier     the record that lay beside that one, if there was one

Trainers with `GoldfishMixin` write it into every checkpoint and model that they save. No communication.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


RECORD = "training_record.json"
FORMAT = "hf_axonn training record 1"
UNKNOWN = "unknown"
MOST_BYTES = 2**20  # of a record
MOST_DATA = 2**33  # bytes of a data set that are read for its checksum: some ten seconds
_NOT_ONE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
_COUNTS = ("steps", "tokens", "dropped")


class Data:
    """The rows of a training set, for its checksum.

    The SHA-256 is of each row in order: the number of its input_ids as 8 bytes, then each of them as 4, little-endian.
    Data sets of the package datasets and sequences of mappings have one; rows that are streamed, or made when they are
    asked for, have none.
    """

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self._facts: dict[str, Any] | None = None

    def facts(self) -> dict[str, Any]:
        """`rows`, None if that is not known, and `rows_sha256`; where that is None, `why`. Computed once."""
        if self._facts is None:
            try:
                count = len(self._rows)
            except TypeError:
                count = None
            try:
                digest, why = _checksum(self._rows, count)
            except Exception as problem:  # noqa: BLE001 - of a data set of any kind; a save does not fail for it
                digest, why = None, f"reading the rows failed ({type(problem).__name__}: {problem})"
            self._facts = {"rows": count, "rows_sha256": digest, **({} if digest else {"why": why})}
            self._rows = None
        return self._facts


class TrainingRecord:
    """The record of a trainer, while it trains.

    Args:
        model: name or path of the model that training starts from; a record beside it is kept as `earlier`.
    """

    def __init__(self, model: str | None = None) -> None:
        self._model, self._earlier = model or None, None
        if model and os.path.isdir(model):
            self._model, self._earlier = os.path.basename(os.path.abspath(model)), read_or_none(model)
        self._parts: list[dict[str, Any]] = []
        self._open = False
        self._first_step = 0  # where the part began

    def begin(self, settings: Mapping[str, Any], data: Data, *, step: int) -> None:
        """Begin a part at a step, unless one has begun and was not ended.

        Raises:
            ValueError: one has begun with other settings of the loss.
        """
        if self._open:
            if (begun := {name: self._parts[-1].get(name) for name in settings}) != settings:
                raise ValueError(
                    f"training began with the {describe_loss(begun)}, and step {step} has the "
                    f"{describe_loss(settings)}. The training record has one loss for a call of train(): let that "
                    "call end, change args, and call train() again."
                )
        else:
            self._open, self._first_step = True, step
            part = {**settings, **dict.fromkeys(_COUNTS, 0), "data": data, "started": _now()}
            self._parts.append(part)

    def add(self, *, step: int, tokens: int, dropped: int) -> None:
        """Count labels of the batches up to a step."""
        if self._open:
            part = self._parts[-1]
            part["steps"] = step - self._first_step
            part["tokens"] += tokens
            part["dropped"] += dropped

    def end(self) -> None:
        """End the part: what is counted later begins another."""
        self._open = False

    def load(self, checkpoint: str | os.PathLike[str], *, step: int) -> None:
        """Take the record of the checkpoint that the weights come from in place of this one.

        Args:
            checkpoint: its directory.
            step: steps that it has trained; of those nothing is known if it has no record.
        """
        found = read_or_none(checkpoint)
        self._open = False
        if found is not None:
            self._parts = [dict(part) for part in found["parts"]]
            self._model, self._earlier = found.get("model"), found.get("earlier")
        else:
            unknown = {"strategy": UNKNOWN, "steps": step, "tokens": None, "dropped": None}
            self._parts = [unknown] if step else []

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the file. Reads the training data the first time."""
        parts: list[dict[str, Any]] = []
        for part in self._parts:
            data = part.get("data")
            now = {**part, "data": data.facts() if isinstance(data, Data) else data}
            if parts and _settings(parts[-1]) == _settings(now):
                now = {**now, **{name: _sum([parts[-1], now], name) for name in _COUNTS}}
                now["started"] = parts[-1].get("started")
                parts.pop()
            parts.append(now)
        return {
            "format": FORMAT,
            **{name: _sum(parts, name) for name in _COUNTS},
            "parts": parts,
            "saved": _now(),
            "model": self._model,
            "earlier": self._earlier,
        }

    def write(self, directory: str | os.PathLike[str]) -> None:
        """Write the file; before any training that of the model as it was, or none."""
        path, record = Path(directory, RECORD), self.as_dict() if self._parts else self._earlier
        if record is None:
            path.unlink(missing_ok=True)  # of other weights
        else:
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_record(directory: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Read the record beside a model; None if there is none.

    Raises:
        ValueError: it is damaged, or not as `TrainingRecord` writes it; the message names the file.
    """
    path = Path(directory, RECORD)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        record = json.loads(path.read_text(encoding="utf-8"))
        _check(record)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, *_NOT_ONE) as problem:
        raise ValueError(
            f"{path} is no training record ({type(problem).__name__}: {problem}): remove it, or take that of the "
            "checkpoint that the weights come from."
        ) from None
    return dict(record)


def is_record(content: Any) -> bool:
    """Return whether a value of JSON is a training record."""
    try:
        _check(content)
    except _NOT_ONE:
        return False
    return True


def read_or_none(directory: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Read the record beside a model; one that is damaged is warned of and counts as none."""
    from hf_axonn.compat.messages import get_logger

    try:
        return read_record(directory)
    except ValueError as problem:
        get_logger(__name__).warning(f"{problem} Without it, what was trained before is not known.")
        return None


def describe_loss(part: Mapping[str, Any]) -> str:
    """Say in words which loss a part of a record was trained with."""
    if not trained_with_goldfish(part):
        return {"none": "ordinary loss", UNKNOWN: UNKNOWN}[part["strategy"]]
    if part.get("k") is None:  # not of goldfish
        about = {name: value for name, value in part.items() if name not in (*_COUNTS, "strategy", "data", "started")}
        words = ", ".join(f"{name}={value}" for name, value in about.items())
        return f"{part['strategy']} ({words})" if words else str(part["strategy"])
    about = {"k": part.get("k"), "h": part.get("context_width"), "s": part.get("start_position")}
    about |= {"seed": part.get("seed"), "table": (part.get("table_sha256") or "")[:12] or None}
    settings = [f"{name}={value}" for name, value in about.items() if value is not None]
    settings += ["as the authors' code packs"] if part.get("as_reference") else []
    return f"goldfish loss ({', '.join([str(part['strategy']), *settings])})"


def describe_counts(part: Mapping[str, Any]) -> list[str]:
    """Return steps, tokens, and the share of the tokens that the loss left out, as text."""
    tokens, dropped = part.get("tokens"), part.get("dropped")
    share = f"{dropped / tokens:.2%}" if tokens and dropped is not None else UNKNOWN
    return [f"{part['steps']:,}", UNKNOWN if tokens is None else f"{tokens:,}", share]


def _check(record: Any, depth: int = 0) -> None:
    if record["format"] != FORMAT or depth > 50:
        raise ValueError(f"its format is {record['format']!r}, and this program reads {FORMAT!r}")
    for part in [record, *record["parts"]]:
        for name in _COUNTS:
            least = 0 if name == "steps" else None
            count = part[name]
            if not (count is None and least is None) and (type(count) is not int or count < 0):
                raise ValueError(f"{name} is {count!r}")
    for part in record["parts"]:
        data = part.get("data") or {}
        if not isinstance(part["strategy"], str) or not isinstance(data.get("rows"), int | None):
            raise ValueError(f"strategy is {part['strategy']!r}, and rows are {data.get('rows')!r}")
        if not all(isinstance(value, str | None) for value in (data.get("rows_sha256"), data.get("why"))):
            raise ValueError(f"data are {data!r}")
    if record.get("earlier") is not None:
        _check(record["earlier"], depth + 1)


def all_parts(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts of a record, those of earlier ones first."""
    earlier = record.get("earlier")
    return [*(all_parts(earlier) if earlier else []), *record["parts"]]


def loss_of(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the loss of a part."""
    return {name: value for name, value in _settings(part).items() if name != "data"}


def trained_with_goldfish(part: Mapping[str, Any]) -> bool:
    """Return whether a part was trained with the goldfish loss."""
    return part["strategy"] not in ("none", UNKNOWN)


def _settings(part: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name not in (*_COUNTS, "started")}


def _sum(parts: Sequence[Mapping[str, Any]], name: str) -> int | None:
    counts = [part[name] for part in parts]
    return None if None in counts else sum(counts)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _checksum(rows: Any, count: int | None) -> tuple[str | None, str]:
    """Return the SHA-256 of the input_ids of all rows, or why there is none."""
    if rows is None:
        return None, "the trainer has no train_dataset"
    if count is None:
        return None, "the rows are streamed"
    if hasattr(rows, "with_format") and hasattr(rows, "column_names"):
        if "input_ids" not in rows.column_names:
            return None, "the rows have no input_ids before they are asked for"
        if rows.data.nbytes > MOST_DATA:
            return None, f"the rows have more than {MOST_DATA >> 30} GiB"
        return _digest(_arrow_rows(rows)), ""
    if not isinstance(rows, list | tuple) or not all(isinstance(row, Mapping) and "input_ids" in row for row in rows):
        return None, "the rows are made when they are asked for"
    return _digest(row["input_ids"] for row in rows), ""


def _arrow_rows(rows: Any) -> Iterator[Any]:
    for batch in rows.select_columns(["input_ids"]).with_format("arrow").iter(1000):
        for chunk in batch.column("input_ids").chunks:
            if not hasattr(chunk, "offsets"):  # lists of one length
                yield from chunk.to_pylist()
                continue
            values, ends = chunk.values.to_numpy(zero_copy_only=False), chunk.offsets.to_numpy()
            yield from (values[begin:end] for begin, end in zip(ends[:-1], ends[1:], strict=True))


def _digest(rows: Iterator[Any]) -> str:
    import numpy as np

    digest = hashlib.sha256()
    for row in rows:
        ids = np.asarray(row).reshape(-1)
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(ids.astype("<i4").tobytes())
    return digest.hexdigest()
