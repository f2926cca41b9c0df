"""Right scripts, each with one option of Accelerate or Trainer: WAY MODEL, a key of `WAYS` and a directory."""

from __future__ import annotations

import multiprocessing
import random
import sys

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import GradientAccumulationPlugin
from datasets import Dataset
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    get_scheduler,
)

from hf_axonn import AxonnConfig, from_pretrained


WORDS = 120


def tokenizer() -> PreTrainedTokenizerFast:
    """One of numbers as words."""
    from tokenizers import Tokenizer, models

    words = {name: index for index, name in enumerate(("[PAD]", "[UNK]", "[MASK]"))}
    words |= {f"w{index}": index for index in range(len(words), WORDS)}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]", eos_token="w3"
    )


def rows(*, same: bool = False, labels: bool = True) -> list[dict]:
    """Rows of different lengths, or of the same one."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for index in range(40):
        ids = torch.randint(4, WORDS, (8 if same else 5 + index % 7,), generator=generator).tolist()
        found.append(
            {"input_ids": ids, "attention_mask": [1] * len(ids)} | ({"labels": ids[:2] + ids[2:]} if labels else {})
        )
    return found


class Stream(IterableDataset):
    """The rows one after another."""

    def __init__(self, of: list[dict]) -> None:
        self.of = of

    def __iter__(self):
        return iter(self.of)


class Noisy(torch.utils.data.Dataset):
    """Rows of which each time other tokens are replaced."""

    def __init__(self, of: list[dict]) -> None:
        self.of = of

    def __len__(self) -> int:
        return len(self.of)

    def __getitem__(self, index: int) -> dict:
        row = dict(self.of[index])
        row["input_ids"] = [
            random.randint(4, WORDS - 1) if random.random() < 0.2 else each for each in row["input_ids"]
        ]
        return row


def build_model():
    """Build the model from its configuration."""
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[2]))


def freeze_embeddings():
    """Build a model of which a part is not trained."""
    model = build_model()
    model.get_input_embeddings().requires_grad_(False)
    return model


def add_adapters():
    """Build a model with LoRA beside it, and dropout."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(build_model(), LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"]))


def bare_loop(*, every: int = 1, labels: bool = True) -> None:
    """A loop that steps after some batches, whose losses it divides by nothing, perhaps with ids for labels."""
    accelerator = Accelerator()
    model = build_model()
    model, optimizer, batches = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), loader(rows(labels=labels))
    )
    for number, batch in enumerate(batches, start=1):
        given = batch if labels else {"attention_mask": batch["attention_mask"], "labels": batch["input_ids"]}
        accelerator.backward(model(**{"input_ids": batch["input_ids"], **given}).loss)
        if number % every == 0:
            optimizer.step()
            optimizer.zero_grad()


def load_model():
    """Load the model: over the grid of the launch file, if there is one."""
    if AxonnConfig.from_env() is not None:
        return from_pretrained(sys.argv[2])
    model, info = AutoModelForCausalLM.from_pretrained(sys.argv[2], output_loading_info=True)
    assert not info["missing_keys"]
    return model


def loop(
    accelerator: Accelerator,
    loader: DataLoader,
    *,
    bare: bool = False,
    clip: str = "accelerator",
    schedule: str = "",
    make=build_model,
) -> None:
    """A loop of Accelerate."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    times = accelerator.num_processes if schedule == "of processes" else 1
    moves = get_scheduler("linear", optimizer, 1 * times, 20 * times)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    moves = moves if schedule == "bare" else accelerator.prepare(moves)
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            if bare:
                loss.backward()
            else:
                accelerator.backward(loss)
            if clip == "accelerator" and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            elif clip == "torch":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            moves.step()
            optimizer.zero_grad()


def pad(of: list[dict]) -> dict:
    """Right-padded."""
    return dict(DataCollatorForSeq2Seq(tokenizer())(of))


def loader(data, batch: int = 2, **options) -> DataLoader:
    """Batches of rows of different lengths."""
    return DataLoader(data, batch, collate_fn=pad, **options)


def configured(**options) -> Accelerator:
    """An Accelerator with options of its loaders."""
    return Accelerator(dataloader_config=DataLoaderConfiguration(**options))


def train(data, collator=None, *, masked: bool = False, loss=None, **options) -> None:
    """A Trainer."""
    kind = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    model = kind.from_pretrained(sys.argv[2], config=AutoConfig.from_pretrained(sys.argv[2]))
    arguments = TrainingArguments(
        **{"output_dir": "out", "per_device_train_batch_size": 2, "max_steps": 4, "learning_rate": 0.01, **options}
    )
    Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        data_collator=collator or DataCollatorForSeq2Seq(tokenizer()),
        processing_class=tokenizer(),
        compute_loss_func=loss,
    ).train()


def own_loss(outputs, labels, num_items_in_batch=None):
    """A loss of the script's own, divided by the tokens of all ranks."""
    logits, wanted = outputs.logits[:, :-1], labels[:, 1:]
    summed = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
    return summed / num_items_in_batch


def late_accelerator() -> None:
    """The loader is there before Accelerate knows that its batches are to be split."""
    made = loader(rows(), 4, shuffle=True)
    loop(configured(split_batches=True), made)


