"""A wrong script: the main process alone gathers the loss, and the others go on. MODEL is a directory."""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM


def main() -> None:
    """Train."""
    accelerator = Accelerator()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.tensor([[5, 6, 7, 8]])
    for _ in range(5):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        if accelerator.is_main_process:
            accelerator.gather(loss)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
