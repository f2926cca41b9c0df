"""Streams of `datasets` in shards: a grid does at each (data, z) what stock accelerate does on as many processes."""

from __future__ import annotations

import torch
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader

from hf_axonn import Grid
from tests.accelerator.test_accelerator_data import FOUR_RANKS, TWO_RANKS, plain, with_loaders
from tests.helpers.ranks import run_ranks


def rows_of_shards(shards: list[int]):
    """The rows of some shards of a stream, seven of each."""
    for shard in shards:
        yield from ({"row": 100 * shard + place} for place in range(7))


def all_streams(grid: Grid | None) -> dict[str, object]:
    """Two epochs of streams of `datasets` in shards, as this rank sees them, and which rows are counted."""
    few = IterableDataset.from_generator(rows_of_shards, gen_kwargs={"shards": [0]})
    three = IterableDataset.from_generator(rows_of_shards, gen_kwargs={"shards": [0, 1, 2]})
    four = Dataset.from_dict({"row": list(range(20))}).to_iterable_dataset(num_shards=4)
    streams = {
        "one shard": few,
        "three shards": three,
        "four shards": four,
        "shuffled": four.shuffle(seed=3, buffer_size=5),
    }
    seen = {}
    for dispatch in (None, False):
        for name, stream in streams.items():
            torch.manual_seed(11)
            accelerator = with_loaders(grid, dispatch_batches=dispatch)
            loader = accelerator.prepare(DataLoader(stream.with_format("torch"), batch_size=2))
            epochs, counted = [], []
            for epoch in range(2):
                loader.set_epoch(epoch)
                for batch in loader:
                    epochs.append(plain(batch))
                    if dispatch is None:  # else positions may have unequal numbers of batches
                        counted += plain(accelerator.gather_for_metrics(batch["row"]))
            seen[f"{name}, dispatch_batches={dispatch}"] = epochs, counted
    return seen


def _compare_streams(grids: list[Grid], truth: list[dict]) -> None:
    for grid in grids:
        place = grid.place(torch.distributed.get_rank())
        assert all_streams(grid) == truth[place.index("data", "rows")], grid


def test_streams_in_shards_are_those_of_stock_accelerate():
    """Dispatched, by default, they are read as by one process; else a position has shards of its own."""
    truth = run_ranks(all_streams, 2, None)
    one = all_streams(None)
    for name, (epochs, counted) in truth[0].items():
        rows = [row for batch in one[name][0] for row in batch["row"]]
        if name.endswith("None"):
            assert counted == rows, name
        else:
            assert [len(epochs), len(truth[1][name][0])] == ([14, 8] if "three" in name else [len(epochs)] * 2), name
            own = [row for its in truth for batch in its[name][0] for row in batch["row"]]
            assert set(own) == set(rows) and (own != rows or "one" in name), name
    run_ranks(_compare_streams, 2, TWO_RANKS, truth)
    run_ranks(_compare_streams, 2, [Grid(x=2)], [one])
    run_ranks(_compare_streams, 4, FOUR_RANKS, truth)
