"""A user's script with a Trainer, and with LoRA: MODEL is a directory with a config.json."""

from __future__ import annotations

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, Trainer, TrainingArguments


class Tokenizer:
    """Pads, as the collator asks."""

    padding_side = "right"

    def pad(self, features, **_):
        """Right-padded ids and masks."""
        longest = max(len(row["input_ids"]) for row in features)
        pad = {name: [row[name] + [0] * (longest - len(row[name])) for row in features] for name in features[0]}
        return {name: torch.tensor(values) for name, values in pad.items()}


def main() -> None:
    """Train on rows whose ids are of the large vocabulary."""
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
    if "--lora" in sys.argv:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, lora_dropout=0.1))
    generator = torch.Generator().manual_seed(7)
    rows = []
    for index in range(40):
        ids = torch.randint(0, model.config.vocab_size * 50, (5 + index % 7,), generator=generator).tolist()
        rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids})
    arguments = TrainingArguments(
        output_dir="somewhere",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        learning_rate=0.01,
        num_train_epochs=1,
        warmup_steps=1,
        bf16=True,
        gradient_checkpointing="--lora" not in sys.argv,
    )
    collator = DataCollatorForSeq2Seq(Tokenizer())
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator)
    trainer.train()
    raise RuntimeError("the script goes on after its steps")


if __name__ == "__main__":
    main()
