"""A user's script with Accelerate, as its nlp_example: classes of texts. MODEL is a directory with a config.json."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForSequenceClassification, get_linear_schedule_with_warmup, set_seed


def collate(rows):
    """Right-padded texts, and one label for each."""
    longest = max(len(row) for row, _ in rows)
    return {
        "input_ids": torch.tensor([row + [0] * (longest - len(row)) for row, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row, _ in rows]),
        "labels": torch.tensor([label for _, label in rows]),
    }


def main() -> None:
    """Train a few steps, with a schedule that counts batches."""
    set_seed(3)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    config = AutoConfig.from_pretrained(sys.argv[1], num_labels=3)
    model = AutoModelForSequenceClassification.from_config(config)
    generator = torch.Generator().manual_seed(5)
    rows = [
        (torch.randint(1, 30000, (4 + index % 5,), generator=generator).tolist(), index % 3) for index in range(30)
    ]
    loader = DataLoader(rows, 2, True, collate_fn=collate, num_workers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, len(loader))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    Path(sys.argv[2]).write_text("written elsewhere")
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
