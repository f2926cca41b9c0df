"""Batches of runs that go on with another number of ranks; tests/end_to_end/test_restarts.py stops and starts them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from hf_axonn import Grid, export_hf
from hf_axonn.trainer.restarts import keep_batch
from tests.helpers.ranks import run_ranks
from tests.helpers.training import make_trainer


def trainer(ranks: int, *, per_device: int = 2, accumulation: int = 3) -> SimpleNamespace:
    arguments = SimpleNamespace(
        train_batch_size=per_device, gradient_accumulation_steps=accumulation, world_size=ranks, process_index=0
    )
    return SimpleNamespace(args=arguments, model=torch.nn.Linear(1, 1))


def test_a_step_keeps_its_samples_or_is_refused(tmp_path):
    started = trainer(3)
    keep_batch(started, str(tmp_path))
    assert started.args.gradient_accumulation_steps == 3, "a checkpoint of an earlier release says nothing"
    saved = {"samples": 24, "per_device": 2, "accumulation": 3}  # on four ranks
    (tmp_path / "step_batch.json").write_text(json.dumps(saved))
    for ranks, accumulation in ((4, 3), (2, 6), (1, 12), (12, 1)):
        started = trainer(ranks)
        keep_batch(started, str(tmp_path))
        assert started.args.gradient_accumulation_steps == accumulation
    for ranks in (5, 24):
        with pytest.raises(ValueError, match=rf"24 samples in a step, which {ranks} rank\(s\) .* batches of 2"):
            keep_batch(trainer(ranks), str(tmp_path))
    other = trainer(5, per_device=1)
    keep_batch(other, str(tmp_path))
    assert other.args.gradient_accumulation_steps == 3, "other arguments hold"


def _save(folder, grid):
    make_trainer(folder, grid, kind="llama", stock=True, max_steps=1, save_steps=1, eval_strategy="no").train()


def test_a_checkpoint_of_one_rank_says_what_a_step_has_too(tmp_path):
    """A run that `data: auto` has shrunk to one rank; what never was on a grid is saved as Trainer saves it."""
    for name, grid in (("grid", Grid()), ("stock", None)):
        run_ranks(_save, 1, tmp_path / name, grid)
    saved = json.loads((tmp_path / "grid" / "checkpoint-1" / "step_batch.json").read_text())
    assert saved == {"samples": 8, "per_device": 4, "accumulation": 2}
    assert not (tmp_path / "stock" / "checkpoint-1" / "step_batch.json").exists()


@pytest.mark.slow
def test_an_exported_model_says_nothing_of_the_batches_of_its_training(tmp_path):
    run_ranks(_save, 2, tmp_path / "run", Grid(x=2))
    export_hf(tmp_path / "run" / "checkpoint-1", tmp_path / "exported")
    assert {path.name for path in (tmp_path / "exported").glob("*.json")} == {"config.json", "generation_config.json"}
