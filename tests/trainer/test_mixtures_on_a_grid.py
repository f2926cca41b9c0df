"""Losses and resumed runs of Trainer, of a mixture whose tokens travel, against one process in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from hf_axonn import AxonnPlugin, Grid
from tests.helpers.ranks import run_ranks
from tests.helpers.training import train, worst_difference
from tests.layers.test_moe import moe


ACCUMULATED = dict(
    stock=True, max_steps=8, save_strategy="no", eval_strategy="no", learning_rate=0.0, weight_decay=0.0
)
WAYS = [(Grid(z=2, x=2), "move"), (Grid(z=4), "move"), (Grid(data=2, z=2), "move"), (Grid(z=2, x=2), "gather")]


def mixture() -> nn.Module:
    return moe("qwen3_moe", num_experts=6)


def run(output: Path, grid: Grid | None = None, experts: str = "auto", **options) -> list[dict[str, float]]:
    """Losses and norms of a trainer on rows of unequal lengths, two micro-batches a step."""
    if grid is not None:
        options["parallelism_config"] = AxonnPlugin(grid=grid, experts=experts)
    return train(output, grid, model=mixture(), **options)


def _losses(folder: Path, truth: list[dict[str, float]]) -> None:
    for grid, experts in WAYS:
        found = run(folder / f"{grid} {experts}", grid, experts, **ACCUMULATED)
        assert worst_difference(found, truth) < 1e-10, (str(grid), experts, found, truth)


@pytest.mark.slow
def test_losses_with_accumulation_and_unequal_rows_at_learning_rate_0(tmp_path) -> None:
    """The case of transformers #45994, whose loss was as many times too large as ranks share experts."""
    truth = run(tmp_path / "one", **ACCUMULATED)
    assert len({entry["loss"] for entry in truth if "loss" in entry}) == 8
    run_ranks(_losses, 4, tmp_path, truth, timeout=400)


def _resumed(folder: Path, truth: list[dict[str, float]]) -> None:
    found = run(folder / "move", Grid(z=2, x=2), "move")
    assert worst_difference(found, truth) < 1e-9
    for grid, experts in ((Grid(z=4), "gather"), (Grid(z=2, y=2), "move")):
        checkpoint = folder / "move" / "checkpoint-3"
        again = run(folder / f"{grid} {experts}", grid, experts, resume=checkpoint)
        assert worst_difference(again[:-1], truth[:-1]) < 1e-9, (str(grid), experts)


@pytest.mark.slow
def test_a_run_whose_tokens_travel_resumes_in_the_other_way_and_on_another_grid(tmp_path) -> None:
    truth = run(tmp_path / "one")
    assert sum("eval_loss" in entry for entry in truth) == 2
    run_ranks(_resumed, 4, tmp_path, truth, timeout=400)
