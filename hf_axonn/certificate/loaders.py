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

from hf_axonn.certificate.rows import IGNORED
from hf_axonn.compat.torch import MapFetcher


COLLATORS = "DataCollator"  # with which the names of Transformers' classes begin
NOT_PREPARED = 0  # in place of a prepared loader's id


class Loading:
    """What loaders of a script share.

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

    def replacements(self) -> dict[tuple[Any, str], Any]:
        """Methods of loaders, for the time of the script."""
        make, length, adapt, begin = (
            DataLoader.__init__,
            DataLoader.__len__,
            DataLoaderAdapter.__init__,
            DataLoader.__iter__,
        )
        prepare, fetch = Accelerator.prepare_data_loader, MapFetcher.fetch
        named = names_of(make, "dataset")
        adapting: list[bool] = []  # while Accelerate makes a loader of one that is there

        def adapted(loader: Any, *words: Any, **options: Any) -> None:
            adapting.append(True)
            try:
                adapt(loader, *words, **options)
            finally:
                adapting.pop()

        def init(loader: Any, dataset: Any, *words: Any, **options: Any) -> None:
            options |= named(words)
            options |= {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "pin_memory": False}
            options.pop("multiprocessing_context", None)
            if adapting:
                loader.__dict__["of_accelerate"] = True
            else:
                self._order(dataset, options)
                self._enlarge(loader, options)
            make(loader, dataset, **options)
            if not isinstance(loader.collate_fn, _Collated):
                loader.collate_fn = _Collated(loader, loader.collate_fn, self)

        def __len__(loader: Any) -> int:
            times = loader.__dict__.get("batches_of_positions")
            if times is None or isinstance(loader.dataset, IterableDataset):
                return int(length(loader))
            batches = loader.batch_sampler
            rows, each = len(getattr(batches, "sampler", loader.sampler)), int(batches.batch_size) // times
            return int(rows // each if batches.drop_last else -(-rows // each))

        def prepared(accelerator: Any, loader: Any, *words: Any, **options: Any) -> Any:
            if accelerator.split_batches and loader.__dict__.pop("batches_of_positions", None):
                # The script's batch is that of all positions
                for holder in {id(owner): owner for owner in (loader, loader.batch_sampler) if owner}.values():
                    if holder.__dict__.get("batch_size"):
                        holder.__dict__["batch_size"] //= self.positions
            return prepare(accelerator, loader, *words, **options)

        def noting(stock: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
            def iterate(loader: Any) -> Iterator[Any]:
                for batch in stock(loader):
                    self._note(id(loader), batch)
                    yield batch

            return iterate

        def iterate_bare(loader: Any) -> Any:
            iterator = begin(loader)
            return iterator if "of_accelerate" in loader.__dict__ else self._noted(iterator)

        def fetched(fetcher: Any, indices: Any) -> Any:
            return _fetched(fetcher, indices, fetch)

        return {
            (DataLoaderAdapter, "__init__"): adapted,
            (DataLoader, "__init__"): init,
            (DataLoader, "__len__"): __len__,
            (DataLoader, "__iter__"): iterate_bare,
            (Accelerator, "prepare_data_loader"): prepared,
            (MapFetcher, "fetch"): fetched,
            **{(kind, "__iter__"): noting(kind.__iter__) for kind in (DataLoaderShard, DataLoaderDispatcher)},
        }

    def _order(self, dataset: Any, options: dict[str, Any]) -> None:
        """Accelerate draws an order of its own on many processes, and torch another one on one."""
        if options.get("shuffle") and options.get("generator") is None:
            options.pop("shuffle")
            options["sampler"] = RandomSampler(dataset)
        drawn_alike(options.get("sampler"), self.seed)
        drawn_alike(getattr(options.get("batch_sampler"), "sampler", None), self.seed)

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

    def _note(self, loader: int, batch: Any) -> None:
        self.seen.setdefault(loader, []).append(dict(batch) if isinstance(batch, Mapping) else {})

    def _noted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._note(NOT_PREPARED, batch)
            yield batch


def names_of(function: Callable[..., Any], *first: str) -> Callable[[Sequence[Any]], dict[str, Any]]:
    """What gives the positional arguments of a method, after those of `first`, their names."""
    names = [name for name in inspect.signature(function).parameters if name not in ("self", *first)]
    return lambda words: dict(zip(names, words, strict=False))


def drawn_alike(sampler: Any, seed: int) -> Any:
    """A sampler with a generator of its own, where it had none: all processes draw the same order."""
    if getattr(sampler, "generator", 0) is None:
        sampler.generator = torch.Generator().manual_seed(seed)
    return sampler


class _Collated:
    """A collator whose draws are those of the rows of one position."""

    def __init__(self, loader: DataLoader[Any], stock: Callable[[Any], Any], loading: Loading) -> None:
        self.loader, self.stock, self.loading = loader, stock, loading

    def __call__(self, rows: Any) -> Any:
        draws = _Draws(self.stock)
        batch = self.stock(rows)
        if draws.are_as_before() or not isinstance(rows, Sequence):
            return self.loading.change(batch)
        size = _batch_size(self.loader) // self.loading.positions or len(rows)
        parts = [rows[begin : begin + size] for begin in range(0, len(rows), size)]
        batches = []
        for part in parts:
            draws.seed(part)
            batches.append(self.stock(part))
        draws.restore()
        return self.loading.change(_joined(batches, [len(part) for part in parts]))


def _batch_size(loader: Any) -> int:
    return int(getattr(loader.batch_sampler, "batch_size", 0) or loader.batch_size or 0)


def _fetched(fetcher: Any, indices: Any, fetch: Callable[..., Any]) -> Any:
    """The batch of some indices; where items draw, each item's draws are those of its index."""
    draws = _Draws(fetcher.dataset)
    batch = fetch(fetcher, indices)
    if draws.are_as_before() or not fetcher.auto_collation:
        return batch
    items = []
    for index in indices:
        draws.seed(index)
        items.append(fetcher.dataset[index])
    draws.restore()
    return fetcher.collate_fn(items)


class _Draws:
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
        """Whether nothing was drawn since."""
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


def _joined(batches: Sequence[Any], rows: Sequence[int]) -> Any:
    """One batch of the batches of positions, padded to the longest of them.

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
        found[name] = torch.cat(_padded(values, IGNORED if name == "labels" else 0))
    else:
        if found:
            return type(batches[0])(found)
    raise ValueError(
        "the collator draws at random, and makes batches without a line for each row, which cannot be put together "
        "for one process: draw when the rows are made."
    )


def _padded(values: Sequence[Tensor], value: int) -> list[Tensor]:
    longest = [max(sizes) for sizes in zip(*(each.shape[1:] for each in values), strict=True)]
    found = []
    for each in values:
        missing = [size - had for size, had in zip(longest, each.shape[1:], strict=True)]
        found.append(nn.functional.pad(each, [n for size in reversed(missing) for n in (0, size)], value=value))
    return found
