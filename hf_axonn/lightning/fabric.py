"""`AxonnFabricStrategy`: Lightning's Fabric over a grid.

    fabric = lightning.Fabric(strategy=AxonnFabricStrategy(z=2, x=2), devices=4, accelerator="cpu")
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)

Needs the extra `lightning`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from lightning.fabric.strategies.parallel import ParallelStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_axonn.checkpoint.manifest import is_sharded_checkpoint
from hf_axonn.compat.lightning import sync_control
from hf_axonn.engine.gradient_sync import averaging
from hf_axonn.engine.state import parallel_state
from hf_axonn.lightning.files import load, local_path, open_checkpoint, save, take_ordinary_optimizer
from hf_axonn.lightning.gradients import clip_by_norm, clip_by_value, leave_unsynced
from hf_axonn.lightning.models import fit_optimizer, model_inside, put_on_grid, without
from hf_axonn.lightning.processes import GridProcesses


# Where the state that fabric.save was given has its model and its optimizer, and the rest of it.
MODEL, OPTIMIZER, REST, BESIDE = "model", "optimizer", "rest", "beside_the_model"


class AxonnFabricStrategy(GridProcesses, ParallelStrategy):
    """Train with Lightning's Fabric over a grid: `Fabric(strategy=AxonnFabricStrategy(z=2, x=2), devices=4)`.

    `fabric.setup` shards a model of Transformers, also inside of another module, or any other module Linear by
    Linear; one of `hf_axonn.from_pretrained` stays as it is. `fabric.all_reduce` and `fabric.all_gather` are over the
    ranks that have different samples, unless they are given a group. `fabric.save` writes one model and its optimizer,
    as a sharded directory that `fabric.load` reads on any grid and on one process.

    Args:
        grid, process_group_backend, timeout, options: see `AxonnStrategy`.
    Raises:
        ValueError: see `AxonnStrategy`.
    """

    of_trainer = False

    @functools.cached_property
    def models(self) -> list[nn.Module]:
        """Models inside of the modules that were set up."""
        return []

    @property
    def _num_nodes(self) -> int:
        return self.num_nodes

    @_num_nodes.setter
    def _num_nodes(self, number: int) -> None:  # by which Fabric sets it
        self.num_nodes = number

    def _set_world_ranks(self) -> None:  # which Fabric calls
        self.set_world_ranks()

    def setup_environment(self) -> None:
        """Join the ranks. Raises and communicates as `GridProcesses.start_processes`."""
        super().setup_environment()
        self.start_processes()
        self._backward_sync_control = _sync_control()

    def module_to_device(self, module: nn.Module) -> None:
        """Move what is not on the grid already. No communication."""
        if parallel_state(module) is None:
            module.to(self.root_device)
        elif (model := model_inside(module)) is not module:
            with without(module, model):
                module.to(self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the model inside of a module, where it stands.

        Raises:
            ValueError: see `put_on_grid`.
        Collectives: those of `put_on_grid`.
        """
        if self._checkpoint_io is not None:
            raise ValueError(
                f"{type(self._checkpoint_io).__name__} cannot write checkpoints of a grid, which are directories that "
                "all ranks write to: omit the plugin."
            )
        model = put_on_grid(
            module, self.config, self.root_device, precision=self.precision, convert=lambda module: module, or_all=True
        )
        self.count_samples_once(module)
        self.models.append(model)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Let an optimizer train the shards of a model that was set up.

        Raises:
            ValueError: see `fit_optimizer`.
        """
        fit_optimizer(optimizer, nn.ModuleList(self.models), self.precision.precision)
        return optimizer

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass; afterwards gradients are averaged, but for passes under `fabric.no_backward_sync`.

        Collectives: those of `syncing`.
        """
        with averaging(*self.models):
            super().backward(tensor, module, *args, **kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the norm over all shards; see `clip_by_norm`."""
        self.precision.unscale_gradients(optimizer)
        return clip_by_norm(optimizer, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clip every element; see `clip_by_value`."""
        self.precision.unscale_gradients(optimizer)
        clip_by_value(optimizer, clip_val)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce in place over the data-parallel ranks; see `over_samples`."""
        return self.over_samples(tensor, group, reduce_op)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write the one model of `state`, its optimizer and the rest; on a grid of one rank Lightning's own file.

        Raises:
            ValueError: there is a filter, not one model, more than one optimizer, or the path is no directory's.
            SaveError: it cannot be written; on every rank.
        Collectives: those of `save`.
        """
        if self.grid.size == 1:
            return super().save_checkpoint(path, state, storage_options, filter)
        if filter:
            raise ValueError(
                f"fabric.save(filter=...) of {next(iter(filter))}: a sharded checkpoint holds all of a model, or what "
                "would be read from it is no model. Omit filter."
            )
        directory = local_path(self.broadcast(str(path)), storage_options)
        module_name, optimizer_name = self._names(state)
        module = state[module_name]
        model = model_inside(module, or_all=True)
        rest: dict[str, Any] = {}
        for name, value in state.items():
            if name not in (module_name, optimizer_name):
                rest[name] = value.state_dict() if hasattr(value, "state_dict") else value
        values = {MODEL: module_name, OPTIMIZER: optimizer_name, REST: rest}
        if module is not model:
            with without(module, model):
                values[BESIDE] = dict(module.state_dict())
        optimizer = None if optimizer_name is None else state[optimizer_name]
        save(directory, model, optimizer, values, self.config)

    def load_checkpoint(
        self,
        path: Any,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Fill the objects of `state`, and return what else the checkpoint has.

        Raises:
            ValueError: there is no model to fill, the checkpoint is not complete, or lacks what is asked for.
        Collectives: those of `open_checkpoint` and `load`.
        """
        directory = local_path(self.broadcast(str(path)), None)
        if isinstance(state, nn.Module):
            if not is_sharded_checkpoint(directory):
                return super().load_checkpoint(directory, state, strict, weights_only)
            manifest, _ = open_checkpoint(directory, self.root_device)
            load(directory, manifest, model_inside(state, or_all=True), None)
            return {}
        if not isinstance(state, dict) or not state:
            raise ValueError(
                f"fabric.load({path}) over a grid needs the model to fill: pass a state, as in fabric.load(path, "
                "{'model': model, 'optimizer': optimizer})."
            )
        module_name, optimizer_name = self._names(state)
        module = state[module_name]
        model = model_inside(module, or_all=True)
        optimizer = None if optimizer_name is None else state[optimizer_name]
        sharded = is_sharded_checkpoint(directory)
        if sharded:
            manifest, values = open_checkpoint(directory, self.root_device)
            rest: dict[str, Any] = values.get(REST, {})
            there = {values.get(MODEL, module_name), values.get(OPTIMIZER), *rest} - {None}
        else:
            rest = super().load_checkpoint(directory, None, strict, weights_only)
            there = set(rest)
        absent = [name for name in state if name not in there]
        if module_name in absent or (absent and strict):
            raise ValueError(
                f"{directory} has no {absent[0]!r}; it has {', '.join(sorted(map(repr, there)))}. Ask for these names."
            )
        if optimizer_name in absent:
            optimizer = None
        if sharded:
            load(directory, manifest, model, optimizer)
            if module is not model and BESIDE in values:
                with without(module, model):
                    module.load_state_dict(values[BESIDE], strict=strict)
        else:
            module.load_state_dict(rest.pop(module_name), strict=strict)
            if optimizer is not None and optimizer_name is not None:
                take_ordinary_optimizer(model, optimizer, rest.pop(optimizer_name), directory)
        for name in [name for name in state if name in rest]:
            if hasattr(state[name], "load_state_dict"):
                state[name].load_state_dict(rest.pop(name))
            else:
                state[name] = rest.pop(name)
        return rest

    def _names(self, state: dict[str, Any]) -> tuple[str, str | None]:
        """Return the names of the model and the optimizer in a state.

        Raises:
            ValueError: it has not one model, or more than one optimizer.
        """
        models = [name for name, value in state.items() if isinstance(value, nn.Module)]
        optimizers = [name for name, value in state.items() if isinstance(value, Optimizer)]
        if len(models) != 1 or len(optimizers) > 1:
            raise ValueError(
                f"a checkpoint over a grid has one model and at most one optimizer, but the state has {len(models)} "
                f"model(s) and {len(optimizers)} optimizer(s): save each model with its optimizer in a directory of "
                "its own."
            )
        return models[0], optimizers[0] if optimizers else None


def _sync_control() -> Any:
    class Control(sync_control()):  # type: ignore[misc]  # what Fabric asks for `no_backward_sync`
        def no_backward_sync(self, module: nn.Module, enabled: bool) -> Any:
            return leave_unsynced(module) if enabled else contextlib.nullcontext()

    return Control()
