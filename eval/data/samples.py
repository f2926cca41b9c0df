"""Samples: windows of documents, split into a prefix that the model is shown and a suffix that it may give back.

Everything is in token ids. sampling.py cuts documents, protocols.py names published cuts; here are the samples and the
files that hold them:

samples.jsonl              one sample a line
samples.jsonl.about.json   how they were made: documents, tokenizer, protocol, what was left out
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from hf_axonn_eval.data.jsonl import LARGE, LineFile, is_count, json_lines, made_of, replacing, write_json


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One question to the model: does it continue `prefix` with `suffix`?

    Args:
        sample_id: unique among the samples of a file.
        document_id: the document it was cut from; intervals are computed over documents.
        bucket: how often the document was trained on, 0 for a control document.
        offset: position in the document of the first prefix token, in tokens; a BOS that was added counts.
        prefix: token ids that are shown.
        suffix: token ids that follow them in the document.
    Raises:
        ValueError: prefix or suffix is empty, or a field has the wrong type.
    """

    sample_id: str
    document_id: str
    bucket: int
    offset: int
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("sample_id", "document_id"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)!r}, but it must be a string that is not empty.")
        for name in ("bucket", "offset"):
            if not is_count(getattr(self, name)) or getattr(self, name) >= LARGE:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, but it must be a whole number of at least 0, below 2^53."
                )
        for name in ("prefix", "suffix"):
            ids = getattr(self, name)
            if not isinstance(ids, (list, tuple)) or set(map(type, ids)) != {int} or min(ids) < 0:
                raise ValueError(f"{name} must be a list of one or more token ids (whole numbers of at least 0).")
            object.__setattr__(self, name, tuple(ids))


def tokens_of(sample: Sample) -> int:
    """Return the number of tokens of prefix and suffix."""
    return len(sample.prefix) + len(sample.suffix)


class SampleFile(LineFile[Sample]):
    """Samples in a file, read when they are asked for. The full file is checked when it is opened.

    Args:
        path: what `write_samples` wrote.
    Raises:
        ValueError: see `read_samples`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(Path(path), (start for start, _ in _read(path)), _from_line)


def write_samples(samples: Iterable[Sample], path: str | os.PathLike[str]) -> str:
    """Write one JSON object a line. The file appears complete or not at all, and no more than one sample is in memory.

    Returns:
        The sha256 of the file, in hex: what `samples_digest` gives for these samples.
    """
    path = Path(path)
    samples = iter(samples)
    first = list(islice(samples, 1))  # what is wrong is mostly so from the start
    digest = hashlib.sha256()
    with replacing(path) as file:
        for sample in chain(first, samples):
            line = _line(sample)
            digest.update(line)
            file.write(line)
    about_file(path).unlink(missing_ok=True)  # it described the samples that were here before
    return digest.hexdigest()


def read_samples(path: str | os.PathLike[str]) -> list[Sample]:
    """Read what `write_samples` wrote.

    Raises:
        ValueError: the file is missing or empty, a line is not a sample, or a sample id occurs twice; the message
            names the line.
    """
    return [sample for _, sample in _read(path)]


def samples_digest(samples: Iterable[Sample]) -> str:
    """Sha256, in hex, of the file that `write_samples` writes for these samples."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(_line(sample))
    return digest.hexdigest()


def about_file(path: str | os.PathLike[str]) -> Path:
    """Return the path of the file that says how a samples file was made."""
    return Path(path).with_name(Path(path).name + ".about.json")


def write_about(path: str | os.PathLike[str], about: dict[str, Any]) -> None:
    """Write how the samples file `path` was made.

    Args:
        path: the samples file.
        about: anything JSON can say; its entry `sha256` is that of the samples file, `tokenizer` what
            `tokenizer_identity` returns.
    """
    write_json(about_file(path), about)


def read_about(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Read how the samples file `path` was made; None if nothing beside it says so.

    Its entries: `samples`, `sha256`, `documents`, `buckets`, `left_out`, `tokenizer` (path, size, sha256; earlier
    versions wrote the path alone), `protocol` (name, source, settings, changed; and `samples`, what its lines are
    compared with, which earlier versions did not write) and `extract` (arguments of `extract` that the protocol asks
    for).

    Raises:
        ValueError: the file beside it is damaged, or describes other samples.
    """
    file = about_file(path)
    if not file.is_file():
        return None
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        recorded = about["sha256"]
        if not all(map(is_count, (counts(about) or {}).values())):
            raise ValueError
        if isinstance(about.get("tokenizer"), dict):
            bytes.fromhex(about["tokenizer"]["sha256"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{file} is damaged; remove it, or write {path} again.") from None
    with open(path, "rb") as content:
        digest = hashlib.sha256()
        while block := content.read(1 << 20):
            digest.update(block)
    if recorded != digest.hexdigest():
        raise ValueError(f"{file} tells of other samples than those in {path}: remove it, or write {path} again.")
    return about


def tokenizer_of(samples: Iterable[Sample]) -> dict[str, Any] | None:
    """Return the tokenizer in the about file of a `SampleFile`; None for other samples, or if it names none.

    Raises:
        ValueError: see `read_about`.
    """
    about = read_about(samples.path) if isinstance(samples, SampleFile) else None
    recorded = about.get("tokenizer") if about is not None else None
    return recorded if isinstance(recorded, dict) else None


def counts(about: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the number of `documents` of samples and of those left out, by reason; None if `about` has none."""
    if "left_out" not in about:
        return None
    copies = {"copies": about["copies"]} if "copies" in about else {}
    return {"documents": about["documents"], **about["left_out"], "not_round_trip": about["not_round_trip"], **copies}


def _line(sample: Sample) -> bytes:
    return (json.dumps(vars(sample), separators=(",", ":")) + "\n").encode()


def _from_line(line: bytes) -> Sample:
    return Sample(**json.loads(line.decode("utf-8-sig")))


def _read(path: str | os.PathLike[str]) -> Iterator[tuple[int, Sample]]:
    """Yield the samples of a file, each with the byte its line begins at."""
    seen: dict[str, int] = {}
    for number, start, entry in json_lines(path):
        try:
            sample = made_of(Sample, entry)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number} is not a sample: {error} A line has the fields "
                f"{', '.join(Sample.__dataclass_fields__)}; `hf-axonn-eval samples` writes such a file."
            ) from None
        if sample.sample_id in seen:
            raise ValueError(
                f"{path}, line {number}: sample id {sample.sample_id!r} is already on line {seen[sample.sample_id]}."
            )
        seen[sample.sample_id] = number
        yield start, sample
    if not seen:
        raise ValueError(f"{path} holds no samples.")
