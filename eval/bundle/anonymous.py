"""Records and results as a bundle shows them: numbers as they are, names in place of paths, keyed hashes in place of
ids and of every text that is not known to be harmless.

What goes in is listed here. What another version adds to run.json or to a result goes in if it is a number; a text of
an unknown name is hashed with the key, and a list of a result that is not listed is left out: it may be token ids.
"""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hf_axonn_eval.bundle.keys import Key
from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.data.samples import Sample
from hf_axonn_eval.metrics.registry import METRICS, value


UNKNOWN = "unknown"  # begins the fingerprint of a model whose weights cannot be read
# texts that this package and its libraries choose, and the numbers in them
_WORDS = {"access", "architecture", "attn_implementation", "batch_size", "decoding", "dtype", "float32_matmul", "grid"}
_WORDS |= {
    "format",
    "near_copies",
    "recite",
    "revision",
    "sampler",
    "saved",
    "scores",
    "started",
    "strategy",
    "weights",
    "why",
}
_PATHS = {"base", "model", "file", "path", "tokenizer"}
_DIGESTS = {"fingerprint", "model_fingerprint", "base_fingerprint", "tokenizer_sha256", "table_sha256", "commit"}
_OPEN = {"versions", "device", "protocol", "deviations"}  # all texts in these are published ones
_PLAIN = re.compile(r"[\w .,:;+=()%@#*<>'-]{0,100}")
_DIGEST = re.compile(r"[0-9a-f]{7,128}")
_SAMPLES = "samples_sha256"
# per token, and of no use without the tokens
_LISTS, _MAPPINGS = {"hits": bool, "logprobs": float, "near_copies": float, "ranks": int}, ("membership", "metrics")
_TEXTS = {"generated", "generated_text", "suffix_text"}
_HOME = re.compile(r"[\\/](?:home|Users)[\\/]+([^\\/\s]+)")
_SEPARATOR = re.compile(r"[\\/]")
# a path in a sentence; not the slashes of a URL, a quotient or "and/or"
_ABSOLUTE = re.compile(r"(?<![\w.:/\\])(?:~\w*|[A-Za-z]:|file:)?[\\/][^\s'\"`,;|<>()\[\]{}]*")


class Anonymous:
    """Takes from the records and results of some runs what may be shown.

    Args:
        key: for hashes.
        texts: where names of people may stand, in the paths of their homes.
        document_ids: show the ids of documents and samples.
    """

    def __init__(self, key: Key, texts: Iterable[str] = (), *, document_ids: bool = False) -> None:
        self.key = key
        self.document_ids = document_ids
        names = {getpass.getuser(), Path.home().name, socket.gethostname(), socket.gethostname().partition(".")[0]}
        names |= {name for text in texts for name in _HOME.findall(text)}
        known = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True) if name)
        self._private = re.compile(rf"(?<![A-Za-z0-9])(?:{known})(?![A-Za-z0-9])", re.IGNORECASE) if known else None

    def hide(self, text: str) -> str:
        """Remove names of the user and the machine from a text, and of absolute paths all but the last part."""
        text = _ABSOLUTE.sub(lambda path: _last(path[0]), text)
        return self._private.sub("<private>", text) if self._private else text

    def name(self, path: str) -> str:
        """Return the last part of a path."""
        return self.hide(_last(path))

    def command(self, words: Sequence[str]) -> list[str]:
        """Return a command line with names in place of paths."""
        return [self._word(str(word)) for word in words]

    def _word(self, word: str) -> str:
        option, equals, rest = word.partition("=")
        if equals and _SEPARATOR.search(rest):  # --model=DIR, base=DIR
            return f"{self.name(option)}={self.name(rest)}"
        return self.name(word) if _SEPARATOR.search(word) else self.hide(word)

    def record(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return run.json, or a part of it, as it may be shown; the sha256 of the samples is hashed with the key."""
        return {self._entry(str(name)): self._value(str(name), entry) for name, entry in record.items()}

    def _entry(self, name: str) -> str:
        return name if _PLAIN.fullmatch(name) else self.key.hash("name", name)

    def _value(self, name: str, entry: Any, *, published: bool = False) -> Any:
        published = published or name in _OPEN
        if name == "command" and isinstance(entry, list):
            return self.command(entry)
        if isinstance(entry, Mapping):
            values = ((str(key), each) for key, each in entry.items())
            return {self._entry(key): self._value(key, each, published=published) for key, each in values}
        if isinstance(entry, list):
            return [self._value(name, each, published=published) for each in entry]
        if not isinstance(entry, str):
            return entry
        if name in _DIGESTS or (name == "sha256" and _DIGEST.fullmatch(entry)):
            unknown = UNKNOWN if entry.startswith(UNKNOWN) else self.key.hash(name, entry)
            return entry if _DIGEST.fullmatch(entry) else unknown
        if name in _PATHS:
            return self.name(entry)
        if published:
            return self.hide(entry)
        if name in _WORDS and _PLAIN.fullmatch(entry):
            return entry
        return self.key.hash(name, entry)

    def samples_hash(self, digest: str) -> str:
        """Hash `samples_digest` with the key, as in `record`: that of a file of few short samples could be guessed."""
        return self.key.hash(_SAMPLES, digest)

    def sample_id(self, name: str) -> str:
        """Return the id of a sample, or its keyed hash."""
        return name if self.document_ids else self.key.hash("sample", name)

    def document_id(self, name: str) -> str:
        """Return the id of a document, or its keyed hash."""
        return name if self.document_ids else self.key.hash("document", name)

    def tokens(self, sample: Sample) -> str:
        """Hash prefix and suffix with the key."""
        return self.key.hash("tokens", [list(sample.prefix), list(sample.suffix)])

    def result(self, result: SampleResult) -> SampleResult:
        """Keep the numbers of a result, with metrics that are computed from texts, and no texts."""
        kept: dict[str, Any] = {}
        for field in fields(SampleResult):
            entry = getattr(result, field.name)
            if field.name in _LISTS:
                kept[field.name] = entry and [_LISTS[field.name](number) for number in entry]
            elif field.name in _MAPPINGS:
                kept[field.name] = entry and {name: number for name, number in entry.items() if is_number(number)}
            else:
                kept[field.name] = entry if is_number(entry) else None
        kept |= {"sample_id": self.sample_id(result.sample_id), "document_id": self.document_id(result.document_id)}
        for name, metric in METRICS.items():
            if name in kept:
                kept[name] = value(result, name)
            elif _TEXTS & set(metric.inputs) and (number := value(result, name)) is not None:
                kept["metrics"] = {**(kept["metrics"] or {}), name: number}
        return SampleResult(**kept)


def is_number(entry: object) -> bool:
    """Test if a field of a result is one number, or yes or no."""
    return isinstance(entry, bool | int | float)


def iterate_texts(entry: Any) -> Iterable[str]:
    """Yield all texts in what JSON can say."""
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, Mapping):
        for each in entry.values():
            yield from iterate_texts(each)
    elif isinstance(entry, list | tuple):
        for each in entry:
            yield from iterate_texts(each)


def _last(path: str) -> str:
    parts = [part for part in _SEPARATOR.split(path) if part not in ("", ".", "..", "~")]
    return parts[-1] if parts else "."
