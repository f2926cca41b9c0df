"""What is asked of the model: pieces of documents, cut into a prefix that is shown and a suffix that is hoped for.

Everything is in token ids. Text is tokenized once, as a whole document, and then cut: cutting text and tokenizing the
pieces would give other tokens at the seam than the model saw in training.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One question to the model: does it continue `prefix` with `suffix`?

    Args:
        sample_id: unique among the samples of a file.
        document_id: the document it was cut from; intervals are computed over documents.
        bucket: how often the document was trained on, 0 for a control document.
        offset: position in the document of the first prefix token, in tokens.
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
            if not _is_count(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}, but it must be a whole number of at least 0.")
        for name in ("prefix", "suffix"):
            ids = getattr(self, name)
            if not isinstance(ids, (list, tuple)) or not ids or not all(map(_is_count, ids)):
                raise ValueError(f"{name} must be a list of one or more token ids (whole numbers of at least 0).")
            object.__setattr__(self, name, tuple(ids))


def build_samples(
    documents: Iterable[Mapping],
    *,
    tokenizer=None,
    prefix_length: int,
    suffix_length: int,
    offsets: Sequence[int] = (0,),
    min_document_tokens: int | None = None,
    max_document_tokens: int | None = None,
    add_special_tokens: bool = False,
) -> list[Sample]:
    """Cut one sample per document and offset.

    A document is used at all offsets or not at all, so that every offset is measured on the same documents. How many
    documents the length filter leaves out is logged as a warning.

    Args:
        documents: mappings with `id`, `bucket` and either `text` or `input_ids`.
        tokenizer: an HF tokenizer; needed for documents that come as text.
        prefix_length: tokens shown.
        suffix_length: tokens that must follow.
        offsets: positions, in tokens, at which the prefix begins.
        min_document_tokens: shorter documents are left out; at least max(offsets) + prefix_length + suffix_length,
            which is the default.
        max_document_tokens: longer documents are left out; no bound by default.
        add_special_tokens: whether tokenizing a text adds the tokenizer's special tokens (a BOS, say). Set it to what
            training did.
    Raises:
        ValueError: a length or offset that cannot be, a document without its fields, an id that occurs twice, or no
            document that is long enough.
    """
    for name, value in (("prefix_length", prefix_length), ("suffix_length", suffix_length)):
        if not _is_count(value) or value < 1:
            raise ValueError(f"{name} is {value!r}, but it must be a whole number of tokens, at least 1.")
    if not offsets or not all(map(_is_count, offsets)) or len(set(offsets)) != len(offsets):
        raise ValueError(f"offsets are {offsets!r}, but they must be one or more different numbers of at least 0.")
    needed = max(offsets) + prefix_length + suffix_length
    shortest = max(needed, min_document_tokens or 0)
    if max_document_tokens is not None and max_document_tokens < shortest:
        raise ValueError(
            f"max_document_tokens is {max_document_tokens}, but a document needs {shortest} tokens (offset "
            f"{max(offsets)} + prefix {prefix_length} + suffix {suffix_length}, or min_document_tokens)."
        )

    samples: list[Sample] = []
    seen: set[str] = set()
    short = long = 0
    for number, document in enumerate(documents, start=1):
        document_id, bucket, tokens = _document_tokens(number, document, tokenizer, add_special_tokens)
        if document_id in seen:
            raise ValueError(f"document id {document_id!r} occurs twice; ids must tell documents apart.")
        seen.add(document_id)
        if len(tokens) < shortest:
            short += 1
        elif max_document_tokens is not None and len(tokens) > max_document_tokens:
            long += 1
        else:
            for offset in offsets:
                middle = offset + prefix_length
                samples.append(
                    Sample(
                        sample_id=f"{document_id}@{offset}",
                        document_id=document_id,
                        bucket=bucket,
                        offset=offset,
                        prefix=tuple(tokens[offset:middle]),
                        suffix=tuple(tokens[middle : middle + suffix_length]),
                    )
                )
    counts = f"{short} of {len(seen)} documents have fewer than {shortest} tokens"
    if max_document_tokens is not None:
        counts += f", {long} more than {max_document_tokens}"
    if not samples:
        raise ValueError(f"no samples: {counts}. Use shorter prefixes, suffixes or offsets, or longer documents.")
    if short or long:
        logger.warning("%s; they are left out.", counts)
    return samples


def write_samples(samples: Iterable[Sample], path: str | os.PathLike) -> None:
    """Write one JSON object a line. The file appears complete or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    with open(unfinished, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(_line(sample) for sample in samples)
    os.replace(unfinished, path)


def read_samples(path: str | os.PathLike) -> list[Sample]:
    """Read what `write_samples` wrote.

    Raises:
        ValueError: the file is missing or empty, a line is not a sample, or a sample id occurs twice; the message
            names the line.
    """
    samples = []
    seen: dict[str, int] = {}
    for number, entry in _json_lines(path):
        try:
            sample = Sample(**entry)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, line {number} is not a sample: {error} A line has the fields "
                f"{', '.join(Sample.__dataclass_fields__)}; `python -m hf_axonn_eval samples` writes such a file."
            ) from None
        if sample.sample_id in seen:
            raise ValueError(
                f"{path}, line {number}: sample id {sample.sample_id!r} is already on line {seen[sample.sample_id]}."
            )
        seen[sample.sample_id] = number
        samples.append(sample)
    if not samples:
        raise ValueError(f"{path} holds no samples.")
    return samples


