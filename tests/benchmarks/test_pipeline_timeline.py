"""The order of passes in real pipelines is the planner's, and the timeline tells bubbles as they are."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from hf_axonn.planner.time.pipeline import BACKWARD, FORWARD
from tests.benchmarks.pipeline.timeline import (
    SCHEDULES,
    Measured,
    Pass,
    Run,
    _steps,
    bubble,
    draw,
    predicted,
    table,
    wrong_orders,
)
from tests.helpers.ranks import run_ranks


NAP = 1e-4


def _every(runs: list[Run]) -> list:
    return [_steps(run, 1) for run in runs]


def test_ranks_do_what_the_planner_says_in_its_order():
    runs = [Run(2, schedule, per_rank, 8, NAP) for schedule, per_rank in SCHEDULES]
    ranks = run_ranks(_every, 2, runs)
    found = {}
    for number, run in enumerate(runs):
        own = [rank[number] for rank in ranks]
        found[run] = Measured([[steps[0] for steps, _ in own]], max(hop for _, hop in own))
        assert [len(passes) for passes in found[run].steps[0]] == 2 * [
            (3 if run.schedule == "zero_bubble" else 2) * 8 * run.per_rank
        ]
        assert wrong_orders(run, found[run]) == []
        assert 0 < bubble(found[run].steps[0]) < 1 and 0 < predicted(run, found[run]) < 1
    assert len(table(found)) == 2 + len(runs)
    picture = ElementTree.fromstring(draw(found))
    boxes = [each for each in picture.iter("{http://www.w3.org/2000/svg}rect") if each.get("y") != "4"]
    assert len(boxes) == sum(len(own) for its in found.values() for own in its.steps[0])
    assert all(float(box.get("x")) + float(box.get("width")) <= 960 for box in boxes)
    # Two passes of one rank the other way around are seen.
    passes = found[runs[1]].steps[0][1]
    passes[2], passes[3] = passes[3], passes[2]
    assert wrong_orders(runs[1], found[runs[1]]) == [1]


def test_the_bubble_of_a_known_step():
    """1F1B with two micro-batches, forward 1 s and backward 2 s: each rank is idle for 3 of 9 s."""
    first = [(FORWARD, 0, 0, 0, 1), (FORWARD, 0, 1, 1, 2), (BACKWARD, 0, 0, 4, 6), (BACKWARD, 0, 1, 7, 9)]
    second = [(FORWARD, 1, 0, 1, 2), (BACKWARD, 1, 0, 2, 4), (FORWARD, 1, 1, 4, 5), (BACKWARD, 1, 1, 5, 7)]
    step = [[Pass(*each) for each in own] for own in (first, second)]
    assert bubble(step) == pytest.approx(1 / 3)
    run = Run(2, "1f1b", 1, 2, 1.0)
    assert predicted(run, Measured([step], hop=0.0)) == pytest.approx(1 / 3)
    assert wrong_orders(run, Measured([step], hop=0.0)) == []
