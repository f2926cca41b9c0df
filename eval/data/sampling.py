"""Cuts of documents into samples: at fixed offsets, by a sliding window, or at their beginning or end.

A document is tokenized once, in full, and then cut: cutting text and tokenizing the pieces would give other tokens
at the seam than the model saw in training. (The one exception is a window that slides over characters, because that is
what its authors did.) Documents are taken one after the other and samples come out one after the other.
"""

import hashlib
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_axonn.compat.messages import get_logger
from hf_axonn_eval.data.jsonl import is_count
from hf_axonn_eval.data.samples import Sample
from hf_axonn_eval.data.sentences import first_sentence
from hf_axonn_eval.data.windows import Sampling


logger = get_logger(__name__)

_SLICES_AT_ONCE = 256
_CHARACTERS_A_TOKEN = 8  # that are tokenized for a window of so many tokens; more are tried if they are too few
_SPARE = 16  # tokens beyond the window: where the text was cut off, the last ones are not those of the full text


@dataclass
class Tally:
    """Counts of the documents, of those left out by reason, and of the samples by their content.

    Args:
        used: documents that have a sample, by bucket.
        dropped_ids: those of `drop` that were there.
        prefixes, suffixes: samples by the tokens of their prefix and suffix.
        copies: documents that have a sample, and the tokens of an earlier one; not counted with `deduplicate`.
        copies_of_other_buckets: those of them whose earlier one is of another bucket.
        begin_with_bos: samples whose first token is the tokenizer's BOS.
        hold_eos: samples with the tokenizer's EOS in the suffix, its last token apart.
    """

    documents: int = 0
    samples: int = 0
    buckets: Counter[int] = field(default_factory=Counter)
    dropped: int = 0
    empty: int = 0
    short: int = 0
    long: int = 0
    beyond: int = 0
    duplicates: int = 0
    duplicates_of_other_buckets: int = 0
    duplicates_of_other_documents: int = 0
    repetitive: int = 0
    windows_short: int = 0
    not_round_trip: int = 0
    copies: int = 0
    copies_of_other_buckets: int = 0
    used: Counter[int] = field(default_factory=Counter)
    dropped_ids: set[str] = field(default_factory=set)
    prefixes: Counter[int] = field(default_factory=Counter)
    suffixes: Counter[int] = field(default_factory=Counter)
    begin_with_bos: int = 0
    hold_eos: int = 0
    least_needed: int | None = None

    def count(self, sample: Sample, tokenizer) -> None:
        """Count a sample that is used."""
        self.samples += 1
        self.buckets[sample.bucket] += 1
        self.prefixes[len(sample.prefix)] += 1
        self.suffixes[len(sample.suffix)] += 1
        if tokenizer is not None:
            self.begin_with_bos += sample.prefix[0] == tokenizer.bos_token_id
            self.hold_eos += tokenizer.eos_token_id in sample.suffix[:-1]

    def facts(self) -> dict[str, Any]:
        """Return the facts that the lines of a protocol are compared with (contract.py), for JSON."""
        return {
            "samples": self.samples,
            "prefix_tokens": _range(self.prefixes),
            "suffix_tokens": _range(self.suffixes),
            "documents_used": {str(bucket): count for bucket, count in sorted(self.used.items())},
            "begin_with_bos": self.begin_with_bos,
            "eos_within_suffix": self.hold_eos,
            "duplicates_of_other_documents": self.duplicates_of_other_documents,
            "left_out": self.left_out(),
        }

    def about(self) -> dict[str, Any]:
        """Return the counts that are written beside the samples (samples.py, `read_about`)."""
        return {
            "samples": self.samples,
            "documents": self.documents,
            "buckets": {str(bucket): count for bucket, count in sorted(self.buckets.items())},
            "left_out": self.left_out(),
            "not_round_trip": self.not_round_trip,
            **({"copies": self.copies} if self.copies else {}),
        }

    def left_out(self) -> dict[str, int]:
        """Return the counts by reason, without those that are 0."""
        reasons = {
            "dropped": self.dropped,
            "too_short": self.short,
            "of_these_empty": self.empty,
            "too_long": self.long,
            "beyond_max_documents": self.beyond,
            "duplicate_samples": self.duplicates,
            "duplicates_of_other_buckets": self.duplicates_of_other_buckets,
            "repetitive_suffixes": self.repetitive,
            "windows_too_short": self.windows_short,
        }
        return {reason: count for reason, count in reasons.items() if count}


