"""Samples of each rank: data loaders, gather and reduce of accelerate over a grid.

Ranks of pipe, context, x and y share samples, those of data and rows (z / context) have their own: there are
dp_size = data * z / context *data-parallel ranks*, and what accelerate does for each process is done here for each of
them. The functions of `accelerate.utils` know of no grid: `gather` there gives a copy for each process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import PartialState
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import recursively_apply
from torch.distributed.tensor import DTensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from hf_axonn.accelerator.dispatching import dispatching_loader
from hf_axonn.accelerator.shuffling import SampleOrder
from hf_axonn.compat.accelerate import is_prepared, keep_place, prepared_loaders, prepared_models
from hf_axonn.compat.replaced import replace_attributes
from hf_axonn.distributed.collectives import reduce_, world_group
from hf_axonn.distributed.consistency import assert_same_on_all_ranks, loader_facts
from hf_axonn.distributed.mesh import ROWS, SAME_SAMPLES, GridMesh, grid_mesh
from hf_axonn.engine.dtensors import whole
from hf_axonn.engine.state import parallel_state


class DataMethods:
    """Methods of Accelerator.

    Attributes:
        counts_processes: whether `num_processes` and `process_index` count processes: for accelerate's own code, and
            for Trainer, which divide them by the size of a tensor-parallel group themselves.
    """

    counts_processes = False
    sample_order: SampleOrder

    @property
    def axonn_mesh(self) -> GridMesh:
        """The process groups of the grid."""
        return grid_mesh(self.axonn_plugin.grid, self.device.type)

    @property
    def num_processes(self) -> int:
        """The number of data-parallel ranks: by it scripts multiply batch sizes, schedules and averaged losses."""
        return PartialState().num_processes if self.counts_processes else self.axonn_mesh.size(*ROWS)

    @property
    def process_index(self) -> int:
        """The number of this data-parallel rank; ranks that share samples have the same.

        With `counts_processes` a number of its own for each rank, in an order in which those that share samples are
        neighbours, as ranks along pipe are not.
        """
        dp_rank, copies = self.axonn_mesh.index(*ROWS), self.axonn_mesh.size(*SAME_SAMPLES)
        return dp_rank * copies + self.axonn_mesh.index(*SAME_SAMPLES) if self.counts_processes else dp_rank

    @property
    def is_last_process(self) -> bool:
        """Same as the stock property: true on one process."""
        return PartialState().is_last_process

    def on_process(self, function: Callable | None = None, process_index: int | None = None) -> Callable:
        """Decorate as the stock method; the function runs on one rank of the data-parallel rank `process_index`."""
        if function is not None and not self.counts_processes:
            runs = process_index == self.process_index and not self._is_copy()
            process_index = PartialState().process_index if runs else None
        stock: Any = super()
        return stock.on_process(function, process_index)

    @contextlib.contextmanager
    def profile(self, profile_handler=None) -> Iterator:
        """Profile as the stock method; each process writes a trace of its own."""
        with contextlib.ExitStack() as at_the_end, super().profile(profile_handler) as profiler:
            yield profiler
            at_the_end.enter_context(replace_attributes({(self, "counts_processes"): True}))

    def prepare_data_loader(
        self, data_loader: DataLoader, device_placement: bool | None = None, slice_fn_for_dispatch=None
    ):
        """Prepare as the stock method; each data-parallel rank gets its own samples.

        Raises:
            ValueError: ranks would get unequal numbers of batches, and there is a model over the grid; a stateful
                loader is to dispatch its batches to ranks that share them; ranks have other data sets or batch sizes.
        """
        if is_prepared(data_loader):
            return super().prepare_data_loader(data_loader)
        placed = self.device_placement if device_placement is None else device_placement
        dispatch = self.dispatch_batches
        if dispatch is None:
            dispatch = placed and isinstance(data_loader.dataset, IterableDataset)
        if not dispatch:
            assert_same_on_all_ranks(
                loader_facts(data_loader), self.device, "Give every rank the whole of the same data."
            )
        settings, generator = self.dataloader_config, None
        own, sampler = torch.Generator().manual_seed(torch.initial_seed()), random_sampler(data_loader)
        seedable = sampler if settings.use_seedable_sampler else None
        # accelerate's dispatcher skips batches before they are put together, in the order of another epoch.
        skips_wrongly = seedable is not None and not settings.use_stateful_dataloader
        if not dispatch or (self.axonn_mesh.size(*SAME_SAMPLES) == 1 and not skips_wrongly):
            stock = not settings.use_seedable_sampler and not settings.use_stateful_dataloader
            alone = stock and (dispatch or self.axonn_mesh.size(*ROWS) == 1)  # accelerate reads as one process
            own = self.sample_order.shared if alone else own
            if sampler is not None:
                generator = self.sample_order.adopt(sampler, as_one_process=alone, resumable=stock)
            with replace_attributes({(self, "counts_processes"): True}):
                prepared = super().prepare_data_loader(
                    data_loader, device_placement=device_placement, slice_fn_for_dispatch=slice_fn_for_dispatch
                )
            if settings.use_stateful_dataloader:
                keep_place(prepared)
            if not dispatch and generator is not None and self.axonn_mesh.size(*ROWS) == 1:
                # Stock accelerate sees one process here, and nothing to synchronize.
                prepared.synchronized_generator = generator
                prepared.rng_types = [*(prepared.rng_types or ()), "generator"]
        else:
            if settings.use_stateful_dataloader:
                raise ValueError(
                    f"use_stateful_dataloader with dispatch_batches is not supported over {self.axonn_plugin.grid}: "
                    "set dispatch_batches=False, every rank then reads its own samples."
                )
            if seedable is not None:
                make_seedable(data_loader, seedable, settings.data_seed)
            elif sampler is not None:
                self.sample_order.adopt(sampler, as_one_process=True, resumable=True)
            prepared = dispatching_loader(
                data_loader,
                self.axonn_mesh,
                split_batches=self.split_batches,
                generator=self.sample_order.shared,
                device=self.device if placed else None,
                slice_fn=slice_fn_for_dispatch,
                non_blocking=self.non_blocking,
            )
            prepared_loaders(self).append(prepared)
        if prepared.base_dataloader.generator is None:
            # What an iteration draws for its workers must not move the generator that dropout uses: a run that is
            # resumed in the middle of an epoch begins one more.
            prepared.base_dataloader.generator = own
        try:
            self.check_even_batches()
        except ValueError:
            prepared_loaders(self).remove(prepared)
            raise
        return prepared

    def check_even_batches(self) -> None:
        """Refuse loaders that would let some ranks wait in the model for others that have no batch left.

        Raises:
            ValueError: there are a model over the grid and such a loader; on every rank alike.
        """
        if not any(parallel_state(model) is not None for model in prepared_models(self)):
            return
        for loader in prepared_loaders(self):
            counts = batches_of_dp_ranks(loader)
            if len(set(counts)) > 1:
                raise ValueError(
                    f"even_batches=False gives {max(counts)} batches to some ranks and {min(counts)} to others, but "
                    "over a grid every rank takes part in every layer: omit it, or drop the last batch "
                    "(drop_last=True)."
                )

    def gather(self, tensor):
        """Gather one block from each data-parallel rank. Sharded tensors are made whole first."""
        grid = self.axonn_mesh.grid

        def distinct(gathered: torch.Tensor) -> torch.Tensor:
            rows = len(gathered) // grid.size
            sizes = (grid.data, grid.pipe, grid.rows, grid.context * grid.x * grid.y)
            return gathered.view(*sizes, rows, *gathered.shape[1:])[:, 0, :, 0].flatten(0, 2)

        return recursively_apply(distinct, super().gather(recursively_apply(whole, tensor)))

    def gather_for_metrics(self, input_data, use_gather_object: bool = False):
        """Gather as the stock method, by `gather`; objects come from one rank for each data-parallel rank."""
        try:
            recursively_apply(lambda value: value, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        if use_gather_object:
            input_data = self.own_objects(input_data)
        return super().gather_for_metrics(input_data, use_gather_object=use_gather_object)

    def own_objects(self, objects):
        """Return what this rank gives to `accelerate.utils.gather_object`: nothing if another has the same samples."""
        return [] if self._is_copy() else objects

    def _is_copy(self) -> bool:
        """Return whether a rank before this one has the same samples, and is counted for both."""
        return self.axonn_mesh.index(*SAME_SAMPLES) != 0

    def reduce(self, tensor, reduction: str = "sum", scale: float = 1.0):
        """Reduce over the data-parallel ranks, each counted once.

        Raises:
            ValueError: a sharded tensor, of which each rank holds another part.
        """
        recursively_apply(_refuse_shards, tensor)
        if reduction == "max":  # accelerate 1.12 would sum
            return recursively_apply(
                lambda value: reduce_(value.clone(), world_group(), op="max"), tensor, error_on_other_type=True
            )
        if self._is_copy():
            tensor = recursively_apply(torch.zeros_like, tensor)
        total = super().reduce(tensor, "sum", scale)
        if reduction == "mean":
            total = recursively_apply(lambda value: value / self.axonn_mesh.size(*ROWS), total)
        return total

    def check_trigger(self) -> bool:
        """Return whether any rank has set the trigger, also one that shares its samples."""
        flag = torch.tensor(0, device=self.device) if self.flag_tensor is None else self.flag_tensor
        triggered = bool(super().reduce(flag, "max"))
        if triggered or self.flag_tensor is None:
            self.flag_tensor = torch.tensor(0, device=self.device)
        return triggered

    @contextlib.contextmanager
    def split_between_processes(self, inputs, apply_padding: bool = False) -> Iterator:
        """Split between data-parallel ranks: ranks with the same samples get the same inputs."""
        mesh = self.axonn_mesh
        view = SimpleNamespace(num_processes=mesh.size(*ROWS), process_index=mesh.index(*ROWS), device=self.device)
        with PartialState.split_between_processes(view, inputs, apply_padding=apply_padding) as own:
            yield own


def random_sampler(loader: DataLoader) -> RandomSampler | None:
    """Return the sampler by which a plain loader shuffles; None if it does not shuffle."""
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if isinstance(loader.sampler, BatchSampler):
        sampler = loader.sampler.sampler
    return sampler if isinstance(sampler, RandomSampler) else None


def make_seedable(loader: DataLoader, sampler: RandomSampler, seed: int | None) -> None:
    """Let a plain loader shuffle by accelerate's seedable sampler in place of its own."""
    owner: Any = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    owner.sampler = SeedableRandomSampler(
        sampler.data_source, sampler.replacement, sampler.num_samples, sampler.generator, data_seed=seed
    )


