"""Accelerate's view of a grid: a ParallelismConfig that it takes, and what that rebinds on one Accelerator.

    accelerator = Accelerator(parallelism_config=AxonnPlugin(grid=Grid(z=2, x=2)))
    accelerator = Accelerator()                        # under `accelerate launch --config axonn.yaml`

To Accelerate, x * y is its tensor-parallel size (ranks that get the same samples) and data * z its sharded
data-parallel size (ranks that get different ones). No class of Accelerate is changed: `_validate_accelerator` gets the
live object and replaces the methods that must know the grid on it alone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from accelerate.parallelism_config import ParallelismConfig
from torch import nn

from hf_axonn.collectives import world_rank
from hf_axonn.config import VARIABLE, AxonnConfig, Overlap
from hf_axonn.grid import Grid, GridMesh, grid_mesh


logger = logging.getLogger(__name__)


class AxonnPlugin(ParallelismConfig):
    """Train with Accelerate over a grid.

    Args:
        grid: sizes of the axes; None takes the settings of the launch file (the environment variable AXONN_CONFIG).
        overlap: which collectives run while the device computes; all if None.
        reduce_dtype: dtype in which gradients are summed.
        keep_gathered: which gathered weights are kept from forward to backward: "none", "all", or of how many layers.
        tune_matmuls: whether operand layouts of matmuls are timed on the first steps and the fastest used.
    Raises:
        ValueError: no grid is given and none was launched; later, when the Accelerator is made: the grid is not the
            number of processes, or fp16, fp8 or torch.compile is asked for.
    """

    def __init__(
        self,
        grid: Grid | None = None,
        *,
        overlap: Overlap | None = None,
        reduce_dtype: str = "float32",
        keep_gathered: str | int = "none",
        tune_matmuls: bool = False,
    ) -> None:
        if grid is None:
            config = AxonnConfig.from_env()
            if config is None:
                raise ValueError(
                    f"AxonnPlugin() without a grid takes it from the launch file, but {VARIABLE} is not set: start "
                    "with accelerate launch --config axonn.yaml, or pass grid=Grid(...)."
                )
        else:
            config = AxonnConfig(
                grid=grid,
                overlap=overlap or Overlap(),
                reduce_dtype=reduce_dtype,
                keep_gathered=keep_gathered,
                tune_matmuls=tune_matmuls,
            )
        self.config = config
        if config.grid.size > 1:
            _install_trainer_hooks()
        super().__init__(
            dp_replicate_size=1,
            dp_shard_size=config.grid.samples_size,
            tp_size=config.grid.x * config.grid.y,
            cp_size=1,
            sp_size=1,
        )

    @property
    def grid(self) -> Grid:
        """Sizes of the axes."""
        return self.config.grid

    @property
    def tp_enabled(self) -> bool:
        """False: Accelerate's own tensor-parallel preparation is not for our models."""
        return False

    def __repr__(self) -> str:
        return f"AxonnPlugin({self.config})"

    def __getstate__(self) -> dict[str, Any]:
        # Process groups cannot be pickled, and Trainer saves its arguments; they are looked up again when needed.
        return {**self.__dict__, "device_mesh": None}

    def __deepcopy__(self, memo: dict) -> AxonnPlugin:
        config = self.config
        return AxonnPlugin(
            self.grid,
            overlap=config.overlap,
            reduce_dtype=config.reduce_dtype,
            keep_gathered=config.keep_gathered,
            tune_matmuls=config.tune_matmuls,
        )

    def build_device_mesh(self, device_type: str):
        """The (dp_shard, tp) mesh that Accelerate's data loaders read, made of the grid's own process groups."""
        if self.grid.size == 1:
            return super().build_device_mesh(device_type)
        return grid_mesh(self.grid, device_type).sample_mesh

    def _validate_accelerator(self, accelerator) -> None:
        if self.grid.size == 1 and accelerator.num_processes == 1:
            return
        self.grid.check(accelerator.num_processes)
        if accelerator.state.mixed_precision not in ("no", "bf16"):
            raise ValueError(
                f"mixed_precision={accelerator.state.mixed_precision} is not supported over a grid: use bf16 or no."
            )
        if accelerator.state.dynamo_plugin.backend.value.lower() != "no":
            raise ValueError("torch.compile (dynamo_backend) is not supported over a grid: leave it away.")
        bind(accelerator, self)


def bind(accelerator, plugin: AxonnPlugin) -> None:
    """Replace, on this one Accelerator, the methods that must know the grid."""
    mesh = grid_mesh(plugin.grid, accelerator.device.type)
    for name, function in {
        "prepare": _prepare,
        "prepare_model": _prepare_model,
        "prepare_data_loader": _prepare_data_loader,
        "backward": _backward,
        "gather": _gather,
        "gather_for_metrics": _gather_for_metrics,
        "save_state": _refuse_state,
        "load_state": _refuse_state,
        "join_uneven_inputs": _refuse_join,
    }.items():
        setattr(accelerator, name, functools.partial(function, accelerator, plugin, mesh, getattr(accelerator, name)))


