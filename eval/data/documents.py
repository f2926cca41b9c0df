"""Documents from what people have: text, JSON lines, parquet, datasets that `datasets` saved, or that are on the Hub.

All are read one document after the other, so that what is in memory does not grow with their number.
"""

import os
from collections.abc import Iterator, Mapping
from itertools import compress
from pathlib import Path
from typing import Any

from hf_axonn_eval.data.hub import PREFIX, hub_rows
from hf_axonn_eval.data.jsonl import decode_utf8, json_lines


TEXT, PARQUET, JSONL = (".txt", ".text", ".md"), (".parquet",), (".jsonl", ".ndjson", ".json")
_ROWS_AT_ONCE = 64


def iter_documents(
    path: str | os.PathLike,
    *,
    id_key: str | None = "id",
    text_key: str = "text",
    bucket_key: str = "bucket",
    bucket: int | None = None,
    split: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Read documents for `build_samples`, one after the other.

    Args:
        path: by its name a text (.txt, .text, .md: one document a file), a parquet file, or else JSON lines; or a
            directory: a dataset written by `save_to_disk`, or any number of such files, also in directories below it,
            in the order of their names; or, as hub:OWNER/NAME/CONFIG@REVISION (hub.py), a data set on the Hub.
        id_key: field that holds the document's id; None: its place, such as `pages.parquet:17`, counted from 1. The
            id of a text is its path below `path`, its name if `path` is the text itself.
        text_key: field that holds its text; `input_ids`, where present, is used instead, without the places that
            `attention_mask`, where present, leaves out.
        bucket_key: field that holds how often it was trained on.
        bucket: this number for every document, in place of a field. Texts have no fields and need it.
        split: of a dataset that has several.
    Yields:
        Mappings with `id`, `bucket` and `text` or `input_ids`.
    Raises:
        ValueError: nothing there to read, bytes that are not UTF-8, a line that is not JSON, a document without
            its fields, or a mask of another length; the message names the file and the line, row or byte.
    Source: texts are taken as they are, line ends included; only a byte order mark at the beginning is left out.
    """
    keys = {"text": text_key} | ({} if id_key is None else {"id": id_key})
    keys |= {} if bucket is not None else {"bucket": bucket_key}
    fixed: dict[str, Any] = {} if bucket is None else {"bucket": bucket}
    found = False
    for name, place, row in _rows(path, [*keys.values(), "input_ids", "attention_mask"], split):
        found = True
        if isinstance(row, str):
            if bucket is None:
                raise ValueError(
                    f"{place} is a text, which cannot say how often it was trained on: give bucket=... (--bucket N; "
                    "--control PATH for those that were not)."
                )
            yield {**fixed, "id": name, "text": row}
            continue
        names = {**keys}
        if isinstance(row, Mapping) and row.get("input_ids") is not None:
            del names["text"]
            names["input_ids"] = "input_ids"
        order = [field for field in ("id", "bucket", "text", "input_ids") if field in names]
        missing = [names[field] for field in order if not isinstance(row, Mapping) or names[field] not in row]
        if missing:
            raise ValueError(
                f"{place} has no field {', '.join(map(repr, missing))}. Name the fields with --id_key, --text_key and "
                "--bucket_key, or give all documents one bucket with --bucket, and their places as ids with "
                "--number_documents."
            )
        numbered = {"id": name} if id_key is None else {}
        document: dict[str, Any] = {**fixed, **numbered, **{field: row[names[field]] for field in order}}
        if "input_ids" in names and (mask := row.get("attention_mask")) is not None:
            if len(mask) != len(row["input_ids"]):
                raise ValueError(f"{place} has {len(row['input_ids'])} input_ids, but {len(mask)} in attention_mask.")
            document["input_ids"] = list(compress(row["input_ids"], mask))
        yield document
    if not found:
        raise ValueError(f"{path} holds no documents.")


def count_documents(path: str | os.PathLike) -> int | None:
    """Count the documents of a path, quickly, for a progress bar; None where that takes more than reading bytes.

    Lines are counted, so that empty ones make the number too large.
    """
    if isinstance(path, str) and path.startswith(PREFIX):
        return None
    path = Path(path)
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    if path.is_dir() and any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return None
    total = 0
    for file in files:
        kind = file.suffix.lower()
        if kind in PARQUET or not file.is_file():
            return None
        if kind in TEXT:
            total += 1
        elif kind in JSONL or file == path:
            with open(file, "rb") as lines:
                total += sum(block.count(b"\n") for block in iter(lambda: lines.read(1 << 20), b""))
    return total


def read_documents(path: str | os.PathLike, **options: Any) -> list[dict[str, Any]]:
    """Return all of `iter_documents`, with the same arguments, in a list."""
    return list(iter_documents(path, **options))


def _rows(place: str | os.PathLike[str], fields: list[str], split: str | None) -> Iterator[tuple[str, str, Any]]:
    """Yield of each document an id made of its place, the place in words, and a text or a mapping."""
    if isinstance(place, str) and place.startswith(PREFIX):
        yield from hub_rows(place, fields, split)
        return
    path = Path(place)
    if path.is_dir() and any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        yield from _dataset(path, fields, split)
        return
    if split is not None:
        raise ValueError(f"{path} is no dataset that `datasets` saved, so it has no split {split!r}.")
    if not path.is_dir():
        yield from _file(path, path.name, fields)
        return
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in (*TEXT, *PARQUET, *JSONL))
    files = [file for file in files if file.is_file()]
    if not files:
        raise ValueError(
            f"{path} holds no documents: neither a dataset that `datasets` saved, nor files named "
            f"{', '.join((*TEXT, *JSONL, *PARQUET))}."
        )
    for file in files:
        yield from _file(file, file.relative_to(path).as_posix(), fields)


def _file(path: Path, name: str, fields: list[str]) -> Iterator[tuple[str, str, Any]]:
    if path.suffix.lower() in PARQUET:
        yield from _parquet(path, name, fields)
    elif path.suffix.lower() in TEXT:
        if not path.is_file():
            raise ValueError(f"{path} is not a file.")
        yield name, str(path), decode_utf8(path.read_bytes(), str(path)).removeprefix("\ufeff")
    else:
        for number, _, value in json_lines(path):
            yield f"{name}:{number}", f"{path}, line {number}", value


def _parquet(path: Path, name: str, fields: list[str]) -> Iterator[tuple[str, str, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"{path} needs the package pyarrow: pip install 'hf_axonn[data]'.") from error
    if not path.is_file():
        raise ValueError(f"{path} is not a file.")
    try:
        with parquet.ParquetFile(path) as file:
            columns = [column for column in dict.fromkeys(fields) if column in file.schema_arrow.names]
            number = 0
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns):
                for number, row in enumerate(_plain(batch, path), start=number + 1):  # noqa: B020
                    yield f"{name}:{number}", f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a parquet file, or a damaged one: {error}") from error


def _plain(batch, path: Path) -> list[dict[str, Any]]:
    try:
        return batch.to_pylist()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: a text is not UTF-8: {error}.") from None


def _dataset(path: Path, fields: list[str], split: str | None) -> Iterator[tuple[str, str, Any]]:
    try:
        import datasets
        import pyarrow
    except ImportError as error:
        raise ValueError(f"{path} needs the package datasets: pip install 'hf_axonn[data]'.") from error
    try:
        dataset = datasets.load_from_disk(str(path))
    except (ValueError, KeyError, TypeError, OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} is a damaged dataset: {error}") from error
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            remedy = "name one of its splits" if split is None else f"there is no split {split!r}"
            raise ValueError(f"{path}: {remedy} with split=... (--split): {', '.join(map(str, dataset))}.")
        dataset = dataset[split]
    elif split is not None:
        raise ValueError(f"{path} has no splits, so there is no split {split!r}.")
    columns = [column for column in dict.fromkeys(fields) if column in dataset.column_names]
    name = f"{path.name}/{split}" if split else path.name
    # without its format: ids as lists, not as the tensors that training asked for
    columns = columns or dataset.column_names  # with no column there would be no row
    plain = dataset.with_format(None).select_columns(columns)
    for number, row in enumerate(plain, start=1):
        yield f"{name}:{number}", f"{path}, row {number}", row
