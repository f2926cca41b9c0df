"""Fine-tune a causal language model, with the goldfish loss, on one process or on a grid of them.

One process, any GPU or none:
    python finetune.py --model MODEL --data documents.jsonl --output_dir out

A grid, as the launch file says (training_scripts/grids has ready ones):
    accelerate launch --config axonn.yaml finetune.py --model MODEL --data documents.jsonl --output_dir out

The ordinary loss: --goldfish False. Packed rows: --packing --sequence_length 2048. LoRA: --lora_r 16. Evaluation:
--held_out 0.05 --eval_strategy epoch. Go on after an interruption: --resume_from_checkpoint last.

A line of documents.jsonl may have "images", a list of files whose paths count from the folder of documents.jsonl, and
in its text the model's placeholder for each; MODEL then has a processor.
"""

from argparse import ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    GgufConfig,
    default_data_collator,
    set_seed,
)

import hf_axonn
from hf_axonn import AxonnConfig, GoldfishConfig, GoldfishTrainer
from hf_axonn.engine.documents import why_documents_mix
from hf_axonn_scripts.announce import Announcement, say_data, say_saved, say_used, use_terminal
from hf_axonn_scripts.checks import (
    Parser,
    check_rows,
    end_with_sentence,
    load_config,
    load_tokenizer,
    make_output,
    refuse_adapters,
)
from hf_axonn_scripts.data import DataArguments, Rows, load_documents, load_rows
from hf_axonn_scripts.images import ImageCollator


