"""Ranks that come early wait for those that come late, again and again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from hf_axonn.distributed.collectives import barrier
from hf_axonn.distributed.meeting import meet
from tests.helpers.ranks import run_ranks


def _wait_twice(folder: Path, wait: Callable[[], None]) -> list[bool]:
    seen = []
    for late in (0, 1):
        if dist.get_rank() == late:
            time.sleep(0.3)  # who does not wait would look before
            (folder / str(late)).touch()
        wait()
        seen.append((folder / str(late)).exists())
    return seen


@pytest.mark.parametrize("wait", [barrier, meet])
def test_who_comes_early_waits(tmp_path, wait):
    assert run_ranks(_wait_twice, 2, tmp_path, wait) == [[True, True]] * 2


def test_nothing_on_one_process():
    barrier()
