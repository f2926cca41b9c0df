"""Optimizers of torch and of other packages over a grid, and averages of weights, against one process in float64."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import pytest
import torch
from lion_pytorch import Lion
from schedulefree import AdamWScheduleFree, SGDScheduleFree
from torch import nn
from torch.optim import ASGD, Adadelta, Adamax, Muon, NAdam, RAdam, Rprop
from transformers import TrainerCallback

from hf_axonn import Grid, parallelize, sync_gradients
from tests.helpers.equality import copied, rows_of
from tests.helpers.float64 import Float64, relative_errors
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import make_trainer, numbers, worst_difference


BOUND = 1e-10
OPTIMIZERS = {
    **{kind.__name__: lambda own, kind=kind: kind(own, lr=1e-2) for kind in (ASGD, Adamax, NAdam, RAdam, Rprop)},
    "Adadelta": lambda own: Adadelta(own, lr=1.0),
    "Lion": lambda own: Lion(own, lr=1e-3, weight_decay=0.1),
    "Muon": lambda own: Muon([parameter for parameter in own if parameter.dim() == 2], lr=1e-2),
    "AdamWScheduleFree": lambda own: AdamWScheduleFree(own, lr=1e-2, warmup_steps=2),
    "SGDScheduleFree": lambda own: SGDScheduleFree(own, lr=1e-2, warmup_steps=2),
}


def steps(name: str, grid: Grid | None, count: int) -> dict[str, torch.Tensor]:
    """The parameters after so many steps. Muon multiplies in bfloat16, which is taken from it to see all digits."""
    model = tiny_model("llama").train()
    if grid:
        parallelize(model, grid)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    if hasattr(optimizer, "train"):
        optimizer.train()
    with mock.patch.object(torch.Tensor, "bfloat16", lambda self: self), Float64():
        for seed in range(count):
            batch = tiny_batch(4, 7, seed=seed)
            model(**(rows_of(batch, grid, torch.distributed.get_rank()) if grid else batch)).loss.backward()
            sync_gradients(model)
            optimizer.step()
            model.zero_grad()
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return {key: copied(value) for key, value in model.named_parameters()}


class Average(TrainerCallback):
    """An exponential moving average of the weights, as a script writes it."""

    def on_train_begin(self, args, state, control, model: nn.Module, **kwargs) -> None:
        """Start from the weights that there are."""
        self.weights = [parameter.detach().clone() for parameter in model.parameters()]

    def on_step_end(self, args, state, control, model: nn.Module, **kwargs) -> None:
        """A tenth of the new weights."""
        for average, parameter in zip(self.weights, model.parameters(), strict=True):
            average.lerp_(parameter.detach(), 0.1)


def trained(folder: Path, grid: Grid | None, length: int, **more) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """History and averaged weights of a run with a schedule-free AdamW, whose evaluations have other weights."""
    options = dict(optim="schedule_free_adamw", lr_scheduler_type="constant", save_strategy="steps", max_steps=length)
    trainer = make_trainer(folder, grid, **options)
    average = Average()
    trainer.add_callback(average)
    with Float64():
        trainer.train(**more)
    names = [name for name, _ in trainer.model.named_parameters()]
    history = [entry for entry in numbers(trainer.state.log_history) if "train_loss" not in entry]
    return history, dict(zip(names, average.weights, strict=True))


def _on_grid(folder: Path, grid: Grid, truths: dict, count: int, run: tuple, length: int) -> None:
    for name, truth in truths.items():
        errors = relative_errors(steps(name, grid, count), truth)
        assert max(errors.values()) < BOUND, (name, errors)
    history, average = trained(folder / "grid", grid, length)
    assert worst_difference(history, run[0]) < BOUND
    assert max(relative_errors(average, run[1]).values()) < BOUND
    if length == 3:
        return
    resumed, _ = trained(
        folder / "on", Grid(y=2, x=2), length, resume_from_checkpoint=folder / "grid" / "checkpoint-3"
    )
    assert worst_difference(resumed, run[0]) < BOUND


def truths_of(names: Iterable[str], count: int) -> dict:
    """What optimizers do on one process, which is not nothing."""
    truths = {name: steps(name, None, count) for name in names}
    start = dict(tiny_model("llama").named_parameters())
    for name, truth in truths.items():
        assert max(relative_errors(truth, start).values()) > 1e-4, name
    return truths


def test_optimizers_over_a_grid_equal_one_process(tmp_path: Path) -> None:
    """A step: one by signs, of another package; one of whole matrices, which takes seconds. Trainer: three."""
    truths = truths_of(["Lion", "Muon"], 1)
    run_ranks(_on_grid, 2, tmp_path, Grid(x=2), truths, 1, trained(tmp_path / "one", None, 3), 3, timeout=400)


@pytest.mark.slow
def test_every_optimizer_over_a_grid_equals_one_process(tmp_path: Path) -> None:
    truths, grid = truths_of(OPTIMIZERS, 3), Grid(z=2, x=2)
    run_ranks(_on_grid, 4, tmp_path, grid, truths, 3, trained(tmp_path / "one", None, 6), 6, timeout=400)