def samples_digest(samples: Iterable[Sample]) -> str:
    """Sha256, in hex, of the file that `write_samples` writes for these samples."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(_line(sample).encode())
    return digest.hexdigest()


def read_documents(
    path: str | os.PathLike,
    *,
    id_key: str = "id",
    text_key: str = "text",
    bucket_key: str = "bucket",
    bucket: int | None = None,
) -> list[dict]:
    """Read documents for `build_samples` from JSON lines.

    Args:
        path: a file with one JSON object a line.
        id_key: field that holds the document's id.
        text_key: field that holds its text; `input_ids`, where present, is used instead.
        bucket_key: field that holds how often it was trained on.
        bucket: this number for every document, in place of a field.
    Raises:
        ValueError: the file is missing or empty, or a line lacks a field; the message names the line.
    """
    documents = []
    for number, entry in _json_lines(path):
        keys = {"id": id_key} | ({} if bucket is not None else {"bucket": bucket_key})
        if isinstance(entry, dict):
            keys |= {"input_ids": "input_ids"} if "input_ids" in entry else {"text": text_key}
        missing = [key for key in keys.values() if not isinstance(entry, dict) or key not in entry]
        if missing:
            raise ValueError(
                f"{path}, line {number} has no field {', '.join(map(repr, missing))}. Name the fields with --id_key, "
                "--text_key and --bucket_key, or give all documents one bucket with --bucket."
            )
        document = {name: entry[key] for name, key in keys.items()}
        documents.append({"bucket": bucket, **document} if bucket is not None else document)
    if not documents:
        raise ValueError(f"{path} holds no documents.")
    return documents


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _line(sample: Sample) -> str:
    return json.dumps(asdict(sample), separators=(",", ":")) + "\n"


def _json_lines(path: str | os.PathLike) -> Iterator[tuple[int, object]]:
    if not Path(path).is_file():
        raise ValueError(f"{path} is not a file.")
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    entry = json.loads(line.decode("utf-8"))
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path}, line {number} is not JSON: {error}.") from None
                yield number, entry


def _document_tokens(
    number: int, document: Mapping, tokenizer, add_special_tokens: bool
) -> tuple[str, int, list[int]]:
    missing = [key for key in ("id", "bucket") if key not in document]
    if "text" not in document and "input_ids" not in document:
        missing.append("text")
    if missing:
        raise ValueError(f"document {number} has no {' and no '.join(map(repr, missing))}.")
    document_id, bucket = str(document["id"]), document["bucket"]
    if not _is_count(bucket):
        raise ValueError(
            f"document {document_id!r} has bucket {bucket!r}, but a bucket is how often the document was trained on: "
            "a whole number, 0 for a control."
        )
    if "input_ids" in document:
        return document_id, bucket, list(document["input_ids"])
    if tokenizer is None:
        raise ValueError(f"document {document_id!r} is text, so build_samples needs tokenizer=...")
    if not isinstance(document["text"], str):
        raise ValueError(f"the text of document {document_id!r} is {type(document['text']).__name__}, not a string.")
    # verbose=False: a document longer than the model's window is no mistake here, only a piece of it is used
    tokens = tokenizer(document["text"], add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    return document_id, bucket, tokens
