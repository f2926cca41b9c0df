"""Checks that the fine-tuning scripts share: options, tokenizer, rows and output before training, and how a run that
cannot begin ends, with a sentence and exit code 2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import datasets
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, HfArgumentParser, PreTrainedConfig, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

import hf_axonn
from hf_axonn.checkpoint.run_folder import hold_folder
from hf_axonn.compat.own_code import refuse_own_code
from hf_axonn.planner.from_settings import too_long
from hf_axonn_scripts import is_first
from hf_axonn_scripts.announce import say
from hf_axonn_scripts.data import largest_id, longest_row


class Parser(HfArgumentParser):
    """A parser that ends a mistake with code 2 and a message. Of several processes only the first one talks.

    Args:
        kinds: the dataclasses whose fields are the options.
        options: of `argparse.ArgumentParser`.
    """

    def __init__(self, kinds: Sequence[Any], **options: Any) -> None:
        super().__init__(kinds, **options)

    def print_help(self, file: Any = None) -> None:
        if is_first():
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n--help lists all options.\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        super().exit(status, message if is_first() else None)

    def parse(self, argv: Sequence[str] | None) -> tuple[Any, ...]:
        """Return the command line, or `argv`, as the dataclasses of this parser, whose ValueErrors are mistakes."""
        try:
            return self.parse_args_into_dataclasses(argv)
        except ValueError as error:
            self.error(str(error))

    def check_training(self, args: TrainingArguments, *, held_out: bool, options: str) -> None:
        """End the program where Trainer's options ask for data or a checkpoint that are not there.

        Args:
            args: options of Trainer.
            held_out: whether there is something to evaluate on.
            options: names of the options that say what.
        """
        if args.eval_strategy != "no" and not held_out:
            self.error(f"--eval_strategy {IntervalStrategy(args.eval_strategy).value} needs {options}")
        resumed = args.resume_from_checkpoint
        if resumed and resumed != "last" and not Path(resumed).is_dir():
            self.error(f"--resume_from_checkpoint {resumed} is no folder; last is the newest one in --output_dir")


@contextmanager
def end_with_sentence(model: str) -> Iterator[None]:
    """End the program with code 2 and one sentence where data or model cannot be trained on.

    Args:
        model: name of the model whose weights are read within.
    """
    try:
        yield
    except (ValueError, OSError, SafetensorError) as error:
        if isinstance(error, SafetensorError):
            error = ValueError(f"the weights of {model} are damaged ({error}): copy or download them again")
        if os.environ.get("LOCAL_RANK", "0") == "0":  # the first of this machine, whose files may be others
            print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def refuse_adapters(model: str, *, option: str) -> None:
    """Refuse a folder of adapters in the place of a model; `option` asks for new ones.

    Raises:
        ValueError: it is one.
    """
    if (Path(model) / "adapter_config.json").is_file():
        base = hf_axonn.adapter_base(model) or "its adapter_config.json does not say which"
        raise ValueError(
            f"{model} holds adapters, which would stay frozen: give the model that they are for ({base}), and "
            f"{option} for new ones"
        )


def load_tokenizer(
    name: str, auto_class: Any = AutoTokenizer, *, pad_token: str | None = None, option: str, **options: Any
) -> Any:
    """Load a tokenizer, or a processor with its own.

    Args:
        name: folder or name of a model.
        auto_class: AutoTokenizer or AutoProcessor.
        pad_token: padding token of a tokenizer that has none; None: its end of sequence, which the labels leave out.
        option: of the command line, that helps where there is neither.
        options: for `from_pretrained`.
    Raises:
        ValueError: there is no padding token, there is no such model, or code that comes with it would have to run.
    """
    try:
        loaded = auto_class.from_pretrained(name, **options)
    except (ValueError, OSError) as error:
        refuse_own_code(name, error)
        if Path(name).exists():
            raise
        raise ValueError(f"{name} is neither a folder here, nor a model on the hub: {error}") from error
    tokenizer = getattr(loaded, "tokenizer", loaded)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = pad_token or tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise ValueError(
            f"the tokenizer {name} has neither a padding token nor an end of sequence: set pad_token and eos_token in "
            f"its tokenizer_config.json, or name another with {option}"
        )
    return loaded


def load_config(model: str, **options: Any) -> PreTrainedConfig:
    """Read the configuration of a model; `options` are those of `from_pretrained`.

    Raises:
        ValueError: code that comes with the model would have to run.
    """
    try:
        return AutoConfig.from_pretrained(model, **options)
    except ValueError as error:
        refuse_own_code(model, error)
        raise


def make_output(folder: Path, *, adapters: bool) -> None:
    """Make the output directory before weights are read, not after training.

    Args:
        folder: the directory.
        adapters: whether the run saves adapters, and not a whole model.
    Raises:
        ValueError: it cannot be made, nothing can be written there, another run trains into it now, or it holds
            adapters, which loaders would add to the whole model that is saved beside them, or read in its place.
    """
    if not adapters and (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"--output_dir {folder} holds adapters of another run, which loaders would add to this run's model, or "
            "read in its place: name another folder, or remove adapter_config.json from it"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output_dir {folder} cannot be made ({error.strerror}): name another folder") from None
    if not os.access(folder, os.W_OK):
        raise ValueError(f"--output_dir {folder} cannot be written to: name another folder")
    if is_first():
        with hold_folder(folder):  # as Trainer will over a grid
            pass


def check_rows(config: PreTrainedConfig, parts: Sequence[datasets.Dataset], *, tokenizer: str, option: str) -> None:
    """Compare rows with the model's configuration: the ids with its vocabulary, and the longest row with its
    positions, of which it warns, as some models take more than their configuration says.

    Args:
        config: of the model.
        parts: data sets with a column `input_ids`.
        tokenizer: name of the one that made the rows.
        option: of the command line, that makes rows shorter.
    Raises:
        ValueError: an id is too large for the model.
    """
    text = config.get_text_config()
    if long := too_long(max(map(longest_row, parts)), getattr(text, "max_position_embeddings", None) or 0):
        say(f"warning: {long}: give a shorter {option}.")
    vocabulary, largest = getattr(text, "vocab_size", None), max(map(largest_id, parts))
    if vocabulary is not None and largest >= vocabulary:
        raise ValueError(
            f"the data have the token id {largest}, but the vocabulary of {config.name_or_path} ends at "
            f"{vocabulary - 1}: the tokenizer ({tokenizer}), or the column input_ids, is of another model"
        )
