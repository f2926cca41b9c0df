"""What is trained on: rows of random tokens of unequal lengths, with ignored labels, and an uneven end of the epoch.

Every row is another sequence of tokens, so a batch tells which rows it has, whoever has made it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


Row = dict[str, list[int]]
SHORTEST, LONGEST = 5, 12
FIRST_ID = 3  # after the padding and the marks of beginning and end
IGNORED = -100


def make_rows(number: int, vocabulary: int, seed: int) -> list[Row]:
    """Rows with different lengths and numbers of labels.

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


def collate(rows: Sequence[Row]) -> dict[str, Tensor]:
    """A batch, right-padded to its longest row."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(values: list[int], value: int) -> list[int]:
        return values + [value] * (longest - len(values))

    return {
        "input_ids": torch.tensor([padded(row["input_ids"], 0) for row in rows]),
        "attention_mask": torch.tensor([padded([1] * len(row["input_ids"]), 0) for row in rows]),
        "labels": torch.tensor([padded(row["labels"], IGNORED) for row in rows]),
    }


def tokens_of(batch: Mapping[str, Tensor]) -> int:
    """Labels that are predicted in a batch: Transformers shifts them by one."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def labels_of(batch: Mapping[str, Tensor]) -> int:
    """Labels of a batch, those of first tokens too: what Trainer counts of a model whose loss it does not know."""
    return int((batch["labels"] != IGNORED).sum())


def seen_in(batch: Mapping[str, Tensor], rows: Sequence[Row]) -> list[int]:
    """Indices of the rows in a batch, those left away that have no labels: they count nothing. -1: no such row."""
    index = {tuple(row["input_ids"]): number for number, row in enumerate(rows)}
    found = []
    for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
        if bool((labels != IGNORED).any()):
            found.append(index.get(tuple(ids[mask.bool()].tolist()), -1))
    return found