def _prepare(accelerator, plugin: AxonnPlugin, mesh: GridMesh, original: Callable, *args, **kwargs):
    """Shard plain models first, and let optimizers that hold their old parameters have the new ones."""
    replaced: dict[int, nn.Parameter] = {}
    for model in args:
        if isinstance(model, nn.Module):
            before = dict(model.named_parameters())
            if shard_plain_model(model, plugin, accelerator.device):
                after = dict(model.named_parameters())
                replaced |= {id(parameter): after[name] for name, parameter in before.items()}
    for optimizer in args:
        if isinstance(optimizer, torch.optim.Optimizer):
            if replaced and optimizer.state:
                raise ValueError(
                    "the optimizer has taken steps on the whole model already: shard the model with "
                    "hf_axonn.parallelize before the optimizer is made."
                )
            for group in optimizer.param_groups:
                group["params"] = [replaced.get(id(parameter), parameter) for parameter in group["params"]]
    return original(*args, **kwargs)


def shard_plain_model(model: nn.Module, plugin: AxonnPlugin, device: torch.device) -> bool:
    """Parallelize a model that is not, with a warning that names the better way. Returns whether it had to."""
    from hf_axonn.gradients import find_state
    from hf_axonn.parallelize import parallelize

    if plugin.grid.size == 1 or find_state(model) is not None:
        return False
    if world_rank() == 0:
        logger.warning(
            f"{type(model).__name__} was loaded whole on every rank and is sharded over {plugin.grid} now. "
            "hf_axonn.from_pretrained(name, grid=...) reads only each rank's own slices."
        )
    _, report = parallelize(model.to(device), plugin.grid, config=plugin.config)
    if world_rank() == 0:
        logger.info(report)
    return True


def _prepare_model(
    accelerator,
    plugin: AxonnPlugin,
    mesh: GridMesh,
    original: Callable,
    model: nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> nn.Module:
    """Autocast as ever, but no DDP around the model: the engine does its own communication."""
    shard_plain_model(model, plugin, accelerator.device)
    return original(model, device_placement=False, evaluation_mode=True)


def _prepare_data_loader(accelerator, plugin: AxonnPlugin, mesh: GridMesh, original: Callable, *args, **kwargs):
    """As the stock method, every rank reading its own samples.

    Its default for an IterableDataset is to let rank 0 read and dispatch, which gives one batch to ranks that differ.
    """
    if accelerator.dispatch_batches:
        raise ValueError(
            "dispatch_batches=True is not supported over a grid: leave it away, every rank then reads its own samples."
        )
    accelerator.dataloader_config.dispatch_batches = False
    return original(*args, **kwargs)


def _backward(accelerator, plugin: AxonnPlugin, mesh: GridMesh, original: Callable, loss, **kwargs) -> None:
    """Backward; after the last micro-batch of a step the gradients are averaged over data, and over the world."""
    from hf_axonn.gradients import syncing

    last = accelerator.sync_gradients
    with syncing(*accelerator._models) if last else contextlib.nullcontext():
        original(loss, **kwargs)


def _gather(accelerator, plugin: AxonnPlugin, mesh: GridMesh, original: Callable, tensor):
    """As the stock method, with one copy for each (data, z): ranks of (x, y) hold the same samples."""
    from accelerate.utils import recursively_apply

    copies = mesh.size("x", "y")

    def distinct(gathered: torch.Tensor) -> torch.Tensor:
        blocks = gathered.unflatten(0, (mesh.size("data", "z"), copies, -1))
        return blocks[:, 0].flatten(0, 1)

    return recursively_apply(distinct, original(tensor))


def _gather_for_metrics(
    accelerator, plugin: AxonnPlugin, mesh: GridMesh, original: Callable, input_data, use_gather_object: bool = False
):
    """As the stock method, which calls `gather`; objects are taken from one rank for each (data, z)."""
    from accelerate.utils import recursively_apply

    try:
        recursively_apply(lambda value: value, input_data, error_on_other_type=True)
    except TypeError:
        use_gather_object = True
    if use_gather_object and mesh.index("x", "y") != 0:
        input_data = []
    return original(input_data, use_gather_object=use_gather_object)


def _refuse_state(accelerator, plugin: AxonnPlugin, mesh: GridMesh, original: Callable, *args, **kwargs):
    raise ValueError(
        "accelerator.save_state and load_state are not supported over a grid yet: save with "
        "hf_axonn.save_sharded(model, DIR, optimizer=optimizer), load with hf_axonn.load_sharded(model, DIR, "
        "optimizer=optimizer), or use Trainer, whose checkpoints resume on any grid."
    )


def _refuse_join(accelerator, plugin: AxonnPlugin, mesh: GridMesh, original: Callable, *args, **kwargs):
    raise ValueError(
        "join_uneven_inputs is not supported over a grid: every rank takes part in every layer, so all must have the "
        "same number of batches (even_batches=True, the default)."
    )


def install_default() -> None:
    """Let a bare `Accelerator()` or `Trainer` of this process use the grid of the launch file.

    Called in worker processes right after accelerate.parallelism_config has been imported (see _autoload.py).
    """
    import accelerate.parallelism_config as module

    module.ParallelismConfig = AxonnPlugin
    os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    _install_trainer_hooks()


def _install_trainer_hooks() -> None:
    from hf_axonn.trainer_hooks import install_when_imported

    install_when_imported()
