"""What a failing test on several ranks says."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist

from tests.helpers.ranks import run_ranks


def crash_where_others_wait():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def test_a_rank_that_a_signal_ends_says_where():
    with pytest.raises(AssertionError, match="rank 1 ended with -11.*\n(.|\n)*in crash_where_others_wait"):
        run_ranks(crash_where_others_wait, 2)
