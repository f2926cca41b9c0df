"""Counts and lists in words, for the sentences of a report."""

from collections.abc import Mapping, Sequence
from math import floor, log10
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


def round_mean(number: float, digits: str = "z.3f") -> str:
    """Write a number; one between 0 and 1 has more digits where it would be written as one of these."""
    text = f"{number:{digits}}"
    return _refine(number, digits, float(text)) if 0 < number < 1 and float(text) in (0, 1) else text


def round_end(number: float, other: float, digits: str) -> str:
    """Write an end of an interval, with more digits where -1, 0 or 1 would stand for it and lies nearer to the other
    end: 0 of 2,000 are not sure to be none.
    """
    text = f"{number:{digits}}"
    inward = (float(text) - number) * (other - number) > 0
    return _refine(number, digits, float(text)) if inward and float(text) in (-1, 0, 1) else text


def write_share(share: float, digits: int = 0) -> str:
    """Write a share in percent, with two digits where it is small: 26%, 0.37%; only nothing is 0%, only all 100%."""
    if 0 < share < 0.0995 * 0.1**digits:
        return f"{100 * share:.2g}%"
    text = f"{share:.{digits}%}"
    return text if share >= 1 or float(text[:-1]) < 100 else f"{_refine(100 * share, '.0f', 100)}%"


def _refine(number: float, digits: str, written: float) -> str:
    """Write two digits of how far a number is from what would be written."""
    sign = digits.partition(".")[0]
    places = f"{1 - floor(log10(abs(number - written)))}f" if written else "2g"
    return f"{number:{sign}.{places}}"


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