def iter_samples(
    documents: Iterable[Mapping[str, Any]],
    *,
    sampling: Sampling,
    tokenizer=None,
    tally: Tally | None = None,
    drop: Collection[str] = (),
) -> Iterator[Sample]:
    """Window documents into samples, one after the other.

    Documents and samples that are left out, and texts that the tokenizer does not give back unchanged, are counted,
    and logged as warnings at the end. The tokens of such a text stand for another text.

    Args:
        documents: mappings with `id`, `bucket` and either `text` or `input_ids`.
        sampling: where to cut.
        tokenizer: an HF tokenizer; needed for documents that come as text.
        tally: filled on the way.
        drop: ids of documents that are left out, such as those that `find_overlaps` names.
    Raises:
        ValueError: a document without its fields or of the wrong type, an id that occurs twice, a BOS or EOS that the
            tokenizer does not have, or no samples at all.
    """
    tally = Tally() if tally is None else tally
    bos, eos = _special_tokens(sampling, tokenizer)
    seen: set[str] = set()
    buckets = array("q", [0])  # of the documents, which are counted from 1
    wholes: dict[bytes, int] = {}  # the bucket of the document that had all these tokens first
    kept: dict[bytes, int] = {}  # the number of the document that had these tokens first
    for number, document in enumerate(documents, start=1):
        document_id, bucket = document_identity(number, document)
        if document_id in seen:
            raise ValueError(f"document id {document_id!r} occurs twice; ids must tell documents apart.")
        seen.add(document_id)
        buckets.append(bucket)
        tally.documents += 1
        if document_id in drop:
            tally.dropped += 1
            tally.dropped_ids.add(document_id)
            continue
        if sampling.max_documents is not None and tally.used[bucket] >= sampling.max_documents:
            tally.beyond += 1
            continue
        tokens, spans = _tokens(document_id, document, tokenizer, sampling, tally)
        if eos and tokens[-1:] == eos:  # the tokenizer, or who made the ids, put it there
            tokens = tokens[:-1]
        shortest = max(sampling.needed_in(bucket), sampling.min_document_tokens or 0)
        if len(tokens) < shortest:
            tally.short += 1
            tally.empty += not tokens
            tally.least_needed = min(shortest, tally.least_needed or shortest)
            continue
        if sampling.max_document_tokens is not None and len(tokens) > sampling.max_document_tokens:
            tally.long += 1
            continue
        seed = _seed(document_id, tokens, tokenizer) if sampling.kind == "sentence" else 0
        if seed == len(tokens) and not eos:  # one sentence, after which nothing comes
            tally.short += 1
            continue
        tally.used[bucket] += 1
        if not sampling.deduplicate:
            whole = hashlib.blake2b(str(tokens).encode(), digest_size=16).digest()
            tally.copies += whole in wholes
            tally.copies_of_other_buckets += wholes.setdefault(whole, bucket) != bucket
        tokens = [*tokens, *eos]
        if seed:
            windows: Iterable[tuple[str, int, list[int], int]] = [("0", 0, tokens, seed)]
        elif spans is None:
            windows = (
                (window.name, window.offset, tokens[window.offset : window.end], window.middle - window.offset)
                for window in sampling.windows(len(tokens), bucket)
            )
        else:
            windows = _windows_over_characters(document["text"], spans, tokenizer, sampling, tally)
        for name, offset, ids, prefix in windows:
            if sampling.min_type_token_ratio is not None:
                suffix = ids[prefix:]
                if len(set(suffix)) / len(suffix) < sampling.min_type_token_ratio:
                    tally.repetitive += 1
                    continue
            if sampling.deduplicate:
                key = hashlib.blake2b(f"{prefix}:{ids}".encode(), digest_size=16).digest()
                if key in kept:
                    tally.duplicates += 1
                    tally.duplicates_of_other_documents += kept[key] != number
                    tally.duplicates_of_other_buckets += buckets[kept[key]] != bucket
                    continue
                kept[key] = number
            sample = Sample(
                sample_id=f"{document_id}@{name}",
                document_id=document_id,
                bucket=bucket,
                offset=offset,
                prefix=(*bos, *ids[:prefix]),
                suffix=tuple(ids[prefix:]),
            )
            tally.count(sample, tokenizer)
            yield sample
    _log_left_out(tally, sampling)


