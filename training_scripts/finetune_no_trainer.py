"""Fine-tune a causal language model with a plain Accelerate loop, on one process or on a grid of them.

    python finetune_no_trainer.py --model MODEL --data documents.jsonl --output_dir out
    accelerate launch --config axonn.yaml finetune_no_trainer.py --model MODEL --data documents.jsonl --output_dir out

Nothing in the loop knows of the grid. --resume goes on from the newest state in the output directory, on the same grid
or another one with the same --batch_size times data * z.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, get_scheduler

import hf_axonn
from hf_axonn import AxonnConfig
from hf_axonn_scripts.announce import describe_grid, describe_model, say, say_data, say_saved, use_terminal
from hf_axonn_scripts.data import DataArguments, load_rows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a model, or its name on the hub")
    parser.add_argument("--data", required=True, help="documents, as finetune.py takes them")
    parser.add_argument("--output_dir", required=True, type=Path)
    parser.add_argument("--sequence_length", type=int, default=1024)
    parser.add_argument("--batch_size", type=int, default=4, help="rows for each (data, z) position")
    parser.add_argument("--accumulation", type=int, default=1, help="batches in a step of the optimizer")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--save_every", type=int, default=500, help="steps between two states")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--log_with", help="a tracker of accelerate that is installed, such as tensorboard")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args(arguments)


class Progress:
    """Place of the run; saved and loaded with the rest of its state."""

    epoch = batch = step = 0

    def state_dict(self) -> dict[str, int]:
        """Return the place, for `register_for_checkpointing`."""
        return {"epoch": self.epoch, "batch": self.batch, "step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over a place, for `register_for_checkpointing`."""
        self.epoch, self.batch, self.step = state["epoch"], state["batch"], state["step"]


def main() -> None:
    """Train, and save an ordinary model directory."""
    args = parse()
    use_terminal()
    set_seed(args.seed)
    project = ProjectConfiguration(str(args.output_dir), automatic_checkpoint_naming=True, total_limit=2)
    # The order of an epoch depends on its number and the seed alone, so that a resumed run finds it again.
    shuffling = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed)
    accelerator = Accelerator(
        gradient_accumulation_steps=args.accumulation,
        project_config=project,
        dataloader_config=shuffling,
        log_with=args.log_with,
    )
    accelerator.init_trackers("finetune", config={name: str(value) for name, value in vars(args).items()})

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    data = DataArguments(data=args.data, sequence_length=args.sequence_length)
    with accelerator.main_process_first():
        rows = load_rows(data, tokenizer)
    say_data(data, rows, args.epochs)
    loader = DataLoader(
        rows.train, batch_size=args.batch_size, shuffle=True, collate_fn=DataCollatorForSeq2Seq(tokenizer)
    )

    launched = AxonnConfig.from_env()
    if launched:  # every rank reads only its own slices
        model = hf_axonn.from_pretrained(args.model, grid=launched.grid, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    # Batches of one position: the prepared schedule moves on by data * z of them in a step.
    batches = args.epochs * len(loader) // args.accumulation
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=batches // 20, num_training_steps=batches)
    model, optimizer, loader, schedule = accelerator.prepare(model.train(), optimizer, loader, schedule)

    steps = args.epochs * len(loader) // args.accumulation
    say(
        f"model      {describe_model(accelerator.unwrap_model(model))}",
        f"grid       {describe_grid(accelerator.unwrap_model(model))}",
        f"steps      {steps:,}; epochs {args.epochs}; {args.batch_size} rows a process and batch",
    )

    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.resume:
        accelerator.load_state()
        project.iteration = int(newest_state(args.output_dir).name.removeprefix("checkpoint_")) + 1

    while progress.epoch < args.epochs:
        loader.set_epoch(progress.epoch)
        for batch in accelerator.skip_first_batches(loader, progress.batch) if progress.batch else loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
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
        args.output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    if accelerator.is_main_process:
        tokenizer.save_pretrained(args.output_dir)
    say_saved(args.output_dir, data, rows.columns)
    accelerator.end_training()


def newest_state(output_dir: Path) -> Path:
    """Return the directory that `load_state` reads under automatic naming."""
    found = [path for path in (output_dir / "checkpoints").iterdir() if path.name.startswith("checkpoint_")]
    return max(found, key=lambda path: int(path.name.removeprefix("checkpoint_")))


if __name__ == "__main__":
    main()
