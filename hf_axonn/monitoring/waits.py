"""Seconds that the computation of a rank waits for collectives in one step: the exposed communication.

All waits of the engine count, so a slower rank and the bubble of a pipeline do, too. On CUDA by
events on the stream that computes, which is what waits there; elsewhere by the clock of the host. What other code
waits for, as DistributedDataParallel does in C++, is not seen.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from hf_axonn.distributed.collectives import watch_waits


class WaitTimer:
    """Measures the waits from `start` to `stop`, on one device.

    Two events a wait on CUDA, two looks at the clock elsewhere; nothing when it is stopped.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._inside = contextlib.ExitStack()
        self._spans: list[tuple[float | torch.cuda.Event, float | torch.cuda.Event]] = []  # the last: all of it
        self._begin: float | torch.cuda.Event | None = None

    @property
    def running(self) -> bool:
        """True if it was started, and not stopped."""
        return self._begin is not None

    def start(self) -> None:
        """Begin. What was measured before and not taken is forgotten."""
        self._spans = []
        self._inside.enter_context(watch_waits(lambda kind, group: self._wait()))
        self._begin = self._now()

    def stop(self) -> None:
        """End."""
        if self._begin is not None:
            self._inside.close()
            self._spans.append((self._begin, self._now()))
            self._begin = None

    def take(self) -> tuple[float, float]:
        """Seconds (of waiting, of all) between `start` and `stop`, once; zeros if there are none. Waits for the
        device."""
        if self.running or not self._spans:
            return 0.0, 0.0
        *waits, whole = [_between(*span) for span in self._spans]
        self._spans = []
        return sum(waits), whole

    @contextlib.contextmanager
    def _wait(self) -> Iterator[None]:
        begin = self._now()
        yield
        self._spans.append((begin, self._now()))

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    """Seconds."""
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    assert not isinstance(end, float)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
