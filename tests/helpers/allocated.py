"""What a process holds of memory, and the most that it held in a while."""

from __future__ import annotations

import ctypes
import threading

import pytest


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks".split()]
    _fields_ += [(name, ctypes.c_size_t) for name in "uordblks fordblks keepcost".split()]


glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="what malloc has given out is a number of glibc 2.33 and newer"
)


def allocated() -> int:
    """Bytes that malloc has given out and not got back.

    Not the process's memory: free memory in glibc's arenas is in it, too (`malloc_trim` leaves the end of each
    thread's, and a rank is forked with all of them), and who allocates it again does not grow.
    """
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    found: _Mallinfo2 = mallinfo2()
    return int(found.uordblks + found.hblkhd)


class Peak(threading.Thread):
    """Watches, from its making on, what is allocated, until it is asked for the growth."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.most = allocated()
        self.done = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.done.wait(0.002):
            self.most = max(self.most, allocated())

    def growth(self) -> int:
        """Bytes at the highest point beyond those at the start."""
        self.done.set()
        self.join()
        return max(self.most, allocated()) - self.before
