"""What WaitTimer measures: by the host's clock, and on CUDA by events, both of which are given here."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from hf_axonn.distributed import collectives
from hf_axonn.distributed.collectives import Pending, watch_waits
from hf_axonn.monitoring.waits import WaitTimer


class Work:
    """Takes a second to wait for."""

    def __init__(self, now: list[float]) -> None:
        self.now = now

    def wait(self) -> None:
        self.now[0] += 1


class Event:
    """Of CUDA: knows when it was recorded, and tells after it was waited for."""

    now: list[float]

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.known = False

    def record(self) -> None:
        self.at = self.now[0]

    def synchronize(self) -> None:
        self.known = True

    def elapsed_time(self, end: Event) -> float:
        assert end.known
        return 1e3 * (end.at - self.at)


def pending(now: list[float]) -> Pending:
    return Pending("arrived", collectives._Work(Work(now), "all_gather", "group"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_waits_of_a_step_are_added_up_once(device):
    now = [0.0]
    Event.now = now
    clock = mock.patch("hf_axonn.monitoring.waits.time.perf_counter", lambda: now[0])
    with clock, mock.patch.object(torch.cuda, "Event", Event):
        timer = WaitTimer(torch.device(device))
        assert timer.take() == (0.0, 0.0)
        pending(now).wait()  # before
        timer.start()
        now[0] += 4
        first, second = pending(now), pending(now)
        assert first.wait() == first.wait() == "arrived"
        now[0] += 2
        second.then(lambda result: result).wait()
        with collectives.waiting("send", "group"):
            now[0] += 0.5
        assert timer.running and timer.take() == (0.0, 0.0)
        timer.stop()
        pending(now).wait()  # after
        assert timer.take() == (2.5, 8.5) and timer.take() == (0.0, 0.0)
        assert not collectives._watches


def test_several_watch_and_nothing_is_left():
    seen: list[str] = []

    def watch(name: str):
        def context(kind: str, group: str) -> mock.MagicMock:
            seen.append(f"{name} {kind} {group}")
            return mock.MagicMock()

        return context

    begun_before = pending([0.0])
    with watch_waits(watch("one")):
        with watch_waits(watch("two")), collectives.waiting("send", "z"):
            pass
        begun_before.wait()
        pending([0.0]).wait()
    with collectives.waiting("send", "z"):
        pass
    assert seen == ["one send z", "two send z", "one all_gather group"]
