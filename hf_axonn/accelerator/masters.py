"""Optimizers that `prepare` gets train float32 weights (engine/master_weights.py), and may keep them and their moments
in host memory (engine/host_weights.py, host_moments.py)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import nn

from hf_axonn.compat.accelerate import prepared_models, prepared_optimizers
from hf_axonn.compat.torch import ask_class_for_step
from hf_axonn.engine.master_weights import make_masters
from hf_axonn.engine.optimizer_steps import keep_moments_on_host, keep_weights_on_host
from hf_axonn.parallel.sharded_model import sharded_model


class MasterMethods:
    """Methods of Accelerator, on a grid of any size."""

    axonn_plugin: Any
    device: torch.device

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None):
        """Prepare as the stock method; under mixed precision trained weights become float32 before, and with `offload:
        optimizer` moments go to host memory, and so do float32 weights, when their model has been prepared, too.

        Raises:
            ValueError: offload is not possible with this optimizer.
        Collectives: those of `stages_agree`.
        """
        ask_class_for_step(getattr(optimizer, "optimizer", optimizer))
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        make_masters(parameters, mixed_precision=AcceleratorState().mixed_precision)
        stages_agree(prepared_models(self))
        if self.axonn_plugin.config.offload == "optimizer":
            keep_moments_on_host(getattr(optimizer, "optimizer", optimizer), self.device)
        prepared = super().prepare_optimizer(optimizer, device_placement=device_placement)  # type: ignore[misc]
        self._keep_weights_on_host()
        return prepared

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False):
        """Prepare as the stock method; weights go to host memory if their optimizer has been prepared."""
        prepared = super().prepare_model(model, device_placement, evaluation_mode)  # type: ignore[misc]
        self._keep_weights_on_host()
        return prepared

    def _keep_weights_on_host(self) -> None:
        if self.axonn_plugin.config.offload != "optimizer":
            return
        states = [state for state in map(sharded_model, prepared_models(self)) if state is not None]
        mixed_precision = AcceleratorState().mixed_precision
        for state, optimizer in itertools.product(states, prepared_optimizers(self)):
            keep_weights_on_host(state.weights, optimizer.optimizer, mixed_precision=mixed_precision)


def stages_agree(models: Iterable[nn.Module]) -> None:
    """Let the stages of pipelines know which dtype travels between them, and what of the others is trained.

    Collectives: those of `Pipeline.update_modules`.
    """
    for model in models:
        state = sharded_model(model)
        if state is not None and state.pipeline is not None:
            state.pipeline.update_modules()
