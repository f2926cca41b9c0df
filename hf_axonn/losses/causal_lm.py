"""The causal-LM loss, made from per-token losses.

Transformers hands a model's logits and labels to `model.loss_function` and takes back one number. The goldfish loss
needs more: what the kept, the dropped and all tokens cost, and in evaluation what each sample costs. `CausalLMLoss`
takes the place of Transformers' own function, returns the same number and can be asked for these.

Two methods do the work and are what a subclass for sharded logits replaces:

    weighted_nll(logits, targets, weights) -> sum over kept tokens (or weighted sum), nll of every token
    normalize(sum, kept_count, num_items_in_batch) -> the loss

Who computes a loss of their own from log-probabilities (TRL: trainer/trl.py) asks for logits and labels instead
(`hand_over`), and tells the object what the tokens cost (`note`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_axonn.compat.transformers import has_causal_lm_loss


IGNORE_INDEX = -100  # a label that does not count, as in torch and Transformers


class LossRecord:
    """Sums of per-token losses since the last `pop`: of all labels, and of those that goldfish kept.

    They stay on the device until they are asked for, so that training does not wait for them.
    """

    NAMES = ("all_sum", "all_count", "kept_sum", "kept_count")

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def add(self, nll: Tensor, *, targets: Tensor, weights: Tensor) -> None:
        """Add the tokens of one forward pass.

        Args:
            nll: [T] negative log-likelihoods in nats, 0 where ignored.
            targets: [T], IGNORE_INDEX where ignored.
            weights: [T], not 0 for a kept token; how much it counts is not recorded.
        """
        wide = widest_float(nll.device)
        nll, kept = nll.detach().to(wide), (weights != 0).to(nll.device, wide)
        counted = (targets.to(nll.device) != IGNORE_INDEX).to(wide)
        sums = torch.stack([nll.sum(), counted.sum(), (nll * kept).sum(), (counted * kept).sum()])
        self._sums = sums if self._sums is None else self._sums + sums

    def pop(self) -> dict[str, float]:
        """Return the sums by `NAMES` and start again from zero. Waits for the device."""
        values = [0.0] * len(self.NAMES) if self._sums is None else self._sums.tolist()
        self._sums = None
        return dict(zip(self.NAMES, values, strict=True))


def mean_losses(sums: dict[str, float]) -> dict[str, float]:
    """Turn a record's sums into what is logged, in nats a token.

    Args:
        sums: by `LossRecord.NAMES`, of one rank or added up over several.
    Returns:
        `loss_all`, `loss_kept`, `loss_dropped` and `goldfish_dropped_fraction`; the mean of nothing is omitted.
    """
    all_sum, all_count, kept_sum, kept_count = (sums[name] for name in LossRecord.NAMES)
    if not all_count:
        return {}
    metrics = {"loss_all": all_sum / all_count}
    if kept_count:
        metrics["loss_kept"] = kept_sum / kept_count
    if all_count > kept_count:
        metrics["loss_dropped"] = (all_sum - kept_sum) / (all_count - kept_count)
    return metrics | {"goldfish_dropped_fraction": 1 - kept_count / all_count}


def widest_float(device: torch.device) -> torch.dtype:
    """The dtype to add long sums in: float64, which mps does not have."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True)
class Targets:
    """The targets of the tokens of a batch.

    Args:
        tokens: [B * S] int64, IGNORE_INDEX where ignored, goldfish's dropped ones not.
        weights: [B * S] bool, True for a kept token; or floats, how much each token counts, 0 where ignored.
        kept_count: 0-d, how many tokens are kept, whatever their weights.
        rows: B.
        recorded: whether they are those of a training run whose losses are recorded.
    """

    tokens: Tensor
    weights: Tensor
    kept_count: Tensor
    rows: int
    recorded: bool


