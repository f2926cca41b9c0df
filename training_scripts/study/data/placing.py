"""Places of passages in their articles, so that none shares text with another.

An article is divided into as many parts of equal length as it gives passages, and each lies within its part:

    |-- passage --|          |  |-- passage --|       ||-- passage --|         |

It begins at the first paragraph of its part, or at a later paragraph, sentence or word if the text from there is
shared with another passage. Shared text is a run of 13 tokens (the length in Brown et al. 2020, arXiv 2005.14165,
appendix C, there of words). An article none of whose places is free for one of its passages is left out.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from hf_axonn_eval.data.overlaps import RunHashes


SHARED_RUN = 13  # tokens
# The least that a passage may take of its part, in characters for each token, so that it stays within it in other
# tokenizers too: tokens of English prose have three to five.
ROOM_OF_A_TOKEN = 6
TRIES = 64  # beginnings that are looked at in a part
SPARE = 16  # tokens beyond a passage: where text is cut off, the last ones are not those of the whole text

PARAGRAPH = re.compile(r"(?:\A|\n)\s*(?=\S)")
SENTENCE = re.compile(r"[.!?][\"')\]]*\s+(?=\S)")
WORD = re.compile(r"\s+(?=\S)")


class Span(NamedTuple):
    """Characters of an article, and the tokens that they are."""

    start: int
    end: int
    input_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class Placed:
    """The passages that `place` found.

    Attributes:
        spans: article -> its passages from the first to the last, in the order of the articles.
        too_short: articles that are too short for their passages.
        shared: articles left out because a passage shares text with another wherever it is put.
        moved: passages that begin later than they would, because they share text there.
    """

    spans: dict[str, list[Span]] = field(default_factory=dict)
    too_short: list[str] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)
    moved: int = 0


def place(
    articles: Iterable[Mapping[str, Any]],
    tokenizer,
    *,
    per_article: int,
    length: int,
    most: int | None = None,
    add_special_tokens: bool = False,
) -> Placed:
    """Take passages from articles, in their order.

    Args:
        articles: mappings with `id` and `text`.
        tokenizer: a fast tokenizer of Transformers.
        per_article: passages of each; a single one is the beginning of its article.
        length: tokens of a passage.
        most: articles to take; None: all.
        add_special_tokens: whether a passage begins with the tokenizer's BOS.
    """
    found, moved = Placed(), 0
    taken: set[int] = set()
    for article in articles:
        if len(found.spans) == most:
            break
        text = article["text"]
        spans: list[Span] = []
        own: set[int] = set()
        reason = None
        for number in range(per_article):
            low, high = (len(text) * part // per_article for part in (number, number + 1))
            reason = found.too_short
            # A single passage begins where its article does, and may fill it.
            starts = [0] if per_article == 1 else _beginnings(text, low, high - ROOM_OF_A_TOKEN * length)
            for tried, start in enumerate(starts):
                span = span_at(text, start, tokenizer, length=length, add_special_tokens=add_special_tokens)
                if span is None or span.end > high:
                    continue
                reason = found.shared
                runs = set(shared_runs(span.input_ids).tolist())
                if not runs & taken and not runs & own:
                    spans.append(span)
                    own |= runs
                    moved += tried > 0
                    reason = None
                    break
            if reason is not None:
                reason.append(article["id"])
                break
        if reason is None:
            found.spans[article["id"]] = spans
            taken |= own
    return Placed(spans=found.spans, too_short=found.too_short, shared=found.shared, moved=moved)


def span_at(text: str, start: int, tokenizer, *, length: int, add_special_tokens: bool = False) -> Span | None:
    """Return the first `length` tokens of the text from a character on; None if there are fewer."""
    characters = ROOM_OF_A_TOKEN * (length + SPARE)
    while True:
        piece = text[start : start + characters]
        encoding = tokenizer(piece, add_special_tokens=add_special_tokens, return_offsets_mapping=True, verbose=False)
        ids = encoding["input_ids"]
        complete = start + characters >= len(text)
        if complete and len(ids) < length:
            return None
        if complete or len(ids) >= length + SPARE:
            return Span(start, start + encoding["offset_mapping"][length - 1][1], ids[:length])
        characters *= 2


def shared_runs(input_ids: Sequence[int]) -> np.ndarray:
    """Return the hashes of the runs of 13 tokens, sorted, as uint64."""
    return RunHashes(None, SHARED_RUN, 1).hash_runs("", {"input_ids": input_ids})


class Known:
    """Runs of passages, to find documents that share one."""

    def __init__(self, passages: Iterable[Sequence[int]]) -> None:
        runs = [shared_runs(ids) for ids in passages]
        together = np.concatenate(runs) if runs else np.empty(0, np.uint64)
        self._runs, counts = np.unique(together, return_counts=True)
        self.repeated = int((counts > 1).sum())  # runs that more than one passage has

    def shares(self, input_ids: Sequence[int]) -> bool:
        """Return whether a document has a run of a passage."""
        if not len(self._runs):
            return False
        runs = shared_runs(input_ids)
        places = np.minimum(np.searchsorted(self._runs, runs), len(self._runs) - 1)
        return bool((self._runs[places] == runs).any())


def latin_square(spans: Mapping[str, Sequence[Any]], buckets: Sequence[int], seed: int) -> dict[tuple[str, int], int]:
    """Return (article, passage) -> bucket.

    Every bucket has equally many passages of every article, or, where articles have one, of every len(buckets)
    articles in a row; over len(buckets) seeds each passage is in every bucket once.
    """
    return {
        (article, number): buckets[(index + number + seed) % len(buckets)]
        for index, (article, places) in enumerate(spans.items())
        for number in range(len(places))
    }


def _beginnings(text: str, low: int, high: int) -> Iterator[int]:
    """Yield the places where a passage may begin, from `low` to `high`: paragraphs, then sentences, then words."""
    patterns = (PARAGRAPH, SENTENCE, WORD)
    matches = chain.from_iterable(pattern.finditer(text, max(low - 1, 0), high + 1) for pattern in patterns)
    places = dict.fromkeys(match.end() for match in matches if low <= match.end() <= high)
    return islice(places, TRIES)
