"""Messages of a training run on the terminal: first what it does, at the end what it left and the next command.

Only the first process talks. Where the terminal is a file, there are no progress bars, and every line is written at
once.
"""

from __future__ import annotations

import io
import os
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow.compute as pc
import torch
import transformers
from transformers import TrainerCallback

from hf_axonn import parallel_state
from hf_axonn.checkpoint.manifest import MANIFEST, read_manifest
from hf_axonn.engine.documents import document_fields, find_document_ids
from hf_axonn.engine.parameter_counts import num_parameters
from hf_axonn.goldfish.goldfish_strategy import Goldfish
from hf_axonn.goldfish.record import describe_loss
from hf_axonn.goldfish.strategy import TrainingBatch
from hf_axonn_scripts import is_first
from hf_axonn_scripts.data import DataArguments, Rows


MEASURED_ROWS = 64  # on so many the share of dropped labels is counted
MEASURED_IMAGE_ROWS = 8  # the pixels of all are made at once


def say(*lines: str) -> None:
    """Print lines, on the first process alone."""
    if is_first():
        print(*lines, sep="\n", flush=True)


def use_terminal() -> bool:
    """Write lines at once, without progress bars where stderr is no terminal; return whether it is one.

    Python's warnings are those of the first process, because the others have the same.
    """
    if not is_first():
        warnings.simplefilter("ignore")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    terminal = sys.stderr.isatty()
    if not (terminal and is_first()):
        transformers.utils.logging.disable_progress_bar()
        datasets.disable_progress_bars()
    return terminal


def say_used(output: Path) -> None:
    """Say what an earlier run has left in the output directory; call it where nothing is to be resumed from there."""
    names = sorted(path.name for path in output.glob("*")) if output.is_dir() else []
    left = [name for name in names if name.startswith("checkpoint-") or name.endswith((".safetensors", ".bin"))]
    left += [MANIFEST] if MANIFEST in names else []
    if left:
        shown = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
        say(
            f"warning: {output} holds {shown} of an earlier run, which this one overwrites as it saves. Name another "
            "--output_dir to keep them; --resume_from_checkpoint last goes on from the newest checkpoint."
        )


def say_data(args: DataArguments, rows: Rows, epochs: float | None) -> None:
    """Say what became of the documents, and warn of those that are on the wrong side.

    Args:
        args, rows: the documents that were read, and the rows made of them.
        epochs: passes of training through the rows; None: the steps are given.
    """
    each = "" if epochs == 1 else " in an epoch" if epochs is None else f" in each of {epochs:g} epochs"
    if rows.buckets is None:
        seen = f"each is seen once{each} (no column {args.bucket_column})"
    else:
        counts = [
            f"{number:,} of bucket {bucket}{'' if bucket else ' (controls, left out)'}"
            for bucket, number in rows.buckets.items()
        ]
        seen = f"{', '.join(counts)}; each is seen as often as its bucket says{each}"
    held_out = f"; {rows.held_out_documents:,} held out" if rows.held_out is not None else ""
    say(f"documents  {rows.documents:,} of {args.data}: {seen}{held_out}")
    length = f"{args.sequence_length:,} tokens, packed" if args.packing else f"at most {args.sequence_length:,} tokens"
    say(f"rows       {len(rows.train):,} of {length}; {_tokens(rows.train):,} tokens{each}")
    for warning in rows.warnings:
        say(f"warning: {warning}.")


def _tokens(rows: datasets.Dataset) -> int:
    return int(pc.sum(pc.list_value_length(rows.data.column("input_ids"))).as_py())


