"""Agreement of ranks on the step after which they stop, without processes."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from hf_axonn.distributed import stopping
from hf_axonn.distributed.watchdog import signals


@pytest.fixture
def ranks(monkeypatch):
    """Agreements of three ranks in one process, which share a store; `request` is their signal."""
    store, request = dist.HashStore(), threading.Event()
    monkeypatch.setattr(stopping, "watch_store", lambda keys: store)
    monkeypatch.setattr(stopping, "stop_requested", request)
    monkeypatch.setattr(stopping, "INTERVAL", 0.02)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    found = []
    for rank in range(3):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        found.append(stopping.Agreement())
    return found, request


def test_ranks_that_are_steps_apart_stop_after_the_same_one(ranks):
    agreements, request = ranks
    for agreement, ends in zip(agreements, (2, 5, 3), strict=True):
        assert not any(agreement.reaches_end() for _ in range(ends))
    request.set()
    end = time.monotonic() + 60  # reached only where a thread makes no promise at all
    while any(agreement._promised is None for agreement in agreements) and time.monotonic() < end:
        time.sleep(0.01)
    stopped = []

    def train(rank: int, ends: int) -> None:
        while not agreements[rank].reaches_end():
            ends += 1
        stopped.append(ends + 1)

    threads = [threading.Thread(target=train, args=pair, daemon=True) for pair in enumerate((2, 5, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert stopped == [6, 6, 6], "the first end that the rank ahead had not passed"


def test_a_rank_that_is_gone_ends_the_others(monkeypatch):
    ended = threading.Event()

    def end() -> None:
        ended.set()
        raise RuntimeError("the process ends")

    monkeypatch.setattr(stopping, "watch_store", lambda keys: dist.HashStore())
    monkeypatch.setattr(stopping, "end_as_asked", end)
    monkeypatch.setattr(stopping, "PATIENCE", 0.05)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    request = threading.Event()
    monkeypatch.setattr(stopping, "stop_requested", request)
    stopping.Agreement()
    request.set()
    assert ended.wait(20)


def test_one_process_stops_at_the_end_of_its_step(monkeypatch):
    request, before = threading.Event(), [signal.getsignal(number) for number in stopping.SIGNALS]
    for module in (stopping, signals):
        monkeypatch.setattr(module, "stop_requested", request)
    assert not dist.is_initialized()
    for number in stopping.SIGNALS:
        with stopping.stop_when_asked() as agreement:
            assert not agreement.reaches_end()
            os.kill(os.getpid(), number)
            assert agreement.reaches_end()
        request.clear()
    assert [signal.getsignal(number) for number in stopping.SIGNALS] == before
