"""Runs of TRL's DPOTrainer, KTOTrainer and RewardTrainer on a tiny model, the same on one process and on any grid."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_from_disk
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from hf_axonn import Grid
from tests.helpers.chats import FirstGradients, chat_tokenizer, logged
from tests.helpers.float64 import Float64
from tests.helpers.models import tiny_model
from tests.helpers.training import training_options


def preferences(rows: int, seed: int) -> Dataset:
    """Questions, each with a better and a worse answer of very different lengths."""
    source = random.Random(seed)

    def said(role: str, letters: str, longest: int) -> list[dict[str, str]]:
        return [{"role": role, "content": "".join(source.choices(letters, k=source.randint(2, longest)))}]

    return Dataset.from_list(
        [
            {
                "prompt": said("user", "abcdef ", 9),
                "chosen": said("assistant", "abcd ", 17),
                "rejected": said("assistant", "defg ", 12),
            }
            for _ in range(rows)
        ]
    )


def write_preferences(folder: Path) -> None:
    """A model and data on disk, where TRL looks for reference models and for what it has computed before."""
    tiny_model("llama").save_pretrained(folder / "model")
    preferences(41, seed=0).save_to_disk(folder / "train")  # the last batch of which is short
    preferences(8, seed=1).save_to_disk(folder / "eval")


def lora(**changes) -> LoraConfig:
    options = dict(r=3, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return LoraConfig(**(options | changes))


def make_dpo(folder: Path, output: Path, grid: Grid | None, *, model=None, reference=False, adapted=False, **changes):
    """A DPOTrainer whose global batch is 8 pairs in two micro-batches.

    Args:
        folder: of `write_preferences`.
        reference: whether it is given a reference model, which is another one.
        adapted: whether the model has an adapter already.
    """
    from trl import DPOConfig, DPOTrainer

    given: dict[str, Any] = {key: changes.pop(key) for key in ("peft_config", "callbacks") if key in changes}
    if reference:
        given["ref_model"] = tiny_model("llama", seed=5)
    if model is None:
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    if adapted:
        torch.manual_seed(3)
        model = get_peft_model(model, lora())
    own = dict(max_length=29, gradient_checkpointing=False, bf16=False, max_steps=3, save_strategy="no", beta=0.5)
    options = training_options(output, grid, **own | changes)
    options["per_device_eval_batch_size"] = options["per_device_train_batch_size"]
    return DPOTrainer(
        model=model,
        args=DPOConfig(**options),
        train_dataset=load_from_disk(folder / "train"),
        eval_dataset=load_from_disk(folder / "eval"),
        processing_class=chat_tokenizer(),
        **given,
    )


def fit(make, *args, evaluate: bool = False, **options):
    """(what was logged, gradients of the first step, parameters at the end) of a trainer, in float64."""
    watch = FirstGradients()
    with Float64():
        trainer = make(*args, callbacks=[watch], **options)
        trainer.train()
        if evaluate:
            trainer.evaluate()
    parameters = {name: its.detach().clone() for name, its in trainer.model.named_parameters() if its.requires_grad}
    return logged(trainer.state.log_history), watch.gradients, parameters