def batches_of_dp_ranks(loader: DataLoader) -> list[int]:
    """Count the batches of each data-parallel rank of a prepared loader; empty if all get as many, or if unknown."""
    from accelerate.data_loader import BatchSamplerShard

    shard = loader.batch_sampler
    if not isinstance(shard, BatchSamplerShard):  # of a BatchSampler that was given as the sampler
        shard = loader.sampler
    if not isinstance(shard, BatchSamplerShard) or shard.even_batches or shard.drop_last:
        return []
    try:
        batches = len(shard.batch_sampler)
        if not shard.split_batches:
            return [len(range(dp_rank, batches, shard.num_processes)) for dp_rank in range(shard.num_processes)]
        left = len(shard.batch_sampler.sampler) % shard.batch_size
    except (TypeError, AttributeError):
        return []
    part = shard.batch_size // shard.num_processes
    return [batches - (0 < left <= part * dp_rank) for dp_rank in range(shard.num_processes)]


def _refuse_shards(tensor: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        raise ValueError(
            f"accelerator.reduce got a tensor of shape {list(tensor.shape)} that is sharded over a grid: each rank "
            "has another part of it. LocalSGD, which averages parameters so, is not possible over a grid: pass "
            "enabled=False or omit it; gradients are averaged by every step."
        )
