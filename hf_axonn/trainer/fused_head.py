"""What each label of a batch gets from a model, without its logits: the contract of TRL's fused head.

    log_probs     log-probability of the label, differentiable
    entropy       entropy of the distribution that the label is drawn from, differentiable
    is_top1       whether the label is the first of the most likely tokens

A parallelized model runs as it does for its own loss, up to the head; losses/label_statistics.py does the rest,
without forming or gathering anything whole. A plain model keeps TRL's own head, which is asked here for more labels.

Source: trl 1.16, trainer/utils.py (FusedCausalLMOutput).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_axonn.losses.causal_lm import CausalLMLoss, Targets
from hf_axonn.losses.label_statistics import label_statistics
from hf_axonn.losses.vocab_parallel import ShardedCausalLMLoss


@dataclass(frozen=True)
class LabelStatistics:
    """Of each label, in the shape of the labels it was asked for; zero where a label is ignored.

    Args:
        log_probs: nats, at least float32.
        entropy: nats.
        is_top1: bool; of equally likely tokens the first counts, as with argmax.
        mask: bool, whether there is a label.
        aux_loss: 0-d, of a mixture of experts that was asked for it.
    """

    log_probs: Tensor
    entropy: Tensor
    is_top1: Tensor
    mask: Tensor
    aux_loss: Tensor | None = None


def sharded_label_statistics(
    model: nn.Module, forward: Callable[..., Any], labels: Tensor | None, shift_labels: Tensor | None, **inputs: Any
) -> LabelStatistics:
    """Statistics of a parallelized model, whose own forward pass runs up to the head.

    Args:
        model: its `loss_function` is a `ShardedCausalLMLoss`.
        forward: the model's forward.
        labels: [B, S], -100 where ignored; or
        shift_labels: [B, S], shifted already.
        inputs: whatever else the model takes.
    Returns:
        [B, S-1] of what labels[:, 1:] are, or [B, S] of shift_labels; the same on all ranks of (x, y).
    Raises:
        ValueError: the model did not call its loss function, or called it more than once.
    Collectives: those of the forward pass and of `label_statistics`.
    """
    loss: ShardedCausalLMLoss = model.loss_function
    with loss.hand_over() as handed:
        output = forward(labels=shift_labels if labels is None else labels, **inputs)
    if len(handed) != 1:
        raise ValueError(
            f"{type(model).__name__} computed its loss {len(handed)} times in a forward pass, not once: TRL cannot "
            "train it over a grid."
        )
    targets = loss.targets(labels, shift_labels)
    found = label_statistics(handed[0], targets.tokens)
    return _noted(loss, targets, found, output.get("aux_loss"), shifted=shift_labels is not None)


def plain_label_statistics(
    loss: CausalLMLoss,
    fused: Callable[[dict[str, Tensor]], Any],
    labels: Tensor | None,
    shift_labels: Tensor | None,
) -> LabelStatistics:
    """Statistics of a plain model from its own fused head, which is also asked for the labels that goldfish dropped.

    Args:
        loss: the model's, which knows the labels as they were before goldfish.
        fused: takes labels or shift_labels and returns something with log_probs, entropy and is_top1.
        labels, shift_labels: as `sharded_label_statistics`.
    Returns:
        As `sharded_label_statistics`. No communication.
    """
    targets = loss.targets(labels, shift_labels)
    shifted = shift_labels is not None
    tokens = targets.tokens.view(targets.rows, -1)
    # A head that shifts labels reads no first one; what it shifts is `tokens` again.
    output = fused({"shift_labels": tokens} if shifted else {"labels": F.pad(tokens[:, :-1], (1, 0))})
    found = (getattr(output, name) for name in ("log_probs", "entropy", "is_top1"))
    found = tuple((value if shifted else F.pad(value, (0, 1))).reshape(-1) for value in found)
    return _noted(loss, targets, found, output.aux_loss, shifted=shifted)


def _noted(
    loss: CausalLMLoss, targets: Targets, found: tuple[Tensor, ...], aux_loss: Tensor | None, *, shifted: bool
) -> LabelStatistics:
    """Tell the loss what tokens [B * S] cost, and put those of kept labels into rows."""
    log_probs, entropy, is_top1 = found
    loss.note(-log_probs.detach(), targets, entropy, is_top1)
    mask = targets.weights.bool().to(log_probs.device)
    kept = (torch.where(mask, log_probs, 0), torch.where(mask, entropy, 0), is_top1 & mask, mask)
    # Unless labels are shifted already, the last of a row predicts nothing. Contiguous, so that sums round as TRL's.
    end = None if shifted else -1
    return LabelStatistics(*(its.view(targets.rows, -1)[:, :end].contiguous() for its in kept), aux_loss)
