"""`GoldfishTrainer`: Transformers' Trainer that leaves one label in k out of the loss, against verbatim copies.

    trainer = GoldfishTrainer(model=model, args=GoldfishConfig(output_dir="out", goldfish_k=4), train_dataset=...)

The way of a training batch: it is masked where it is born (`get_batch_samples`), before the Trainer counts the tokens
it will divide by, so that the mean is over kept tokens for any gradient accumulation and number of ranks. The labels
as they were travel beside it and are put into the model's `CausalLMLoss` for the one call (`compute_loss`); they never
pass through the model's forward, which a wrapper or a strict signature could stop. The loss object sums what kept,
dropped and all tokens cost; `log` adds the sums over ranks.

Evaluation is never masked, and its loss is the total negative log-likelihood over the total number of target tokens.
The stock Trainer reports the mean over batches of each batch's mean, which depends on how the batches are cut.

What is trained on is counted, and written beside the weights into every checkpoint: record.py, recording.py. Documents
that are packed into one row do not see each other (engine/documents.py), in training and in evaluation.

It works with one process and a plain model, and with a model that is sharded over a grid; the latter carries its own
subclass of `CausalLMLoss`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding, Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from hf_axonn.compat.messages import get_logger
from hf_axonn.compat.versions import check_versions
from hf_axonn.engine.documents import document_fields, find_document_ids, separate_documents
from hf_axonn.engine.state import parallel_state
from hf_axonn.goldfish.collator import GoldfishCollator, drop_labels, ids_and_labels
from hf_axonn.goldfish.mask import HASHES, RANDOM, check_options, count_unprotected, goldfish_mask
from hf_axonn.goldfish.recording import RecordingMixin
from hf_axonn.goldfish.table import CPU_TABLE_SHA256, load_table, table_sha256
from hf_axonn.losses.causal_lm import IGNORE_INDEX, CausalLMLoss, install_causal_lm_loss, mean_losses, widest_float
from hf_axonn.trainer import hooks as trainer_hooks
from hf_axonn.trainer.accumulation import from_last_stage
from hf_axonn.trainer.liger import without_losses
from hf_axonn.trainer.watching import is_training_log


logger = get_logger(__name__)

UNMASKED_LABELS = "unmasked_labels"  # the private key: labels before goldfish, aligned with what the loss reads
SAMPLE_LENGTHS = "sample_lengths"  # the private key of a collator that puts all samples into one row: their tokens
PRIVATE_KEYS = (UNMASKED_LABELS, SAMPLE_LENGTHS)
EVAL_SUMS = ("nll", "tokens", "entropy", "top1")  # over target tokens; the last two where the trainer knows them


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

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]  # of Transformers
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


def make_mask(
    args: GoldfishConfig, input_ids: Tensor, labels: Tensor, document_ids: Tensor | None, **options: Any
) -> Tensor:
    """Return the mask of `goldfish_mask` with the settings of a config.

    Args:
        args: strategy, k, width and whatever else decides which labels are dropped.
        input_ids, labels, document_ids: [B, S], as `goldfish_mask` takes them.
        options: table, step and sample_ids of `goldfish_mask`.
    """
    return goldfish_mask(
        input_ids,
        labels,
        document_ids,
        strategy=args.goldfish_strategy,
        k=args.goldfish_k,
        context_width=args.goldfish_context_width,
        start_position=args.goldfish_start_position,
        hash_labels=args.goldfish_as_reference,
        ignored_token=args.goldfish_ignored_token,
        seed=_seed_of(args),
        **options,
    )


def _seed_of(args: GoldfishConfig) -> int:
    return args.seed if args.goldfish_seed is None else args.goldfish_seed


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
        settings["seed"] = _seed_of(args)
    if args.goldfish_as_reference:
        settings |= {"as_reference": True, "ignored_token": args.goldfish_ignored_token}
    return settings


class GoldfishMixin(RecordingMixin):
    """The goldfish loss and the token-weighted evaluation loss for `Trainer` or a subclass, mixed in before it.

    Its `args` must be a `GoldfishConfig`. Collectives beyond the stock Trainer's, all over the whole world: one sum at
    each training log, at each checkpoint and at the end of training, and in evaluation one gather for every batch.

    Raises:
        ValueError: a library has a release that is not proven (`check_versions`), args of another class, a model
            without the causal language model's loss, or an option that does not go together with the goldfish loss
            (named in the message).
    """

    args: GoldfishConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_versions()
        super().__init__(*args, **kwargs)
        if not isinstance(self.args, GoldfishConfig):
            raise ValueError(
                f"{type(self).__name__} got args of class {type(self.args).__name__}: pass "
                "args=GoldfishConfig(output_dir=...), a TrainingArguments with the goldfish options."
            )
        if self.args.goldfish:
            self._refuse_what_bypasses_the_loss()
        self._eval_totals: Tensor | None = None
        self._documents: Tensor | None = None
        self._table: Tensor | None = None
        if self.args.goldfish_table is not None:
            self._table = load_table(self.args.goldfish_table, self.args.goldfish_table_sha256).to(self.args.device)
        self._warned_unprotected = False
        self._warned_no_rows = False
        self._token_loss()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer.train` does; the logged token losses start from nothing.

        Raises:
            ValueError: labels are dropped by the collator already.
        """
        if self.args.goldfish and isinstance(self.data_collator, GoldfishCollator):
            raise ValueError(
                f"data_collator is a GoldfishCollator, and {type(self).__name__} drops labels by itself: pass the "
                "collator without it, or train with goldfish=False."
            )
        self._token_loss().record.pop()
        self._documents = None
        return super().train(*args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor | int | None]:
        """Mask the micro-batches of an optimizer step, then let the Trainer count their kept tokens."""
        return super().get_batch_samples(map(self._mask_batch, itertools.count(), epoch_iterator), num_batches, device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """Compute the loss as the Trainer does, with the unmasked labels handed to the loss function alone."""
        unmasked = inputs.get(UNMASKED_LABELS)
        inputs = {name: value for name, value in inputs.items() if name not in PRIVATE_KEYS}
        inputs = self._separate_documents(inputs)
        loss = self._token_loss()
        calls = loss.calls
        # nn.DataParallel cuts the batch in the model's forward, where the loss's own labels would not be cut with it.
        with loss.watch(unmasked if self.args.n_gpu <= 1 else None):
            result = super().compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        if unmasked is not None and self.args.goldfish and loss.calls == calls:
            raise ValueError(
                f"{type(self._base_model()).__name__} computes its loss without calling model.loss_function, so it is "
                "not known which label belongs to which token. Train it with goldfish=False, or choose a decoder-only "
                "model of Transformers."
            )
        return result

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Evaluate a batch as the Trainer does, and add up what its samples cost."""
        loss, inputs = self._token_loss(), self._separate_documents(inputs)
        with loss.capture(inputs.get(SAMPLE_LENGTHS)) as rows, loss.alone() if prediction_loss_only else nullcontext():
            result = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        own = torch.cat([part.to(self.args.device) for part in rows]) if rows else None
        own = from_last_stage(self.model, own)
        if own is not None and self._eval_totals is not None:
            # One row a sample: like the Trainer's own gathering of losses, gather_for_metrics leaves out the samples
            # that the data loader repeated to fill the last batch. Rows of a short batch are filled with zeros.
            every = self.accelerator.gather_for_metrics(self.accelerator.pad_across_processes(own))
            self._eval_totals[: every.shape[1]] += every.to(self._eval_totals.dtype).sum(dim=0)
        return result

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate as the Trainer does, with `{metric_key_prefix}_loss` in nats a token over all target tokens.

        A loss that is not a number stays one: `logging_nan_inf_filter` does not apply to it. If the model's loss does
        not come from `model.loss_function` (label smoothing, a `compute_loss_func`), the stock number stands, and a
        warning says so.

        One row of a batch is one sample, or the batch has one row and `SAMPLE_LENGTHS` says how many of its tokens
        each sample has. Another collator that flattens a batch into one row breaks this on several ranks, where the
        last batch is filled up with repeated samples: evaluate with per_device_eval_batch_size=1 there.
        """
        self._eval_totals = torch.zeros(len(EVAL_SUMS), dtype=widest_float(self.args.device), device=self.args.device)
        try:
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
            sums = dict(zip(EVAL_SUMS, self._eval_totals.tolist(), strict=True))
        finally:
            self._eval_totals = None
        metrics = output.metrics
        assert metrics is not None  # the stock loop makes them
        key = f"{metric_key_prefix}_loss"
        if sums["tokens"]:
            metrics[key] = sums["nll"] / sums["tokens"]
            self._use_eval_sums(sums)
        elif key in metrics and not self._warned_no_rows:
            self._warned_no_rows = True
            logger.warning(
                f"{key} is the stock Trainer's mean over batches, not weighted by tokens: this loss is not computed "
                "by model.loss_function."
            )
        return output

    def _use_eval_sums(self, sums: dict[str, float]) -> None:
        """Use the sums over all target tokens of an evaluation, in a subclass that reports more than the loss."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as the Trainer does; to the training loss add what `mean_losses` returns (not under nn.DataParallel).

        Every rank calls this for the losses of training (with a start_time) and at its end; a call of a user's own on
        one rank alone issues no collective.
        """
        if is_training_log(self, logs, start_time):
            sums = self._world_sums()
            if "train_loss" not in logs:
                logs.update(mean_losses(sums))
            self._warn_unprotected(sums["unprotected"], sums["documents"])
        super().log(logs, start_time)

    def _mask_batch(self, micro_batch: int, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of the batch with goldfish labels, and the labels as they were under `UNMASKED_LABELS`."""
        input_ids, labels = ids_and_labels(batch)
        shifted = batch.get("shift_labels")
        unmasked = labels if shifted is None else shifted
        targets = ((labels[:, 1:] if shifted is None else shifted) != IGNORE_INDEX).sum()
        if not self.args.goldfish:
            self.count_labels({"strategy": "none"}, targets, torch.zeros_like(targets))
            return {**batch, UNMASKED_LABELS: unmasked}
        args, document_ids = self.args, None
        if not args.goldfish_as_reference:
            document_ids = find_document_ids(input_ids, **document_fields(batch))
        mask = make_mask(
            args,
            input_ids,
            labels,
            document_ids,
            table=self._table,
            step=self.state.global_step,
            sample_ids=self._sample_ids(micro_batch, len(input_ids)),
        )
        self.count_labels(loss_settings(args), targets, mask.sum())
        if args.goldfish_strategy in HASHES:
            counts = torch.stack(count_unprotected(labels, document_ids, context_width=args.goldfish_context_width))
            self._documents = counts if self._documents is None else self._documents + counts
        return {**drop_labels(batch, mask), UNMASKED_LABELS: unmasked}

    def _separate_documents(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with documents that do not see each other; over a grid the forward pass separates them."""
        if parallel_state(self.model) is not None:
            return inputs
        return separate_documents(self.accelerator.unwrap_model(self.model, keep_torch_compile=False), inputs)

    def _sample_ids(self, micro_batch: int, rows: int) -> Tensor:
        """Return [rows] places of samples in the step over all ranks, on the CPU; the same however it is cut."""
        axonn = parallel_state(self.model)
        if axonn is None:
            rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        else:
            rank, ranks = axonn.grid_mesh.index("data", "rows"), axonn.grid.dp_size
        first = (micro_batch * ranks + rank) * max(self.args.train_batch_size, rows)
        return torch.arange(first, first + rows)

    def _world_sums(self) -> dict[str, float]:
        """Sum the record and the counts of documents over ranks with different samples, and reset the record."""
        sums = self._token_loss().record.pop()
        unprotected, documents = (0, 0) if self._documents is None else self._documents.tolist()
        sums |= {"unprotected": unprotected, "documents": documents}
        return dict(zip(sums, self.over_ranks(list(sums.values())), strict=True))

    def _warn_unprotected(self, unprotected: float, documents: float) -> None:
        if unprotected and not self._warned_unprotected:
            self._warned_unprotected = True
            if self.is_world_process_zero():
                width = self.args.goldfish_context_width
                logger.warning(
                    f"{unprotected:.0f} of the {documents:.0f} documents trained on up to step "
                    f"{self.state.global_step} are not protected: with goldfish_context_width={width} no label of a "
                    f"document shorter than {width + 1} tokens is dropped. Take longer documents, or lower the width."
                )

    def _refuse_what_bypasses_the_loss(self) -> None:
        parallelism = getattr(self.accelerator, "parallelism_config", None)
        refused = {
            "compute_loss_func": self.compute_loss_func is not None,
            "label_smoothing_factor": self.args.label_smoothing_factor != 0,
            "context parallelism": (getattr(parallelism, "cp_size", None) or 1) > 1,
            "sequence parallelism": (getattr(parallelism, "sp_size", None) or 1) > 1,
        }
        for name, requested in refused.items():
            if requested:
                raise ValueError(
                    f"{name} does not go together with the goldfish loss, which needs every token's loss from "
                    f"model.loss_function: leave {name} out, or train with goldfish=False."
                )
        if self.args.use_liger_kernel:
            self.args.liger_kernel_config = without_losses(self.args.liger_kernel_config, "the goldfish loss")

    def _base_model(self) -> nn.Module:
        """Return the model without DDP, torch.compile or PEFT around it."""
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        base: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
        return base

    def _token_loss(self) -> CausalLMLoss:
        """Return the model's loss, installed if it is missing: `model_init` makes a new model in each `train`."""
        return install_causal_lm_loss(self._base_model())


class GoldfishTrainer(GoldfishMixin, Trainer):
    """`Trainer` with the goldfish loss; takes a `GoldfishConfig` as args and is otherwise used like it.

    With a tokenizer as `processing_class`, and no `data_collator`, labels are padded with the rest of a row: the
    collator that Trainer takes pads everything but them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if type(self.data_collator) is DataCollatorWithPadding:
            self.data_collator = DataCollatorForSeq2Seq(self.data_collator.tokenizer)


# Also without a launch file: a sharded checkpoint resumes on one process, too.
trainer_hooks.install(Trainer)
