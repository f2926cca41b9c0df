"""JSON lines: one value a line, and errors that name the file, the line and the byte."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


BOM = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """A line of a file: its number from 1 on, the byte it begins at, and what it says."""

    number: int
    start: int
    value: object


def json_lines(path: str | os.PathLike) -> Iterator[Line]:
    """The lines of a file one after the other; empty ones are passed over.

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
                text = decoded(content, f"{path}, line {number}", before=start + len(line) - len(content))
                try:
                    value = json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path}, line {number} is not JSON: {error}.") from None
                yield Line(number, start, value)
            start += len(line)


def decoded(content: bytes, place: str, *, before: int = 0) -> str:
    """The text of some bytes.

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
