"""Counts and lists in words, for the sentences of a report."""

from collections.abc import Mapping, Sequence
from typing import Any


SETTINGS = {  # names in run.json that say too little
    "batch_size": "batch size",
    "size": "tokens",
    "rows": "rows at most",
    "number": "in all",
    "in_a_unit": "at once",
    "tokens": "tokens read",
    "tokens_alone": "tokens if each sample were read alone",
    "decoded_rows": "rows at most in decoding",
    "near_tie_below": "margin of a near tie, in nats,",
    "requests": "requests at once",
    "alternatives": "other tokens asked at each place",
    "membership_unknown": "membership scores that a server does not give",
}


def join_words(words: Sequence[object], last: str = "and") -> str:
    """Join words: a, b and c."""
    texts = [str(word) for word in words]
    return f" {last} ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def count(number: int, one: str) -> str:
    """Write how many there are: 1 sample, 1,200 samples."""
    return f"{number:,} {one}{'' if number == 1 else 's'}"


def times(buckets: Sequence[str]) -> str:
    """Write how often, by the names of buckets: once, 1 or 12 times."""
    return "once" if list(buckets) == ["1"] else f"{join_words(buckets, 'or')} times"


def settings(entries: Mapping[str, Any]) -> str:
    """Write what JSON can say as text: "batches (rows at most 4, in all 3)"; what is None is left out."""
    return ", ".join(
        f"{SETTINGS.get(name, name)} {_value(value)}" for name, value in entries.items() if value is not None
    )


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return f"({settings(value)})"
    if isinstance(value, (list, tuple)):
        return " ".join(map(_value, value))
    return str(value)
