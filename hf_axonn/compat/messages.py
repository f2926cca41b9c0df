"""Messages of hf_axonn and hf_axonn_eval in a run, at the level that Transformers and Accelerate are set to.

    logger = get_logger(__name__)

Every message of a run is one of a logger of `hf_axonn` or of `hf_axonn_eval`, as loud as ACCELERATE_LOG_LEVEL says,
else as Transformers is (`transformers.logging.set_verbosity`, TRANSFORMERS_VERBOSITY, `log_level` of Trainer), unless
the program has set a level of its own: `logging.getLogger("hf_axonn").setLevel(...)`. It goes to the handlers that the
program has set up for `logging`, else to stderr. Not here are what a launcher says before a script begins, the results
of a command, and why a run ends (distributed/watchdog): these are printed, and no level silences them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator


class _Follower(logging.Logger):
    """A logger whose level is that of others where nobody has set its own."""

    @property
    def level(self) -> int:
        return self.__dict__["level"] or _read_level()

    @level.setter
    def level(self, value: int) -> None:
        self.__dict__["level"] = value


class _Stderr(logging.StreamHandler):
    """A handler like `logging.lastResort`, at any level: it prints where the program has set up nothing."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers:
            self.stream = sys.stderr  # which may have been replaced since
            super().emit(record)


def get_logger(name: str) -> logging.Logger:
    """The logger of a module of one of our packages."""
    package = name.partition(".")[0]
    root = logging.getLogger(package)
    if not isinstance(root, _Follower):
        root.__class__ = _Follower
        handler = _Stderr()
        handler.setFormatter(logging.Formatter(f"[{package}] %(message)s"))
        root.addHandler(handler)
    return logging.getLogger(name)


@contextlib.contextmanager
def printed_on_first_rank() -> Iterator[None]:
    """An error that leaves the block, which every rank of a launch raises, is printed by the first one alone.

    For what may be raised before the ranks meet; afterwards the watchdog sees to it (distributed/watchdog).
    """
    try:
        yield
    except Exception as error:
        before, this = sys.excepthook, error
        if os.environ.get("RANK", "0") != "0":
            sys.excepthook = lambda kind, raised, where: None if raised is this else before(kind, raised, where)
        raise


def _read_level() -> int:
    level = logging.getLevelName(os.environ.get("ACCELERATE_LOG_LEVEL", "").upper())
    if isinstance(level, int):
        return level
    theirs = sys.modules.get("transformers.utils.logging")
    return theirs.get_verbosity() if theirs is not None else logging.WARNING
