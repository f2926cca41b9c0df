"""memory_snapshots: refused without CUDA; its signal and its observer, with CUDA's allocator replaced."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch

import hf_axonn.monitoring.memory_snapshots as module
from hf_axonn import memory_snapshots


def test_without_cuda_it_says_what_there_is(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    with pytest.raises(ValueError, match="this process has no CUDA device: ProfilerCallback\\(profile_memory=True\\)"):
        memory_snapshots(tmp_path)
    assert not list(tmp_path.iterdir()) and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_a_signal_the_end_of_memory_and_a_call_write_a_snapshot(tmp_path):
    observers, began = [], []
    fakes = {
        "record_allocations": lambda: began.append(True),
        "write_allocations": lambda path: Path(path).write_text("snapshot"),
        "when_out_of_memory": observers.append,
    }
    folder = tmp_path / "snapshots"
    with mock.patch.multiple(module, **fakes), mock.patch.object(torch.cuda, "is_available", lambda: True):
        try:
            write = memory_snapshots(folder)
            assert began == [True] and not list(folder.iterdir())
            os.kill(os.getpid(), signal.SIGUSR2)
            assert len(list(folder.iterdir())) == 1
            observers[0]()
            assert write() == folder / f"rank-0-pid-{os.getpid()}-2.pickle"
            assert len(list(folder.iterdir())) == 3
            with pytest.raises(ValueError, match="SIGUSR2 has a handler already"):
                memory_snapshots(folder)
        finally:
            signal.signal(signal.SIGUSR2, signal.SIG_DFL)
