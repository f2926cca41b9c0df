"""Documents of held-out rows: rows are packed, and an interval counts documents."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_axonn_scripts.data import tokenize
from hf_axonn_scripts.study.data.texts import read_rows


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Text that no run trains on.

    Attributes:
        rows: by document its rows of token ids; a row of several documents is of the one that it has most tokens of.
        texts: the documents, with `id` and `text`, of which rows have any token.
    """

    rows: Mapping[str, Sequence[Sequence[int]]]
    texts: Sequence[Mapping[str, str]]

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(len(row) for rows in self.rows.values() for row in rows)


def read_held_out(rows_file: Path, texts_file: Path, tokenizer: Any) -> HeldOut:
    """Read rows, and find their documents by tokenizing the texts again.

    Args:
        rows_file: data/TOKENIZER/held_out.jsonl: the texts one behind the other, without those left out, in rows.
        texts_file: texts/held_out.jsonl.
        tokenizer: that of the rows.
    Raises:
        ValueError: the rows are not of these texts.
    """
    rows = [row["input_ids"] for row in read_rows(rows_file)]
    stream = [token for row in rows for token in row]
    of: list[str] = []  # the document of each token of the stream
    texts: list[Mapping[str, str]] = []
    for document in read_rows(texts_file):
        if len(of) == len(stream):
            break
        for ids in tokenize([document["text"]], tokenizer):
            piece = stream[len(of) : len(of) + len(ids)]
            if piece == ids[: len(piece)]:
                of += [document["id"]] * len(piece)
                texts.append({"id": document["id"], "text": document["text"]})
    if not rows or len(of) < len(stream):
        raise ValueError(
            f"{rows_file} is not made of {texts_file}: {len(of):,} of its {len(stream):,} tokens are. Remove it, and "
            "do the step again that writes it"
        )
    found: dict[str, list[Sequence[int]]] = {}
    start = 0
    for row in rows:
        ((name, _),) = Counter(of[start : start + len(row)]).most_common(1)
        found.setdefault(name, []).append(row)
        start += len(row)
    return HeldOut(rows=found, texts=texts)
