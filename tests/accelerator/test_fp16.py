"""fp16 by Accelerate and Trainer over a grid: steps, scales and clipping of one process, saved and loaded.

Accelerate ignores fp16 on CPUs, so that tests switch on what it does on a GPU: autocast and a GradScaler.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import SCALER_NAME

from hf_axonn import Grid
from hf_axonn.checkpoint.manifest import read_manifest
from hf_axonn.engine.dtensors import local
from tests.helpers.equality import rows_of
from tests.helpers.float64 import relative_errors
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import make_trainer, new_accelerator


GRIDS = [Grid(data=2), Grid(x=2)]
STEPS, PLANTED = 4, 2


def fp16_accelerator(grid: Grid | None, scale: float) -> Accelerator:
    accelerator = new_accelerator(grid, mixed_precision="fp16")
    accelerator.native_amp, accelerator.scaler = True, a_scaler(scale)
    return accelerator


def a_scaler(scale: float) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)


def loop(grid: Grid | None, rank: int, folder: Path | None = None):
    """(skipped, rate, scale) of each step, norms, parameters. With a folder, a state in it restores the scale."""
    accelerator = fp16_accelerator(grid, 2.0**10)
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=1).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / accelerator.num_processes))
    model, optimizer, rates = accelerator.prepare(model, optimizer, rates)
    log, norms = [], []
    for step in range(STEPS):
        batch = tiny_batch(4, 7, seed=step)
        batch = rows_of(batch, grid, rank) if grid else batch
        loss = model(**batch, num_items_in_batch=17).loss * (grid.dp_size if grid else 1)
        accelerator.backward(loss)
        if step == PLANTED and rank == 1:
            local(model.model.layers[0].mlp.up_proj.weight.grad).view(-1)[-1] = float("nan")
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        if step != PLANTED:
            norms.append(float(norm))
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        log.append((optimizer.step_was_skipped, rates.get_last_lr()[0], accelerator.scaler.get_scale()))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if folder is None:
        return log, norms, parameters
    accelerator.save_state(str(folder))
    assert SCALER_NAME in read_manifest(folder).files
    tracked = accelerator.scaler.state_dict()
    accelerator.scaler = a_scaler(4.0)
    accelerator.load_state(str(folder))
    assert accelerator.scaler.state_dict() == tracked and tracked["scale"] == log[-1][2]
    accelerator.scaler = None  # as with bf16
    accelerator.load_state(str(folder))
    return log, norms, parameters


def on_grids(folder: Path, truth):
    rank, errors = dist.get_rank(), {}
    for grid in GRIDS:
        log, norms, parameters = loop(grid, rank, folder / str(grid))
        assert log == truth[0], (grid, log)
        worst = max(abs(mine - its) / its for mine, its in zip(norms, truth[1], strict=True))
        errors[str(grid)] = max(worst, *relative_errors(parameters, truth[2]).values())
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return errors, resumed(folder / "trainer")


def resumed(folder: Path) -> list[float]:
    """Scales of a Trainer before it is saved, of one that goes on from there, and of one in bf16 that does."""
    scales = []
    for steps, scale in ((2, 2.0**8), (3, 2.0**4), (4, None)):
        options = dict(stock=True, max_steps=steps, save_steps=steps, eval_strategy="no")
        trainer = make_trainer(folder, Grid(x=2), **options)
        trainer.accelerator.scaler = a_scaler(scale) if scale else None
        trainer.train(resume_from_checkpoint=steps > 2)
        if scale:
            scales.append(trainer.accelerator.scaler.get_scale())
    return scales


def test_a_loop_of_accelerate_and_a_trainer(tmp_path):
    """A norm's distance is a rounding of fp16, 2**-11, of the sums of some 50 products."""
    truth = loop(None, 1)
    assert [skipped for skipped, *_ in truth[0]] == [step == PLANTED for step in range(STEPS)]
    for errors, scales in run_ranks(on_grids, 2, tmp_path, truth):
        assert max(errors.values()) < 2**-9, errors
        assert scales == [2.0**9, 2.0**9]  # two good steps, and one more
