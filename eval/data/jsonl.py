"""JSON and JSON lines on disk: files that appear complete or not at all, lines that are read when they are asked for,
and errors that name the file, the line and the byte.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from math import isinf, isnan
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, overload


T = TypeVar("T")
BOM = b"\xef\xbb\xbf"
LARGE = 2**53  # a float cannot count to it, and neither can many readers of JSON


class Line(NamedTuple):
    """A line of a file: its number from 1 on, the byte it begins at, and its value."""

    number: int
    start: int
    value: object


def json_lines(path: str | os.PathLike[str]) -> Iterator[Line]:
    """Yield the lines of a file one after the other; empty ones are skipped.

    Raises:
        ValueError: there is no such file, or a line is not UTF-8 or not JSON.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path} is not a file.")
    start = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            content = line.removeprefix(BOM) if number == 1 else line
            if content.strip():
                text = decode_utf8(content, f"{path}, line {number}", before=start + len(line) - len(content))
                try:
                    value = json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path}, line {number} is not JSON: {error}.") from None
                yield Line(number, start, value)
            start += len(line)


def made_of(kind: type[T], entry: object) -> T:
    """Make an object of a dataclass of the fields of a JSON object.

    Raises:
        ValueError: it is no object, has a field that the dataclass has not, or lacks one; or what the dataclass
            raises.
    """
    if not isinstance(entry, dict):
        raise ValueError("it is not a JSON object.")
    known: tuple[Field[Any], ...] = fields(kind)  # type: ignore[arg-type]  # a dataclass
    unknown = sorted(set(entry) - {field.name for field in known})
    needed = [field.name for field in known if field.default is MISSING and field.default_factory is MISSING]
    missing = [name for name in needed if name not in entry]
    if unknown or missing:
        lacks = f"it has no field {', '.join(missing)}" if missing else ""
        more = f"{kind.__name__} has no field {', '.join(unknown)}" if unknown else ""
        raise ValueError(f"{'; '.join(filter(None, (lacks, more)))}.")
    return kind(**entry)


def decode_utf8(content: bytes, place: str, *, before: int = 0) -> str:
    """Decode bytes as UTF-8.

    Args:
        content: the bytes.
        place: where they are from, for the message.
        before: how many bytes stand before them in their file.
    Raises:
        ValueError: they are not UTF-8; the message names the byte.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place} is not UTF-8: byte 0x{content[error.start]:02x} at position {before + error.start} of the file "
            f"({error.reason}). Write the file as UTF-8, or name the file that is."
        ) from None


class LineFile(Sequence[T]):
    """Lines of a file as a sequence of values, read when they are asked for: a million of them take 8 MB of memory.

    Args:
        path: the file.
        starts: the byte that each line begins at, in the order of the sequence.
        parse: gives the value of a line.
    """

    def __init__(self, path: Path, starts: Iterable[int], parse: Callable[[bytes], T]) -> None:
        self.path = path
        self._starts = array("Q", starts)
        self._parse = parse

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        with open(self.path, "rb") as file:
            file.seek(self._starts[index])
            return self._parse(file.readline())

    def __iter__(self) -> Iterator[T]:
        with open(self.path, "rb") as file:
            for start in self._starts:
                file.seek(start)
                yield self._parse(file.readline())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of `path` when it is complete; an error leaves the file that was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        with open(unfinished, "wb") as file:
            yield file
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def json_text(content: Any) -> str:
    """Return content as the text of a JSON file, in which infinities are "inf" and "-inf", and NaN is null."""
    return json.dumps(_finite(content), indent=2, allow_nan=False) + "\n"


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and isnan(content) else quote_infinity(content)


def quote_infinity(number: Any) -> Any:
    """Return a number for JSON: the text of an infinite one, and else the number itself."""
    return str(number) if isinstance(number, float) and isinf(number) else number


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, complete or not at all; see `json_text`."""
    with replacing(path) as file:
        file.write(json_text(content).encode())


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Add lines, each with its line feed, to a file, and see that they are on disk."""
    with open(path, "a", encoding="utf-8", newline="\n") as file:
        file.write("".join(lines))
        file.flush()
        os.fsync(file.fileno())


def cut_unfinished_line(path: Path) -> bytes:
    """Remove a last line that a crash cut short from a file, and return the rest."""
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        with open(path, "r+b") as file:
            file.truncate(complete)
    return content[:complete]


def is_count(value: object, *, least: int = 0) -> bool:
    """Return whether a value is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
