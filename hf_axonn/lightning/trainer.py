"""`AxonnStrategy`: Lightning's Trainer over a grid.

    trainer = lightning.Trainer(strategy=AxonnStrategy(z=2, x=2), devices=4, accelerator="cpu")
    trainer.fit(module, loader)

The module holds a model of Transformers, which `setup` shards where it stands. Needs the extra `lightning`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_axonn.checkpoint.full_state import full_state_dict
from hf_axonn.checkpoint.manifest import is_sharded_checkpoint
from hf_axonn.checkpoint.save import finish_saves
from hf_axonn.compat.lightning import finish_closure
from hf_axonn.engine.gradient_sync import averaging
from hf_axonn.lightning.files import load, local_path, open_checkpoint, save, take_ordinary_optimizer
from hf_axonn.lightning.gradients import clip_by_norm, clip_by_value, leave_unsynced
from hf_axonn.lightning.models import fit_optimizer, put_on_grid, without
from hf_axonn.lightning.processes import GridProcesses
from hf_axonn.topology.grid import Grid


BESIDE = "beside_the_model"


class AxonnStrategy(GridProcesses, ParallelStrategy):
    """Train with Lightning's Trainer over a grid: `Trainer(strategy=AxonnStrategy(z=2, x=2), devices=4)`.

    The LightningModule holds one model of Transformers, with PEFT's adapters or without, or one that `parallelize` has
    sharded. One that is made in `configure_model` by `hf_axonn.from_pretrained(name, grid=self.trainer.strategy.grid,
    config=self.trainer.strategy.config)` is read in slices; any other is sharded before `configure_optimizers`.
    Checkpoints are sharded directories, which any grid and one process resume from.

    Args:
        grid: sizes of the axes, or an AxonnConfig with all settings. None takes them from `options`, or from the
            launch file (AXONN_CONFIG) where there are none.
        process_group_backend: of torch.distributed; that of the device if None.
        timeout: of collectives; torch's own if None.
        options: sizes of axes (data, z, y, x), and settings (`AxonnConfig`) such as overlap or reduce_dtype.
    Raises:
        ValueError: a grid with pipe or none at all, or settings that contradict each other; when a run begins: the
            grid is not the number of processes, a library has a release that is not proven, or the module, its
            optimizers, its precision or a plugin cannot be used over a grid (docs/refusals.md lists what).
    """

    strategy_name = "axonn"
    of_trainer = True
    sharded: nn.Module | None = None  # the model inside of the LightningModule
    _failed = False

    def setup_environment(self) -> None:
        """Join the ranks. Raises and communicates as `GridProcesses.start_processes`."""
        super().setup_environment()
        self.start_processes()

    def setup(self, trainer: lightning.Trainer) -> None:
        """Shard the model, and make the optimizer on its shards.

        Raises:
            ValueError: see the class.
        Collectives: those of `put_on_grid`.
        """
        assert self.accelerator is not None and self.lightning_module is not None
        if self._layer_sync is not None:
            raise ValueError("sync_batchnorm is not supported over a grid: omit sync_batchnorm=True.")
        if self._checkpoint_io is not None:
            raise ValueError(
                f"{type(self._checkpoint_io).__name__} cannot write checkpoints of a grid, which are directories that "
                "all ranks write to: omit the plugin (async_save=True saves while the training goes on)."
            )
        self._failed = False
        self.accelerator.setup(trainer)
        self.sharded = put_on_grid(
            self.lightning_module,
            self.config,
            self.root_device,
            precision=self.precision_plugin,
            convert=self.precision_plugin.convert_module,
        )
        self.model = self.lightning_module
        self.count_samples_once(self.lightning_module)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def setup_optimizers(self, trainer: lightning.Trainer) -> None:
        """Make optimizers and schedules.

        Raises:
            ValueError: there is more than one optimizer, or one that cannot train shards.
        """
        self._reset_optimizers_and_schedulers()  # those of an earlier fit
        super().setup_optimizers(trainer)
        if len(self.optimizers) > 1:
            raise ValueError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers, but a checkpoint over a grid has "
                "the state of one: give one optimizer several parameter groups."
            )
        assert self.sharded is not None
        for optimizer in self.optimizers:
            fit_optimizer(optimizer, self.sharded, self.precision_plugin.precision)

    def setup_precision_plugin(self) -> None:
        """Set the plugin up, and let it clip over all shards: Lightning asks it for that."""
        super().setup_precision_plugin()
        plugin: Any = self.precision_plugin
        plugin.clip_grad_by_norm, plugin.clip_grad_by_value = clip_by_norm, clip_by_value

    def model_to_device(self) -> None:
        """Do nothing: `setup` has brought the module there."""

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run a backward pass; after the last one of a step gradients are averaged, before `on_after_backward`.

        Collectives: those of `syncing`.
        """
        module, plugin = self.lightning_module, self.precision_plugin
        assert module is not None and self.sharded is not None
        self.pre_backward(closure_loss)
        loss = plugin.pre_backward(closure_loss, module)
        with averaging(self.sharded):
            plugin.backward(loss, module, optimizer, *args, **kwargs)
        loss = plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Leave gradients of passes that begin inside unaveraged; the Trainer accumulates so."""
        assert self.sharded is not None
        with leave_unsynced(self.sharded):
            yield

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Run the closure before the step and not inside of it, so that hooks of steps see its gradients.

        One of them refuses gradients that are not averaged: inside, those of the passes before would be there. Torch's
        elementwise optimizers run a closure first in any case (engine/optimizer_steps.py), others do not.
        """
        module: Any = model or self.lightning_module
        plugin: Any = self.precision_plugin
        if getattr(plugin, "scaler", None) is not None:  # which does the same
            return super().optimizer_step(optimizer, closure, module, **kwargs)
        result = closure()
        finish_closure(plugin, module, optimizer)
        optimizer.step(**kwargs)
        return result

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data-parallel ranks: what `self.log(..., sync_dist=True)` calls. See `over_samples`."""
        return self.over_samples(tensor, group, reduce_op)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the LightningModule's `state_dict()` with full tensors, on the CPU of rank 0; empty on the others.

        Every rank must call it. Collectives: those of `full_state_dict` of the model.
        """
        assert self.lightning_module is not None
        if self.grid.size == 1:
            return self.lightning_module.state_dict()
        return full_state_dict(self.lightning_module)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: a checkpoint fills shards."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: `load_checkpoint` does."""
        return False

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return nothing on a grid: `save_checkpoint` writes the shards of the state itself."""
        return super().optimizer_state(optimizer) if self.grid.size == 1 else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint of the Trainer, by all ranks; on a grid of one rank Lightning's own file.

        Raises:
            ValueError: the path is that of another kind of file system.
            SaveError: it cannot be written; on every rank.
        Collectives: those of `save`.
        """
        if self.grid.size == 1:
            return super().save_checkpoint(checkpoint, filepath, storage_options)
        path = local_path(self.broadcast(str(filepath)), storage_options)
        assert self.lightning_module is not None and self.sharded is not None
        values = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        with without(self.lightning_module, self.sharded):
            values[BESIDE] = dict(self.lightning_module.state_dict())
        optimizer = self.optimizers[0] if checkpoint.get("optimizer_states") else None
        save(path, self.sharded, optimizer, values, self.config)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Fill model and optimizer, and return the rest, which Lightning restores.

        Raises:
            ValueError: the checkpoint is not complete, or lacks what is to be restored; on every rank.
        Collectives: those of `open_checkpoint` and `load`.
        """
        path = local_path(self.broadcast(str(checkpoint_path)), None)
        assert self.sharded is not None
        optimizer = next(iter(self.optimizers), None)
        if not is_sharded_checkpoint(path):
            checkpoint = super().load_checkpoint(path, weights_only)
            if optimizer is not None:
                if not checkpoint.get("optimizer_states"):
                    raise ValueError(f"{path} has no optimizer state: it was saved with weights only.")
                take_ordinary_optimizer(self.sharded, optimizer, checkpoint["optimizer_states"][0], path)
            return checkpoint
        manifest, values = open_checkpoint(path, self.root_device)
        if optimizer is not None and "loops" not in values:
            raise ValueError(
                f"{path} was not written by Lightning's Trainer, so there is nothing to go on with: read its weights "
                "with hf_axonn.from_pretrained, and omit ckpt_path."
            )
        self._check_places(path, manifest.grid, values)
        load(path, manifest, self.sharded, optimizer)
        return {"pytorch-lightning_version": lightning.__version__, **values}

    def _check_places(self, path: Any, grid: Grid, values: dict[str, Any]) -> None:
        """Refuse the places of stateful data loaders where samples are divided in another way."""
        loops = values.get("loops", {}).values()
        stateful = any(
            isinstance(state, dict) and state.get("combined_loader") for loop in loops for state in loop.values()
        )
        if stateful and grid.dp_size != self.grid.dp_size:
            raise ValueError(
                f"{path} was saved with data * z / context = {grid.dp_size}, and the places of stateful data loaders "
                f"are of no use with {self.grid.dp_size}: resume from one with an ordinary loader, or on such a grid."
            )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load what is beside the model; of an ordinary checkpoint all. No communication."""
        assert self.lightning_module is not None and self.sharded is not None
        if "state_dict" in checkpoint:
            super().load_model_state_dict(checkpoint, strict=strict)
        elif BESIDE in checkpoint:
            with without(self.lightning_module, self.sharded):
                self.lightning_module.load_state_dict(checkpoint[BESIDE], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: `load_checkpoint` has loaded it."""

    def on_exception(self, exception: BaseException) -> None:
        """Note that ranks may be in different places."""
        self._failed = True

    def teardown(self) -> None:
        """Wait for a save in the background; the model stays where it is. Collectives: those of `finish_saves`."""
        if not self._failed:
            finish_saves()
        assert self.accelerator is not None and self.cluster_environment is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
