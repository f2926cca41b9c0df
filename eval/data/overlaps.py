"""Documents of different buckets that share text: a control that is nearly a member is no control.

    the set of a document   its runs of n words (or token ids), each as a 64-bit hash
    Jaccard                 shared / all of both                    near-identical documents
    containment             shared / those of the smaller one       a short one inside of a long one
    covered                 share of one document's runs that any member has

All pairs with a shared run are found, by an index over the runs. Nothing is missed by chance, as with bands of
MinHash, which find what has a large Jaccard similarity and so no short text in a long one. Where the index does not
fit into memory, only hashes that a number divides are kept, of all documents the same ones (Broder's MOD sketch): the
three numbers are estimates then, and of a short document nothing may be left.

Sources: Broder 1997, On the resemblance and containment of documents; `covered` as a filter of controls, Duan et al.
2024, arXiv 2402.07841.
"""

import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, combinations, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array

from hf_axonn_eval.data.jsonl import decode_utf8, replacing
from hf_axonn_eval.data.sampling import document_identity


HELD_OUT = "held_out"
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying loses nothing
MOST_PAIRS = 200_000
_ROWS_AT_ONCE = 256
_CACHED_WORDS = 1_000_000


class Overlap(NamedTuple):
    """Two documents of different buckets: ids, buckets ("held_out" for those), how many runs each has, how many both
    have, and the two measures."""

    ids: tuple[str, str]
    buckets: tuple[str, str]
    runs: tuple[int, int]
    shared: int
    jaccard: float
    containment: float


@dataclass(frozen=True, kw_only=True)
class Overlaps:
    """Result of `find_overlaps`.

    Args:
        settings: n, least, one_in, and whether runs are of "words" or "ids".
        documents: how many there are, by bucket.
        without_runs: how many of them have no run, and overlap with nothing.
        pairs: the overlaps, the largest containment first.
        covered: by id of a control or held-out document the share of its runs that members have, where it is at least
            `least`.
        drop: ids of controls and held-out documents that are covered, or in a pair with a member.
    """

    settings: dict[str, Any]
    documents: dict[str, int]
    without_runs: int
    pairs: list[Overlap]
    covered: dict[str, float]
    drop: list[str]

    def by_buckets(self) -> list[dict[str, Any]]:
        """Count for each two buckets the overlapping pairs, the documents of each in them and the largest numbers."""
        found: dict[tuple[str, str], list[Overlap]] = {two: [] for two in combinations(self.documents, 2)}
        for pair in self.pairs:
            found[pair.buckets].append(pair)
        return [
            {
                "buckets": list(two),
                "pairs": len(pairs),
                "documents": [len({pair.ids[side] for pair in pairs}) for side in (0, 1)],
                "most_jaccard": max((pair.jaccard for pair in pairs), default=0.0),
                "most_containment": max((pair.containment for pair in pairs), default=0.0),
            }
            for two, pairs in found.items()
        ]

    def record(self) -> dict[str, Any]:
        """Return everything, for a JSON file."""
        return {
            "settings": self.settings,
            "documents": self.documents,
            "without_runs": self.without_runs,
            "by_buckets": self.by_buckets(),
            "pairs": [pair._asdict() for pair in self.pairs],
            "covered": self.covered,
            "drop": self.drop,
        }