@dataclass
class ModelArguments:
    """The model to train."""

    _argument_group_name = "model"

    model: str = field(metadata={"help": "Folder of a model, or its name on the hub."})
    gguf_file: str | None = field(default=None, metadata={"help": "GGUF file in that folder; it is dequantized."})
    tokenizer: str | None = field(default=None, metadata={"help": "Folder or name of the tokenizer, if another."})
    dtype: str = field(
        default="float32",
        metadata={
            "help": "Type of the weights (mixed precision is --bf16, or the launch file's). auto: as stored.",
            "choices": ["float32", "bfloat16", "auto"],
        },
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "sdpa, eager, flash_attention_2 ...; None: the best that is installed."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the model."})
    lora_r: int = field(default=0, metadata={"help": "Rank of LoRA adapters; 0 trains all weights."})
    lora_alpha: int = field(default=32, metadata={"help": "LoRA scale: updates are multiplied by alpha / r."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before the adapters."})
    lora_target_modules: str = field(
        default="all-linear", metadata={"help": "Modules to adapt: names separated by commas, or all-linear."}
    )

    def __post_init__(self):
        refuse_adapters(self.model, option="--lora_r")
        if self.lora_r < 0:
            raise ValueError(f"lora_r is {self.lora_r}: give the rank of the adapters, or 0 to train all weights")


class HelpFormatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Help with defaults, and the description as it is written."""


def parse(argv: Sequence[str] | None = None) -> tuple[ModelArguments, DataArguments, GoldfishConfig]:
    """Read the command line; a mistake in it ends the program with code 2 and a message."""
    parser = Parser(
        [ModelArguments, DataArguments, GoldfishConfig],
        usage="%(prog)s --model MODEL --data DATA [--goldfish_k K] [--packing] [--lora_r R] [any Trainer option] ...",
        description=__doc__,
        formatter_class=HelpFormatter,
    )
    # One epoch, in which a document is seen as often as its bucket says; 10 to 20 lines of losses, however long the
    # run is; warnings of one process, because the others have the same.
    parser.set_defaults(num_train_epochs=1, logging_steps=0.05, log_level_replica="error")
    model_args, data_args, args = parser.parse(argv)
    held_out = bool(data_args.held_out or data_args.held_out_data)
    parser.check_training(args, held_out=held_out, options="--held_out or --held_out_data")
    return model_args, data_args, args


def read_tokenizer(args: ModelArguments, auto_class: Any = AutoTokenizer):
    """Load the tokenizer, or the processor with its own (`load_tokenizer`)."""
    gguf: dict[str, Any] = {"gguf_file": args.gguf_file} if args.gguf_file and not args.tokenizer else {}
    options: dict[str, Any] = {"option": "--tokenizer", "trust_remote_code": args.trust_remote_code, **gguf}
    return load_tokenizer(args.tokenizer or args.model, auto_class, **options)


def load_model(args: ModelArguments, grid: hf_axonn.Grid | None, auto_class: Any = AutoModelForCausalLM):
    """Load the model, with LoRA adapters if asked for, sharded over the grid if there is one.

    On a grid each rank reads only its own slices; a GGUF file is first dequantized, once.
    """
    options: dict[str, Any] = {"dtype": args.dtype, "trust_remote_code": args.trust_remote_code}
    if args.attn_implementation:
        options["attn_implementation"] = args.attn_implementation
    if args.gguf_file:
        options |= {"gguf_file": args.gguf_file, "quantization_config": GgufConfig(dequantize=True)}
    if grid is None:
        model = auto_class.from_pretrained(args.model, **options)
    else:
        model = hf_axonn.from_pretrained(args.model, grid=grid, auto_class=auto_class, **options)
    return add_lora(model, args) if args.lora_r else model


def load_frozen(args: ModelArguments, grid: hf_axonn.Grid | None, training: GoldfishConfig, auto_class: Any):
    """Load the model a second time where the loss compares with it as it was; None elsewhere, and beside adapters."""
    rival = training.make_rival()
    reads = rival is not None and "frozen" in rival.sources
    return load_model(args, grid, auto_class) if reads and not args.lora_r else None


def add_lora(model, args: ModelArguments):
    """Freeze the model and add adapters that are trained instead."""
    from peft import LoraConfig, get_peft_model

    names = args.lora_target_modules
    return get_peft_model(
        model,
        LoraConfig(
            task_type="CAUSAL_LM",
            r=args.lora_r,
            lora_alpha=args.lora_alpha,
            lora_dropout=args.lora_dropout,
            target_modules=names if names == "all-linear" else names.split(","),
        ),
    )


def check_data(args: ModelArguments, rows: Rows) -> None:
    """Compare the rows with the model's configuration, before any weight is read (`check_rows`)."""
    gguf: dict[str, Any] = {"gguf_file": args.gguf_file} if args.gguf_file else {}
    config = load_config(args.model, trust_remote_code=args.trust_remote_code, **gguf)
    parts = [part for part in (rows.train, rows.held_out) if part is not None]
    check_rows(config, parts, tokenizer=args.tokenizer or args.model, option="--sequence_length")


def check_packing(model, args: GoldfishConfig) -> None:
    """Refuse packing where one document could attend to another: position_ids alone tell packed ones apart.

    Raises:
        ValueError: documents in a row of this model see each other, or flash attention would read several rows as one.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if reason := why_documents_mix(model):
        raise ValueError(f"--packing would let documents of {type(base).__name__} see each other, {reason}: omit it")
    implementation = base.config._attn_implementation or ""  # noqa: SLF001  (its only name)
    rows = max(args.per_device_train_batch_size, args.per_device_eval_batch_size)
    if "flash" in implementation and rows > 1:
        raise ValueError(
            f"--packing with {implementation} takes one row at a time, not {rows}: set --attn_implementation sdpa, or "
            "--per_device_train_batch_size 1 --per_device_eval_batch_size 1 and a longer --sequence_length"
        )


def main(argv: Sequence[str] | None = None) -> GoldfishTrainer:
    """Train, evaluate what was held out, and save the model with its tokenizer."""
    model_args, data_args, args = parse(argv)
    args.disable_tqdm = args.disable_tqdm or not use_terminal()
    output = Path(str(args.output_dir))
    if not args.resume_from_checkpoint:
        say_used(output)
    launched = AxonnConfig.from_env()
    grid = launched.grid if launched else None
    set_seed(args.seed)  # adapters begin with random numbers, which must be the same on every rank
    with end_with_sentence(model_args.model):
        # One process prepares the rows, the others read them from the cache.
        with args.main_process_first(desc="tokens to rows"):
            documents = load_documents(data_args, data_args.data)
            seen = "images" in documents.column_names
            tokenizer = read_tokenizer(model_args, AutoProcessor if seen else AutoTokenizer)
            rows = load_rows(data_args, tokenizer, documents=documents, seed=args.seed)
        say_data(data_args, rows, None if args.max_steps > 0 else args.num_train_epochs)
        check_data(model_args, rows)
        make_output(output, adapters=model_args.lora_r > 0)
        auto_class = AutoModelForImageTextToText if seen else AutoModelForCausalLM
        model = load_model(model_args, grid, auto_class)
        if data_args.packing:
            check_packing(model, args)
        frozen = load_frozen(model_args, grid, args, auto_class)

    args.remove_unused_columns = args.remove_unused_columns and not seen  # pixels are made of other columns
    collator = ImageCollator(tokenizer) if seen else DataCollatorForSeq2Seq(tokenizer)
    trainer = GoldfishTrainer(
        model=model,
        args=args,
        train_dataset=rows.train,
        eval_dataset=rows.held_out,
        processing_class=tokenizer,
        data_collator=default_data_collator if data_args.packing else collator,
        frozen_model=frozen,
    )
    trainer.add_callback(Announcement(trainer))
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_metrics("train", result.metrics)
    if rows.held_out is not None:
        trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_model()
    trainer.save_state()
    say_saved(output, data_args, rows.columns)
    return trainer


if __name__ == "__main__":
    main()
