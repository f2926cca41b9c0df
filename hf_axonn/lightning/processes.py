"""Methods of both strategies: settings, processes, and the samples of each rank.

Ranks of x and y share samples, those of data and z have their own. Lightning counts processes; where it means those
that have different samples (samplers, means of metrics, gathered rows), it gets the *data-parallel ranks* (data, z).
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function, reset_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from hf_axonn.compat.lightning import gather_tensor, reduce_tensor, start_process_group, subprocess_launcher, tell_rank
from hf_axonn.compat.versions import check_versions
from hf_axonn.config import VARIABLE, AxonnConfig
from hf_axonn.distributed.collectives import barrier, broadcast_object, reduce_, world_group
from hf_axonn.distributed.mesh import ROWS, GridMesh, grid_mesh
from hf_axonn.topology.axis_order import ORDER
from hf_axonn.topology.grid import SIZES, Grid


EXAMPLE = "AxonnStrategy(z=2, x=2)"


def read_settings(grid: Grid | AxonnConfig | None, options: dict[str, Any]) -> AxonnConfig:
    """Return the settings that the arguments of a strategy name.

    Raises:
        ValueError: a grid is given twice, or not at all where none was launched, or another one was; settings beside
            an AxonnConfig; a grid with pipe; `order` or `save_failure`, which Lightning has no use for.
    """
    sizes = {axis: options.pop(axis) for axis in SIZES if axis in options}
    if grid is not None and sizes:
        raise ValueError(f"{next(iter(sizes))} beside {grid!r}: write all sizes in the one or in the other.")
    if isinstance(grid, AxonnConfig):
        if options:
            raise ValueError(f"{next(iter(options))} beside an AxonnConfig: write it into the AxonnConfig.")
        config = grid
    elif grid is not None or sizes:
        config = AxonnConfig(grid=grid or Grid(**sizes), **options)
    else:
        launched = AxonnConfig.from_env()
        if launched is None or options:
            raise ValueError(
                f"a strategy without a grid takes the grid and all settings from {VARIABLE}, "
                f"{'which is not set' if launched is None else 'so omit ' + next(iter(options))}: write "
                f"sizes, as in {EXAMPLE}."
            )
        return _check(launched)
    if config.order != ORDER:
        raise ValueError(
            f"order is {', '.join(config.order)}, but it is applied where axonn-launch starts processes, and "
            "Lightning starts these: omit order, or launch with axonn_config in a launch file."
        )
    return _check(AxonnConfig.with_launch(config, "the strategy"))


def _check(config: AxonnConfig) -> AxonnConfig:
    """Refuse settings that Lightning cannot follow, and return the others."""
    if config.grid.pipe > 1:
        raise ValueError(
            f"the grid {config.grid} has pipe, which Lightning's loops cannot drive: a pipeline makes its gradients "
            "in the forward pass. Use data, z, y and x, or train over pipe with Accelerate or Transformers' Trainer."
        )
    if config.save_failure != "stop":
        raise ValueError(
            f"save_failure is {config.save_failure}, but ModelCheckpoint must know that nothing was saved: omit "
            "save_failure, and a checkpoint that cannot be saved ends the run on all ranks."
        )
    return config


class GridProcesses:
    """Constructor and methods of a strategy, before those of Lightning's ParallelStrategy."""

    config: AxonnConfig
    parallel_devices: Any
    cluster_environment: Any
    local_rank: int
    global_rank: int
    node_rank: int
    world_size: int
    is_distributed = True  # Lightning then gives loaders a DistributedSampler
    num_nodes = 1
    of_trainer: bool  # whether it is Lightning's Trainer, or else Fabric

    def __init__(
        self,
        grid: Grid | AxonnConfig | None = None,
        *,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.config = read_settings(grid, options)
        self.process_group_backend, self.timeout = process_group_backend, timeout

    def _configure_launcher(self) -> None:
        if self.grid.size > 1 and not self.cluster_environment.creates_processes_externally:
            self._launcher = subprocess_launcher(self, of_trainer=self.of_trainer)

    @property
    def grid(self) -> Grid:
        """Sizes of the axes."""
        return self.config.grid

    @property
    def mesh(self) -> GridMesh:
        """The process groups of the grid, which has more than one rank."""
        return grid_mesh(self.grid, self.root_device.type)

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        device: torch.device = self.parallel_devices[self.local_rank]
        return device

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices or ())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Arguments of a DistributedSampler that divides samples among the data-parallel ranks."""
        if self.grid.size == 1:
            return {"num_replicas": 1, "rank": 0}
        return {"num_replicas": self.mesh.size(*ROWS), "rank": self.mesh.index(*ROWS)}

    def start_processes(self) -> None:
        """Join the ranks and make the process groups of the grid.

        Raises:
            ValueError: the grid is not the number of processes, or a library has a release that is not proven.
        Collectives: creation of the process groups.
        """
        check_versions()
        check_versions("lightning")
        reset_seed()  # the one of seed_everything, which all ranks must have
        self.set_world_ranks()
        self.grid.check(self.world_size)
        if self.grid.size > 1:
            start_process_group(self.cluster_environment, self.root_device, self.process_group_backend, self.timeout)
            grid_mesh(self.grid, self.root_device.type)

    def set_world_ranks(self) -> None:
        """Tell Lightning's environment which rank this is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        tell_rank(self.global_rank)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Let workers of ranks that share samples draw the same numbers after `seed_everything(workers=True)`."""
        if isinstance(dataloader, DataLoader) and int(os.environ.get("PL_SEED_WORKERS", 0)):
            set_ = dataloader.worker_init_fn
            if set_ is None or (isinstance(set_, partial) and set_.func is pl_worker_init_function):
                rank = self.distributed_sampler_kwargs["rank"]
                dataloader.worker_init_fn = partial(pl_worker_init_function, rank=rank)
        return dataloader

    def count_samples_once(self, module: nn.Module) -> None:
        """Let metrics in a module gather from the data-parallel ranks, unless they have a group. No communication."""
        for metric in module.modules():
            if self.grid.size > 1 and isinstance(metric, Metric) and metric.process_group is None:
                metric.process_group = self.mesh.group(*ROWS)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks, without a limit of time. Collectives: a barrier over the world."""
        barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src`, on all ranks. Collectives: two broadcasts over the world."""
        if self.grid.size == 1:
            return obj
        return broadcast_object(obj, src, self.root_device)

    def over_samples(self, value: Any, group: Any = None, operation: Any = "mean") -> Any:
        """Reduce a tensor in place over the data-parallel ranks (group None or the world), or over another group.

        Collectives: a barrier and an all-reduce over the group.
        """
        if self.grid.size == 1 or not isinstance(value, Tensor):
            return value
        return reduce_tensor(value, self._group(group), operation)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """[data * z / context, *shape]: those of the data-parallel ranks; of a single one its own, as Lightning does.

        Args:
            tensor: of one shape on all ranks.
            group: another group of ranks; None and the world are the data-parallel ones.
            sync_grads: whether gradients go back to the ranks that the rows come from.
        Collectives: an all-gather over the group.
        """
        if self.grid.size == 1:
            return tensor
        chosen = self._group(group)
        return tensor if chosen.size() == 1 else gather_tensor(tensor, chosen, with_gradients=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks have decided so, or any. Collectives: an all-reduce over the world."""
        if self.grid.size == 1:
            return decision
        votes = int(reduce_(torch.tensor(int(decision), device=self.root_device), world_group()))
        return votes == self.grid.size if all else votes > 0

    def _group(self, group: Any) -> Any:
        return self.mesh.group(*ROWS) if group in (None, dist.group.WORLD) else group
