"""Rows that are trained on: random tokens of unequal lengths, with ignored labels, and an uneven end of the epoch.

Every row is another sequence of tokens, so a batch tells which rows it has, whoever has made it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_axonn.engine.documents import document_fields, find_document_ids


Row = dict[str, list[int]]
SHORTEST, LONGEST = 5, 12
FIRST_ID = 3  # after the padding and the marks of beginning and end
IGNORED = -100


def make_rows(number: int, vocabulary: int, seed: int) -> list[Row]:
    """Make rows with different lengths and numbers of labels.

    Raises:
        ValueError: the vocabulary is too small for rows that differ.
    """
    generator = torch.Generator().manual_seed(seed)
    rows: dict[tuple[int, ...], Row] = {}
    for _ in range(100 * number):
        if len(rows) == number:
            return list(rows.values())
        length = int(torch.randint(SHORTEST, LONGEST + 1, (), generator=generator))
        ids = torch.randint(FIRST_ID, vocabulary // 2, (length,), generator=generator).tolist()
        ignored = len(rows) % 3  # of a prompt, as it were
        labels = [IGNORED] * ignored + ids[ignored:]
        if len(rows) % 4 == 1:
            labels[length // 2] = IGNORED
        rows[tuple(ids)] = {"input_ids": ids, "labels": labels}
    raise ValueError(f"a vocabulary of {vocabulary} is too small for {number} rows that differ.")


def collate(rows: Sequence[Row], least: int = 0) -> dict[str, Tensor]:
    """Make a batch, right-padded to its longest row, and to a least length."""
    longest = max(least, *(len(row["input_ids"]) for row in rows))

    def pad(values: list[int], value: int) -> list[int]:
        return values + [value] * (longest - len(values))

    return {
        "input_ids": torch.tensor([pad(row["input_ids"], 0) for row in rows]),
        "attention_mask": torch.tensor([pad([1] * len(row["input_ids"]), 0) for row in rows]),
        "labels": torch.tensor([pad(row["labels"], IGNORED) for row in rows]),
    }


def collate_evenly(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Make a batch, right-padded to the longest row that there may be: dispatch_batches joins such batches."""
    return collate(rows, LONGEST)


def tokens_of(batch: Mapping[str, Tensor]) -> int:
    """Count the labels that are predicted in a batch: Transformers shifts them by one. Without a label for each token,
    count rows."""
    if batch["labels"].shape != batch["input_ids"].shape:
        return len(batch["input_ids"])
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def labels_of(batch: Mapping[str, Tensor]) -> int:
    """Count all labels of a batch, those of first tokens too, as Trainer does if it does not know the loss."""
    return int((batch["labels"] != IGNORED).sum())


def spans(batch: Mapping[str, Tensor]) -> list[tuple[int, Tensor]]:
    """Return for each row of a batch its line and its places there: without padding, or one of a packed line."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    places = torch.arange(ids.shape[1])
    documents = find_document_ids(ids, **document_fields(batch))
    if documents is None:
        return [(line, places) for line in range(len(ids))]
    if mask is not None and mask.shape == ids.shape:
        documents = documents.masked_fill(mask == 0, -1)
    return [
        (line, places[numbers == number])
        for line, numbers in enumerate(documents)
        for number in numbers.unique().tolist()
        if number >= 0
    ]


def seen_in(batch: Mapping[str, Tensor], rows: Sequence[Row]) -> list[int]:
    """Return the indices of the rows in a batch, without those that have no labels. -1: no such row."""
    index = {tuple(row["input_ids"]): number for number, row in enumerate(rows)}
    found = []
    for line, places in spans(batch):
        if bool((batch["labels"][line, places] != IGNORED).any()):
            found.append(index.get(tuple(batch["input_ids"][line, places].tolist()), -1))
    return found


def fingerprints(batch: Mapping[str, Tensor]) -> list[int]:
    """Return numbers that stand for the rows of a batch of unknown rows: the same for the same ids and labels."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return []
    labels = batch.get("labels")
    found = []
    for line, places in spans(batch):
        of_row = labels[line] if isinstance(labels, Tensor) and len(labels) == len(ids) else torch.zeros(())
        values = [ids[line, places].tolist(), (of_row[places] if of_row.shape == ids[line].shape else of_row).tolist()]
        found.append(int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:4], "big"))
    return found


def pack(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Put all rows one after another in one line, as Transformers' DataCollatorWithFlattening has them."""
    return {
        "input_ids": torch.tensor([[token for row in rows for token in row["input_ids"]]]),
        "labels": torch.tensor([[label for row in rows for label in (IGNORED, *row["labels"][1:])]]),
        "position_ids": torch.tensor([[place for row in rows for place in range(len(row["input_ids"]))]]),
    }
