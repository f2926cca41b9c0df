"""Fine-tune a causal language model with a plain Accelerate loop, on one process or on a grid of them.

    python finetune_no_trainer.py --model MODEL --data documents.jsonl --output_dir out
    accelerate launch --config axonn.yaml finetune_no_trainer.py --model MODEL --data documents.jsonl --output_dir out

Nothing in the loop knows of the grid. --resume goes on from the newest state in the output directory, on the same grid
or another one with the same --batch_size times data * z.
"""

import math
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, get_scheduler

import hf_axonn
from hf_axonn import AxonnConfig
from hf_axonn_scripts.announce import describe_grid, describe_model, say, say_data, say_saved, say_used, use_terminal
from hf_axonn_scripts.checks import (
    Parser,
    check_rows,
    end_with_sentence,
    load_config,
    load_tokenizer,
    make_output,
    refuse_adapters,
)
from hf_axonn_scripts.data import DataArguments, load_rows


@dataclass
class Arguments:
    """The options."""

    model: str = field(metadata={"help": "Folder of a model, or its name on the hub."})
    data: str = field(metadata={"help": "Documents, as finetune.py takes them."})
    output_dir: str = field(metadata={"help": "Folder for states and for the model."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the model."})
    sequence_length: int = field(default=1024, metadata={"help": "Longest row, in tokens."})
    batch_size: int = field(default=4, metadata={"help": "Rows for each (data, z) position."})
    accumulation: int = field(default=1, metadata={"help": "Batches in a step of the optimizer."})
    epochs: int = field(default=1, metadata={"help": "Passes through the rows."})
    learning_rate: float = field(default=2e-5, metadata={"help": "Largest rate of a cosine schedule."})
    save_every: int = field(default=500, metadata={"help": "Steps between two states."})
    resume: bool = field(default=False, metadata={"help": "Go on from the newest state in the output directory."})
    log_with: str | None = field(
        default=None, metadata={"help": "A tracker of accelerate that is installed, such as tensorboard."}
    )
    seed: int = field(default=42, metadata={"help": "Decides the order of the rows."})

    def __post_init__(self):
        refuse_adapters(self.model, option="--lora_r of finetune.py")
        for name in ("batch_size", "accumulation", "epochs", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give a whole number of at least 1")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate is {self.learning_rate}: give a number above 0")
        # accelerate leaves out a tracker that is not installed.
        trackers = ["all", *map(str, get_available_trackers())]
        if self.log_with and self.log_with not in trackers:
            raise ValueError(f"log_with is {self.log_with}, which is not installed: give one of {', '.join(trackers)}")


def parse(argv: Sequence[str] | None = None) -> Arguments:
    """Read the command line; a mistake in it ends the program with code 2 and a message."""
    parser = Parser([Arguments], description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    (args,) = parser.parse(argv)
    if newest_state(args) is not None and not args.resume:
        parser.error(
            f"--output_dir {args.output_dir} holds states of an earlier run: go on with --resume, or name another"
        )
    return args


def newest_state(args: Arguments) -> int | None:
    """Return the number of the state that `load_state` reads under automatic naming; None if there is none."""
    states = (Path(args.output_dir) / "checkpoints").glob("checkpoint_*")
    return max((int(path.name.removeprefix("checkpoint_")) for path in states), default=None)


@contextmanager
def first_process_first(accelerator: Accelerator) -> Iterator[None]:
    """Let the others wait for the first process, also where it fails: then they come to the same failure.

    In `main_process_first` of accelerate they would wait for it until they are ended.
    """
    if not accelerator.is_main_process:
        accelerator.wait_for_everyone()
    try:
        yield
    finally:
        if accelerator.is_main_process:
            accelerator.wait_for_everyone()


class Progress:
    """Place of the run; saved and loaded with the rest of its state.

    Args:
        rows: of a batch of all processes, by which batches are counted.
    """

    epoch = batch = step = 0

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def state_dict(self) -> dict[str, int]:
        """Return the place, for `register_for_checkpointing`."""
        return {"epoch": self.epoch, "batch": self.batch, "step": self.step, "rows": self.rows}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over a place, for `register_for_checkpointing`.

        Raises:
            ValueError: its batches have other numbers of rows, so that other rows would come next.
        """
        if (rows := state.get("rows", self.rows)) != self.rows:
            raise ValueError(
                f"the batches of the state have {rows} rows, those of this run {self.rows}: give a --batch_size with "
                f"which it is {rows}, over all processes that have rows of their own"
            )
        self.epoch, self.batch, self.step = state["epoch"], state["batch"], state["step"]


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and save an ordinary model directory."""
    args = parse(argv)
    output, found = Path(args.output_dir), newest_state(args)
    use_terminal()
    set_seed(args.seed)
    project = ProjectConfiguration(args.output_dir, automatic_checkpoint_naming=True, total_limit=2)
    # The order of an epoch depends on its number and the seed alone, so that a resumed run finds it again.
    shuffling = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed)
    accelerator = Accelerator(
        gradient_accumulation_steps=args.accumulation,
        project_config=project,
        dataloader_config=shuffling,
        log_with=args.log_with,
    )
    if found is None:
        say_used(output)
    with end_with_sentence(args.model):
        options: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
        tokenizer = load_tokenizer(args.model, option="--model", **options)
        data = DataArguments(data=args.data, sequence_length=args.sequence_length)
        with first_process_first(accelerator):
            rows = load_rows(data, tokenizer)
        say_data(data, rows, args.epochs)
        config = load_config(args.model, **options)
        check_rows(config, [rows.train], tokenizer=args.model, option="--sequence_length")
        make_output(output, adapters=False)
        launched = AxonnConfig.from_env()
        if launched:  # every rank reads only its own slices
            model = hf_axonn.from_pretrained(args.model, grid=launched.grid, dtype=torch.float32, **options)
        else:
            model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, **options)
    loader = DataLoader(
        rows.train, batch_size=args.batch_size, shuffle=True, collate_fn=DataCollatorForSeq2Seq(tokenizer)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    loader = accelerator.prepare(loader)
    steps = args.epochs * math.ceil(len(loader) / args.accumulation)  # an epoch ends with one, however many batches
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=steps // 20, num_training_steps=steps)
    model, optimizer = accelerator.prepare(model.train(), optimizer)
    accelerator.init_trackers("finetune", config={name: str(value) for name, value in vars(args).items()})
    say(
        f"model      {describe_model(accelerator.unwrap_model(model))}",
        f"grid       {describe_grid(accelerator.unwrap_model(model))}",
        f"steps      {steps:,}; epochs {args.epochs}; {args.batch_size} rows a process and batch",
    )

    progress = Progress(args.batch_size * accelerator.num_processes)
    accelerator.register_for_checkpointing(progress, schedule)
    if found is not None:
        with end_with_sentence(f"state {found}"):
            accelerator.load_state()
        project.iteration = found + 1
    elif args.resume:
        say(f"warning: {output} has no state: training starts at step 0.")

    while progress.epoch < args.epochs:
        loader.set_epoch(progress.epoch)
        for batch in accelerator.skip_first_batches(loader, progress.batch) if progress.batch else loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
                    schedule.step()  # once for a step of the optimizer, on any number of processes
                optimizer.zero_grad()
            progress.batch += 1
            if accelerator.sync_gradients:
                progress.step += 1
                mean = accelerator.gather(loss.detach()).mean().item()
                accelerator.log({"loss": mean, "rate": schedule.get_last_lr()[0]}, step=progress.step)
                if progress.step % max(1, steps // 20) == 0:
                    accelerator.print(f"step {progress.step}: loss {mean:.4f}, rate {schedule.get_last_lr()[0]:.2e}")
                if progress.step % args.save_every == 0:
                    accelerator.save_state()
        progress.epoch, progress.batch = progress.epoch + 1, 0

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(  # every rank calls it, rank 0 writes
        output, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    if accelerator.is_main_process:
        tokenizer.save_pretrained(output)
    say_saved(output, data, rows.columns)
    accelerator.end_training()


if __name__ == "__main__":
    main()
