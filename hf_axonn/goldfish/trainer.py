"""`GoldfishTrainer`: Transformers' Trainer with a loss against verbatim copies: goldfish, which leaves out one label
in k, or another strategy (strategy.py).

    trainer = GoldfishTrainer(model=model, args=GoldfishConfig(output_dir="out", goldfish_k=4), train_dataset=...)

The way of a training batch: its labels are masked, or get weights, where it is born (`get_batch_samples`), before the
Trainer counts the tokens it will divide by, so that the mean is over kept tokens for any gradient accumulation and
number of ranks. The labels as they were, and the weights, travel beside it and are put into the model's `CausalLMLoss`
for the one call (`compute_loss`); they never pass through the model's forward, which a wrapper or a strict signature
could stop. The loss object sums what kept, dropped and all tokens cost; `log` adds the sums over ranks.

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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding, Trainer
from transformers.trainer_utils import EvalLoopOutput

from hf_axonn.accelerator.prepare import shard_plain_model
from hf_axonn.compat.messages import get_logger
from hf_axonn.compat.peft import trained_beside_adapters
from hf_axonn.compat.versions import check_versions
from hf_axonn.engine.documents import document_fields, find_document_ids, separate_documents
from hf_axonn.engine.state import parallel_state
from hf_axonn.goldfish.collator import GoldfishCollator, drop_labels, ids_and_labels
from hf_axonn.goldfish.config import GoldfishConfig
from hf_axonn.goldfish.goldfish_strategy import idle_options, make_strategy
from hf_axonn.goldfish.record import describe_loss
from hf_axonn.goldfish.recording import RecordingMixin
from hf_axonn.goldfish.statistics import token_statistics
from hf_axonn.goldfish.strategy import LossStrategy, Source, TokenStatistics, TrainingBatch, check_strategy, weigh
from hf_axonn.losses.causal_lm import IGNORE_INDEX, CausalLMLoss, install_causal_lm_loss, mean_losses, widest_float
from hf_axonn.trainer import hooks as trainer_hooks
from hf_axonn.trainer.accumulation import from_last_stage
from hf_axonn.trainer.liger import without_losses
from hf_axonn.trainer.watching import is_training_log


logger = get_logger(__name__)

UNMASKED_LABELS = "unmasked_labels"  # the private key: labels before goldfish, aligned with what the loss reads
SAMPLE_LENGTHS = "sample_lengths"  # the private key of a collator that puts all samples into one row: their tokens
LOSS_WEIGHTS = "loss_weights"  # the private key: how much each label counts, aligned with what the loss reads
PRIVATE_KEYS = (UNMASKED_LABELS, SAMPLE_LENGTHS, LOSS_WEIGHTS)
EVAL_SUMS = ("nll", "tokens", "entropy", "top1")  # over target tokens; the last two where the trainer knows them


class GoldfishMixin(RecordingMixin):
    """The goldfish loss and the token-weighted evaluation loss for `Trainer` or a subclass, mixed in before it.

    Its `args` must be a `GoldfishConfig`. Collectives beyond the stock Trainer's, all over the whole world: one sum at
    each training log, at each checkpoint and at the end of training, in evaluation one gather for every batch, and one
    a step for a strategy whose denominator is the sum of its weights.

    Args:
        loss_strategy: in place of the one that `args` names; it is not for goldfish=False.
        frozen_model: what a strategy with the source "frozen" reads; another object than the model that is trained.
            On a grid it is parallelized like it. None with PEFT's adapters: the trained model with its adapters off.
        args, kwargs: as the Trainer's.
    Raises:
        ValueError: a library has a release that is not proven (`check_versions`), args of another class, a model
            without the causal language model's loss, an option that does not go together with the goldfish loss
            (named in the message), a strategy that `check_strategy` refuses, or a frozen model where none is read, or
            none where one is.
    """

    args: GoldfishConfig

    def __init__(
        self,
        *args: Any,
        loss_strategy: LossStrategy | None = None,
        frozen_model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
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
        self._unfit: Tensor | None = None  # weights that no label may have, counted on this rank since the last sum
        if loss_strategy is not None and (not self.args.goldfish or self.args.loss_strategy != "goldfish"):
            named = "goldfish=False" if not self.args.goldfish else f"loss_strategy={self.args.loss_strategy}"
            raise ValueError(
                f"{type(loss_strategy).__name__} is given as loss_strategy, but args say {named}: omit one."
            )
        self._strategy_given = loss_strategy is not None
        self.loss_strategy = make_strategy(self.args, self.args.device) if loss_strategy is None else loss_strategy
        check_strategy(self.loss_strategy)
        if (idle := idle_options(self.args, self.loss_strategy)) and self.is_world_process_zero():
            loss = describe_loss(self.loss_strategy.settings())
            logger.warning(f"training with the {loss}: {', '.join(idle)} has no effect; leave it out.")
        self._frozen = self._freeze(frozen_model)
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
        if self.model is not None:  # between trials of a search for hyperparameters there is none
            self._token_loss().record.pop()
        self._documents = self._unfit = None
        ordinary = type(self.loss_strategy) is LossStrategy
        if not self._strategy_given and self.args.goldfish == ordinary:
            # args were changed after the trainer was made
            self.loss_strategy = make_strategy(self.args, self.args.device)
        self.loss_strategy.prepare(self.train_dataset)
        return super().train(*args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor | int | None]:
        """Mask and weigh the micro-batches of an optimizer step, then let the Trainer count their kept tokens."""
        masked = map(self._mask_batch, itertools.count(), epoch_iterator)
        batches, items = super().get_batch_samples(masked, num_batches, device)
        if self.loss_strategy.denominator == "weights" and batches:
            self._scale_weights(batches)
        return batches, items

    def _scale_weights(self, batches: list[dict[str, Any]]) -> None:
        """Scale the weights of a step's batches to a mean of 1, so that the sum of weights is the count of labels."""
        device, wide = self.args.device, widest_float(self.args.device)
        sums = torch.zeros(2, dtype=wide, device=device)
        for batch in batches:
            shifted = batch.get("shift_labels")
            labels, weights = (
                (batch["labels"][:, 1:], batch[LOSS_WEIGHTS][:, 1:])
                if shifted is None
                else (shifted, batch[LOSS_WEIGHTS])
            )
            kept = labels != IGNORE_INDEX
            sums += torch.stack([kept.sum(), torch.where(kept, weights, 0).sum()]).to(device, wide)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            sums = self.accelerator.gather(sums[None]).sum(dim=0)
        count, total = sums
        scale = torch.where(total > 0, count / total, 1)
        for batch in batches:
            batch[LOSS_WEIGHTS] *= scale.to(batch[LOSS_WEIGHTS].device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """Compute the loss as the Trainer does, with the unmasked labels handed to the loss function alone."""
        unmasked, weights = inputs.get(UNMASKED_LABELS), inputs.get(LOSS_WEIGHTS)
        inputs = {name: value for name, value in inputs.items() if name not in PRIVATE_KEYS}
        inputs = self._separate_documents(inputs)
        loss = self._token_loss()
        calls = loss.calls
        # nn.DataParallel cuts the batch in the model's forward, where the loss's own labels would not be cut with it.
        with loss.watch(unmasked if self.args.n_gpu <= 1 else None, weights):
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

        Raises:
            ValueError: on every rank, a kept label had a weight that is not finite, or below 0 where weights are the
                denominator. It is raised here, as a step does not wait for the device.
        """
        if is_training_log(self, logs, start_time):
            sums = self._world_sums()
            if self._unfit is not None:
                self._refuse_unfit(sums["unfit"])
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
        seen = TrainingBatch(
            input_ids,
            labels,
            find_document_ids(input_ids, **document_fields(batch)),
            self._sample_ids(micro_batch, len(input_ids)),
            step=self.state.global_step,
            progress=self.state.global_step / max(self.state.max_steps, 1),
        )
        dropped, weights = weigh(self.loss_strategy, seen, lambda source: self._statistics(source, batch))
        self.count_labels(self.loss_strategy.settings(), targets, dropped[:, 1:].sum())
        if (documents := self.loss_strategy.count_unprotected(seen)) is not None:
            counts = torch.stack(documents)
            self._documents = counts if self._documents is None else self._documents + counts
        masked = {**drop_labels(batch, dropped), UNMASKED_LABELS: unmasked}
        if self.loss_strategy.denominator == "weights" and weights is None:
            weights = torch.ones_like(labels, dtype=widest_float(labels.device))
        if weights is not None:
            self._check_weights()
            # Alike on every grid, they would not be if they were rounded.
            weights = weights.detach().to(labels.device, widest_float(labels.device))
            fit = weights.isfinite()
            if self.loss_strategy.denominator == "weights":
                fit &= weights >= 0
            unfit = (seen.targets & ~dropped & ~fit).sum()
            self._unfit = unfit if self._unfit is None else self._unfit + unfit
            masked[LOSS_WEIGHTS] = weights if shifted is None else F.pad(weights[:, 1:], (0, 1))
        return masked

    def _check_weights(self) -> None:
        """Refuse weights where the loss has none. Subclasses that compute the loss by themselves raise here."""
        if self.args.n_gpu > 1:
            raise ValueError(
                f"{type(self.loss_strategy).__name__} gives labels weights, which nn.DataParallel does not divide "
                f"among {self.args.n_gpu} GPUs of one process: start a process for each (accelerate launch)."
            )

    def _statistics(self, source: Source, batch: dict[str, Any]) -> TokenStatistics:
        """Return what a source says of the labels of a batch."""
        frozen = self._frozen if source == "frozen" else None
        model: Any = self.model if frozen is None else frozen
        before_training = model.disable_adapter() if source == "frozen" and frozen is None else nullcontext()
        inputs = {name: value for name, value in batch.items() if name not in (*PRIVATE_KEYS, "shift_labels")}
        inputs = self._prepare_inputs(self._separate_documents(inputs))
        with before_training, self.accelerator.autocast():
            found = token_statistics(model, install_causal_lm_loss(_without_wrappers(self.accelerator, model)), inputs)
        device = batch["labels"].device
        return TokenStatistics(found.log_probs.to(device), found.entropy.to(device))

    def _freeze(self, model: nn.Module | None) -> nn.Module | None:
        """Make the frozen model of a strategy ready; return None where that is the trained one, its adapters off.

        Raises:
            ValueError: there is none and the strategy reads one, or the other way round, or it is the trained one.
        """
        name, reads = type(self.loss_strategy).__name__, "frozen" in self.loss_strategy.sources
        if model is None and reads and hasattr(self.model, "disable_adapter"):
            if trained := trained_beside_adapters(self.model):
                raise ValueError(
                    f"{name} reads a frozen model, and with its adapters off this one still uses what is trained "
                    f"beside them ({trained[0]}; {len(trained)} in all): pass frozen_model=... ."
                )
            return None
        if (model is not None) != reads:
            what = "reads a frozen model, but none is given" if reads else "reads no frozen model, but one is given"
            raise ValueError(f"{name} {what}: {'pass' if reads else 'omit'} frozen_model=... .")
        if model is None:
            return None
        if model is self.model:
            raise ValueError(f"the frozen_model of {name} is the model that is trained: load it a second time.")
        plugin = getattr(self.accelerator, "axonn_plugin", None)
        if plugin is not None and plugin.grid.size > 1:
            shard_plain_model(model, plugin, self.args.device)
        else:
            model.to(self.args.device)
        return model.requires_grad_(False)

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
        unfit = 0 if self._unfit is None else self._unfit.item()
        sums |= {"unprotected": unprotected, "documents": documents, "unfit": unfit}
        return dict(zip(sums, self.over_ranks(list(sums.values())), strict=True))

    def _refuse_unfit(self, unfit: float) -> None:
        if unfit:
            divides = self.loss_strategy.denominator == "weights"
            raise ValueError(
                f"{type(self.loss_strategy).__name__} has given {unfit:.0f} kept labels weights that are not finite"
                f"{' or below 0' if divides else ''}, up to step {self.state.global_step}: these steps are wrong. "
                f"Return finite numbers{' of at least 0, as it divides by their sum' if divides else ''}, or False "
                "for a label that is to be left out."
            )

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
        return _without_wrappers(self.accelerator, self.model)

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


def _without_wrappers(accelerator: Any, model: Any) -> nn.Module:
    model = accelerator.unwrap_model(model, keep_torch_compile=False)
    base: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base


# Also without a launch file: a sharded checkpoint resumes on one process, too.
trainer_hooks.install(Trainer)
