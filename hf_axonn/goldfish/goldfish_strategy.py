"""The goldfish loss as a strategy of `GoldfishTrainer`, and the choice of a strategy by a config."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from hf_axonn.goldfish.config import GoldfishConfig
from hf_axonn.goldfish.mask import HASHES, RANDOM, count_unprotected, goldfish_mask
from hf_axonn.goldfish.strategy import LossStrategy, TrainingBatch
from hf_axonn.goldfish.table import CPU_TABLE_SHA256, load_table


def loss_settings(args: GoldfishConfig) -> dict[str, Any]:
    """Return what decides which labels are dropped, as the training record has it."""
    settings: dict[str, Any] = {"strategy": args.goldfish_strategy, "k": args.goldfish_k}
    if args.goldfish_strategy in HASHES:
        settings["context_width"] = args.goldfish_context_width
    if args.goldfish_strategy == "hash-table":
        settings["table_sha256"] = args.goldfish_table_sha256 or CPU_TABLE_SHA256
    if args.goldfish_strategy == "static":
        settings["start_position"] = args.goldfish_start_position
    if args.goldfish_strategy in RANDOM:
        settings["seed"] = args.goldfish_seed_used
    if args.goldfish_as_reference:
        settings |= {"as_reference": True, "ignored_token": args.goldfish_ignored_token}
    return settings


def idle_options(args: GoldfishConfig, strategy: LossStrategy) -> list[str]:
    """Return the goldfish options that are not at their default and that a strategy does not read, as name=value."""
    read = {"goldfish"}
    if isinstance(strategy, Goldfish):
        read = {each.name for each in fields(args)}
        read -= set() if args.goldfish_strategy in RANDOM else {"goldfish_seed"}
        read -= set() if args.goldfish_strategy in HASHES else {"goldfish_context_width", "goldfish_ignored_token"}
    elif args.loss_strategy == "entrodrop":
        read |= {"goldfish_seed"}
    options = [each for each in fields(args) if each.name.startswith("goldfish") and each.name not in read]
    return [f"{each.name}={value}" for each in options if (value := getattr(args, each.name)) != each.default]


class Goldfish(LossStrategy):
    """The goldfish loss: labels that `goldfish_mask` drops do not count.

    Args:
        args: its goldfish options.
        device: where the table of `goldfish_table` goes.
    """

    def __init__(self, args: GoldfishConfig, device: torch.device | str = "cpu") -> None:
        self.args = args
        self._table: Tensor | None = None
        if args.goldfish_table is not None:
            self._table = load_table(args.goldfish_table, args.goldfish_table_sha256).to(device)

    def weigh_ids(self, batch: TrainingBatch) -> Tensor:
        """Return [B, S] bool: False for a dropped label."""
        args = self.args
        return ~goldfish_mask(
            batch.input_ids,
            batch.labels,
            self._documents(batch),
            strategy=args.goldfish_strategy,
            k=args.goldfish_k,
            context_width=args.goldfish_context_width,
            start_position=args.goldfish_start_position,
            hash_labels=args.goldfish_as_reference,
            ignored_token=args.goldfish_ignored_token,
            table=self._table,
            seed=args.goldfish_seed_used,
            step=batch.step,
            sample_ids=batch.sample_ids,
        )

    def count_unprotected(self, batch: TrainingBatch) -> tuple[Tensor, Tensor] | None:
        """Return the documents that are too short for a hash, and all."""
        if self.args.goldfish_strategy not in HASHES:
            return None
        width = self.args.goldfish_context_width
        return count_unprotected(batch.labels, self._documents(batch), context_width=width)

    def settings(self) -> dict[str, Any]:
        """Return `loss_settings`."""
        return loss_settings(self.args)

    def _documents(self, batch: TrainingBatch) -> Tensor | None:
        return None if self.args.goldfish_as_reference else batch.document_ids


def make_strategy(args: GoldfishConfig, device: torch.device | str = "cpu") -> LossStrategy:
    """Return the strategy that a config names: the ordinary loss, goldfish, or a rival."""
    if not args.goldfish:
        return LossStrategy()
    return args.make_rival() or Goldfish(args, device)