def build_samples(
    documents: Iterable[Mapping[str, Any]],
    *,
    tokenizer=None,
    sampling: Sampling | None = None,
    prefix_length: int | None = None,
    suffix_length: int | None = None,
    offsets: Sequence[int] = (0,),
    min_document_tokens: int | None = None,
    max_document_tokens: int | None = None,
    add_special_tokens: bool = False,
) -> list[Sample]:
    """Window documents into samples: at fixed offsets, or as `sampling` says.

    A document is used at all offsets or not at all, so that every offset is measured on the same documents. How many
    documents the length filter leaves out is logged as a warning.

    Args:
        documents: mappings with `id`, `bucket` and either `text` or `input_ids`.
        tokenizer: an HF tokenizer; needed for documents that come as text.
        sampling: where to cut, in place of all that follows: `Sampling(...)`, or `protocol("sc24").sampling`.
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
    if sampling is None:
        if prefix_length is None or suffix_length is None:
            raise ValueError("build_samples needs prefix_length=... and suffix_length=..., or sampling=....")
        sampling = Sampling(
            prefix_length=prefix_length,
            suffix_length=suffix_length,
            offset=offsets,
            min_document_tokens=min_document_tokens,
            max_document_tokens=max_document_tokens,
            add_special_tokens=add_special_tokens,
        )
    elif (prefix_length, suffix_length) != (None, None):
        raise ValueError("build_samples takes sampling=... or prefix_length=... and suffix_length=..., not both.")
    return list(iter_samples(documents, sampling=sampling, tokenizer=tokenizer))


def document_identity(number: int, document: Mapping[str, Any]) -> tuple[str, int]:
    """Return id and bucket of the document with this number, counted from 1.

    Raises:
        ValueError: it lacks a field, has no id, or a bucket that is no count.
    """
    missing = [key for key in ("id", "bucket") if key not in document]
    if "text" not in document and "input_ids" not in document:
        missing.append("text")
    if missing:
        raise ValueError(f"document {number} has no {' and no '.join(map(repr, missing))}.")
    if document["id"] is None or document["id"] == "":
        raise ValueError(f"document {number} has the id {document['id']!r}; ids must tell documents apart.")
    document_id, bucket = str(document["id"]), document["bucket"]
    if not is_count(bucket):
        raise ValueError(
            f"document {document_id!r} has bucket {bucket!r}, but a bucket is how often the document was trained on: "
            "a whole number, 0 for a control."
        )
    return document_id, bucket


def _special_tokens(sampling: Sampling, tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens before every prefix, and those at the end of every document.

    Raises:
        ValueError: `sampling` asks for a token that the tokenizer does not have.
    """
    bos: list[Any] = [tokenizer.bos_token_id if tokenizer is not None else None] if sampling.bos == "prefix" else []
    eos: list[Any] = [tokenizer.eos_token_id if tokenizer is not None else None] if sampling.append_eos else []
    for name, ids in (("BOS", bos), ("EOS", eos)):
        if ids == [None]:
            setting = "bos='prefix'" if name == "BOS" else "append_eos"
            if tokenizer is None:
                raise ValueError(f"{setting} needs a tokenizer with a {name} token; give tokenizer=....")
            raise ValueError(
                f"{setting} needs the tokenizer to have a {name} token; {tokenizer.name_or_path!r} has none."
            )
    return bos, eos


def _seed(document_id: str, tokens: list[int], tokenizer) -> int:
    if tokenizer is None:
        raise ValueError(f"the first sentence of document {document_id!r} needs a tokenizer; give tokenizer=....")
    try:
        return first_sentence(tokens, tokenizer)
    except OverflowError:
        raise ValueError(
            f"document {document_id!r} has token ids, among them {min(tokens)} and {max(tokens)}, that the tokenizer "
            "cannot decode; give the documents as text or with ids of this tokenizer."
        ) from None


def _with_bos(ids: list[int], tokenizer, sampling: Sampling) -> list[int]:
    """Put the BOS of a window before ids, where the tokenizer has one and put none there."""
    bos = tokenizer.bos_token_id
    return [bos, *ids] if sampling.bos == "window" and bos is not None and ids[:1] != [bos] else ids


def _range(lengths: Counter[int]) -> dict[str, int]:
    return {"least": min(lengths), "most": max(lengths)} if lengths else {}


def _tokens(
    document_id: str, document: Mapping[str, Any], tokenizer, sampling: Sampling, tally: Tally
) -> tuple[list[int], list[int] | None]:
    """Return a document's tokens, and for a window over characters the first character of each ordinary token."""
    by_characters = sampling.kind == "sliding" and sampling.stride_unit == "characters"
    if "input_ids" in document:
        if by_characters:
            raise ValueError(
                f"document {document_id!r} is token ids, but the window slides over characters: give its text, or "
                "stride_unit='tokens'."
            )
        ids = document["input_ids"]
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        if not isinstance(ids, (list, tuple)):
            raise ValueError(
                f"the input_ids of document {document_id!r} are {type(ids).__name__}, not a list of token ids."
            )
        return list(ids), None
    text = document["text"]
    if not isinstance(text, str):
        raise ValueError(f"the text of document {document_id!r} is {type(text).__name__}, not a string.")
    if tokenizer is None:
        raise ValueError(f"document {document_id!r} is text, so build_samples needs tokenizer=...")
    if by_characters and not tokenizer.is_fast:
        raise ValueError(
            "a window over characters needs a fast tokenizer, which says where its tokens are in the text."
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text of document {document_id!r} cannot be written as UTF-8: {text[error.start]!r} at character "
            f"{error.start} is half of a surrogate pair."
        ) from None
    # verbose=False: a document longer than the model's window is no mistake here, only a piece of it is used
    encoding = tokenizer(
        text,
        add_special_tokens=sampling.add_special_tokens,
        return_offsets_mapping=by_characters,
        return_special_tokens_mask=by_characters,
        verbose=False,
    )
    tokens = encoding["input_ids"]
    again = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    tally.not_round_trip += again != text
    if not by_characters:
        return tokens, None
    spans = zip(encoding["offset_mapping"], encoding["special_tokens_mask"], strict=True)
    tokens = _with_bos(tokens, tokenizer, sampling)
    return tokens, [begin for (begin, _), special in spans if not special]


