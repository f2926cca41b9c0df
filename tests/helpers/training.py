"""Runs of GoldfishTrainer and Trainer on a tiny model, the same on one process and on any grid."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from hf_axonn import AxonnPlugin, GoldfishConfig, GoldfishTrainer, Grid
from tests.helpers.float64 import Float64
from tests.helpers.models import tiny_model


def token_data(rows: int, seed: int, length: int = 20) -> Dataset:
    """Random rows of two lengths, so that batches are ragged and kept labels unequal."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for row in range(rows):
        ids = torch.randint(3, 131, (length - 5 * (row % 2),), generator=generator).tolist()
        samples.append({"input_ids": ids, "labels": ids})
    return Dataset.from_list(samples)


def collate(samples: list[dict]) -> dict[str, torch.Tensor]:
    """Right-padded to the longest sample."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def pad(name: str, value: int) -> torch.Tensor:
        return torch.tensor([sample[name] + [value] * (longest - len(sample[name])) for sample in samples])

    ids = pad("input_ids", 0)
    return {"input_ids": ids, "labels": pad("labels", -100), "attention_mask": (ids != 0).long()}


def new_accelerator(grid: Grid | None, **options) -> Accelerator:
    """Make an Accelerator on CPUs, over a grid or on one process, that knows nothing of those before it."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return Accelerator(cpu=True, parallelism_config=AxonnPlugin(grid=grid) if grid else None, **options)


def training_options(output: Path, grid: Grid | None, *, goldfish: bool = False, **changes) -> dict:
    """Arguments of a run: 8 rows a step in two micro-batches, on one process (grid None) or on a grid."""
    options = dict(
        output_dir=str(output),
        per_device_train_batch_size=4 // (grid.dp_size if grid else 1),
        gradient_accumulation_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        adam_beta2=0.95,
        weight_decay=0.1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    if goldfish:
        options.update(goldfish_k=3, goldfish_context_width=3)
    if grid:
        options.update(parallelism_config=AxonnPlugin(grid=grid))
    return options | changes


def make_trainer(
    output: Path, grid: Grid | None, *, kind: str = "qwen3", stock: bool = False, model=None, given=None, **changes
):
    """A trainer whose global batch is 8 rows in two micro-batches, on one process (grid None) or on a grid.

    `given` are further arguments of the trainer."""
    often = dict(max_steps=6, save_steps=3, eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=3)
    options = training_options(output, grid, goldfish=not stock, **often | changes)
    trainer_class, config = (Trainer, TrainingArguments) if stock else (GoldfishTrainer, GoldfishConfig)
    return trainer_class(
        model=tiny_model(kind) if model is None else model,
        args=config(**options),
        train_dataset=token_data(64, seed=0),
        eval_dataset=token_data(7, seed=1),
        data_collator=collate,
        **(given or {}),
    )


def train(output: Path, grid: Grid | None = None, *, resume: Path | None = None, **options) -> list[dict[str, float]]:
    """Train in float64 and return the logged losses and norms, one dict a log."""
    trainer = make_trainer(output, grid, **options)
    with Float64():
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return numbers(trainer.state.log_history)


def numbers(history: list[dict]) -> list[dict[str, float]]:
    """Of a log history what must not depend on the grid."""
    wanted = ("loss", "grad_norm", "fraction", "learning_rate", "step")
    return [
        {key: value for key, value in entry.items() if any(part in key for part in wanted) and "per_second" not in key}
        for entry in history
    ]


def worst_difference(ours: list[dict], truth: list[dict], floor: float = 1e-12) -> float:
    """Largest relative difference of two histories, which must have the same entries; of what is below `floor`,
    relative to that.

    Trainer adds up `loss` in float32 whatever the model's dtype, so of it 3e-7 is allowed before anything counts.
    """
    assert [set(entry) for entry in ours] == [set(entry) for entry in truth]
    return max(
        abs(mine[key] - true[key]) / max(abs(true[key]), floor) - (3e-7 if key in ("loss", "train_loss") else 0)
        if math.isfinite(true[key])
        else math.inf
        for mine, true in zip(ours, truth, strict=True)
        for key in true
    )