def find_overlaps(
    documents: Iterable[Mapping[str, Any]],
    held_out: Iterable[Mapping[str, Any]] = (),
    *,
    tokenizer=None,
    n: int = 8,
    least: float = 0.2,
    one_in: int = 1,
) -> Overlaps:
    """Find documents of different buckets that share text.

    Each is read once, and takes about 35 bytes of memory for each of its runs.

    Args:
        documents: mappings with `id`, `bucket` and `text` or `input_ids`; bucket 0 are controls, all others members.
        held_out: the same of documents that no model was trained on; their bucket is ignored.
        tokenizer: compare the ids that it gives a text; by default texts are compared by words: runs of letters and
            digits, in Unicode's NFKC form and without case.
        n: words, or ids, in a run. A shorter document is one run.
        least: containment, or covered share, from which on documents overlap.
        one_in: keep one of this number of hashes; above 1 all numbers are estimates.
    Raises:
        ValueError: a number that cannot be, a document without its fields, an id that occurs twice, no documents,
            texts beside ids without a tokenizer, or more than 200,000 pairs.
    """
    if n < 1 or one_in < 1 or not 0 < least <= 1:
        raise ValueError(
            f"n is {n}, one_in {one_in} and least {least}, but n and one_in must be at least 1, and least above 0 and "
            "at most 1."
        )
    labelled = chain(((None, document) for document in documents), ((HELD_OUT, document) for document in held_out))
    hashes = RunHashes(tokenizer, n, one_in)
    ids: dict[str, str] = {}
    runs: list[np.ndarray] = []
    for number, (label, document) in enumerate(labelled, start=1):
        document_id, bucket = document_identity(number, document)
        if document_id in ids:
            raise ValueError(
                f"document id {document_id!r} occurs twice; ids must tell documents apart, those of controls and "
                "held-out ones too."
            )
        ids[document_id] = label or str(bucket)
        runs.append(hashes.hash_runs(document_id, document))
    if not ids:
        raise ValueError("there are no documents to compare.")
    names, labels, sizes = list(ids), list(ids.values()), np.array([len(some) for some in runs])
    shared = _shared_runs(runs)
    del runs
    buckets = sorted(set(labels), key=lambda label: (not label.isdecimal(), int(label) if label.isdecimal() else 0))
    rows = {bucket: np.array([place for place, label in enumerate(labels) if label == bucket]) for bucket in buckets}
    every = (
        Overlap((names[one], names[other]), (first, second), (int(sizes[one]), int(sizes[other])), *numbers)
        for first, second in combinations(buckets, 2)
        for one, other, numbers in _pairs(shared, sizes, rows[first], rows[second], least)
    )
    pairs = list(islice(every, MOST_PAIRS + 1))
    if len(pairs) > MOST_PAIRS:
        raise ValueError(
            f"more than {MOST_PAIRS} pairs of documents overlap, so many share a passage, such as a licence or a "
            "template: take it out of the texts, or compare with a larger bound (least=..., --least)."
        )
    pairs.sort(key=lambda pair: (-pair.containment, -pair.jaccard, pair.ids))
    outside = ("0", HELD_OUT)
    is_member = np.array([label not in outside for label in labels])
    with_member = shared[is_member].sum(axis=0) > 0
    share = shared[:, with_member].sum(axis=1) / np.maximum(sizes, 1)
    covered = {names[place]: float(share[place]) for place in np.flatnonzero(~is_member & (share >= least)).tolist()}
    near = {
        pair.ids[side]
        for pair in pairs
        for side in (0, 1)
        if pair.buckets[side] in outside and pair.buckets[1 - side] not in outside
    }
    return Overlaps(
        settings={"n": n, "least": least, "one_in": one_in, "runs_of": hashes.kind or "words"},
        documents={bucket: len(rows[bucket]) for bucket in buckets},
        without_runs=int((sizes == 0).sum()),
        pairs=pairs,
        covered=covered,
        drop=[name for name in names if name in near or name in covered],
    )


def _shared_runs(runs: Sequence[np.ndarray]) -> csr_array:
    """Return [documents, runs] 1 where a document has a run, without those of a single document, which are most."""
    hashes = np.concatenate(runs)
    order = np.argsort(hashes, kind="stable")
    hashes = hashes[order]
    again = np.flatnonzero(hashes[1:] == hashes[:-1])
    kept = np.union1d(again, again + 1)
    columns = np.cumsum(np.diff(hashes[kept], prepend=hashes[kept[:1]]) != 0)
    documents = np.repeat(np.arange(len(runs), dtype=np.int32), [len(some) for some in runs])[order[kept]]
    width = int(columns[-1]) + 1 if len(columns) else 0
    return csr_array((np.ones(len(kept), np.int32), (documents, columns)), shape=(len(runs), width))


