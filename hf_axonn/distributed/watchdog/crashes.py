"""Stack of a process that a signal of its own ended, in a file for the other ranks.

gloo aborts a process that receives another number of bytes than it waits for, in a thread without Python: no
exception, no handler, no exit function runs. Python's faulthandler still writes the stacks into a file, which the
other ranks of the same host read. A program that has enabled faulthandler itself keeps its own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from hf_axonn.distributed.watchdog.progress import FRAMES, is_waiting_file, source_line


@dataclass(frozen=True)
class Crash:
    """A rank's end by a signal.

    Args:
        reason: the signal in words, such as Aborted.
        call: the line of the user's program, empty if there is none; as in Account.
        waiting: whether the main thread stood in a collective.
        stack: the innermost frames of the main thread, the innermost last.
    """

    reason: str
    call: str
    waiting: bool
    stack: tuple[str, ...]

    def to_dict(self) -> dict:
        """Return it for JSON; `Crash(**...)` reads it back."""
        return asdict(self)


class CrashFile:
    """The file into which this process writes its stacks when a signal ends it. Removed by `close`."""

    def __init__(self, folder: str, rank: int) -> None:
        self._path = Path(folder, str(rank))
        self._file: IO[bytes] | None = None
        if faulthandler.is_enabled():
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            # Without a buffer, which a full disk would leave to be written when this is closed.
            file = open(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0)
            file.write(f"main 0x{threading.main_thread().ident:016x}\n".encode())
            faulthandler.enable(file)
            self._file = file

    def close(self, *, of_all: bool = False) -> None:
        """Stop, and remove this file and those of ranks that crashed, or of all; with the last one the folder goes."""
        if self._file is not None:
            faulthandler.disable()
            self._file.close()
            self._file = None
        folder = self._path.parent
        crashed = [folder / str(rank) for rank, _ in crashes_in(str(folder))]
        with contextlib.suppress(OSError):
            for path in list(folder.iterdir()) if of_all else [self._path, *crashed]:
                path.unlink(missing_ok=True)
            folder.rmdir()


def crashes_in(folder: str) -> Iterator[tuple[int, Crash]]:
    """Yield the ranks of this host that ended in this way."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError, ValueError):
                crash = parse(Path(folder, name).read_text(errors="replace"))
                if crash is not None:
                    yield int(name), crash


def parse(text: str) -> Crash | None:
    """Read what faulthandler wrote after the number of the main thread; None if it has written nothing."""
    header, _, dump = text.partition("\n")
    reason = re.search(r"^Fatal Python error: (.+)$", dump, re.M)
    if reason is None:
        return None
    thread = header.removeprefix("main ")
    _, _, stack = dump.partition(f"hread {thread} ")  # Thread, or Current thread
    frames = re.findall(r'^  File "(.+)", line (\d+) in (.+)$', stack.partition("\n\n")[0], re.M)
    places = [(file, int(line)) for file, line, _ in frames]
    return Crash(
        reason=reason.group(1),
        call=source_line(places),
        waiting=any(is_waiting_file(file) for file, _ in places[:FRAMES]),
        stack=tuple(f"{file}:{line} in {name}" for file, line, name in reversed(frames[:FRAMES])),
    )
