"""Samples as texts, for tools that tokenize themselves.

A tool that is given texts makes token ids of them by rules of its own, and another id at the boundary is another
question. So each sample is decoded, tokenized again as the tool does it, and left out if prefix or suffix come back
as other ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hf_axonn_eval.data.jsonl import replacing
from hf_axonn_eval.data.samples import Sample


class Texts(NamedTuple):
    """A sample whose texts a tool turns into its ids."""

    sample: Sample
    prefix: str
    suffix: str


# prefix and suffix text -> what the tool feeds as prefix and scores as suffix
Tokenize = Callable[[str, str], tuple[Sequence[int], Sequence[int]]]


@dataclass
class Tally:
    """Counts of the samples that became texts, and of those left out, by reason; filled while they are read."""

    exported: int = 0
    left_out: dict[str, int] = field(default_factory=lambda: {"not_text": 0, "other_ids": 0})


def as_texts(
    samples: Iterable[Sample], tokenizer: Any, *, begin: Sequence[int], tokenize: Tokenize, tally: Tally
) -> Iterator[Texts]:
    """Yield the samples whose texts lead to their ids.

    Left out are, as `not_text`, samples that cannot be cut into two texts (a character of several tokens lies across
    the boundary, or one of the two is empty), and as `other_ids` those of whose texts the tool makes other ids.

    Args:
        samples: to be exported.
        tokenizer: that made them.
        begin: ids that the tool adds before every prefix; where a sample begins with them, its text does not.
        tokenize: what the tool does.
        tally: is counted up.
    Raises:
        ValueError: at the end, if no sample was left.
    """
    for sample in samples:
        ids = list(sample.prefix)
        if begin and ids[: len(begin)] == list(begin):
            ids = ids[len(begin) :]
        prefix, full = _decode(tokenizer, ids), _decode(tokenizer, [*ids, *sample.suffix])
        suffix = full.removeprefix(prefix)
        if not prefix or not suffix or prefix + suffix != full:
            tally.left_out["not_text"] += 1
            continue
        shown, scored = tokenize(prefix, suffix)
        if list(shown) != list(sample.prefix) or list(scored) != list(sample.suffix):
            tally.left_out["other_ids"] += 1
            continue
        tally.exported += 1
        yield Texts(sample, prefix, suffix)
    if not tally.exported:
        reasons = ", ".join(f"{number} {reason}" for reason, number in tally.left_out.items())
        raise ValueError(
            f"no sample can be exported ({reasons}): the tool makes other token ids of their texts. Samples with "
            "--add_special_tokens suit tokenizers that begin texts with BOS, samples without it others."
        )


def write_documents(
    texts: Iterable[Texts], directory: Path, *, name: str, fields: Callable[[Texts], dict[str, Any]]
) -> dict[str, int]:
    """Write texts as JSON lines with these fields, those of a bucket into the file NAME_bucket_N.jsonl.

    Returns:
        The name of each file without its ending, and the tokens of the longest suffix in it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    longest: dict[str, int] = {}
    files: dict[str, BinaryIO] = {}
    with ExitStack() as stack:
        for some in texts:
            task = f"{name}_bucket_{some.sample.bucket}"
            if task not in files:
                files[task] = stack.enter_context(replacing(directory / f"{task}.jsonl"))
            files[task].write((json.dumps(fields(some)) + "\n").encode())
            longest[task] = max(longest.get(task, 0), len(some.sample.suffix))
    return longest


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
