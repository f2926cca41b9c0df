"""`label_smoothing_factor` of Trainer over a grid.

Each function wraps the method of Trainer that has its name (hooks.py). Checked with transformers 5.20 to 5.24.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_axonn.compat.peft import without_peft
from hf_axonn.losses.vocab_parallel import ShardedCausalLMLoss
from hf_axonn.parallel.sharded_model import sharded_model


def compute_loss(
    self,
    original: Callable,
    model: nn.Module,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor | tuple[Tensor, Any]:
    """Smooth the labels without logits.

    Trainer keeps the labels from the model and smooths a loss of its own from the logits, which every rank would hold
    whole. Here the model gets the labels, and its loss (losses/vocab_parallel.py) is the smoothed one: the same
    number.
    """
    loss = loss_to_smooth(self, model, inputs)
    if loss is None:
        return original(model, inputs, return_outputs, num_items_in_batch)
    smoother, self.label_smoother = self.label_smoother, None
    try:
        with loss.smooth_labels(smoother.epsilon):
            return original(model, inputs, return_outputs, num_items_in_batch)
    finally:
        self.label_smoother = smoother


def loss_to_smooth(trainer, model: nn.Module, inputs: dict[str, Any]) -> ShardedCausalLMLoss | None:
    """Return the loss of a model in training if it can be smoothed chunk by chunk and is Trainer's own, or None."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.trainer_pt_utils import LabelSmoother

    smoother = getattr(trainer, "label_smoother", None)
    if type(smoother) is not LabelSmoother or smoother.ignore_index != -100 or trainer.compute_loss_func is not None:
        return None
    if not (model.training and torch.is_grad_enabled()) or "labels" not in inputs or "shift_labels" in inputs:
        return None
    state = sharded_model(trainer.accelerator.unwrap_model(model))
    if state is None or not (state.has_head or state.pipeline is not None):  # where one stage has the head
        return None
    inner = without_peft(trainer.accelerator.unwrap_model(model))
    loss, config = getattr(inner, "loss_function", None), inner.config.get_text_config()
    # Trainer shifts the labels of these only. Its loss has no auxiliary loss of routers, which a model would add.
    shifted = type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    routers = inputs.get("output_router_logits", getattr(config, "output_router_logits", False))
    return loss if shifted and not routers and isinstance(loss, ShardedCausalLMLoss) else None


WRAPPERS = (compute_loss,)
