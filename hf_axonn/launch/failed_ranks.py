"""Ranks that failed, in a line each: what a launcher ends with instead of its own traceback and torchrun's table.

The reason is what the rank has printed itself, and forty lines below it nobody finds it.
"""

from __future__ import annotations

import signal
import sys
import time
from types import TracebackType
from typing import Any

from hf_axonn.distributed.watchdog.signals import EXIT_CODE


LINGER = 3.0  # seconds after EXIT_CODE: srun ends the launchers of other nodes as soon as the first one has failed


def shorten_child_failures() -> None:
    """Let this launcher print a line for each rank that failed, and end with the exit code of the first; where a
    signal ends it, one line, and the exit code that a shell gives.

    Any other exception that reaches the launcher keeps its traceback.
    """
    stock = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if kind.__name__ == "SignalException":  # torchrun's, as the next; their modules take long to import
            number: signal.Signals = vars(error)["sigval"]
            print(f"hf_axonn: the launcher got {number.name}, and has ended its ranks.", file=sys.stderr)
            raise SystemExit(128 + number)
        if kind.__name__ != "ChildFailedError":
            stock(kind, error, traceback)
            return
        code = exit_code(error)
        if code == EXIT_CODE:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of srun, which ends with the largest exit code
            print(f"hf_axonn: the ranks have saved and stopped: exit code {code}.", file=sys.stderr)
            time.sleep(LINGER)
        else:
            print(*describe_failures(error), sep="\n", file=sys.stderr)
        raise SystemExit(code)

    sys.excepthook = hook


def describe_failures(error: Any) -> list[str]:
    """Return the lines for a ChildFailedError of torchrun: the first rank that failed, then the others."""
    first, _ = error.get_first_failure()
    lines = []
    for rank in sorted(error.failures, key=lambda rank: (rank != first, rank)):
        failure = error.failures[rank]
        by = f"by {failure.signal_name()}" if failure.exitcode < 0 else f"with exit code {failure.exitcode}"
        file = f", and wrote {failure.error_file}" if failure.error_file != "<N/A>" else ""
        lines.append(f"hf_axonn: rank {rank} (process {failure.pid}) ended {by}{file}.")
    return [*lines, "hf_axonn: the reason is above, or in the files of --log_dir."]


def exit_code(error: Any) -> int:
    """Return the exit code of the first rank that failed; 1 if a signal ended it."""
    _, failure = error.get_first_failure()
    return failure.exitcode if failure.exitcode > 0 else 1