def describe_model(model: Any) -> str:
    """Return type, size and dtype of a model, and what of it is trained."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    dtype = _name(next(model.parameters()).dtype)
    text = f"{type(base).__name__}, {num_parameters(model):,} parameters, {dtype} weights"
    peft = getattr(model, "peft_config", None)
    if not peft:
        return text
    lora = next(iter(peft.values()))
    modules = getattr(lora, "target_modules", None)
    if isinstance(modules, (list, set, tuple)):  # full names where all-linear was asked for
        modules = ", ".join(sorted({name.rpartition(".")[2] for name in modules}))
    return f"{text}; frozen, but for LoRA of rank {lora.r} (alpha {lora.lora_alpha}) on {modules}"


def describe_grid(model: torch.nn.Module) -> str:
    """Return the grid and its number of processes, or that there is none."""
    parallel = parallel_state(model)
    if parallel is not None:
        return f"{parallel.grid} on {parallel.grid.size} processes"
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return "one process, no grid" if ranks == 1 else f"{ranks} processes, no grid: each holds the whole model"


def dropped_share(goldfish: Goldfish, batch: Mapping[str, torch.Tensor]) -> float | None:
    """Return which share of the labels of a batch the goldfish loss drops; None if there is nothing to learn in it."""
    ids, labels = batch["input_ids"], batch["labels"]
    documents = find_document_ids(ids, **document_fields(batch))
    seen = TrainingBatch(ids, labels, documents, torch.arange(len(labels)), step=0, progress=0.0)
    kept, targets = goldfish.weigh_ids(seen), seen.targets
    return (~kept & targets).sum().item() / targets.sum().item() if targets.any() else None


class Announcement(TrainerCallback):
    """A callback that says what a Trainer is about to do, when its first step begins.

    Args:
        trainer: of the run.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print the model, the grid, the loss and the steps."""
        trainer, model = self.trainer, self.trainer.accelerator.unwrap_model(self.trainer.model)
        rows, dropped = trainer.train_dataset, ""
        if is_first() and args.goldfish and args.loss_strategy == "goldfish":
            measured = MEASURED_IMAGE_ROWS if "images" in rows[0] else MEASURED_ROWS
            some = [rows[place] for place in range(min(len(rows), measured))]
            share = dropped_share(trainer.loss_strategy, trainer.data_collator(some))
            dropped = "" if share is None else f"; {share:.1%} of the labels are dropped"
        parallel = parallel_state(model)
        ranks = parallel.grid.dp_size if parallel is not None else args.world_size
        batch = args.train_batch_size * args.gradient_accumulation_steps * ranks
        parts = f"{args.train_batch_size} a process"
        parts += f" x {ranks} processes with rows of their own" if ranks > 1 else ""
        accumulated = args.gradient_accumulation_steps
        parts += f" x {accumulated} accumulated" if accumulated > 1 else ""
        epochs = state.max_steps * batch / len(rows) if args.max_steps > 0 else args.num_train_epochs
        passes = f"{epochs:.2g} {'epoch' if epochs == 1 else 'epochs'}"
        begin = f", from step {state.global_step} on" if state.global_step else ""
        mixed = trainer.accelerator.mixed_precision
        say(
            f"model      {describe_model(model)}",
            f"grid       {describe_grid(model)}",
            f"loss       {describe_loss(trainer.loss_strategy.settings())}{dropped}",
            f"steps      {state.max_steps:,} ({passes}){begin}; {batch} rows a step: {parts}",
            f"precision  {'as the weights' if mixed == 'no' else mixed + ' mixed precision'}",
            f"output     {args.output_dir}",
        )


def say_saved(output: Path, args: DataArguments | None = None, columns: Sequence[str] = ()) -> None:
    """Say what is in the output directory, and how to go on.

    Args:
        output: directory of the saved model.
        args: data that it was trained on.
        columns: columns of the data; with id and text they are documents that samples can be made of, with images
            no text comes back of them by `hf-axonn-eval`.
    """
    if not is_first():
        return
    seen = "images" in columns
    reader = "AutoModelForImageTextToText" if seen else "AutoModelForCausalLM"
    form, commands = "an ordinary model directory", []
    if (output / MANIFEST).is_file():
        manifest = read_manifest(output)
        form = f"a sharded checkpoint of the grid {manifest.grid}, which {reader}.from_pretrained reads"
        if manifest.model:
            commands.append(["hf-axonn", "convert", output, f"{output}-hf"])
    if (output / "adapter_config.json").is_file():
        form, commands = f"LoRA adapters, which {reader}.from_pretrained reads with their base model", []
    if args is not None and not seen and {"id", "text"} <= set(columns) and Path(args.data).exists():
        samples = ["hf-axonn-eval", "samples", "--documents", args.data, "--tokenizer", output]
        if args.bucket_column in columns:
            samples += [] if args.bucket_column == "bucket" else ["--bucket_key", args.bucket_column]
        else:
            samples += ["--bucket", 1]  # each was seen once an epoch
        commands.append([*samples, "--output", "samples.jsonl"])
    if not seen:
        run = f"runs/{output.resolve().name}"
        commands.append(["hf-axonn-eval", "extract", "--model", output, "--samples", "samples.jsonl", "--output", run])
    lines = [f"    {shlex.join(map(str, command))}" for command in commands]
    say(f"saved      {output}: {form}", *(["next:", *lines] if lines else []))


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
