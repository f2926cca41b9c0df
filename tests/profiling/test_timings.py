"""Timings: what is repeated, what is left out, and which number counts."""

import math
from types import SimpleNamespace

import pytest
import torch

from hf_axonn.distributed.collectives import world_rank
from hf_axonn.profiling import timings
from hf_axonn.profiling.timings import UNMEASURED, Line, Timings
from tests.helpers.ranks import run_ranks


def several():
    """By a clock that the actions themselves move on."""
    now = [0.0]
    timings.time = SimpleNamespace(perf_counter=lambda: now[0])
    timings.LONG = 0.05
    calls = {"slow": 0, "fast": 0, "optional": 0}

    def action(name, seconds):
        calls[name] += 1
        now[0] += seconds

    found = Timings(torch.device("cpu"))
    found.add("slow", lambda: action("slow", 0.08 if world_rank() else 0.01))
    found.add("fast", lambda: action("fast", 0.002))
    found.run(3, math.inf)
    once = dict(calls)
    late = Timings(torch.device("cpu"))
    late.add("slow", lambda: action("slow", 0.002))
    late.add("optional", lambda: action("optional", 0.002), optional=True)
    late.run(3, 0.0)
    after = {name: calls[name] - once[name] for name in calls}
    return found.seconds("slow"), found.seconds("fast"), found.beyond("slow", "fast"), once, late.missing, after


def test_every_pass_times_everything_and_the_slowest_rank_counts():
    of_ranks = run_ranks(several, 2)
    for slow, fast, beyond, once, missing, after in of_ranks:
        assert (slow, fast, beyond) == pytest.approx((0.08, 0.002, 0.078))
        # Twice to begin with, then in each of three passes: the slow one once, the fast one 25 times.
        assert once["slow"] == 2 + 3 and once["fast"] == 2 + 3 * 25
        # No time: what must be is timed in one pass.
        assert missing == ["optional"] and after["optional"] == 0 and after["slow"] == 2 + 25
    assert of_ranks[0] == of_ranks[1]  # all ranks come to the same numbers, and repeat as often


def test_medians_are_of_passes_and_differences_of_pairs():
    found = Timings(torch.device("cpu"))
    found._found = {"both": [3.0, 9.0, 4.0], "one": [1.0, 6.5, 1.0]}
    assert found.seconds("both") == 4.0
    assert found.beyond("both", "one") == 2.5
    assert found.beyond("one", "both") == UNMEASURED
    with pytest.raises(KeyError):
        found.seconds("another")


def test_a_collective_is_a_line_through_two_sizes():
    """2 ms and 1 GB/s; then, noise: no latency is below what a clock tells, and no bandwidth below 0."""
    line = Line.through((1e6, 3e-3), (8e6, 10e-3))
    assert line == pytest.approx((2e-3, 1e9))
    line = Line.through((1e6, 0.9e-3), (8e6, 10e-3))
    assert line == pytest.approx((UNMEASURED, 8e6 / 10e-3), rel=1e-3)
    line = Line.through((1e6, 5e-3), (8e6, 4e-3))
    assert line == pytest.approx((UNMEASURED, 8e6 / 4e-3), rel=1e-3)
