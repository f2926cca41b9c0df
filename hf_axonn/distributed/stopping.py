"""Stopping of all ranks after the same step, when a signal asks for it: SIGTERM, or SIGUSR1 before a time limit.

Signals reach ranks at different times, or one rank alone, and ranks may be steps apart: one that waits for a GPU is
behind its own calls. So each rank has a thread that looks once a second into the store of the process group, as the
watchdog's does, and nothing is sent while nobody asks:

    1. the thread of a rank that got a signal writes the request
    2. each thread promises that its main thread does not pass the next end of a step until a step is agreed
    3. rank 0 takes the latest of these ends, which nobody has passed: all ranks go on to it, and stop there

Threads answer at any time, so a main thread that waits at such an end waits for no other main thread.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

from hf_axonn.compat.torch import watch_store
from hf_axonn.distributed.watchdog.signals import keep_until_limit, request_stop, stop_requested
from hf_axonn.distributed.watchdog.watchdog import end_as_asked


SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
INTERVAL = 1.0  # seconds between two looks; longer in worlds of more than 2,000 ranks, which share one store
PATIENCE = 15.0  # seconds in which every living rank promises

_agreement: Agreement | None = None


@contextlib.contextmanager
def stop_when_asked() -> Iterator[Agreement | Alone]:
    """Take SIGTERM and SIGUSR1 as a request to stop inside, in the main thread of every rank. No collective.

    Afterwards SIGTERM does what it did before. SIGUSR1 does no harm until the process has ended, to a final save.
    """
    global _agreement
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if not alone and (_agreement is None or _agreement.world is not dist.group.WORLD):
        _agreement = Agreement()
    main = threading.current_thread() is threading.main_thread()  # no other takes signals
    keep_until_limit()
    before = {number: signal.signal(number, request_stop) for number in SIGNALS if main}
    agreement = Alone() if alone or _agreement is None else _agreement
    agreement.in_training = True
    try:
        yield agreement
    finally:
        agreement.in_training = False
        for number, handler in before.items():
            signal.signal(number, handler)


class Alone:
    """Agreement of a single process with itself."""

    in_training = False

    def reaches_end(self) -> bool:
        """Return whether a signal has asked to stop."""
        return stop_requested.is_set()


class Agreement:
    """The agreement of the ranks on a step, kept by a thread that lives as long as the process.

    Ranks count the ends of steps together, over all calls of `train`, so that a rank whose training is over still
    answers the others.
    """

    def __init__(self) -> None:
        self.world = dist.group.WORLD
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._store = watch_store("stop")
        self._lock = threading.Lock()
        self._ends = 0  # of steps that the main thread has reached
        self._promised: int | None = None
        self._agreed = threading.Event()
        self._last = 0  # the end at which all stop
        self.in_training = False  # else the main thread comes to no end of a step, and has its last files to write
        threading.Thread(target=self._run, name="hf_axonn-stop", daemon=True).start()

    def reaches_end(self) -> bool:
        """Count the end of a step, and return whether all ranks stop here. Waits for a step to be agreed on, if this
        rank has promised not to pass; else it does not communicate."""
        with self._lock:
            self._ends += 1
            promised = self._promised
        if promised is None or self._ends < promised:
            return False
        self._agreed.wait()
        return self._ends >= self._last

    def _run(self) -> None:
        interval = max(INTERVAL, self._size / 2000)
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it whoever kept it: the run is over
            while not self._store.check(["request"]):
                if stop_requested.wait(interval):
                    self._store.set("request", "1")
            self._agree()

    def _agree(self) -> None:
        with self._lock:
            self._promised = self._ends + 1
        self._store.set(f"promise/{self._rank}", str(self._promised))
        end = time.monotonic() + PATIENCE
        names = [f"promise/{rank}" for rank in range(self._size)] if self._rank == 0 else ["last"]
        while not self._store.check(names):
            if not self.in_training:  # a rank may be gone because its work is done
                end = time.monotonic() + PATIENCE
            elif time.monotonic() > end:  # a rank is gone, and torchrun ends the others
                end_as_asked()
            time.sleep(INTERVAL / 10)
        if self._rank == 0:
            self._store.set("last", str(max(int(self._store.get(name)) for name in names)))
        self._last = int(self._store.get("last"))
        self._agreed.set()