class CausalLMLoss:
    """Next-token cross-entropy; called as Transformers calls `ForCausalLMLoss` and equal to it.

    One difference: where no token is left (all labels -100, or all dropped) the loss is 0 with zero gradients, and
    not 0/0, which would end a training run.
    """

    def __init__(self) -> None:
        self.record = LossRecord()
        self.calls = 0
        self._unmasked: Tensor | None = None
        self._weights: Tensor | None = None
        self._captured: list[Tensor] | None = None
        self._sample_lengths: Tensor | None = None
        self._handed: list[Any] | None = None
        self._read: Callable[[Tensor], Any] | None = None
        self._alone = False

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: Tensor | None = None,
        *,
        unmasked_labels: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Compute the loss of a batch.

        Args:
            logits: [B, S, V]; any float type, the loss is computed in at least float32.
            labels: [B, S] not shifted, -100 where ignored. Not read if shift_labels are given.
            vocab_size: taken for the sake of the signature; V is read off the logits.
            num_items_in_batch: kept tokens in the whole optimizer step, over ranks and micro-batches; the loss is then
                sum / num_items_in_batch. None: the mean over this batch's kept tokens.
            ignore_index: the label that is ignored.
            shift_labels: [B, S], already shifted: shift_labels[t] is what logits[t] predict.
            unmasked_labels: [B, S] the labels before goldfish dropped some, shifted if and only if shift_labels are
                given. With them and with gradients on, `record` is added to.
            kwargs: whatever else the model was called with; not read, as in Transformers.
        Returns:
            0-d loss in nats a token.
        """
        if self._handed is not None:
            self._handed.append(logits if self._read is None else self._read(logits))
            return torch.zeros((), device=logits.device)
        targets = self.targets(labels, shift_labels, unmasked_labels=unmasked_labels, ignore_index=ignore_index)
        weighted_sum, nll = self.weighted_nll(logits, targets.tokens, targets.weights)
        self.note(nll, targets)
        return self.normalize(weighted_sum, targets.kept_count, num_items_in_batch)

    def targets(
        self,
        labels: Tensor | None,
        shift_labels: Tensor | None = None,
        *,
        unmasked_labels: Tensor | None = None,
        ignore_index: int = IGNORE_INDEX,
    ) -> Targets:
        """Return what a batch is to predict; arguments as for a call.

        Raises:
            ValueError: unmasked labels of another shape.
        """
        unmasked = self._unmasked if unmasked_labels is None else unmasked_labels
        shifted = shift_labels is not None
        kept = _targets(shift_labels if shifted else labels, ignore_index, shifted=shifted)
        targets = kept if unmasked is None else _targets(unmasked, ignore_index, shifted=shifted)
        if targets.shape != kept.shape:
            raise ValueError(
                f"unmasked_labels have shape {tuple(targets.shape)} but labels {tuple(kept.shape)}: "
                "they must be the same."
            )
        weights = is_kept = kept.reshape(-1) != IGNORE_INDEX
        if self._weights is not None:
            given = self._weights if shifted else F.pad(self._weights, (0, 1))[:, 1:]
            weights = torch.where(is_kept, given.reshape(-1), 0)
        return Targets(targets.reshape(-1), weights, is_kept.sum(), len(kept), unmasked is not None)

    def note(self, nll: Tensor, targets: Targets, *more: Tensor) -> None:
        """Take note of what the tokens of a batch cost: once for each forward pass with labels.

        Args:
            nll: [B * S] in nats, 0 where ignored.
            targets: of this batch.
            more: [B * S] other numbers of each token, which `capture` adds up over kept tokens.
        """
        self.calls += 1
        if targets.recorded and torch.is_grad_enabled():
            self.record.add(nll, targets=targets.tokens, weights=targets.weights)
        if self._captured is None:
            return
        counts = (targets.weights != 0).to(nll.device, nll.dtype)
        columns = torch.stack(
            [nll.detach() * counts, counts, *(other.detach().to(nll) * counts for other in more)], dim=1
        )
        if self._sample_lengths is None:
            self._captured.append(columns.view(targets.rows, -1, columns.shape[1]).sum(dim=1))
            return
        lengths = self._sample_lengths.to(nll.device)
        sample = torch.arange(len(lengths), device=nll.device).repeat_interleave(lengths)
        sums = columns.new_zeros(len(lengths), columns.shape[1])
        self._captured.append(sums.index_add_(0, sample, columns[: len(sample)]))

    def weighted_nll(self, logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Sum the losses of the kept tokens, or of all by their weights, and say what every token costs.

        No communication.

        Args:
            logits: [B, S, V] or [T, V].
            targets: [T] int64, IGNORE_INDEX where ignored.
            weights: [T] as in `Targets`: bool, or floats, which have no gradient.
        Returns:
            (0-d weighted sum, differentiable; [T] nll without gradient and without weights, 0 where ignored).
        """
        logits = logits.reshape(-1, logits.shape[-1])
        targets, weights = targets.to(logits.device), weights.to(logits.device)
        # One softmax serves both, and the two halves of F.cross_entropy apart round exactly as the whole does.
        log_probs = F.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
        if weights.dtype == torch.bool:
            kept = targets.masked_fill(~weights, IGNORE_INDEX)
            weighted_sum = F.nll_loss(log_probs, kept, ignore_index=IGNORE_INDEX, reduction="sum")
            return weighted_sum, F.nll_loss(log_probs.detach(), targets, ignore_index=IGNORE_INDEX, reduction="none")
        nll = F.nll_loss(log_probs, targets, ignore_index=IGNORE_INDEX, reduction="none")
        return (nll * weights.to(nll.dtype)).sum(), nll.detach()

    def normalize(self, weighted_sum: Tensor, kept_count: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        """Divide a sum over kept tokens by how many there are: in the whole step if that is known, else in this batch.

        Args:
            weighted_sum: 0-d.
            kept_count: 0-d, kept tokens of this call.
            num_items_in_batch: kept tokens of the optimizer step, or None.
        """
        count = kept_count if num_items_in_batch is None else num_items_in_batch
        if not isinstance(count, Tensor):  # which the device would have to be given
            return weighted_sum / max(count, 1)
        return weighted_sum / count.to(weighted_sum.device).clamp(min=1)

    @contextmanager
    def watch(self, unmasked_labels: Tensor | None, weights: Tensor | None = None) -> Iterator[None]:
        """Use these as `unmasked_labels` for the calls inside: they need not pass through the model's forward.

        Args:
            unmasked_labels: [B, S].
            weights: [B, S] how much each label counts, shifted as the labels are. None: each that is kept counts 1.
        """
        self._unmasked, self._weights = unmasked_labels, weights
        try:
            yield
        finally:
            self._unmasked = self._weights = None

    @contextmanager
    def watch_rows(self, start: int, stop: int) -> Iterator[None]:
        """Within `watch`, calls inside are given these rows of the batch; rows beyond its last one count nothing."""
        whole = self._unmasked, self._weights

        def part(value: Tensor | None, fill: int) -> Tensor | None:
            if value is None:
                return None
            rows = value[start:stop]
            return torch.cat([rows, rows.new_full((stop - start - len(rows), *rows.shape[1:]), fill)])

        self._unmasked, self._weights = part(whole[0], IGNORE_INDEX), part(whole[1], 0)
        try:
            yield
        finally:
            self._unmasked, self._weights = whole

    @contextmanager
    def capture(self, sample_lengths: Tensor | None = None) -> Iterator[list[Tensor]]:
        """Collect [samples, 2] (sum of nll, number of kept tokens) of each sample, one tensor for each call inside.

        One row of a batch is one sample, unless `sample_lengths` [samples] says how many tokens of a single row each
        has. Columns for `more` numbers follow, where the caller of `note` has some.
        """
        self._captured = captured = []
        self._sample_lengths = sample_lengths
        try:
            yield captured
        finally:
            self._captured = self._sample_lengths = None

    @contextmanager
    def hand_over(self, read: Callable[[Tensor], Any] | None = None) -> Iterator[list[Any]]:
        """Let calls inside compute nothing: the logits of each are put into the list, and the loss is 0.

        Args:
            read: makes of logits what is put into the list instead, while the forward pass is under way.
        """
        handed: list[Any] = []
        self._handed, self._read = handed, read
        try:
            yield handed
        finally:
            self._handed = self._read = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Leave logits to the loss alone inside: over a grid they are not gathered, in evaluation either."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    @property
    def takes_logits(self) -> bool:
        """True if the logits of the pass under way are for the loss alone, or for the caller of `hand_over`."""
        return self._alone or self._handed is not None


def install_causal_lm_loss(model: nn.Module) -> CausalLMLoss:
    """Make `model.loss_function` a `CausalLMLoss`, unless it is one already, and return it.

    Args:
        model: a Transformers causal LM, without wrappers.
    Raises:
        ValueError: the model has another kind of loss, which this one must not replace.
    """
    current = getattr(model, "loss_function", None)
    if isinstance(current, CausalLMLoss):
        return current
    encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if encoder_decoder or not has_causal_lm_loss(model):
        raise ValueError(
            f"{type(model).__name__} does not take Transformers' loss of causal language models (its loss_function is "
            f"{getattr(current, '__name__', current)!r}). The goldfish loss is for decoder-only models, such as "
            "AutoModelForCausalLM loads, with their own loss function."
        )
    model.loss_function = loss = CausalLMLoss()
    return loss


def kept_labels(labels: Tensor, *, shifted: bool) -> Tensor:
    """Return the number of labels that count, on their device."""
    return (_targets(labels, IGNORE_INDEX, shifted=shifted) != IGNORE_INDEX).sum()


def _targets(labels: Tensor, ignore_index: int, *, shifted: bool) -> Tensor:
    """Return what each position predicts: [B, S] int64, IGNORE_INDEX where ignored and in the last column of a row."""
    targets = labels.long() if shifted else F.pad(labels.long(), (0, 1), value=ignore_index)[..., 1:]
    return targets if ignore_index == IGNORE_INDEX else targets.masked_fill(targets == ignore_index, IGNORE_INDEX)
