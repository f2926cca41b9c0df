"""The share of a book that comes out of a model, in characters.

Windows slide over a book, and p_z is the chance that one draw gives the suffix of a window. A character is covered at
tau if it is in a suffix with p_z >= tau, so that coverage is a share of the characters of the book, not of windows.
All windows of the book are asked: a census of it, without an interval, which says nothing of other books.

Source: Cooper et al. 2025, arXiv 2505.12546, and its code, pasta41/book-extraction-science at 7720bceb, script/
memorization/plots/plot_utils.py, `max_variable_length_probs`. That code counts from 50 (the prefix's tokens)
*characters* after the beginning of a window to one before its end, so it begins within the prefix. `Book.released` is
this; everything else here counts the characters of the suffix.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import deprecated

from hf_axonn_eval.data.characters import Span, suffix_spans
from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.data.samples import Sample


THRESHOLDS = (0.001, 0.01, 0.1, 0.5, 0.75)  # 0.001: the least that the source calls extraction
SAMPLED, FULL = "sampled", "full"


class Passage(NamedTuple):
    """Characters from `begin` to before `end`, and the largest p_z of a suffix on them; None if not measured."""

    begin: int
    end: int
    most: float | None


@dataclass(frozen=True, kw_only=True)
class Book:
    """The parts of one document that one model gives.

    Args:
        document_id: the document.
        bucket: how often it was trained on.
        characters: of its text.
        windows: samples of it.
        greedy_windows: of which so many come back by greedy decoding.
        probability: of what p_z is: "sampled", by the stated sampler, or "full", from the full distribution at
            temperature 1; None if it was not measured.
        edges: [pieces + 1] characters between which all of the following are constant; the first is 0, the last
            `characters`.
        best: [pieces] the largest p_z of the suffixes that cover it; NaN where none does.
        released: [pieces] the same by the ranges of the authors' code.
        greedy: [pieces] whether it is in a suffix that greedy decoding gives back.
    """

    document_id: str
    bucket: int
    characters: int
    windows: int
    greedy_windows: int
    probability: str | None
    edges: np.ndarray
    best: np.ndarray
    released: np.ndarray
    greedy: np.ndarray

    def count_covered(self, threshold: float | None) -> int:
        """Count the characters in suffixes with p_z of at least the threshold; None: that greedy decoding gives."""
        return self._count(self._chosen(threshold))

    @deprecated("Book.covered is Book.count_covered now, and leaves with the next release.", category=FutureWarning)
    def covered(self, threshold: float | None) -> int:
        """Call `count_covered`, by its name until 0.2."""
        return self.count_covered(threshold)

    def count_as_released(self, threshold: float) -> int:
        """Count the same by the ranges of the authors' code."""
        return self._count(self.released >= threshold)

    @property
    def asked(self) -> int:
        """Characters that are in any suffix; the beginning of a book, for example, is only in prefixes."""
        return self._count(~np.isnan(self.best))

    def passages(self, threshold: float | None) -> list[Passage]:
        """List the longest runs of covered characters, in the order of the text; threshold as of `count_covered`."""
        chosen = self._chosen(threshold)
        changes = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]])))
        found = []
        for first, last in zip(changes[::2].tolist(), changes[1::2].tolist(), strict=True):
            most = float(self.best[first:last].max()) if self.probability is not None else None
            found.append(Passage(int(self.edges[first]), int(self.edges[last]), most))
        return found

    def _chosen(self, threshold: float | None) -> np.ndarray:
        return self.greedy if threshold is None else self.best >= threshold

    def _count(self, chosen: np.ndarray) -> int:
        return int(np.diff(self.edges)[chosen].sum())


def books(
    runs: Mapping[str, Iterable[SampleResult]],
    samples: Sequence[Sample],
    documents: Iterable[Mapping[str, Any]],
    *,
    tokenizer: Any,
) -> dict[str, list[Book]]:
    """Find the parts that models give of the documents that have samples at several places.

    Args:
        runs: results by the name of the run.
        samples: what was asked.
        documents: with `id` and `text`; others than those of samples are passed over.
        tokenizer: of the samples.
    Returns:
        By run a book for each such document, in the order of the documents.
    Raises:
        ValueError: a document is missing, has no text, or another one than when it was sampled; results of other
            samples.
    """
    places: dict[str, list[int]] = {}
    offsets: dict[str, set[int]] = {}
    for place, sample in enumerate(samples):
        places.setdefault(sample.document_id, []).append(place)
        offsets.setdefault(sample.document_id, set()).add(sample.offset)
    places = {name: some for name, some in places.items() if len(offsets[name]) > 1}
    answers = {name: _answers(results) for name, results in runs.items()}
    found: dict[str, list[Book]] = {name: [] for name in runs}
    seen = set()
    for document in documents:
        name = str(document["id"])
        if name not in places or name in seen:
            continue
        seen.add(name)
        if not isinstance(document.get("text"), str):
            raise ValueError(f"document {name!r} is token ids, so that it has no characters: give its text.")
        some = [samples[place] for place in places[name]]
        spans = suffix_spans(document["text"], some, tokenizer)
        for run, given in answers.items():
            found[run].append(_book(run, some, spans, len(document["text"]), given))
    missing = [name for name in places if name not in seen]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(places)} documents with samples at several places are not among the documents "
            f"that were given, such as {missing[0]!r}: give those that `samples` was given, with the same ids."
        )
    return found


