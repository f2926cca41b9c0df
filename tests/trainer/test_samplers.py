"""Samplers of Trainer: every sample at one position, whatever the ranks have drawn from their generators before."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from torch.utils.data import get_worker_info
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

from hf_axonn import AxonnPlugin, Grid
from hf_axonn.compat.accelerate import forget_state
from hf_axonn.distributed.consistency import gather_json
from hf_axonn.trainer.samplers import for_grid
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks


ROWS = 24
LENGTHS = [1 + row * 7 % 11 for row in range(ROWS)]


def grouped_trainer(output, grid: Grid | None, seed: int, **options) -> Trainer:
    """A Trainer that groups by length, with 4 rows a step; afterwards the generator of this rank stands at `seed`."""
    trainer = Trainer(
        model=tiny_model("llama"),
        args=TrainingArguments(
            output_dir=str(output),
            train_sampling_strategy="group_by_length",
            per_device_train_batch_size=4 // (grid.dp_size if grid else 1),
            parallelism_config=AxonnPlugin(grid=grid) if grid else None,
            use_cpu=True,
            report_to="none",
            remove_unused_columns=False,
            **options,
        ),
        train_dataset=Dataset.from_list([{"input_ids": [row] * length} for row, length in enumerate(LENGTHS)]),
        data_collator=lambda rows: {
            "row": torch.tensor([row["input_ids"][0] for row in rows]),
            "noise": torch.rand(len(rows)) if get_worker_info() else torch.zeros(len(rows)),
        },
    )
    torch.manual_seed(seed)
    return trainer


def epochs(trainer: Trainer) -> tuple[list[int], list[float], list[float]]:
    """The rows of two epochs in the order of all positions, what is drawn from the generator then, and what workers of
    this rank have drawn for its rows."""
    loader, rows, noise = trainer.get_train_dataloader(), [], []
    for _ in range(2):
        for batch in loader:
            rows += trainer.accelerator.gather_for_metrics(batch["row"]).tolist()
            noise += batch["noise"].tolist()
    return rows, torch.rand(2).tolist(), noise


def check_orders(output, truth: dict) -> None:
    own = 5 + dist.get_rank()  # that of rank 0 counts
    for grid, seed, workers in ((Grid(data=2), own, 0), (Grid(z=2), own, 1), (Grid(x=2), 5, 1)):
        forget_state()
        rows, drawn, noise = epochs(grouped_trainer(output, grid, seed, dataloader_num_workers=workers))
        assert rows == truth[5][0], grid
        assert drawn == truth[seed][1], "each rank goes on from its own state"
        if workers:  # ranks that share samples draw the same for them, others do not
            assert len({*map(tuple, gather_json(noise, "cpu"))}) == grid.dp_size and len({*noise}) == len(noise), grid
    # Rank 0 alone reads: it has nobody to agree with.
    for grid in (Grid(data=2), Grid(x=2)):
        forget_state()
        rows, *_ = epochs(grouped_trainer(output, grid, 5, accelerator_config={"dispatch_batches": True}))
        assert sorted(rows[:ROWS]) == sorted(rows[ROWS:]) == list(range(ROWS)), (grid, rows)


def test_groups_by_length_are_those_of_one_process_though_generators_differ(tmp_path):
    truth = {}
    for seed in (5, 6):
        forget_state()
        truth[seed] = epochs(grouped_trainer(tmp_path, None, seed))
    assert truth[5] != truth[6]
    for rows, *_ in truth.values():
        assert sorted(rows[:ROWS]) == sorted(rows[ROWS:]) == list(range(ROWS)) and rows[:ROWS] != rows[ROWS:]
    run_ranks(check_orders, 2, tmp_path, truth)


def test_other_samplers_are_left_alone():
    seeded = LengthGroupedSampler(4, lengths=LENGTHS, generator=torch.Generator().manual_seed(1))
    assert type(for_grid(seeded, Grid(x=2), 0, 4)) is LengthGroupedSampler
    assert for_grid(None, Grid(x=2), 0, 4) is None


def test_samples_that_are_balanced_among_positions_are_not_read_by_one_rank_for_all():
    balanced = BatchRebalanceSampler(LENGTHS, effective_batch_size=4, dp_size=1, grad_accum=1)
    assert for_grid(balanced, Grid(data=2), 1, 4).dp_size == 2
    with pytest.raises(ValueError, match="rank 0 cannot read for all"):
        for_grid(balanced, Grid(data=2), 1, 4, dispatched=True)