def masked_loop() -> None:
    """A masked language model, whose collator draws."""
    accelerator = Accelerator()
    model = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(sys.argv[2]))
    collator = DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.4)
    made = DataLoader(rows(labels=False), 2, True, collate_fn=collator)
    model, optimizer, made = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), made)
    for batch in made:
        optimizer.zero_grad()
        accelerator.backward(model(**batch).loss)
        optimizer.step()


MASKING = {"mlm_probability": 0.4}
SPLIT = {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 4}
WAYS = {
    "loop": lambda: loop(Accelerator(), loader(rows(), shuffle=True)),
    "split_batches": lambda: loop(configured(split_batches=True), loader(rows(), 4, shuffle=True)),
    "split_batches of an earlier loader": late_accelerator,
    "dispatch_batches": lambda: loop(configured(dispatch_batches=True), loader(rows(same=True), shuffle=True)),
    "split and dispatch": lambda: loop(
        configured(dispatch_batches=True, split_batches=True), loader(rows(), 4, shuffle=True)
    ),
    "even_batches off": lambda: loop(configured(even_batches=False), loader(rows(), drop_last=True)),
    "use_seedable_sampler": lambda: loop(configured(use_seedable_sampler=True), loader(rows(), shuffle=True)),
    "accumulation": lambda: loop(Accelerator(gradient_accumulation_steps=2), loader(rows())),
    "sync_each_batch": lambda: loop(
        Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)),
        loader(rows()),
    ),
    "loss.backward": lambda: loop(Accelerator(), loader(rows()), bare=True),
    "clipping by torch": lambda: loop(Accelerator(), loader(rows()), clip="torch"),
    "hf_axonn.from_pretrained": lambda: loop(Accelerator(), loader(rows()), make=load_model),
    "accumulation by hand": lambda: bare_loop(every=2),
    "ids for labels": lambda: bare_loop(labels=False),
    "frozen embeddings": lambda: loop(Accelerator(), loader(rows()), make=freeze_embeddings),
    "LoRA of its own": lambda: loop(Accelerator(), loader(rows()), make=add_adapters),
    "a scheduler of its own": lambda: loop(Accelerator(), loader(rows()), schedule="bare"),
    "a schedule times num_processes": lambda: loop(Accelerator(), loader(rows()), schedule="of processes"),
    "step_scheduler_with_optimizer off": lambda: loop(
        Accelerator(step_scheduler_with_optimizer=False), loader(rows())
    ),
    "RandomSampler": lambda: loop(Accelerator(), loader(made := rows(), sampler=RandomSampler(made))),
    "WeightedRandomSampler": lambda: loop(
        Accelerator(), loader(rows(), sampler=WeightedRandomSampler([1.0] * 20 + [2.0] * 20, 40))
    ),
    "BatchSampler": lambda: loop(
        Accelerator(),
        DataLoader(made := rows(), batch_sampler=BatchSampler(RandomSampler(made), 2, True), collate_fn=pad),
    ),
    "IterableDataset": lambda: loop(Accelerator(), loader(Stream(rows(same=True)))),
    "IterableDataset, not dispatched": lambda: loop(configured(dispatch_batches=False), loader(Stream(rows()))),
    "items that draw": lambda: loop(Accelerator(), loader(Noisy(rows()), shuffle=True)),
    "masked language model": masked_loop,
    "Trainer": lambda: train(rows()),
    "Trainer, masked language model": lambda: train(
        rows(labels=False), DataCollatorForLanguageModeling(tokenizer(), **MASKING), masked=True
    ),
    "Trainer, masked with a seed": lambda: train(
        rows(labels=False), DataCollatorForLanguageModeling(tokenizer(), seed=3, **MASKING), masked=True
    ),
    "Trainer, BERT, means of ranks": lambda: train(
        rows(labels=False),
        DataCollatorForLanguageModeling(tokenizer(), **MASKING),
        masked=True,
        average_tokens_across_devices=False,
    ),
    "Trainer, split_batches": lambda: train(rows(), **SPLIT),
    "Trainer, label_smoothing_factor": lambda: train(rows(), label_smoothing_factor=0.1),
    "Trainer, label_smoothing_factor, end of the epoch": lambda: train(rows()[:6], label_smoothing_factor=0.1),
    "Trainer, group_by_length": lambda: train(
        Dataset.from_list(rows()), train_sampling_strategy="group_by_length", gradient_accumulation_steps=2
    ),
    "Trainer, adafactor": lambda: train(rows(), optim="adafactor"),
    "Trainer, compute_loss_func": lambda: train(rows(), loss=own_loss, gradient_accumulation_steps=2),
    "Trainer, flattened rows": lambda: train(rows(), DataCollatorWithFlattening()),
    "Trainer, streamed rows": lambda: train(Dataset.from_list(rows(same=True)).to_iterable_dataset(2)),
    "Trainer, dispatched": lambda: train(rows(same=True), accelerator_config={"dispatch_batches": True}),
    "Trainer, masked and streamed": lambda: train(
        Dataset.from_list(rows(labels=False, same=True)).to_iterable_dataset(2),
        DataCollatorForLanguageModeling(tokenizer(), **MASKING),
        masked=True,
    ),
}


if __name__ == "__main__":
    multiprocessing.current_process().name = "MainProcess"  # a fork of a test stands for a process of its own
    WAYS[sys.argv[1]]()
