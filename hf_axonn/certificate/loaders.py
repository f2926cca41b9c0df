"""Loaders of a script: one process has the rows that all positions have together, in the same order and drawn alike.

What is drawn at random belongs to rows and not to processes: an order is that of a seed, an item's draws are those of
its index, and those of a collator (masks of a masked language model) are those of one position's rows. One process
collates the rows of each position by themselves and puts them together.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderAdapter, DataLoaderDispatcher, DataLoaderShard
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from hf_axonn.certificate.patching import Patches, Stock, patch
from hf_axonn.certificate.rows import IGNORED
from hf_axonn.compat.replaced import replace_attributes
from hf_axonn.compat.torch import MapFetcher


COLLATORS = "DataCollator"  # with which the names of Transformers' classes begin
NOT_PREPARED = 0  # in place of a prepared loader's id


class LoaderPatches(Patches):
    """Loaders give the rows of all positions, and their batches are noted.

    Args:
        positions: by which a batch of one process is larger than the script's; 1 under the launch file.
        seed: of orders.
        change: makes a batch one for the small model.
    Attributes:
        seen: batches that a loader has given and no backward pass has used, by the id of the prepared loader.
    """

    def __init__(self, positions: int, seed: int, change: Callable[[Any], Any]) -> None:
        self.positions, self.seed, self.change = positions, seed, change
        self.seen: dict[int, list[dict[str, Any]]] = {}
        self.adapting = False  # inside, Accelerate makes a loader of one that is there

    @patch(DataLoaderAdapter, name="__init__")
    def adapt(self, stock: Stock, loader: Any, *args: Any, **options: Any) -> None:
        """Let loaders that are made inside be known as Accelerate's."""
        with replace_attributes({(self, "adapting"): True}):
            stock(loader, *args, **options)

    @patch(DataLoader, name="__init__")
    def init(self, stock: Stock, loader: Any, dataset: Any, *args: Any, **options: Any) -> None:
        """Make a loader in this process, with an order of its own and batches for all positions."""
        options |= name_arguments(stock, (dataset, *args))
        options |= {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "pin_memory": False}
        options.pop("multiprocessing_context", None)
        if self.adapting:
            loader.__dict__["of_accelerate"] = True
        else:
            self._order(dataset, options)
            self._enlarge(loader, options)
        stock(loader, **options)
        if not isinstance(loader.collate_fn, PositionCollator):
            loader.collate_fn = PositionCollator(loader, loader.collate_fn, self)

    @patch(DataLoader, name="__len__")
    def count_batches(self, stock: Stock, loader: Any) -> int:
        """Return the number of batches that one position has."""
        times = loader.__dict__.get("batches_of_positions")
        if times is None or isinstance(loader.dataset, IterableDataset):
            return int(stock(loader))
        batches = loader.batch_sampler
        rows, size = len(getattr(batches, "sampler", loader.sampler)), int(batches.batch_size) // times
        return int(rows // size if batches.drop_last else -(-rows // size))

    @patch(DataLoader, name="__iter__")
    def iterate(self, stock: Stock, loader: Any) -> Any:
        """Note each batch of a loader that is not prepared."""
        iterator = stock(loader)
        return iterator if "of_accelerate" in loader.__dict__ else self._note_all(NOT_PREPARED, iterator)

    @patch(DataLoaderShard, DataLoaderDispatcher, name="__iter__")
    def iterate_prepared(self, stock: Stock, loader: Any) -> Iterator[Any]:
        """Note each batch."""
        return self._note_all(id(loader), stock(loader))

    @patch(Accelerator)
    def prepare_data_loader(self, stock: Stock, accelerator: Any, loader: Any, *args: Any, **options: Any) -> Any:
        """Prepare a loader; where batches are split, the script's batch is that of all positions already."""
        if accelerator.split_batches and loader.__dict__.pop("batches_of_positions", None):
            for holder in {id(owner): owner for owner in (loader, loader.batch_sampler) if owner}.values():
                if holder.__dict__.get("batch_size"):
                    holder.__dict__["batch_size"] //= self.positions
        return stock(accelerator, loader, *args, **options)

    @patch(MapFetcher)
    def fetch(self, stock: Stock, fetcher: Any, indices: Any) -> Any:
        """Fetch the batch of some indices; where items draw, each item's draws are those of its index."""
        draws = Draws(fetcher.dataset)
        batch = stock(fetcher, indices)
        if draws.are_as_before() or not fetcher.auto_collation:
            return batch
        items = []
        for index in indices:
            draws.seed(index)
            items.append(fetcher.dataset[index])
        draws.restore()
        return fetcher.collate_fn(items)

    def _order(self, dataset: Any, options: dict[str, Any]) -> None:
        """Accelerate draws an order of its own on many processes, and torch another one on one."""
        if options.get("shuffle") and options.get("generator") is None:
            options.pop("shuffle")
            options["sampler"] = RandomSampler(dataset)
        draw_alike(options.get("sampler"), self.seed)
        draw_alike(getattr(options.get("batch_sampler"), "sampler", None), self.seed)

    def _enlarge(self, loader: Any, options: dict[str, Any]) -> None:
        """Let a batch of one process be as many rows as all positions have."""
        if self.positions == 1:
            return
        sampler: Any = options.get("batch_sampler")
        if isinstance(getattr(sampler, "batch_size", None), int):
            sampler.batch_size *= self.positions
        elif sampler is not None:
            kind = type(sampler).__name__
            raise ValueError(f"{kind} has no batch_size, so that one process cannot have the rows of all.")
        elif options.get("batch_size", 1) is not None:
            options["batch_size"] = options.get("batch_size", 1) * self.positions
        else:
            return
        loader.__dict__["batches_of_positions"] = self.positions

    def _note_all(self, loader: int, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.seen.setdefault(loader, []).append(dict(batch) if isinstance(batch, Mapping) else {})
            yield batch


def name_arguments(method: Callable[..., Any], values: Sequence[Any]) -> dict[str, Any]:
    """Return the positional arguments of a method, without the object, by their names."""
    return dict(zip([*inspect.signature(method).parameters][1:], values, strict=False))


def draw_alike(sampler: Any, seed: int) -> Any:
    """Give a sampler a generator of its own, where it has none, so that all processes draw the same order."""
    if getattr(sampler, "generator", 0) is None:
        sampler.generator = torch.Generator().manual_seed(seed)
    return sampler


class PositionCollator:
    """A collator whose draws are those of the rows of one position."""

    def __init__(self, loader: DataLoader[Any], stock: Callable[[Any], Any], loading: LoaderPatches) -> None:
        self.loader, self.stock, self.loading = loader, stock, loading

    def __call__(self, rows: Any) -> Any:
        draws = Draws(self.stock)
        batch = self.stock(rows)
        if draws.are_as_before() or not isinstance(rows, Sequence):
            return self.loading.change(batch)
        whole = getattr(self.loader.batch_sampler, "batch_size", 0) or self.loader.batch_size or 0
        size = int(whole) // self.loading.positions or len(rows)
        parts = [rows[begin : begin + size] for begin in range(0, len(rows), size)]
        batches = []
        for part in parts:
            draws.seed(part)
            batches.append(self.stock(part))
        draws.restore()
        return self.loading.change(join_batches(batches, [len(part) for part in parts]))


class Draws:
    """The generators of random numbers of this process, and those that an object has."""

    def __init__(self, owner: Any) -> None:
        self.owner = getattr(owner, "__self__", owner)
        self.before = self._states()

    def _states(self) -> list[Any]:
        own = [generator.get_state() for generator in self._generators(torch.Generator)]
        own += [generator.getstate() for generator in self._generators(random.Random)]
        own += [generator.bit_generator.state for generator in self._generators(np.random.Generator)]
        return [torch.get_rng_state(), random.getstate(), np.random.get_state(), *own]

    def _generators(self, kind: type) -> list[Any]:
        found, of_collator = [], [*getattr(self.owner, "__dict__", {}).values()]
        for value in of_collator:  # one that stands in another, as Trainer puts it
            of_collator += [*vars(value).values()] if type(value).__name__.startswith(COLLATORS) else []
            found += [value] if isinstance(value, kind) else []
        return found

    def are_as_before(self) -> bool:
        """Return whether nothing was drawn since."""
        return _digest(self._states()) == _digest(self.before)

    def seed(self, of: Any) -> None:
        """Let what is drawn next be a function of an object."""
        seed = int.from_bytes(_digest(of)[:4], "big")
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        for generator in self._generators(torch.Generator):
            generator.manual_seed(seed)
        for generator in self._generators(random.Random):
            generator.seed(seed)
        for generator in self._generators(np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(seed).state

    def restore(self) -> None:
        """Let this process draw what it would have drawn without what was seeded."""
        torch.set_rng_state(self.before[0])
        random.setstate(self.before[1])
        np.random.set_state(self.before[2])


def _digest(value: Any) -> bytes:
    """The same for the same numbers, in any process."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Mapping):
            for name in sorted(value, key=str):
                add((name, value[name]))
        elif isinstance(value, (Tensor, np.ndarray)):
            found.update(repr(tuple(value.shape)).encode() + np.asarray(value).tobytes())
        elif isinstance(value, (list, tuple)) and not all(isinstance(each, (int, float)) for each in value):
            for each in value:
                add(each)
        else:
            found.update(repr(value).encode())

    add(value)
    return found.digest()


def join_batches(batches: Sequence[Any], rows: Sequence[int]) -> Any:
    """Join the batches of positions, padded to the longest of them.

    Raises:
        ValueError: they have not one entry for each row.
    """
    if len(batches) == 1:
        return batches[0]
    found = {}
    for name in batches[0] if isinstance(batches[0], Mapping) else ():
        values = [batch[name] for batch in batches]
        if not all(isinstance(value, Tensor) and value.dim() for value in values):
            break
        if [len(value) for value in values] != [*rows]:
            break
        found[name] = torch.cat(_pad(values, IGNORED if name == "labels" else 0))
    else:
        if found:
            return type(batches[0])(found)
    raise ValueError(
        "the collator draws at random, and makes batches without a line for each row, which cannot be put together "
        "for one process: draw when the rows are made."
    )


def _pad(values: Sequence[Tensor], value: int) -> list[Tensor]:
    longest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in values), strict=True)]
    padded = []
    for tensor in values:
        missing = [size - own for size, own in zip(longest, tensor.shape[1:], strict=True)]
        padded.append(nn.functional.pad(tensor, [n for size in reversed(missing) for n in (0, size)], value=value))
    return padded
