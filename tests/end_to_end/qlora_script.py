"""QLoRA with stock Accelerate, Transformers, PEFT and bitsandbytes; nothing here knows of a grid.

python qlora_script.py MODEL OUTPUT        or the same with accelerate launch
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, set_seed


def main(folder: str, output: str) -> None:
    set_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, dtype=torch.bfloat16)
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    set_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    rows = torch.randint(3, 131, (32, 12), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(rows, batch_size=8)
    optimizer = torch.optim.AdamW([its for its in model.parameters() if its.requires_grad], lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.gather(loss.detach().reshape(1)).mean()
        accelerator.print(f"loss {mean.item():.6f}")
    accelerator.unwrap_model(model).save_pretrained(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