def _pairs(
    shared: csr_array, sizes: np.ndarray, ones: np.ndarray, others: np.ndarray, least: float
) -> Iterator[tuple[int, int, tuple[int, float, float]]]:
    """Yield the places of documents of two buckets that overlap; the runs both have, Jaccard and containment."""
    right = shared[others].T.tocsr()
    for start in range(0, len(ones), _ROWS_AT_ONCE):
        some = ones[start : start + _ROWS_AT_ONCE]
        both = (shared[some] @ right).tocoo()
        one, other = some[both.coords[0]], others[both.coords[1]]
        containment = both.data / np.minimum(sizes[one], sizes[other])
        jaccard = both.data / (sizes[one] + sizes[other] - both.data)
        kept = containment >= least
        numbers = zip(*(column[kept].tolist() for column in (both.data, jaccard, containment)), strict=True)
        yield from zip(one[kept].tolist(), other[kept].tolist(), numbers, strict=True)


class RunHashes:
    """The runs of documents as sorted, different 64-bit hashes.

    Args:
        tokenizer: of texts; None: they are taken as words.
        n: words, or ids, in a run.
        one_in: the hashes that it divides are kept.
    """

    def __init__(self, tokenizer, n: int, one_in: int) -> None:
        self._tokenizer = tokenizer
        self._n = n
        self._one_in = np.uint64(one_in)
        self._words: dict[str, int] = {}
        self.kind: str | None = None

    def hash_runs(self, document_id: str, document: Mapping[str, Any]) -> np.ndarray:
        """Hash the runs of one document."""
        if document.get("input_ids") is not None:
            kind, units = "ids", _mix(_as_ids(document_id, document["input_ids"]))
        elif not isinstance(document["text"], str):
            raise ValueError(
                f"the text of document {document_id!r} is {type(document['text']).__name__}, not a string."
            )
        elif self._tokenizer is not None:
            encoding = self._tokenizer(document["text"], add_special_tokens=False, verbose=False)
            kind, units = "ids", _mix(_as_ids(document_id, encoding["input_ids"]))
        else:
            kind, units = "words", self._hash_words(document["text"])
        if self.kind not in (None, kind):
            raise ValueError(
                f"document {document_id!r} is compared by {kind} and the ones before it by {self.kind}: to compare "
                "texts with token ids, give the tokenizer of the ids (tokenizer=..., --tokenizer)."
            )
        self.kind = kind
        if not len(units):
            return units
        width = min(self._n, len(units))
        hashes = np.zeros(len(units) - width + 1, np.uint64)
        for place in range(width):
            hashes = hashes * _MULTIPLIER + units[place : place + len(hashes)]
        hashes = np.unique(_mix(hashes))
        return hashes[hashes % self._one_in == 0]

    def _hash_words(self, text: str) -> np.ndarray:
        words = re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())
        known = self._words
        if len(known) > _CACHED_WORDS:
            known.clear()
        for word in set(words) - known.keys():
            digest = blake2b(word.encode(), digest_size=8).digest()
            known[word] = int.from_bytes(digest, "little")
        return np.fromiter((known[word] for word in words), np.uint64, len(words))


def _as_ids(document_id: str, ids: Any) -> np.ndarray:
    found = np.asarray(ids) if len(ids) else np.empty(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError(f"the input_ids of document {document_id!r} are not a list of token ids.")
    return found.astype(np.uint64)


def _mix(numbers: np.ndarray) -> np.ndarray:
    """Return numbers that look random, different ones for different numbers (the finalizer of SplitMix64)."""
    numbers = numbers + _MULTIPLIER
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def write_drop(ids: Iterable[str], path: str | os.PathLike[str]) -> None:
    """Write ids of documents to leave out, one a line.

    Raises:
        ValueError: an id that is not one line.
    """
    ids = list(ids)
    for name in ids:
        if name.splitlines() != [name]:
            raise ValueError(
                f"document id {name!r} is not one line, so it cannot stand in {path}: give it another id."
            )
    with replacing(Path(path)) as file:
        file.write("".join(f"{name}\n" for name in ids).encode())


def read_drop(path: str | os.PathLike[str]) -> frozenset[str]:
    """Read ids as `write_drop` writes them: one a line, empty lines apart.

    Raises:
        ValueError: not a file, or not UTF-8.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path} is not a file.")
    return frozenset(decode_utf8(Path(path).read_bytes(), str(path)).removeprefix("\ufeff").splitlines()) - {""}
