"""Signals that a launcher passes on to its ranks, which may save before they end (distributed/stopping.py).

torchrun answers SIGTERM by SIGTERM to the ranks, and thirty seconds later by SIGKILL, whatever they do; SIGUSR1, which
Slurm sends before a time limit, would end the launcher alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType


HANDLED = "PET_SIGNALS_TO_HANDLE"  # by torchrun: it reads the variable as its option --signals-to-handle
HANDLED_WITHOUT_TERM = "SIGINT,SIGHUP,SIGQUIT"


def forward_signals() -> None:
    """Pass SIGUSR1 on, and SIGTERM where torchrun leaves it to this process."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, _forward)
        if os.environ.get(HANDLED) == HANDLED_WITHOUT_TERM:
            signal.signal(signal.SIGTERM, _forward)


def _forward(number: int, frame: FrameType | None) -> None:
    import psutil

    ranks = psutil.Process().children()
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.send_signal(number)
    if not ranks and number == signal.SIGTERM:
        raise SystemExit(128 + number)
