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

from argparse import RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from trl import ModelConfig, get_peft_config, get_quantization_config

import hf_axonn
from hf_axonn import AxonnConfig, GoldfishSFTConfig, GoldfishSFTTrainer
from hf_axonn_scripts.announce import Announcement, say_saved, say_used, use_terminal
from hf_axonn_scripts.checks import (
    Parser,
    check_rows,
    end_with_sentence,
    load_config,
    load_tokenizer,
    make_output,
    refuse_adapters,
)
from hf_axonn_scripts.data import check_share, open_data, refuse_choices, refuse_gaps
from hf_axonn_scripts.images import require_images


CHATS = ("messages", "conversations")
NEEDS = {
    "use_peft": ("lora_", "use_rslora", "use_dora"),
    "load_in_4bit": ("bnb_4bit_", "use_bnb_"),
}  # options by prefix


@dataclass
class DataArguments:
    """Conversations to train on."""

    data: str = field(metadata={"help": "A file with one conversation a line (jsonl), or a data set of the hub."})
    split: str = field(default="train", metadata={"help": "Which split of a data set of the hub."})
    held_out: float = field(default=0.0, metadata={"help": "Part of the conversations to evaluate on."})

    def __post_init__(self):
        check_share(self.held_out)


@dataclass
class ModelArguments(ModelConfig):
    """TRL's options of a model, none of which is left out in silence."""

    def __post_init__(self):
        super().__post_init__()
        if self.model_name_or_path is None:
            raise ValueError("--model_name_or_path is missing: give a folder of a model, or its name on the hub")
        refuse_adapters(self.model_name_or_path, option="--use_peft")
        given = [option.name for option in fields(self) if getattr(self, option.name) != option.default]
        for switch, prefixes in NEEDS.items():
            if idle := [name for name in given if name.startswith(prefixes) and not getattr(self, switch)]:
                raise ValueError(f"--{idle[0]} has no effect without --{switch}")


def load_rows(args: DataArguments, *, text_column: str = "text") -> Dataset:
    """Read the conversations, with their images where they have a column `images`.

    Args:
        args: names the data.
        text_column: column of rows that are plain text.
    Raises:
        ValueError: the data is not there or cannot be read, has no rows, no column that TRL reads, or no split where
            one is named, or a row lacks its column; a conversation is no list of turns; a row has no list of files,
            or a file of an image is not there.
    """
    refuse_choices([args.data], split=args.split, of_texts=False)
    rows = open_data(args.data, split=args.split)
    forms = [["input_ids"], *([name] for name in CHATS), ["prompt", "completion"], [text_column]]
    form = next((columns for columns in forms if {*columns} <= {*rows.column_names}), None)
    if form is None:
        raise ValueError(
            f"{args.data} has neither a column messages, nor prompt and completion, nor {text_column} "
            f"(--dataset_text_field), but {', '.join(rows.column_names)}"
        )
    for column in form:
        refuse_gaps(rows, column, args.data)
    turns = rows[0][form[0]]
    if form[0] in CHATS and not (isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)):
        raise ValueError(
            f"{form[0]} of the first row of {args.data} is {turns!r:.60}: write a list of turns, each with role and "
            "content"
        )
    return rows


def check_chats(rows: Dataset, processing: Any, args: GoldfishSFTConfig, model: str) -> None:
    """Compare conversations with what the model reads them by.

    Raises:
        ValueError: there are images, and no processor of images, or conversations, and no chat template.
    """
    first = rows[0]
    if "images" in first:
        require_images(processing)
    turns = "input_ids" not in first and any(isinstance(first.get(name), list) for name in (*CHATS, "prompt"))
    if turns and processing.chat_template is None and args.chat_template_path is None:
        raise ValueError(
            f"{model} has no chat template, and conversations need one: take another model, or name a .jinja file, "
            "or a model that has one, with --chat_template_path"
        )


def model_options(args: ModelArguments, training: GoldfishSFTConfig) -> dict[str, Any]:
    """Return how the model's own files are read, its configuration and its tokenizer too."""
    return {"revision": args.model_revision, "trust_remote_code": training.trust_remote_code}


def load_model(args: ModelArguments, training: GoldfishSFTConfig, auto_class: Any = AutoModelForCausalLM):
    """Load the model; ranks of a grid read only their own slices."""
    kwargs: dict[str, Any] = {"dtype": args.dtype or "float32", "attn_implementation": args.attn_implementation}
    given: Any = training.model_init_kwargs or {}  # a dict, once the command line is read
    kwargs |= model_options(args, training) | given
    if quantization := get_quantization_config(args):
        kwargs["quantization_config"] = quantization
    launched, name = AxonnConfig.from_env(), str(args.model_name_or_path)
    if launched is None:
        return auto_class.from_pretrained(name, **kwargs)
    return hf_axonn.from_pretrained(name, grid=launched.grid, auto_class=auto_class, **kwargs)


def parse(argv: Sequence[str] | None = None) -> tuple[DataArguments, ModelArguments, GoldfishSFTConfig]:
    """Read the command line, or `argv`; a mistake in it ends the program with code 2 and a message."""
    parser = Parser(
        [DataArguments, ModelArguments, GoldfishSFTConfig],
        usage="%(prog)s --model_name_or_path MODEL --data DATA [any option of SFTConfig] ...",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.set_defaults(logging_steps=0.05, log_level_replica="error")  # as in finetune.py
    data_args, model_args, args = parser.parse(argv)
    parser.check_training(args, held_out=bool(data_args.held_out), options="--held_out")
    return data_args, model_args, args


def main(argv: Sequence[str] | None = None) -> GoldfishSFTTrainer:
    """Train, evaluate what was held out, and save the model with its tokenizer."""
    data_args, model_args, args = parse(argv)
    args.disable_tqdm = args.disable_tqdm or not use_terminal()
    output, name = Path(str(args.output_dir)), str(model_args.model_name_or_path)
    if not args.resume_from_checkpoint:
        say_used(output)
    with end_with_sentence(name):
        # One process reads the file, the others its cache.
        with args.main_process_first(desc="conversations"):
            rows = load_rows(data_args, text_column=args.dataset_text_field)
            parts: Mapping[str, Dataset] = {"train": rows}
            if data_args.held_out:
                parts = rows.train_test_split(data_args.held_out, seed=args.seed)
        seen = "images" in rows.column_names
        options = model_options(model_args, args)
        processing = load_tokenizer(
            name,
            AutoProcessor if seen else AutoTokenizer,
            pad_token=args.pad_token or args.eos_token,
            option="--pad_token",
            **options,
        )
        check_chats(rows, processing, args, name)
        config = load_config(name, **options)
        make_output(output, adapters=model_args.use_peft)
        model = load_model(model_args, args, AutoModelForImageTextToText if seen else AutoModelForCausalLM)
        args.model_init_kwargs = None  # the model has been made with them
        trainer = GoldfishSFTTrainer(
            model=model,
            args=args,
            train_dataset=parts["train"],
            eval_dataset=parts.get("test"),
            processing_class=processing,
            peft_config=get_peft_config(model_args),
        )
        if not seen:  # those with images become tokens in their batch
            made = [part for part in (trainer.train_dataset, trainer.eval_dataset) if part is not None]
            check_rows(config, made, tokenizer=name, option="--max_length")
    trainer.add_callback(Announcement(trainer))
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_metrics("train", result.metrics)
    if data_args.held_out:
        trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_model()
    trainer.save_state()
    say_saved(output, columns=rows.column_names)
    return trainer


if __name__ == "__main__":
    main()
