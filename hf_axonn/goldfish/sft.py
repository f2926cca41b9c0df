"""`GoldfishSFTTrainer`: TRL's supervised fine-tuning with the goldfish loss, on one process or over a grid.

    trainer = GoldfishSFTTrainer(
        model=model, args=GoldfishSFTConfig(output_dir="out", packing=True), train_dataset=conversations, ...
    )

Everything of SFTTrainer works as in TRL: chat data, packing, completion-only and assistant-only loss, `peft_config`.
The stock SFTTrainer trains over a grid, too; what both need of a parallelized model is in trainer/trl.py.

Needs the extra `trl`. Checked with trl 1.15 and 1.16.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from hf_axonn.compat.extras import lacking
from hf_axonn.goldfish.config import GoldfishConfig
from hf_axonn.goldfish.trainer import SAMPLE_LENGTHS, GoldfishMixin
from hf_axonn.trainer import hooks as trainer_hooks
from hf_axonn.trainer import trl as compat_trl


try:
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling, SFTTrainer
except ModuleNotFoundError as error:
    if not (reason := lacking("trl")):
        raise
    raise ImportError(f"GoldfishSFTTrainer is a trainer of TRL: {reason}") from error

compat_trl.install()
trainer_hooks.install_cards_of_trl()


# SFTConfig comes first: a dataclass takes the default of a field from the first base that has it.
@dataclass
class GoldfishSFTConfig(SFTConfig, GoldfishConfig):
    """TRL's SFTConfig, with its defaults, and the options of the goldfish loss.

    Raises:
        ValueError: an option is out of range.
    """


class GoldfishSFTTrainer(GoldfishMixin, SFTTrainer):
    """`SFTTrainer` with the goldfish loss; takes a `GoldfishSFTConfig` as args and is otherwise used like it.

    The goldfish hash looks at all tokens of a document, prompts included; labels that TRL leaves out of the loss stay
    out of it. `mean_token_accuracy` and `entropy` of training are those of kept labels. In evaluation nothing is
    masked, and `eval_loss`, `eval_mean_token_accuracy` and `eval_entropy` are means over all target tokens, where the
    stock SFTTrainer reports means over batches.

    Raises:
        ValueError: args of another class, or an option that does not go together with the goldfish loss.
    """

    def __init__(self, model: Any, args: GoldfishSFTConfig | None = None, *others: Any, **options: Any) -> None:
        # TRL makes an SFTConfig of any other arguments, and would fail on names that it does not know.
        if not (isinstance(args, SFTConfig) and isinstance(args, GoldfishConfig)):
            raise ValueError(
                f"{type(self).__name__} got args of class {type(args).__name__}: pass "
                "args=GoldfishSFTConfig(output_dir=...), TRL's SFTConfig with the goldfish options."
            )
        super().__init__(model, args, *others, **options)
        if self.padding_free:
            assert isinstance(self.data_collator, DataCollatorForLanguageModeling)  # TRL refuses any other
            self.data_collator = _SampleCollator(**_fields(self.data_collator))

    def _check_weights(self) -> None:
        """Refuse weights: TRL sums the log-probabilities of kept labels by itself."""
        raise ValueError(
            f"{type(self.loss_strategy).__name__} gives labels weights, which TRL's loss does not take: use "
            "GoldfishTrainer, or a strategy that leaves labels out."
        )

    def _use_eval_sums(self, sums: dict[str, float]) -> None:
        """Take the place of what TRL has collected for the next log, a number for each batch."""
        self._metrics["eval"]["mean_token_accuracy"] = [sums["top1"] / sums["tokens"]]
        self._metrics["eval"]["entropy"] = [sums["entropy"] / sums["tokens"]]


@dataclass
class _SampleCollator(DataCollatorForLanguageModeling):
    """TRL's collator without padding, which puts a batch into one row, and says how long each sample of it is."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        lengths = [len(example["input_ids"]) for example in examples]
        return {**super().torch_call(examples), SAMPLE_LENGTHS: torch.tensor(lengths)}


def _fields(instance: DataCollatorForLanguageModeling) -> dict[str, Any]:
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
