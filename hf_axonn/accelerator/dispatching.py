"""dispatch_batches over pipe, x and y: rank 0 reads, every rank gets the part of its data-parallel rank.

accelerate's own dispatcher knows data parallelism or tensor parallelism, not both. Here the dispatching is a data set
of whole batches, so that accelerate's ordinary loader, `skip_first_batches` and everything else work with it as it is.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, cast

import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.state import GradientState
from accelerate.utils import (
    broadcast,
    broadcast_object_list,
    concatenate,
    find_batch_size,
    initialize_tensors,
    send_to_device,
    slice_tensors,
)
from accelerate.utils.operations import get_data_structure
from torch.utils.data import DataLoader, IterableDataset

from hf_axonn.distributed.mesh import ROWS, GridMesh


def dispatching_loader(
    loader: DataLoader,
    mesh: GridMesh,
    *,
    split_batches: bool,
    generator: torch.Generator,
    device: torch.device | None,
    slice_fn: Callable | None = None,
    non_blocking: bool = False,
) -> DataLoaderShard:
    """Return a prepared loader of the batches that rank 0 reads from `loader`.

    Args:
        loader: plain; on the other ranks it is not read.
        mesh: of the grid. It has dp_size = data * z / context.
        split_batches: whether a batch of `loader` is divided among the data-parallel ranks, or each of them gets one.
        generator: of which `loader` draws for its workers, before the sampler does for an epoch.
        device: of the batches; None leaves them where they travel, on this rank's own.
        slice_fn: takes (batch, slice, process_index=, num_processes=); accelerate's `slice_tensors` if None.
        non_blocking: of copies to the device.
    Raises:
        ValueError: the batch size is not divisible by dp_size, where it has to be.
    A batch with images raises a RuntimeError when it is read, unless `slice_fn` cuts it.
    """
    dp_size = mesh.size(*ROWS)
    if split_batches and (loader.batch_size or 0) % dp_size:
        raise ValueError(
            f"split_batches with a batch size of {loader.batch_size}: it must be divisible by data * z / context = "
            f"{dp_size}."
        )
    loader.generator = generator
    return DataLoaderShard(
        DispatchedBatches(loader, mesh, split_batches=split_batches, slice_fn=slice_fn or slice_tensors),
        device=device,
        batch_size=None,
        collate_fn=take_batch,
        _non_blocking=non_blocking,
    )


def rows_read(loader: Any) -> int | None:
    """Return how many rows rank 0 reads for a loader of `dispatching_loader`; None of others, and where none knows."""
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, DispatchedBatches):
        with contextlib.suppress(TypeError):
            return dataset.total_length
    return None


def take_batch(batch: Any) -> Any:
    """Return a batch, which is complete when it has been dispatched."""
    return batch


class DispatchedBatches(IterableDataset):
    """This rank's batches. Every rank must iterate, and all continue together.

    Collectives: two broadcasts over the world for each batch, one of them of every tensor.
    """

    def __init__(self, loader: DataLoader, mesh: GridMesh, *, split_batches: bool, slice_fn: Callable) -> None:
        self.loader, self.device = loader, mesh.device
        self.split_batches, self.slice_fn = split_batches, slice_fn
        self.dp_size, self.dp_rank, self.reads = mesh.size(*ROWS), mesh.index(*ROWS), mesh.rank == 0
        self._random = torch.get_rng_state()

    def __len__(self) -> int:
        batches = len(self.loader)
        if self.split_batches:
            return batches
        return batches // self.dp_size if self.loader.drop_last else math.ceil(batches / self.dp_size)

    @property
    def total_length(self) -> int:
        """Count the rows: accelerate's `total_dataset_length` of the loader."""
        return len(cast(Sized, self.loader.dataset))

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers and the data set the epoch, as accelerate does for a loader of its own."""
        for owner in (
            self.loader.batch_sampler,
            getattr(self.loader.batch_sampler, "sampler", None),
            self.loader.dataset,
        ):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        source = self._source() if self.reads else None
        last = False
        while not last:
            batch, message = None, [None, 0, True, ""]
            if self.reads:
                batch, *message = self._next(source)
            structure, rows, last, problem = broadcast_object_list(message)
            if problem:
                raise RuntimeError(f"rank 0, which reads for all, failed: {problem}")
            if structure is None:
                return
            if not self.reads:
                batch = initialize_tensors(structure)
            batch = broadcast(send_to_device(batch, self.device))
            part = math.ceil(rows / self.dp_size)
            own = slice(self.dp_rank * part, (self.dp_rank + 1) * part)
            own = self.slice_fn(batch, own, process_index=self.dp_rank, num_processes=self.dp_size)
            if last:
                # accelerate's loader looks one batch ahead, and then tells that this is the last one.
                GradientState().active_dataloader.remainder = rows
            yield own

    def _next(self, source: Iterator) -> tuple:
        """Return, on rank 0, (whole batch, its structure, rows, whether it is the last, error message)."""
        try:
            with self._own_random():
                batch, rows, last = next(source, (None, 0, True))
            return batch, None if batch is None else get_data_structure(batch), rows, last, ""
        except Exception as problem:
            return None, None, 0, True, f"{type(problem).__name__}: {problem}"

    def _source(self) -> Iterator[tuple[Any, int, bool]]:
        """Yield whole batches: (batch, rows without those that fill it up, whether it is the last one)."""
        first, before = None, None
        for batch in self._groups():
            first = batch if first is None else first
            if before is not None:
                yield self._fill_up(before, first, last=False)
            before = batch
        if before is not None:
            yield self._fill_up(before, first, last=True)

    def _groups(self) -> Iterator[Any]:
        size, group = 1 if self.split_batches else self.dp_size, []
        for batch in self.loader:
            self._check_images(batch)
            group.append(batch)
            if len(group) == size:
                yield _concatenate(group)
                group = []
        if group and not self.loader.drop_last:
            yield _concatenate(group)

    def _check_images(self, batch: Any) -> None:
        images = [name for name in batch if str(name).startswith("pixel_values")] if isinstance(batch, Mapping) else []
        if images and "input_ids" in batch and self.dp_size > 1 and self.slice_fn is slice_tensors:
            raise ValueError(
                f"a batch with {images[0]} beside input_ids cannot be divided among data * z / context = "
                f"{self.dp_size} data-parallel ranks, as a row may have any number of images: set "
                "dispatch_batches=False (accelerator_config of TrainingArguments), every rank then reads its own rows "
                "and their images."
            )

    def _fill_up(self, batch: Any, first: Any, *, last: bool) -> tuple[Any, int, bool]:
        rows = find_batch_size(batch)
        missing = -rows % self.dp_size
        if missing and not last:
            raise ValueError(
                f"a batch of {rows} rows cannot be divided among data * z / context = {self.dp_size} data-parallel "
                "ranks: give batches one size, or set dispatch_batches=False."
            )
        while missing:
            more = slice_tensors(first, slice(0, missing))
            batch = concatenate([batch, more])
            missing = -find_batch_size(batch) % self.dp_size
        return batch, rows, last

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        """Draw random numbers of the data from a state of their own: rank 0 must not get ahead of the other ranks."""
        outer = torch.get_rng_state()
        torch.set_rng_state(self._random)
        try:
            yield
        finally:
            self._random = torch.get_rng_state()
            torch.set_rng_state(outer)


def _concatenate(group: list[Any]) -> Any:
    try:
        return concatenate(group) if len(group) > 1 else group[0]
    except RuntimeError as problem:
        raise ValueError(
            "batches of different shapes cannot be dispatched together: set dispatch_batches=False, every rank then "
            f"reads its own, or split_batches=True ({problem})."
        ) from None
