"""The same run twice, and a run that was broken off and resumed, give the same bits as the unbroken one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader

from hf_axonn import AxonnPlugin, Grid
from hf_axonn.distributed.watchdog.progress import PROGRESS
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import collate, make_trainer, numbers, token_data


GRIDS = [Grid(z=2, x=2), Grid(data=2, y=2)]


def local_bits(model, optimizer) -> str:
    """Of this rank's parameters and optimizer state, to the last bit."""
    digest = hashlib.sha256()

    def add(value: torch.Tensor) -> None:
        local = getattr(value, "to_local", lambda: value)()
        digest.update(local.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())

    for parameter in model.parameters():
        add(parameter)
    optimizer = getattr(optimizer, "optimizer", optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for value in optimizer.state[parameter].values():
                if torch.is_tensor(value):
                    add(value)
    return digest.hexdigest()


def _trainer_run(folder: Path, grid: Grid, *, steps: int, resume: Path | None = None, seed: int = 42, **changes):
    """Two micro-batches a step, dropout in attention and goldfish labels, rows shuffled: 32 rows are 4 steps."""
    torch.manual_seed(7)
    options = dict(max_steps=steps, save_steps=3, eval_strategy="no", lr_scheduler_type="linear", seed=seed) | changes
    model = tiny_model("llama", dtype=torch.float32, attention_dropout=0.2)
    trainer = make_trainer(folder, grid, model=model, **options)
    trainer.train_dataset = token_data(32, seed=0)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    assert PROGRESS.done == steps, "what a failure would call the step"
    return numbers(trainer.state.log_history), local_bits(trainer.model, trainer.optimizer)


def _trainer_runs(folder: str, grids: list[Grid]) -> None:
    for grid in grids:
        place = Path(folder, str(grid))
        # Five steps: the checkpoint after three stands in the middle of the first epoch, the run ends in the second.
        one = _trainer_run(place / "one", grid, steps=5)
        again = _trainer_run(place / "again", grid, steps=5, save_strategy="no")
        assert again == one, (grid, "the same run twice")
        resumed = _trainer_run(place / "resumed", grid, steps=5, resume=place / "one" / "checkpoint-3")
        assert resumed[0][:-1] == one[0][:-1] and resumed[1] == one[1], (grid, "resumed in the middle of an epoch")
        other = _trainer_run(place / "other", grid, steps=5, seed=43, save_strategy="no")
        assert other[1] != one[1], "bits that do not depend on the seed prove nothing"


@pytest.mark.parametrize("grid", [Grid(z=2), *(pytest.param(grid, marks=pytest.mark.slow) for grid in GRIDS)], ids=str)
def test_trainer_gives_the_same_bits_twice_and_when_resumed(tmp_path, grid):
    run_ranks(_trainer_runs, grid.size, str(tmp_path), [grid])


def _loop(folder: Path, grid: Grid, *, save_at: tuple[int, int] | None = None, load: bool = False) -> str:
    """A plain Accelerate loop with accumulation; it may save its state in the middle of an epoch, or go on from it."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    set_seed(3)
    accelerator = Accelerator(cpu=True, parallelism_config=AxonnPlugin(grid=grid), gradient_accumulation_steps=2)
    model = tiny_model("llama", dtype=torch.float32, attention_dropout=0.2).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    loader = DataLoader(token_data(24, seed=0).to_list(), batch_size=2, shuffle=True, collate_fn=collate)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    evaluation = accelerator.prepare(DataLoader(token_data(8, seed=1).to_list(), batch_size=2, collate_fn=collate))
    if load:
        accelerator.load_state(str(folder))
    for epoch in range(save_at[0] if load else 0, 3):
        loader.set_epoch(epoch)
        skipped = save_at[1] if load and epoch == save_at[0] else 0
        rows = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        for number, batch in enumerate(rows, start=skipped + 1):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if (epoch, number) == save_at and not load:
                accelerator.save_state(str(folder))
        for batch in evaluation:
            with torch.no_grad():
                model(**batch)
    return local_bits(model, optimizer)


def _loops(folder: str, grids: list[Grid]) -> None:
    for grid in grids:
        AcceleratorState._reset_state()  # all accelerators of a process share the grid of the first
        place = Path(folder, str(grid))
        one = _loop(place, grid)
        for save_at in ((0, 4), (1, 2)):
            assert _loop(place, grid, save_at=save_at) == one, (grid, "the same loop twice; saving changes nothing")
            again = _loop(place, grid, save_at=save_at, load=True)
            assert again == one, (grid, save_at, "resumed in the middle of an epoch")


@pytest.mark.slow
def test_a_plain_loop_gives_the_same_bits_twice_and_when_resumed(tmp_path):
    run_ranks(_loops, 4, str(tmp_path), [*GRIDS, Grid(y=2, x=2)])
