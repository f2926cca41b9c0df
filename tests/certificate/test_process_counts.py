"""Numbers of one process that remember what they are under a launch file, and schedules that are given them."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR
from transformers import get_scheduler

from hf_axonn.certificate.process_counts import ProcessCount, as_launched


def test_what_is_computed_of_a_count_remembers_and_is_a_number_to_all_others():
    count = ProcessCount(1, 4)
    for value, number, launched in (
        (20 * count, 20, 80),
        (count * 20 + 3, 23, 83),
        ((20 * count - 2) // 3, 6, 26),
        (100 // count, 100, 25),
        (8 - count * count, 7, -8),
    ):
        assert isinstance(value, ProcessCount) and (value, value.launched) == (number, launched)
    assert type(count * 0.5) is float and count * 0.5 == 0.5 and type(8 / count) is float
    assert len(range(20 * count)) == 20 and json.dumps({"steps": 20 * count}) == '{"steps": 20}'
    for kept in (pickle.loads(pickle.dumps(count)), copy.deepcopy(count)):
        assert kept == 1 and type(kept) is int


class Falling:
    """A function of the step that is an object."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return 1 - step / self.steps


def sequence(optimizer: torch.optim.Optimizer, times: int) -> SequentialLR:
    parts = [LinearLR(optimizer, total_iters=3 * times), CosineAnnealingLR(optimizer, T_max=7 * times)]
    return SequentialLR(optimizer, parts, milestones=[3 * times])


def test_what_else_a_schedule_refers_to_stays_what_it_is():
    """A list of the script's, a name without a value yet, and a function of C."""
    seen: list[int] = []

    def rate(step: int) -> float:
        seen.append(step)
        return 1.0 if step < 2 else later

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    schedule = LambdaLR(optimizer, rate)
    as_launched(schedule)
    later = 0.5
    schedule.step()
    assert seen == [0, 1] and schedule.lr_lambdas == [rate]
    as_launched(LambdaLR(optimizer, abs))


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer, int], Any]] = {
    "linear": lambda optimizer, times: get_scheduler("linear", optimizer, 2 * times, 10 * times),
    "cosine": lambda optimizer, times: get_scheduler("cosine", optimizer, 2 * times, 10 * times),
    "an object": lambda optimizer, times: LambdaLR(optimizer, Falling(10 * times)),
    "a closure": lambda optimizer, times: LambdaLR(optimizer, lambda step: 1 - step / (10 * times)),
    "torch's": lambda optimizer, times: CosineAnnealingLR(optimizer, T_max=10 * times),
    "a sequence": sequence,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_has_the_rates_that_it_has_under_the_launch_file(name):
    def rates(times: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        schedule = SCHEDULES[name](optimizer, times)
        as_launched(schedule)
        found = []
        for _ in range(10 * 3):
            optimizer.step()
            schedule.step()
            found.append(schedule.get_last_lr()[0])
        return found

    assert rates(ProcessCount(1, 3)) == rates(3) != rates(1)
