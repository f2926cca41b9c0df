"""Repetitions of a document in training: the column `bucket`, as `hf-axonn-eval samples` reads it.

A document of bucket 3 is laid out three times in each epoch, and one of bucket 0, a control, not at all. Which rows
are the same document is found by their ids and their texts: copies of a document must not be on both sides of a
split, and a control that is trained on under another id is no control.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import datasets
import numpy as np


def read_buckets(documents: datasets.Dataset, column: str, name: str) -> np.ndarray | None:
    """Return how often each document is to be seen, or None if there is no such column.

    Args:
        documents: one document a row.
        column: name of the column.
        name: what the data are called, for messages.
    Raises:
        ValueError: an entry is not a whole number of at least 0, or all are 0.
    """
    if column not in documents.column_names:
        return None
    buckets = list(documents[column])
    for number, bucket in enumerate(buckets, start=1):
        if isinstance(bucket, bool) or not isinstance(bucket, int | float) or bucket < 0 or bucket % 1:
            raise ValueError(
                f"{name}, document {number}: {column} is {bucket!r}, but it is how often training sees the document, "
                "a whole number of at least 0. Name the column with --bucket_column; with a name that no column has, "
                "every document is seen once an epoch"
            )
    if not any(buckets):
        raise ValueError(f"all {len(buckets)} documents of {name} are controls ({column} is 0): nothing to train on")
    return np.array(buckets, dtype=np.int64)


def turn(copy: Any, count: Any, phase: Any) -> Any:
    """Return when a document has its turn number `copy` of `count`, between 0 and 1: at equal distances.

    Args:
        copy: number of the turn, from 0.
        count: turns of the document in all.
        phase: where between two turns it begins, between 0 and 1.
    """
    return (copy + phase) / count


def repeat(documents: datasets.Dataset, buckets: np.ndarray) -> datasets.Dataset:
    """Repeat every document as often as its bucket says, its copies spread evenly over all rows.

    Documents of one bucket keep their order: those of bucket 2 come one after the other, and then once more. So copies
    are apart in a packed row, too, and with a sampler that does not shuffle.
    """
    if (buckets == 1).all():
        return documents
    places = np.repeat(np.arange(len(buckets)), buckets)
    first = np.cumsum(buckets) - buckets
    copies = np.arange(len(places)) - first[places]
    turns = turn(copies, buckets[places], (places + 0.5) / len(buckets))
    return documents.select(places[np.argsort(turns, kind="stable")])


def same_documents(documents: datasets.Dataset, keys: list[list[str]]) -> np.ndarray:
    """Return for each row the first row that is the same document.

    Rows are the same document if the columns of one of the keys have the same entries in both, or through a third row.
    An entry that is None is like no other.
    """
    group = np.arange(len(documents))
    found = [np.unique(_digests(documents, columns), return_inverse=True)[1] for columns in keys]
    while True:
        before = group.copy()
        for key in found:
            least = np.full(len(documents), len(documents))
            np.minimum.at(least, key, group)
            group = least[key]
        if (group == before).all():
            return group


def shared_with(documents: datasets.Dataset, others: datasets.Dataset, columns: list[str]) -> int:
    """Count the documents that have the entries of one of the others in these columns."""
    return int(np.isin(_digests(documents, columns), _digests(others, columns)).sum())


def warnings_of(buckets: np.ndarray, group: np.ndarray, name: str) -> list[str]:
    """Return sentences on controls that reach training as another row, and on documents that stand there repeatedly.

    Args:
        buckets: bucket of each row.
        group: what `same_documents` returns for the same rows.
        name: what the data are called.
    """
    found = []
    trained = np.unique(group[buckets > 0])
    controls = np.unique(group[buckets == 0])
    reached = np.intersect1d(controls, trained)
    if len(reached):
        found.append(
            f"{len(reached)} of the {len(controls)} controls (bucket 0) reach training, because another document of "
            f"{name} with the same id or the same text has a bucket above 0; the first is document {reached[0] + 1}. "
            "They are no controls: take these documents out, or samples that are made of them will mislead"
        )
    rows = Counter(group[buckets > 0].tolist())
    repeated = sum(count > 1 for count in rows.values())
    if repeated:
        found.append(
            f"{repeated} documents of {name} stand there more than once (the same id, or the same text): each is seen "
            "as often as its buckets add up to"
        )
    return found


def _digests(documents: datasets.Dataset, columns: list[str]) -> np.ndarray:
    """Return a number for the entries of each row in these columns, the same for the same; `datasets` caches them."""

    def digest(*entries: list[Any]) -> dict[str, list[int]]:
        *entries, places = entries
        rows = zip(zip(*entries, strict=True), places, strict=True)
        return {"digest": [_hash(repr((row, place) if None in row else row)) for row, place in rows]}

    numbers = documents.map(
        digest,
        batched=True,
        with_indices=True,
        input_columns=columns,
        remove_columns=documents.column_names,
        desc="comparing documents",
    )
    return np.array(list(numbers["digest"]), dtype=np.int64)


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
