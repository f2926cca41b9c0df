"""Places of the suffixes of samples in the text of their document, in characters.

Samples are in tokens. Their characters are found by tokenizing the document again, as `sampling` did, and every token
of a sample is compared with the token at its place: another text or tokenizer is an error, not another place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from hf_axonn_eval.data.samples import Sample, tokens_of


_AT_ONCE = 256  # windows that are tokenized together
_BEFORE = (0, 1, 2)  # special tokens before a text
_CHARACTERS_A_TOKEN = 8  # of text that is tokenized for a window; more if these do not give the window's tokens


class Span(NamedTuple):
    """Characters of the document: where a window begins, where its suffix begins, and before which one it ends."""

    start: int
    begin: int
    end: int


class _Text(NamedTuple):
    """A tokenized text: ids without special tokens, and the characters of each."""

    ids: list[int]
    spans: list[tuple[int, int]]


def first_character(sample: Sample) -> int | None:
    """Return the first character of a window that slides over characters; None for a sample cut at tokens."""
    name = sample.sample_id.removeprefix(f"{sample.document_id}@")
    return int(name[:-1]) if re.fullmatch(r"\d+c", name, re.ASCII) else None


def suffix_spans(text: str, samples: Sequence[Sample], tokenizer: Any) -> list[Span]:
    """Find the samples of one document in its text.

    A suffix begins where the token before it ends, so that suffixes side by side leave no gap where a tokenizer counts
    no space to its tokens. A character of which the prefix has some bytes and the suffix the others is the suffix's.

    Args:
        text: of the document.
        samples: of the document, cut at tokens or sliding over characters.
        tokenizer: that they were cut with; a fast one.
    Raises:
        ValueError: a slow tokenizer, or the text does not give the tokens of a sample.
    """
    if not tokenizer.is_fast:
        raise ValueError("places in characters need a fast tokenizer, which says where its tokens are in the text.")
    special = set(tokenizer.all_special_ids)
    places: dict[int, Span] = {}
    at_tokens: list[int] = []
    sliding: list[int] = []
    for number, sample in enumerate(samples):
        (at_tokens if first_character(sample) is None else sliding).append(number)
    if at_tokens:
        (whole,) = _tokenize(tokenizer, [text])
        before = _tokens_before(whole, [samples[number] for number in at_tokens], special)
        for number in at_tokens:
            sample = samples[number]
            places[number] = _span(whole, sample.offset - before, sample, special)
    for begin in range(0, len(sliding), _AT_ONCE):
        numbers = sliding[begin : begin + _AT_ONCE]
        characters = _CHARACTERS_A_TOKEN
        while numbers:
            windows = [samples[number] for number in numbers]
            starts = [first_character(sample) or 0 for sample in windows]
            ends = [start + characters * tokens_of(sample) for start, sample in zip(starts, windows, strict=True)]
            pieces = _tokenize(tokenizer, [text[start:end] for start, end in zip(starts, ends, strict=True)])
            left = []
            for number, sample, start, end, piece in zip(numbers, windows, starts, ends, pieces, strict=True):
                first = _first_token(piece, sample, special)
                if first is not None:
                    span = _span(piece, first, sample, special)
                    places[number] = Span(start, start + span.begin, start + span.end)
                elif end < len(text):
                    left.append(number)  # the cut through the text changed the last tokens
                else:
                    raise _other(sample)
            numbers, characters = left, characters * 4
    return [places[number] for number in range(len(samples))]


def _tokenize(tokenizer: Any, texts: list[str]) -> list[_Text]:
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [_Text(*each) for each in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)]


def _first_token(piece: _Text, sample: Sample, special: set[int]) -> int | None:
    """Return minus the number of special tokens that a window has before those of its text; None: other tokens."""
    return next((-before for before in _BEFORE if _fits(piece, sample, -before, special)), None)


def _tokens_before(whole: _Text, samples: Sequence[Sample], special: set[int]) -> int:
    """Count the special tokens that samples have before tokens of the text: the least number that fits all."""
    for before in _BEFORE:
        if all(_fits(whole, sample, sample.offset - before, special) for sample in samples):
            return before
    raise _other(next(sample for sample in samples if not _fits(whole, sample, sample.offset, special)))


def _leading(sample: Sample, special: set[int]) -> int:
    """Count the special tokens a sample begins with: a BOS may stand before tokens from the middle of a document."""
    return next((place for place, token in enumerate(sample.prefix) if token not in special), len(sample.prefix))


def _fits(piece: _Text, sample: Sample, first: int, special: set[int]) -> bool:
    """Compare a sample, its first token put at the `first`-th of the piece, with the tokens of the piece.

    Special tokens at its beginning, and those beyond the end of the piece, stand for no text.
    """
    ids = sample.prefix + sample.suffix
    begin = first + _leading(sample, special)
    inside = range(begin, min(first + len(ids), len(piece.ids)))
    beyond = ids[max(len(piece.ids) - first, 0) :]
    return (
        begin >= 0 and special.issuperset(beyond) and all(piece.ids[place] == ids[place - first] for place in inside)
    )


def _span(piece: _Text, first: int, sample: Sample, special: set[int]) -> Span:
    """The span of a sample whose first token is put at the `first`-th of the piece."""
    last = len(piece.spans) - 1
    middle, end = first + len(sample.prefix), min(first + tokens_of(sample) - 1, last)
    start = piece.spans[min(first + _leading(sample, special), last)][0]
    begin = piece.spans[max(middle, 0)][0] if middle <= last else piece.spans[last][1]
    if 0 < middle <= last:
        begin = min(begin, piece.spans[middle - 1][1])
    return Span(start, begin, max(piece.spans[end][1], begin))


def _other(sample: Sample) -> ValueError:
    return ValueError(
        f"sample {sample.sample_id!r}: the text of document {sample.document_id!r} does not give its tokens. Give the "
        "documents and the tokenizer that `samples` was given."
    )
