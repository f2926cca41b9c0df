"""Statistics of the labels of a batch that a model gives, by a forward pass beside training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_axonn.goldfish.strategy import TokenStatistics
from hf_axonn.losses.causal_lm import CausalLMLoss
from hf_axonn.losses.label_statistics import label_statistics
from hf_axonn.trainer.accumulation import from_last_stage


def token_statistics(model: nn.Module, loss: CausalLMLoss, inputs: Mapping[str, Any]) -> TokenStatistics:
    """Return what a model says of the labels of a batch, without gradients and without dropout.

    Args:
        model: plain or parallelized; its modules are as they were afterwards.
        loss: the model's `loss_function`.
        inputs: the arguments of the model, with labels [B, S].
    Raises:
        ValueError: the model did not call its loss function.
    Collectives: those of the model's forward pass and of `label_statistics`; with pipe those of `Pipeline.from_last`.
    """
    tokens = loss.targets(inputs["labels"]).tokens

    def read(logits: Any) -> Tensor:
        found = label_statistics(logits, tokens)
        return torch.stack([found["log_probs"], found["entropy"]])

    calls = loss.calls
    with _evaluating(model), torch.no_grad(), loss.hand_over(read) as handed:
        model(**inputs)
    found = from_last_stage(model, handed[0] if handed else None)
    if found is None:
        raise ValueError(
            f"{type(model).__name__} computes its loss without calling model.loss_function ({loss.calls - calls} "
            "calls), so what it says of each label is not known: choose a loss_strategy that reads no outputs."
        )
    shape = inputs["labels"].shape
    # What position t predicts is label t + 1.
    log_probs, entropy = (F.pad(each.view(shape)[:, :-1], (1, 0)) for each in found)
    return TokenStatistics(log_probs, entropy)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
