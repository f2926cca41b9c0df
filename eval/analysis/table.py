"""Results as columns of numbers: what a summary keeps of each sample.

A `SampleResult` holds texts and a list per token; a million of them fit into no memory. A table reads them once, from
any iterator, and keeps some hundred bytes a sample.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, nan

import numpy as np

from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.metrics.discoverability import CHANCES, n_needed
from hf_axonn_eval.metrics.inextractability import easiest_window
from hf_axonn_eval.metrics.registry import METRICS, value
from hf_axonn_eval.metrics.text import is_degenerate


MEMBERSHIP = "membership."  # + name of the score
NEEDED = "n_needed."  # + p
NEEDED_AT_LEAST = "n_at_least."  # + p
RANK_BITS = "rank_bits"  # the metric; + "." and a length: of the easiest window
NEAR_COPIES = "near_copies."  # + edits
NEAR_COPIES_COST = "near_copies.draws"


def share_names() -> list[str]:
    """List the metrics that are yes or no for a sample."""
    return [name for name, metric in METRICS.items() if metric.mean == "share"]


@dataclass(frozen=True)
class Table:
    """Numbers of samples, a column each; NaN where a sample does not have the number.

    Args:
        ids: sample ids.
        documents: [samples] the document of each sample.
        buckets: [samples] whole numbers.
        columns: by name [samples] float64: METRICS, `suffix_length`, `near_tie`, `degenerate`, `membership.<score>`,
            `n_needed.<p>`, `n_at_least.<p>`, `rank_bits.<tokens>`, `near_copies.<edits>`, probabilities, and
            `near_copies.draws`, what they cost.
    """

    ids: Sequence[str]
    documents: Sequence[Hashable]
    buckets: np.ndarray
    columns: Mapping[str, np.ndarray]

    @classmethod
    def read(cls, results: Iterable[SampleResult], lengths: Sequence[int] = ()) -> Table:
        """Read results once.

        Args:
            results: of one run.
            lengths: of windows, in tokens, for which `rank_bits` is a column too.
        Raises:
            ValueError: there are none.
        """
        ids: list[str] = []
        documents: list[str] = []
        names: dict[str, str] = {}
        buckets = array("q")
        columns: dict[str, array[float]] = {}
        for result in results:
            for name, number in _numbers(result, lengths).items():
                if number is not None:
                    column = columns.setdefault(name, array("d"))
                    column.extend([nan] * (len(ids) - len(column)))  # samples before it that did not have it
                    column.append(number)
            ids.append(result.sample_id)
            documents.append(names.setdefault(result.document_id, result.document_id))  # one string a document
            buckets.append(result.bucket)
        if not ids:
            raise ValueError("there are no results to summarize; in a job of several ranks only rank 0 has them.")
        for column in columns.values():
            column.extend([nan] * (len(ids) - len(column)))
        return cls(ids, documents, np.asarray(buckets), {name: np.asarray(column) for name, column in columns.items()})

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, chosen: np.ndarray) -> Table:
        """Select the samples at these places, in this order; `chosen` holds places, or a bool a sample."""
        places = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
        in_order = places.tolist()
        return Table(
            [self.ids[place] for place in in_order],
            [self.documents[place] for place in in_order],
            self.buckets[places],
            {name: column[places] for name, column in self.columns.items()},
        )

    def column(self, name: str) -> np.ndarray:
        """Return a column, all NaN if no sample has the number."""
        found = self.columns.get(name)
        return np.full(len(self), nan) if found is None else found

    def with_column(self, name: str, column: np.ndarray) -> Table:
        """Return the same samples with one more number each."""
        return Table(self.ids, self.documents, self.buckets, {**self.columns, name: column})

    def groups(self) -> dict[str, np.ndarray]:
        """Return [samples] bool of each bucket, by its number as text in growing order, and last of "all"."""
        groups = {str(bucket): self.buckets == bucket for bucket in np.unique(self.buckets)}
        return groups | {"all": np.ones(len(self), dtype=bool)}


def _numbers(result: SampleResult, lengths: Sequence[int]) -> dict[str, float | bool | None]:
    numbers: dict[str, float | bool | None] = {metric: value(result, metric) for metric in METRICS}
    numbers["suffix_length"] = result.suffix_length
    numbers["near_tie"] = result.near_tie
    numbers["degenerate"] = is_degenerate(result.type_token_ratio, result.zlib_ratio)
    for score, number in (result.membership or {}).items():
        numbers[MEMBERSHIP + score] = number
    if result.sampled_logprob is not None:
        for chance in CHANCES:
            numbers[f"{NEEDED}{chance:g}"] = n_needed(result.sampled_logprob, chance)
    bits = numbers[RANK_BITS] if RANK_BITS in numbers else None
    if bits is not None:
        for chance in CHANCES:
            numbers[f"{NEEDED_AT_LEAST}{chance:g}"] = n_needed(-bits * log(2), chance)
    for length in lengths:
        if result.ranks is not None and length <= result.suffix_length:
            numbers[f"{RANK_BITS}.{length}"] = easiest_window(result.ranks, length).bits
    for edits, logprob in enumerate(result.near_copies or ()):
        numbers[f"{NEAR_COPIES}{edits}"] = exp(logprob)
    if result.near_copies_read is not None:
        numbers[NEAR_COPIES_COST] = result.near_copies_read / max(1, result.suffix_length - 1)
    return numbers
