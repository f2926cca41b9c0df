"""Agreement of ranks on the step after which they stop, without processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest
import torch.distributed as dist

from hf_axonn.distributed import stopping
from hf_axonn.distributed.watchdog import signals
from tests.helpers import ROOT


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


def test_a_rank_that_is_gone_ends_the_others_in_training_alone(monkeypatch):
    """After training it may have ended, and another one may still write the last files."""
    ended, looks = threading.Event(), threading.Semaphore(0)

    def end() -> None:
        ended.set()
        raise RuntimeError("the process ends")

    class Store(dist.HashStore):
        def check(self, names: list[str]) -> bool:
            looks.release()
            return super().check(names)

    monkeypatch.setattr(stopping, "watch_store", lambda keys: Store())
    monkeypatch.setattr(stopping, "end_as_asked", end)
    monkeypatch.setattr(stopping, "INTERVAL", 0.02)
    monkeypatch.setattr(stopping, "PATIENCE", 0.0)  # over at the second look
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    request = threading.Event()
    monkeypatch.setattr(stopping, "stop_requested", request)
    agreement = stopping.Agreement()
    request.set()
    assert all(looks.acquire(timeout=20) for _ in range(50)) and not ended.is_set()
    agreement.in_training = True
    assert ended.wait(20)


# SIGUSR1 comes, and once more when Python has given the handlers back and frees what there is.
NOTED = """
import os, signal
from hf_axonn.distributed.watchdog import signals

class Last:
    def __del__(self, kill=os.kill, process=os.getpid(), number=signal.SIGUSR1, write=os.write):
        kill(process, number)
        write(1, b"freed")

last = Last()
signals.keep_until_limit()
os.kill(os.getpid(), signal.SIGUSR1)
assert signals.stop_requested.is_set()
os.write(1, b"saved ")
"""


def test_sigusr1_lets_a_process_come_to_its_end():
    done = subprocess.run([sys.executable, "-c", NOTED], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "saved freed"), done.stderr[-2000:]


def test_one_process_stops_at_the_end_of_its_step(monkeypatch):
    request, before = threading.Event(), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(signals, "atexit", mock.Mock())  # of pytest's own process
    at_limit = signal.getsignal(signal.SIGUSR1)
    for module in (stopping, signals):
        monkeypatch.setattr(module, "stop_requested", request)
    assert not dist.is_initialized()
    for number in stopping.SIGNALS:
        with stopping.stop_when_asked() as agreement:
            assert not agreement.reaches_end()
            os.kill(os.getpid(), number)
            assert agreement.reaches_end()
        request.clear()
    assert signal.getsignal(signal.SIGTERM) is before
    # After training SIGUSR1 is noted still, as it would end a process that has its last files to write.
    assert signal.signal(signal.SIGUSR1, at_limit) is signals.request_stop
