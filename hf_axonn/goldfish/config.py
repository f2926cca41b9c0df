"""`GoldfishConfig`: training arguments with the options of the goldfish loss and of the rivals (rivals.py)."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from transformers import TrainingArguments

from hf_axonn.goldfish.mask import check_options
from hf_axonn.goldfish.rivals import EntroDrop, NgramPenalty, TfIdf
from hf_axonn.goldfish.strategy import LossStrategy, Source
from hf_axonn.goldfish.table import load_table, table_sha256


Loss = Literal["goldfish", "entrodrop", "tf-idf", "ngram"]
LOSSES: tuple[Loss, ...] = get_args(Loss)


@dataclass
class GoldfishConfig(TrainingArguments):
    """Training arguments with the goldfish loss. With TRL's: `GoldfishSFTConfig`.

    Raises:
        ValueError: an option is out of range.
    """

    goldfish: bool = field(
        default=True,
        metadata={"help": "Leave labels out of the training loss. False: ordinary loss, with the same logs."},
    )
    goldfish_strategy: Literal["hash-table", "hash", "hash-avalanche", "static", "random", "seeded_random"] = field(
        default="hash-table",
        metadata={
            "help": "How labels are chosen: hash-table (the authors' code), hash (the paper), hash-avalanche (the "
            "authors' hash without a table), static (every k-th of a document), random (a baseline that does not "
            "protect), seeded_random (the same with torch's generator, as in the authors' code)."
        },
    )
    goldfish_k: int = field(default=4, metadata={"help": "One label in k is dropped; at least 2."})
    goldfish_context_width: int = field(
        default=13,
        metadata={"help": "Tokens a hash looks at. As many labels at the start of a document are never dropped."},
    )
    goldfish_as_reference: bool = field(
        default=False,
        metadata={
            "help": "Packed rows and prompts as in the authors' code: a row is one document, whatever was packed into "
            "it, and a hash reads labels, in which prompts are goldfish_ignored_token."
        },
    )
    goldfish_ignored_token: int = field(
        default=-1,
        metadata={
            "help": "With goldfish_as_reference what a hash reads where labels are ignored: -1, as the authors' code "
            "without a tokenizer, or the id of the padding token, as with one."
        },
    )
    goldfish_start_position: int = field(
        default=0, metadata={"help": "Labels that the strategy static keeps at the start of a document."}
    )
    goldfish_table: str | None = field(
        default=None,
        metadata={
            "help": "File with the table of the strategy hash-table, as another device drew it (python -m "
            "hf_axonn.goldfish.table). Default: the table that every CPU draws."
        },
    )
    goldfish_table_sha256: str | None = field(
        default=None, metadata={"help": "SHA-256 that the table of goldfish_table must have. Default: any."}
    )
    goldfish_seed: int | None = field(
        default=None, metadata={"help": "Seed of the strategies random and seeded_random. Default: that of the run."}
    )

    loss_strategy: Loss = field(
        default="goldfish",
        metadata={
            "help": "The loss against memorization: goldfish; entrodrop leaves out labels where a model is sure; "
            "tf-idf gives rare tokens more weight; ngram penalizes n-grams that the model has come to know."
        },
    )
    entrodrop_rate: float = field(
        default=0.5, metadata={"help": "entrodrop: share of the candidates that is left out at the end of training."}
    )
    entrodrop_share: float = field(
        default=0.5,
        metadata={"help": "entrodrop: share of a row's labels, of lowest entropy, that are candidates."},
    )
    entrodrop_source: Source = field(
        default="model", metadata={"help": "entrodrop: whose entropies: the model as it trains, or a frozen one."}
    )
    ngram_length: int = field(default=4, metadata={"help": "ngram: tokens of an n-gram."})
    ngram_weight: float = field(default=1.0, metadata={"help": "ngram: weight of the penalty."})
    ngram_margin: float = field(
        default=0.1, metadata={"help": "ngram: by how much the model may be surer of an n-gram than a frozen one."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]  # of Transformers
        self._check_rival()
        check_options(
            strategy=self.goldfish_strategy,
            k=self.goldfish_k,
            context_width=self.goldfish_context_width,
            start_position=self.goldfish_start_position,
        )
        if self.goldfish_ignored_token != -1 and not self.goldfish_as_reference:
            raise ValueError(
                f"goldfish_ignored_token is {self.goldfish_ignored_token}, but without goldfish_as_reference=True "
                "hashes read the tokens, also where labels are ignored: set both, or neither."
            )
        if self.goldfish_table is not None:
            if self.goldfish_strategy != "hash-table":
                raise ValueError(
                    f"goldfish_table={self.goldfish_table} does not go with goldfish_strategy="
                    f"{self.goldfish_strategy}: only hash-table looks up a table."
                )
            # Every rank reads the file by itself, and compares its arguments with the other ranks': the checksum, too.
            self.goldfish_table_sha256 = table_sha256(load_table(self.goldfish_table, self.goldfish_table_sha256))
        elif self.goldfish_table_sha256 is not None:
            raise ValueError(f"goldfish_table_sha256={self.goldfish_table_sha256} is of no table: set goldfish_table.")

    @property
    def goldfish_seed_used(self) -> int:
        """Return the seed of what the loss draws."""
        return self.seed if self.goldfish_seed is None else self.goldfish_seed

    def make_rival(self) -> LossStrategy | None:
        """Return the strategy that `loss_strategy` names; None for goldfish.

        Raises:
            ValueError: unknown, or a setting is out of range.
        """
        if self.loss_strategy == "goldfish":
            return None
        if self.loss_strategy == "entrodrop":
            return EntroDrop(
                rate=self.entrodrop_rate,
                share=self.entrodrop_share,
                source=self.entrodrop_source,
                seed=self.goldfish_seed_used,
            )
        if self.loss_strategy == "tf-idf":
            return TfIdf()
        if self.loss_strategy == "ngram":
            return NgramPenalty(length=self.ngram_length, weight=self.ngram_weight, margin=self.ngram_margin)
        raise ValueError(f"loss_strategy is {self.loss_strategy!r}: choose one of {', '.join(LOSSES)}.")

    def _check_rival(self) -> None:
        if self.make_rival() is not None and not self.goldfish:
            raise ValueError(
                f"goldfish=False is the ordinary loss, and loss_strategy={self.loss_strategy} another: set one."
            )
        defaults = {each.name: each.default for each in fields(self)}
        for name, default in defaults.items():
            prefix = name.partition("_")[0]
            if prefix in LOSSES[1:] and prefix != self.loss_strategy and getattr(self, name) != default:
                raise ValueError(
                    f"{name}={getattr(self, name)} is of loss_strategy={prefix}, but loss_strategy is "
                    f"{self.loss_strategy}: omit it, or choose {prefix}."
                )