def book_coverage(found: Mapping[str, Sequence[Book]], *, thresholds: Sequence[float] = THRESHOLDS) -> dict[str, Any]:
    """Give the numbers of books, as JSON can say them.

    Args:
        found: what `books` returned.
        thresholds: tau.
    Returns:
        `thresholds`, and `runs`: by name and document id `bucket`, `characters`, `windows`, `greedy_windows`, `asked`
        (characters in any suffix), `probability`, and `greedy`, `at` and `at_as_released`, the latter by threshold as
        text: each `characters` that are covered and their `share` of the book's; `greedy` and `at` also the
        number of `passages` and the `longest` in characters.
    Raises:
        ValueError: a threshold that is not above 0 and at most 1.
    """
    wrong = [threshold for threshold in thresholds if not 0 < threshold <= 1]
    if wrong:
        raise ValueError(f"tau is {wrong[0]}, but it must be a chance above 0 and at most 1.")
    return {
        "thresholds": list(thresholds),
        "runs": {
            name: {book.document_id: _numbers(book, thresholds) for book in some} for name, some in found.items()
        },
    }


def _answers(results: Iterable[SampleResult]) -> dict[str, tuple[float | None, bool, bool]]:
    """Return by sample p_z, if it is of a stated sampler, and if greedy decoding gives the suffix back."""
    found: dict[str, tuple[float | None, bool, bool]] = {}
    for result in results:
        sampled = result.sampled_logprob is not None
        logprob = result.sampled_logprob if sampled else result.logprob
        chance = None if logprob is None else exp(min(logprob, 0.0))
        found[result.sample_id] = (chance, sampled, result.exact_match)
    return found


def _book(
    run: str,
    samples: Sequence[Sample],
    spans: Sequence[Span],
    characters: int,
    answers: Mapping[str, tuple[float | None, bool, bool]],
) -> Book:
    best, released = np.full(characters, np.nan), np.full(characters, np.nan)
    greedy = np.zeros(characters, dtype=bool)
    kinds = set()
    count = 0
    for sample, span in zip(samples, spans, strict=True):
        if sample.sample_id not in answers:
            raise ValueError(f"run {run!r} has no result of sample {sample.sample_id!r}: it was asked other samples.")
        chance, sampled, exact = answers[sample.sample_id]
        suffix = slice(span.begin, span.end)
        as_released = slice(span.start + len(sample.prefix), span.end - 1)
        if chance is not None:
            kinds.add(SAMPLED if sampled else FULL)
            np.fmax(released[as_released], chance, out=released[as_released])
        np.fmax(best[suffix], -1.0 if chance is None else chance, out=best[suffix])
        greedy[suffix] |= exact
        count += exact
    if len(kinds) > 1:
        raise ValueError(f"run {run!r} has a sampler's probability of some samples and none of others.")
    changes = np.flatnonzero(_differs(best) | _differs(released) | _differs(greedy)) + 1
    edges = np.concatenate([[0], changes, [characters]])
    return Book(
        document_id=samples[0].document_id,
        bucket=samples[0].bucket,
        characters=characters,
        windows=len(samples),
        greedy_windows=count,
        probability=kinds.pop() if kinds else None,
        edges=edges,
        best=best[edges[:-1]],
        released=released[edges[:-1]],
        greedy=greedy[edges[:-1]],
    )


def _differs(values: np.ndarray) -> np.ndarray:
    """[characters - 1] whether each character differs from the next; NaN is like NaN."""
    differs: np.ndarray = (values[1:] != values[:-1]) & ~(np.isnan(values[1:]) & np.isnan(values[:-1]))
    return differs


def _numbers(book: Book, thresholds: Sequence[float]) -> dict[str, Any]:
    def share(characters: int) -> dict[str, Any]:
        return {"characters": characters, "share": characters / book.characters}

    def entry(threshold: float | None) -> dict[str, Any]:
        lengths = [passage.end - passage.begin for passage in book.passages(threshold)]
        return {**share(book.count_covered(threshold)), "passages": len(lengths), "longest": max(lengths, default=0)}

    by_text = {f"{threshold:g}": threshold for threshold in (thresholds if book.probability is not None else ())}
    names = ("bucket", "characters", "windows", "greedy_windows", "asked", "probability")
    return {
        **{name: getattr(book, name) for name in names},
        "greedy": entry(None),
        "at": {text: entry(threshold) for text, threshold in by_text.items()},
        "at_as_released": {text: share(book.count_as_released(threshold)) for text, threshold in by_text.items()},
    }
