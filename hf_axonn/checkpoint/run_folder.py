"""The folder that a run saves its checkpoints in, which one run at a time may have."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path


HELD = 15.0  # seconds in which processes of a run that has ended may still hold its folder


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Keep the folder of a run from other runs inside, by a lock that ends with this process; on one rank.

    Nothing is written. A file system that cannot lock a directory, such as NFS, lets every run in.

    Raises:
        ValueError: another run holds it.
    """
    handle, end = os.open(folder, os.O_RDONLY), time.monotonic() + HELD
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise ValueError(
                        f"another run trains into {folder} now, and each would replace and remove checkpoints of the "
                        "other: end it first, or name another output_dir"
                    ) from None
                time.sleep(HELD / 30)
            except OSError:
                break
        yield
    finally:
        os.close(handle)
