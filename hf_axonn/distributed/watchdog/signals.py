"""SIGTERM and Ctrl-C, noticed by a thread while the main thread waits in a collective, where Python's handlers do not
run.

The handler that C runs at once writes a byte into a socket (signal.set_wakeup_fd); a thread waits at its other end. A
program that has a handler or a wakeup socket of its own keeps it, and then nothing is noticed here; so does one that
sets its handler later, to save a checkpoint before a time limit.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import threading
import time
from types import FrameType


EXIT_CODE = 75  # of a process that has saved and is to be started again: EX_TEMPFAIL of sysexits.h
stop_requested = threading.Event()  # a signal asks this run to save and to stop (distributed/stopping.py)


def request_stop(number: int, frame: FrameType | None) -> None:
    """Note that a signal asks this run to stop; a handler of signals."""
    stop_requested.set()


def keep_until_limit() -> None:
    """Note SIGUSR1, which comes before a time limit, instead of ending at it, until the process has ended.

    Only in the main thread, and where the program has no handler of its own.
    """
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, request_stop)
        # Python gives handlers back long before it has freed everything; what is ignored stays so.
        atexit.register(signal.signal, signal.SIGUSR1, signal.SIG_IGN)


class Termination:
    """Made by the main thread, waited for by another one."""

    def __init__(self) -> None:
        self._reader = self._writer = None
        self._paused = False
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            return
        self._reader, self._writer = reader, writer
        self._on()
        os.register_at_fork(before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._in_child)

    def _on(self) -> None:
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._handler)

    def _off(self) -> bool:
        """Do what was done before; returns whether this was on. Only the main thread can switch."""
        if self._writer is None or threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(signal.SIGTERM) != self._handler:
            return False
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        other = signal.set_wakeup_fd(-1)
        if other not in (-1, self._writer.fileno()):
            signal.set_wakeup_fd(other)
        return True

    def wait(self, seconds: float) -> int:
        """Wait so long, or until a signal comes; returns SIGTERM or SIGINT, or 0 if none has come."""
        if self._reader is None:
            time.sleep(seconds)
            return 0
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._reader.settimeout(left)  # select takes no file above 1023, as rank 0 has where thousands connect
            came = b""
            with contextlib.suppress(TimeoutError):
                came = self._reader.recv(64)
            if any(signal.getsignal(number) is request_stop for number in came if number):
                stop_requested.set()  # the main thread may wait in a collective, and not come to the handler
            if signal.SIGTERM in came and signal.getsignal(signal.SIGTERM) == self._handler:
                return signal.SIGTERM
            if signal.SIGINT in came and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                return signal.SIGINT
        return 0

    def close(self) -> None:
        """Let SIGTERM do again what it did before."""
        if self._off():
            self._writer = None

    def _before_fork(self) -> None:
        """Let a child process end at SIGTERM as ever, and not write into its parent's socket."""
        self._paused = self._off()

    def _after_fork(self) -> None:
        if self._paused:
            self._on()

    def _in_child(self) -> None:
        self._off()  # of a fork from another thread, which is the main one now
        self._writer = None

    def _handler(self, number: int, frame) -> None:
        """Do nothing when the main thread comes to it: the other thread has been told."""
