"""Fine-tune a model on conversations with TRL's SFTTrainer and the goldfish loss, on one process or on a grid of them.

One process:
    python finetune_chat.py --model_name_or_path MODEL --data chats.jsonl --output_dir out

A grid, as the launch file says (training_scripts/grids has ready ones): the same command with
accelerate launch --config axonn.yaml in the place of python.

A line of chats.jsonl has "messages", or "prompt" and "completion", in any form that TRL reads. Packed rows: --packing
--max_length 2048. Loss on the answers alone: --assistant_only_loss. LoRA: --use_peft --lora_r 16. The ordinary loss:
--goldfish False. Go on after an interruption: --resume_from_checkpoint last. All options of SFTConfig: --help.

A line may have "images", a list of files whose paths count from the folder of chats.jsonl; MODEL then has a processor.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    HfArgumentParser,
)
from trl import ModelConfig, get_peft_config

import hf_axonn
from hf_axonn import AxonnConfig, GoldfishSFTConfig, GoldfishSFTTrainer
from hf_axonn_scripts.announce import Announcement, say_saved, say_used, use_terminal
from hf_axonn_scripts.images import open_images


@dataclass
class DataArguments:
    """Conversations to train on."""

    data: str = field(metadata={"help": "A file with one conversation a line (jsonl), or a data set of the hub."})
    split: str = field(default="train", metadata={"help": "Which split of a data set of the hub."})
    held_out: float = field(default=0.0, metadata={"help": "Part of the conversations to evaluate on."})


def load_rows(args: DataArguments) -> Dataset:
    """Read the conversations, with their images where they have a column `images`.

    Raises:
        ValueError: a row has no list of files, or a file of an image is not there.
    """
    if not args.data.endswith((".json", ".jsonl")):
        return load_dataset(args.data, split=args.split)
    rows = load_dataset("json", data_files=args.data, split="train")
    if "images" not in rows.column_names:
        return rows
    return open_images(rows, Path(args.data).parent)


def load_model(args: ModelConfig, auto_class: type = AutoModelForCausalLM):
    """Load the model; ranks of a grid read only their own slices."""
    kwargs = {"dtype": args.dtype or "float32", "attn_implementation": args.attn_implementation}
    launched = AxonnConfig.from_env()
    if launched is None:
        return auto_class.from_pretrained(args.model_name_or_path, **kwargs)
    return hf_axonn.from_pretrained(args.model_name_or_path, grid=launched.grid, auto_class=auto_class, **kwargs)


def parse(argv: Sequence[str] | None = None) -> tuple[DataArguments, ModelConfig, GoldfishSFTConfig]:
    """Read the command line, or `argv`."""
    parser = HfArgumentParser((DataArguments, ModelConfig, GoldfishSFTConfig))
    parser.set_defaults(logging_steps=0.05, log_level_replica="error")  # as in finetune.py
    return parser.parse_args_into_dataclasses(argv)


def main(argv: Sequence[str] | None = None) -> GoldfishSFTTrainer:
    """Train, evaluate what was held out, and save the model with its tokenizer."""
    data_args, model_args, args = parse(argv)
    args.disable_tqdm = args.disable_tqdm or not use_terminal()
    if not args.resume_from_checkpoint:
        say_used(Path(str(args.output_dir)))
    # One process reads the file, the others its cache.
    with args.main_process_first(desc="conversations"):
        rows = load_rows(data_args)
        parts = rows.train_test_split(data_args.held_out, seed=args.seed) if data_args.held_out else {"train": rows}
    seen = "images" in rows.column_names
    processing = AutoProcessor if seen else AutoTokenizer
    trainer = GoldfishSFTTrainer(
        model=load_model(model_args, AutoModelForImageTextToText if seen else AutoModelForCausalLM),
        args=args,
        train_dataset=parts["train"],
        eval_dataset=parts.get("test"),
        processing_class=processing.from_pretrained(model_args.model_name_or_path),
        peft_config=get_peft_config(model_args),
    )
    trainer.add_callback(Announcement(trainer))
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_metrics("train", result.metrics)
    if data_args.held_out:
        trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_model()
    trainer.save_state()
    say_saved(Path(str(args.output_dir)), columns=rows.column_names)
    return trainer


if __name__ == "__main__":
    main()
