"""Optimizers that `prepare` gets train float32 weights (engine/master_weights.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_axonn.compat.accelerate import prepared_models
from hf_axonn.engine.master_weights import make_masters
from hf_axonn.engine.state import parallel_state


if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    _MixedInto = Accelerator
else:
    _MixedInto = object


class MasterMethods(_MixedInto):
    """Methods of Accelerator, on a grid of any size."""

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None):
        """As the stock method; what is trained becomes float32 before, under mixed precision.

        Collectives: those of `stages_agree`.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        make_masters(parameters, mixed_precision=self.mixed_precision)
        self.stages_agree()
        return super().prepare_optimizer(optimizer, device_placement=device_placement)

    def stages_agree(self) -> None:
        """Let the stages of prepared pipelines know which dtype travels between them. Collectives: those of
        `Pipeline.know_modules`."""
        for model in prepared_models(self):
            state = parallel_state(model)
            if state is not None and state.pipeline is not None:
                state.pipeline.know_modules()