def _windows_over_characters(
    text: str, begins: list[int], tokenizer, sampling: Sampling, tally: Tally
) -> Iterator[tuple[str, int, list[int], int]]:
    """Yield the first tokens of the text from every `stride`-th character on, special tokens of each window included.

    With a BOS both the document and the window have one. So its offset is the place of the document's token before
    the one in which it begins, where its BOS stands: from there every token is where the document has it.
    """
    [prefix], [suffix] = sampling.prefix_length, sampling.suffix_length
    window = prefix + suffix

    def encode(starts: Sequence[int], characters: int) -> list[list[int]]:
        some = [text[start : start + characters] for start in starts]
        encoded = tokenizer(some, add_special_tokens=sampling.add_special_tokens, verbose=False)["input_ids"]
        return [_with_bos(ids, tokenizer, sampling) for ids in encoded]

    fixed = sampling.slice_characters is not None
    first = sampling.slice_characters or _CHARACTERS_A_TOKEN * window
    starts = range(0, len(text), sampling.stride)
    for place in range(0, len(starts), _SLICES_AT_ONCE):
        some = starts[place : place + _SLICES_AT_ONCE]
        for start, ids in zip(some, encode(some, first), strict=True):
            characters = first
            while not fixed and len(ids) < window + _SPARE and start + characters < len(text):
                characters *= 4
                [ids] = encode([start], characters)
            if len(ids) >= window:
                offset = max(bisect_right(begins, start) - 1, 0)
                yield f"{start}c", offset, ids[:window], prefix
            else:
                tally.windows_short += fixed and start + characters <= len(text)  # the end of a text fills none


def _log_left_out(tally: Tally, sampling: Sampling) -> None:
    """Log what was left out.

    Raises:
        ValueError: nothing is left.
    """
    shortest = tally.least_needed or max(sampling.needed, sampling.min_document_tokens or 0)
    counts = f"{tally.short} of {tally.documents} documents have fewer than {shortest} tokens"
    if tally.empty:
        counts += f" ({tally.empty} of them none at all)"
    if sampling.max_document_tokens is not None:
        counts += f", {tally.long} more than {sampling.max_document_tokens}"
    if tally.dropped:
        counts += f", {tally.dropped} are to be dropped"
        logger.warning("%d of %d documents are to be dropped; they are left out.", tally.dropped, tally.documents)
    if tally.windows_short:
        counts_short = f"{tally.windows_short} windows have too few tokens in {sampling.slice_characters} characters"
        logger.warning("%s; they are left out.", counts_short)
        counts += f", {counts_short}"
    if tally.repetitive:
        counts_few = f"{tally.repetitive} suffixes have a type-token ratio below {sampling.min_type_token_ratio}"
        logger.warning("%s; they are left out.", counts_few)
        counts += f", {counts_few}"
    if not tally.samples:
        raise ValueError(f"no samples: {counts}. Use shorter prefixes, suffixes or offsets, or longer documents.")
    if tally.short or tally.long:
        logger.warning("%s; they are left out.", counts)
    if tally.duplicates:
        other = tally.duplicates_of_other_buckets
        logger.warning(
            "%d samples have the same tokens as an earlier one; they are left out%s.",
            tally.duplicates,
            f". {other} of them are of another bucket than the earlier one: the buckets are not disjoint"
            if other
            else "",
        )
    if tally.copies:
        logger.warning(
            "%d documents have the tokens of an earlier one, %d of them of one of another bucket. Each counts as a "
            "document of its own, so intervals are too narrow and a control may be a member: leave copies out "
            "(deduplicate, --deduplicate), or use overlaps.",
            tally.copies,
            tally.copies_of_other_buckets,
        )
    if tally.not_round_trip:
        logger.warning(
            "the tokenizer does not give back %d of %d documents unchanged (decoded, the tokens are another text); "
            "tokens are what is compared.",
            tally.not_round_trip,
            tally.documents,
        )
