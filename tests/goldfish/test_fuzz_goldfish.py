"""Made-up goldfish options: every number that a run on a grid logs is that of one process.

The same ones in every run; AXONN_FUZZ=50 tries as many others.
"""

from __future__ import annotations

import os
from pathlib import Path
from random import Random, SystemRandom

import pytest

from hf_axonn import Grid
from hf_axonn.goldfish.mask import STRATEGIES
from tests.helpers.ranks import run_ranks
from tests.helpers.training import train, worst_difference


OPTIONS = len(STRATEGIES)
BRIEF = {"max_steps": 2, "save_strategy": "no", "eval_strategy": "no", "kind": "llama"}


def made_up(number: int) -> dict:
    """Options number `number`: each strategy in turn, widths up to that of the longest row (20 tokens) and above."""
    random = Random(number)
    strategy = STRATEGIES[number % len(STRATEGIES)]
    as_reference = random.random() < 0.5
    return {
        "goldfish_strategy": strategy,
        "goldfish_as_reference": as_reference,
        "goldfish_ignored_token": random.choice([-1, 0, 7]) if as_reference else -1,
        "goldfish_start_position": random.choice([0, 1, 6]) if strategy == "static" else 0,
        "goldfish_k": random.choice([2, 3, 4, 7, 50]),
        "goldfish_context_width": random.choice([1, 2, 5, 13, 14, 19, 20, 30]),
        "goldfish_seed": random.choice([None, 0, -7, 2**40]),
        "seed": random.randint(0, 99),
        "gradient_accumulation_steps": random.choice([1, 2, 3]),
    }


def differences(folder: Path, runs: list[tuple[dict, list[dict]]], grid: Grid) -> list[float]:
    return [worst_difference(train(folder, grid, **BRIEF, **options), truth) for options, truth in runs]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[tuple[dict, list[dict]]]:
    """Options with the history of one process."""
    more = int(os.environ.get("AXONN_FUZZ", "0"))
    start = SystemRandom().randrange(2**32) if more else 0
    made = [made_up(number) for number in range(start, start + (more or OPTIONS))]
    found = [(options, train(tmp_path_factory.mktemp("truth"), **BRIEF, **options)) for options in made]
    dropped = [history[0]["goldfish_dropped_fraction"] for _, history in found]
    assert more or sum(0 < share < 0.6 for share in dropped) > len(dropped) // 2, dropped
    return found


# Over z each strategy is quick in test_strategies_on_a_grid.py.
OTHERS = (Grid(z=2), Grid(y=2), Grid(data=2), Grid(z=2, x=2))


@pytest.mark.parametrize(
    "grid", [Grid(x=2), *(pytest.param(grid, marks=pytest.mark.slow) for grid in OTHERS)], ids=str
)
def test_goldfish_options(tmp_path, runs, grid):
    wrong = [
        f"{options}: {found}"
        for (options, _), *found in zip(runs, *run_ranks(differences, grid.size, tmp_path, runs, grid), strict=True)
        if not max(found) < 1e-9  # as in test_trainers_on_a_grid.py
    ]
    assert not wrong, "\n".join(wrong)
