"""Times actions of all ranks together, in passes, so that no disturbance of the machine spoils one timing alone.

Every pass over the actions times each of them once; medians of the passes count. A disturbance of some seconds then
spoils one pass of many actions and not all timings of one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hf_axonn.distributed.collectives import barrier, reduce_, world_group


# Seconds that a timing lasts at least, by repeating what is short: processes that share cores take turns of some
# milliseconds, and what is shorter than a turn would seem to have a core to itself.
LONG = 0.1
MOST_REPEATS = 10_000
UNMEASURED = 1e-6  # seconds of what is too short for the clock


def slowest(value: float, device: torch.device) -> float:
    """The largest of all ranks' values. One all-reduce over the world."""
    return float(reduce_(torch.tensor(value, dtype=torch.float64, device=device), world_group(), op="max"))


class Timings:
    """Actions by name, and the seconds of each in every pass, of the slowest rank.

    Args:
        device: where the actions run.
    Attributes:
        missing: optional actions that there was no time for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._actions: dict[str, Callable[[], Any]] = {}
        self._optional: set[str] = set()
        self._found: dict[str, list[float]] = {}
        self.missing: list[str] = []

    def add(self, name: str, action: Callable[[], Any], *, optional: bool = False) -> None:
        """Add an action, the same on every rank. An optional one may be skipped for want of time."""
        self._actions[name] = action
        if optional:
            self._optional.add(name)

    def run(self, passes: int, seconds: float) -> None:
        """Time every action once in each pass. Collective over the world.

        Args:
            passes: how many at most.
            seconds: when they are over no optional action is timed for the first time, and no further pass begins.
        """
        start = time.perf_counter()

        def over() -> bool:  # by the clock of the slowest, so that all ranks time the same
            return slowest(time.perf_counter() - start, self._device) > seconds

        repeats = {}
        for number in range(passes):
            if number and over():
                break
            for name, action in self._actions.items():
                if not number:
                    if name in self._optional and over():
                        self.missing.append(name)
                        continue
                    self._time(action, 1)  # what is done for the first time takes longer
                    once = max(self._time(action, 1), UNMEASURED)
                    repeats[name] = min(MOST_REPEATS, max(1, round(LONG / once)))
                if name in repeats:
                    self._found.setdefault(name, []).append(self._time(action, repeats[name]))

    def _time(self, action: Callable[[], Any], repeats: int) -> float:
        """Seconds of an action, begun by all ranks together and over with the slowest."""
        barrier()
        self._finish()
        start = time.perf_counter()
        for _ in range(repeats):
            action()
        self._finish()
        return slowest((time.perf_counter() - start) / repeats, self._device)

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def seconds(self, name: str) -> float:
        """Median seconds of an action."""
        return max(UNMEASURED, statistics.median(self._found[name]))

    def beyond(self, name: str, less: str) -> float:
        """Median seconds by which an action exceeds another in the same pass."""
        pairs = zip(self._found[name], self._found[less], strict=True)
        return max(UNMEASURED, statistics.median(value - other for value, other in pairs))


class Line(NamedTuple):
    """Seconds of a collective: latency + bytes that a rank sends / bandwidth."""

    latency: float
    bandwidth: float

    @classmethod
    def through(cls, short: tuple[float, float], long: tuple[float, float]) -> Line:
        """The line through two points (bytes sent, seconds).

        Where a clock's noise would make a slope or a latency that cannot be, all seconds of the long one are bytes.
        """
        slope = (long[1] - short[1]) / (long[0] - short[0])
        latency = short[1] - slope * short[0] if slope > 0 else 0.0
        latency = max(UNMEASURED, latency)
        return cls(latency, long[0] / max(UNMEASURED, long[1] - latency))
