"""Synthetic secrets: texts with a random part, put into training data a known number of times.

canaries.json      the format, the seed, the canaries and how often each was put in
candidates.jsonl   other texts of the same format, none of which was put in: what the canaries are ranked among
"""

import hashlib
import json
import os
import random
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from hf_axonn_eval.data.jsonl import BOM, is_count, json_lines, made_of, replacing, write_json


T = TypeVar("T")
ALPHABETS = {"digits": string.digits, "letters": string.ascii_lowercase, "hex": "0123456789abcdef"}
CANARIES, CANDIDATES = "canaries.json", "candidates.jsonl"
_FIELD = re.compile(r"\{(\w+):(\d+)\}")


class Format:
    """A text with random fields, "The code of the safe is {digits:6}." for example.

    Args:
        text: with one or more fields {digits:N}, {letters:N} or {hex:N} of N characters; all else stays as it is.
    Raises:
        ValueError: no field, an unknown one, or one without characters.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        fields = _FIELD.findall(text)
        if not fields or any(kind not in ALPHABETS or int(length) < 1 for kind, length in fields):
            raise ValueError(
                f"the format {text!r} needs one or more fields like {{digits:9}}: a kind of character "
                f"({', '.join(ALPHABETS)}) and how many of them."
            )
        if sum(int(length) for _, length in fields) > 1000:
            raise ValueError(f"the format {text!r} has more than 1000 random characters; use shorter fields.")
        self._alphabets = [ALPHABETS[kind] for kind, length in fields for _ in range(int(length))]
        self._lengths = [int(length) for _, length in fields]

    @property
    def space(self) -> int:
        """Number of different texts."""
        return prod(map(len, self._alphabets))

    def candidate(self, number: int) -> str:
        """Return the text with this number, from 0 to space - 1."""
        characters = []
        for alphabet in reversed(self._alphabets):
            number, digit = divmod(number, len(alphabet))
            characters.append(alphabet[digit])
        drawn = iter(reversed(characters))
        lengths = iter(self._lengths)
        return _FIELD.sub(lambda _: "".join(next(drawn) for _ in range(next(lengths))), self.text)


@dataclass(frozen=True, kw_only=True)
class Canary:
    """A secret, and how often it was put into the training data; 0 for a control."""

    canary_id: str
    text: str
    insertions: int


@dataclass(frozen=True, kw_only=True)
class CanarySet:
    """Canaries of one format, and the texts they are ranked among.

    Args:
        format: as for `Format`.
        space: how many texts of this format there are.
        seed: all was drawn with it.
        canaries: what was put in, and controls that were not.
        candidates: other texts of the format; all that there are, or a random sample of them.
    """

    format: str
    space: int
    seed: int
    canaries: tuple[Canary, ...]
    candidates: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """True if the candidates are all texts of the format that are not canaries, so that ranks are exact."""
        return len(self.candidates) + len(self.canaries) == self.space


def make_canaries(
    format: str, *, insertions: Sequence[int], each: int = 1, candidates: int = 10_000, seed: int = 0
) -> CanarySet:
    """Draw canaries and candidates, all different.

    Args:
        format: the text, with its random fields; see `Format`.
        insertions: how often a canary is to be put in; 0 makes a control.
        each: canaries for each number of insertions.
        candidates: how many other texts to draw, or all of them if there are fewer.
        seed: the same seed draws the same ones.
    Raises:
        ValueError: a format without fields, too small for so many canaries, or numbers that cannot be.
    """
    form = Format(format)
    if not insertions or min(insertions) < 0 or len(set(insertions)) != len(insertions):
        raise ValueError(
            f"insertions are {list(insertions)}, but they must be one or more different numbers from 0 on."
        )
    if each < 1 or candidates < 1:
        raise ValueError(f"each is {each} and candidates are {candidates}, but both must be at least 1.")
    count = each * len(insertions)
    if form.space <= count:
        raise ValueError(
            f"there are only {form.space} texts like {format!r}, too few for {count} canaries and candidates to rank "
            "them among: use longer fields."
        )
    numbers = _different(random.Random(seed), form.space, min(count + candidates, form.space))
    texts = [form.candidate(number) for number in numbers]
    times = [number for number in insertions for _ in range(each)]
    canaries = (
        Canary(canary_id=f"canary-{place}", text=text, insertions=number)
        for place, (text, number) in enumerate(zip(texts, times, strict=False), start=1)
    )
    return CanarySet(
        format=format, space=form.space, seed=seed, canaries=tuple(canaries), candidates=tuple(texts[count:])
    )


def interleave(rows: Iterable[T], extra: Sequence[T], *, total: int, seed: int) -> Iterator[T]:
    """Yield `rows` in their order, with `extra` in a random order at random places between them.

    Args:
        rows: as many as `total`; taken one after the other.
        extra: what is put in.
        total: the number of rows.
        seed: the same seed gives the same order.
    """
    generator = random.Random(seed)
    shuffled = list(extra)
    generator.shuffle(shuffled)
    places = set(generator.sample(range(total + len(shuffled)), len(shuffled)))
    source, added = iter(rows), iter(shuffled)
    for place in range(total + len(shuffled)):
        yield next(added) if place in places else next(source)


def insert_canaries(
    documents: str | os.PathLike,
    output: str | os.PathLike,
    canaries: CanarySet,
    *,
    id_key: str = "id",
    text_key: str = "text",
) -> int:
    """Copy training data with every canary put in as often as it says, each time as a document of its own.

    The lines of `documents` are copied as they are; those of the canaries have an id (`canary-1#1`, ...) and a text
    and stand at random places between them, drawn with the seed of the set. Where the documents have a bucket (how
    often training sees them), each of these lines has bucket 1.

    Args:
        documents: JSON lines.
        output: the file to write; it appears complete or not at all.
        canaries: of `make_canaries`.
        id_key: field for the id in the lines that are added.
        text_key: field for their text.
    Returns:
        How many lines were added.
    Raises:
        ValueError: `documents` is missing, not JSON lines, or has no such text field.
    """
    total, buckets = 0, False
    for number, _, row in json_lines(documents):
        if not isinstance(row, dict) or text_key not in row:
            raise ValueError(f"{documents}, line {number} has no field {text_key!r}; name it with --text_key.")
        total += 1
        buckets = buckets or "bucket" in row
    seen = {"bucket": 1} if buckets else {}
    added = [
        json.dumps({id_key: f"{canary.canary_id}#{time}", text_key: canary.text, **seen}).encode()
        for canary in canaries.canaries
        for time in range(1, canary.insertions + 1)
    ]
    if os.path.exists(output) and os.path.samefile(documents, output):
        raise ValueError(f"{output} is the training data itself: name another file for the copy with canaries.")
    with open(documents, "rb") as file:
        lines = (line.removeprefix(BOM).rstrip(b"\r\n") for line in file if line.removeprefix(BOM).strip())
        with replacing(Path(output)) as copy:
            copy.writelines(line + b"\n" for line in interleave(lines, added, total=total, seed=canaries.seed))
    return len(added)


def write_canaries(canaries: CanarySet, directory: str | os.PathLike) -> None:
    """Write the two files named above into a directory."""
    directory = Path(directory)
    lines = [(json.dumps({"text": text}) + "\n").encode() for text in canaries.candidates]
    about: dict[str, Any] = {name: getattr(canaries, name) for name in ("format", "space", "seed")}
    about["candidates"] = len(lines)
    about["candidates_sha256"] = hashlib.sha256(b"".join(lines)).hexdigest()
    about["canaries"] = [asdict(canary) for canary in canaries.canaries]
    with replacing(directory / CANDIDATES) as file:
        file.writelines(lines)
    write_json(directory / CANARIES, about)


def read_canaries(directory: str | os.PathLike) -> CanarySet:
    """Read what `write_canaries` wrote.

    Raises:
        ValueError: a file is missing or damaged, or the two are not of one set.
    """
    directory = Path(directory)
    if not (directory / CANARIES).is_file():
        raise ValueError(f"{directory} holds no {CANARIES}; `canaries make` writes it.")
    candidates: list[Any] = [
        row.get("text") if isinstance(row, dict) else "" for _, _, row in json_lines(directory / CANDIDATES)
    ]
    digest = hashlib.sha256((directory / CANDIDATES).read_bytes()).hexdigest()
    try:
        about = json.loads((directory / CANARIES).read_text(encoding="utf-8"))
        if about["candidates_sha256"] != digest:
            raise ValueError(f"{CANDIDATES} is not the one that was written with {CANARIES}")
        if not all(map(is_count, [about["space"], *(canary["insertions"] for canary in about["canaries"])])):
            raise ValueError("space and insertions are whole numbers of at least 0")
        texts = [about["format"], *candidates, *(canary["text"] for canary in about["canaries"])]
        if not about["canaries"] or not all(isinstance(text, str) for text in texts):
            raise ValueError("the format, canaries and candidates are texts, and there is a canary")
        return CanarySet(
            **{name: about[name] for name in ("format", "space", "seed")},
            canaries=tuple(made_of(Canary, canary) for canary in about["canaries"]),
            candidates=tuple(candidates),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{directory} is damaged ({error}): make the canaries again with the same seed.") from None


def _different(generator: random.Random, space: int, count: int) -> list[int]:
    """Draw `count` different numbers below `space`, which may be larger than a range can be."""
    if space < 2**62:
        return generator.sample(range(space), count)
    drawn: dict[int, None] = {}
    while len(drawn) < count:
        drawn[generator.randrange(space)] = None
    return list(drawn)
