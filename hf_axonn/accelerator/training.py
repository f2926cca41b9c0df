"""The training loop of accelerate over a grid: prepare, backward, accumulation, clipping, learning rates."""

from __future__ import annotations

import contextlib
from functools import partial
from types import SimpleNamespace

import torch
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from torch import nn
from torch.distributed.tensor import DTensor

from hf_axonn.accelerator.masters import stages_agree
from hf_axonn.accelerator.prepare import point_to_shards, shard_plain_model
from hf_axonn.compat.accelerate import is_over, prepared_models, prepared_optimizers, without_autocast
from hf_axonn.compat.messages import get_logger
from hf_axonn.compat.replaced import replace_attributes
from hf_axonn.distributed.collectives import world_rank
from hf_axonn.distributed.mesh import ROWS
from hf_axonn.engine.dtensors import whole
from hf_axonn.engine.gradient_sync import averaging
from hf_axonn.engine.optimizer_steps import refuse_unserved
from hf_axonn.engine.state import parallel_state
from hf_axonn.parallel.compiled import compile_regions
from hf_axonn.parallel.pipeline.norms import norm_over_stages
from hf_axonn.parallel.sharded_model import sharded_model


logger = get_logger(__name__)


class GridScheduler(AcceleratedScheduler):
    """accelerate's wrapper of a scheduler, which steps as often as different batches went into the step."""

    dp_size: int  # data * z / context; the stock wrapper takes the number of processes

    def step(self, *args, **kwargs) -> None:
        """Step once for each data-parallel rank, as if each were a process."""
        if self.split_batches or not self.step_with_optimizer or not self.gradient_state.sync_gradients:
            super().step(*args, **kwargs)
        elif not any(optimizer.step_was_skipped for optimizer in self.optimizers):
            for _ in range(self.dp_size):
                if not is_over(self.scheduler):
                    self.scheduler.step(*args, **kwargs)


@torch.no_grad()
def clip_to_norm(parameters: list[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Scale gradients whose norm over all shards is `norm`, each rank its own part. No communication."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    own = [SimpleNamespace(grad=grad.to_local() if isinstance(grad, DTensor) else grad) for grad in gradients]
    torch.nn.utils.clip_grads_with_norm_(own, max_norm, norm)


class TrainingMethods:
    """Methods of Accelerator."""

    def prepare(self, *args, device_placement: list[bool] | None = None):
        """Prepare models first: an optimizer may stand before its model."""
        for model in args:
            if isinstance(model, nn.Module):
                self._shard(model)
        result = super().prepare(*args, device_placement=device_placement)
        self._warn_of_idle_optimizers(args)
        return result

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False):
        """Prepare with autocast, but without DDP: the engine does its own communication. With a dynamo plugin a
        parallelized model is compiled by regions (parallel/compiled.py)."""
        self._shard(model)
        state, shared = sharded_model(model), AcceleratorState()
        dynamo, off = shared.dynamo_plugin, TorchDynamoPlugin(backend="no")
        with replace_attributes({(shared, "dynamo_plugin"): off} if state is not None else {}):
            prepared = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        self.check_even_batches()
        stages_agree(prepared_models(self))
        if state is not None:
            if dynamo.backend != DynamoBackend.NO:
                options = dynamo.to_kwargs()
                if not dynamo.dynamic:  # `accelerate launch` says False by default
                    options.pop("dynamic", None)
                compile_regions(state, model, **options)
            state.context.averaging.average_by_itself()
            # Scripts take these from the wrapper that DistributedDataParallel would be.
            prepared.no_sync = partial(self.no_sync, prepared)
            prepared.__dict__["module"] = prepared
        return prepared

    def _shard(self, model: nn.Module) -> None:
        shard_plain_model(model, self.axonn_plugin, self.device)
        for optimizer in prepared_optimizers(self):
            point_to_shards(optimizer)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None):
        """Give an optimizer that was made before the model was sharded the sharded parameters."""
        refuse_unserved(optimizer)
        point_to_shards(optimizer)
        return super().prepare_optimizer(optimizer, device_placement=device_placement)

    def _warn_of_idle_optimizers(self, args: tuple) -> None:
        models = [model for model in prepared_models(self) if parallel_state(model) is not None]
        owned = {id(parameter) for model in models for parameter in model.parameters()}
        for optimizer in args:
            if models and isinstance(optimizer, torch.optim.Optimizer) and world_rank() == 0:
                parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                if not any(id(parameter) in owned for parameter in parameters):
                    logger.warning(
                        f"{type(optimizer).__name__} has none of the parameters of the models that were prepared: it "
                        "will not train them."
                    )

    def prepare_scheduler(self, scheduler):
        """Let learning rates move on with the batches, which are the same on ranks that share samples."""
        prepared = super().prepare_scheduler(scheduler)
        if type(prepared) is AcceleratedScheduler:
            prepared.__class__ = GridScheduler
            prepared.dp_size = self.axonn_mesh.size(*ROWS)
        return prepared

    def backward(self, loss: torch.Tensor, **kwargs) -> None:
        """Run backward; after the last micro-batch of a step gradients are averaged over data, and over the world.

        As under DistributedDataParallel, whether they are is decided where the forward pass begins (`no_sync`).
        """
        each = self.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        with averaging(*prepared_models(self), last=self.sync_gradients or each):
            super().backward(loss, **kwargs)

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Leave the gradients of passes that begin inside as each rank has them."""
        state = parallel_state(model)
        return super().no_sync(model) if state is None else state.context.averaging.no_sync()

    def trigger_sync_in_backward(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Average the gradients in the backward pass inside, though its forward pass was under `no_sync`."""
        state = parallel_state(model)
        return super().trigger_sync_in_backward(model) if state is None else state.context.averaging.force_sync()

    def clip_grad_norm_(self, parameters, max_norm: float, norm_type: float = 2):
        """Clip by the norm over all shards, a plain tensor that is the same on all ranks. Every rank must call it.

        Local tensors are scaled: DTensor would spend some 10 ms on each gradient in the first step.
        """
        parameters = list(parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        mesh = self.axonn_mesh
        if mesh.size("pipe") > 1:
            states = [state for model in prepared_models(self) if (state := sharded_model(model)) is not None]
            pipelines = [state.pipeline for state in states if state.pipeline is not None]
            norm = norm_over_stages(gradients, pipelines, mesh, norm_type)
            clip_to_norm(parameters, max_norm, norm)
            return norm
        meshes = {grad.device_mesh if isinstance(grad, DTensor) else None for grad in gradients}
        if len(meshes) != 1 or None in meshes:
            norm = super().clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
            return whole(norm)
        self.unscale_gradients()
        norm = whole(torch.nn.utils.get_total_norm(gradients, norm_type))
        clip_to_norm(parameters, max_norm, norm)
        return norm

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True):
        """Unwrap as the stock method, which can take autocast only off a forward that is the method of a class."""
        model = super().unwrap_model(model, keep_torch_compile=keep_torch_compile)
        if not keep_fp32_wrapper:
            without_autocast(model)
        return model

    def join_uneven_inputs(self, *args, **kwargs):
        """Refuse.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "join_uneven_inputs is not supported over a grid: every rank takes part in every layer, so all must have "
            "the same number of batches (even_batches=True, the default)."
        )
