"""The interface of losses against memorization: which labels count in training, and how much.

    weigh_ids(batch)                   from the tokens alone, before any forward pass
    weigh_outputs(batch, outputs)      from what a model says of the labels: this one as it is now, or a frozen one

Each returns [B, S] bool, False for a label that is left out, or floats, the weight of each label. With w of both a
step's loss, over all its micro-batches and ranks, is

    sum of w * nll / number of kept labels        denominator "kept"
    sum of w * nll / sum of w of kept labels      denominator "weights"

What a model says is computed before the step, by a forward pass without gradients and without dropout. So weights are
data of a batch like its labels: how a step is cut into micro-batches, ranks and stages does not change them, and the
denominator is known before the first backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hf_axonn.losses.causal_lm import IGNORE_INDEX


Source = Literal["model", "frozen"]
Denominator = Literal["kept", "weights"]
SOURCES: tuple[Source, ...] = get_args(Source)
DENOMINATORS: tuple[Denominator, ...] = get_args(Denominator)


@dataclass(frozen=True)
class TrainingBatch:
    """A micro-batch as a strategy sees it, on the device of its input_ids.

    Args:
        input_ids: [B, S] integers.
        labels: [B, S] not shifted: label t sits where token t does. -100 where nothing is learnt.
        document_ids: [B, S], a new document starts where the number changes; None: each row is one document.
        sample_ids: [B] on the CPU, places of the rows in the step over all ranks.
        step: optimizer steps before this one.
        progress: from 0 at the first step to 1 at the end of training.
    """

    input_ids: Tensor
    labels: Tensor
    document_ids: Tensor | None
    sample_ids: Tensor
    step: int
    progress: float

    @property
    def targets(self) -> Tensor:
        """Return [B, S] bool, True for a label that is predicted: not ignored, and not the first of its row."""
        targets = self.labels != IGNORE_INDEX
        targets[:, :1] = False
        return targets


@dataclass(frozen=True)
class TokenStatistics:
    """Statistics of each label that a model gives, at the place of the label; 0 where none is predicted.

    Args:
        log_probs: [B, S] of the label, in nats.
        entropy: [B, S] of the distribution that predicts it, in nats.
    """

    log_probs: Tensor
    entropy: Tensor


class LossStrategy:
    """The ordinary loss, and the base of all others: `GoldfishTrainer(..., loss_strategy=...)` takes one.

    Attributes:
        denominator: what a step's weighted sum is divided by: the number of kept labels, or the sum of their weights,
            which then are at least 0 (a training log raises ValueError where they were not).
        sources: models whose outputs `weigh_outputs` reads: "model", the one that is trained, as it is before the
            step; "frozen", the `frozen_model` of the trainer. Each costs a forward pass.
    """

    denominator: Denominator = "kept"
    sources: tuple[Source, ...] = ()

    def prepare(self, train_dataset: Any) -> None:
        """Look at the training rows before training. On every rank, of all rows; no communication is expected."""

    def weigh_ids(self, batch: TrainingBatch) -> Tensor | None:
        """Return [B, S] bool or floats from the tokens of a batch; None: all labels count alike."""
        return None

    def weigh_outputs(self, batch: TrainingBatch, outputs: Mapping[str, TokenStatistics]) -> Tensor | None:
        """Return [B, S] bool or floats from what the `sources` say, by their names; None: all labels count alike."""
        return None

    def count_unprotected(self, batch: TrainingBatch) -> tuple[Tensor, Tensor] | None:
        """Return how many documents the strategy leaves whole and how many there are, 0-d; None: it does not say."""
        return None

    def settings(self) -> dict[str, Any]:
        """Return what the training record says of the loss; `strategy` is its name, the rest its settings."""
        return {"strategy": "none" if type(self) is LossStrategy else type(self).__name__}


def check_strategy(strategy: LossStrategy) -> None:
    """Check what a strategy declares of itself: a name that nobody knows would be another loss in silence.

    Raises:
        ValueError: no object of a subclass of LossStrategy, an unknown source or denominator, or sources without
            `weigh_outputs`, or the other way round.
    """
    if not isinstance(strategy, LossStrategy):
        raise ValueError(f"loss_strategy is {strategy!r}: pass an object of a subclass of LossStrategy.")
    name, sources = type(strategy).__name__, strategy.sources
    if isinstance(sources, str) or not set(SOURCES).issuperset(sources):
        some = ", ".join(SOURCES)
        raise ValueError(f'the sources of {name} are {sources!r}: write a tuple of some of {some}, as ("model",).')
    if strategy.denominator not in DENOMINATORS:
        among = ", ".join(DENOMINATORS)
        raise ValueError(f"the denominator of {name} is {strategy.denominator!r}: choose one of {among}.")
    reads = type(strategy).weigh_outputs is not LossStrategy.weigh_outputs
    if reads and not sources:
        raise ValueError(
            f'{name} has weigh_outputs and no sources, so that it is never called: write sources = ("model",) for the '
            'model that is trained, or ("frozen",).'
        )
    if sources and not reads:
        raise ValueError(
            f"{name} has sources and no weigh_outputs: each costs a forward pass, and nothing reads it. Omit them."
        )


def weigh(
    strategy: LossStrategy, batch: TrainingBatch, statistics: Callable[[Source], TokenStatistics]
) -> tuple[Tensor, Tensor | None]:
    """Ask a strategy about a batch.

    Args:
        strategy: any; its two answers are combined.
        batch: what it is asked about.
        statistics: returns what a source says of the batch.
    Returns:
        ([B, S] bool, which labels are left out; [B, S] weights, None where every kept label counts 1).
    Raises:
        ValueError: an answer of another shape.
    Collectives: those of `statistics`.
    """
    answers = [strategy.weigh_ids(batch)]
    if strategy.sources:
        answers.append(strategy.weigh_outputs(batch, {source: statistics(source) for source in strategy.sources}))
    dropped = torch.zeros_like(batch.labels, dtype=torch.bool)
    weights: Tensor | None = None
    for answer in answers:
        if answer is None:
            continue
        if answer.shape != batch.labels.shape:
            raise ValueError(
                f"{type(strategy).__name__} returned weights of shape {tuple(answer.shape)} for labels of shape "
                f"{tuple(batch.labels.shape)}: return one for each label, not shifted."
            )
        if answer.dtype == torch.bool:
            dropped |= ~answer
        else:
            weights = answer if weights is None else weights * answer
    return dropped & (batch.labels != IGNORE_INDEX), weights
