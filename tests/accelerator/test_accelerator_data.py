"""Who gets which samples: a grid does at each (data, z) what stock accelerate does on each of as many processes."""

from __future__ import annotations

import functools

import accelerate
import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from hf_axonn import Grid
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import new_accelerator


ROWS = 11
TWO_RANKS = [Grid(data=2), Grid(z=2)]
FOUR_RANKS = [Grid(z=2, x=2), Grid(data=2, y=2), Grid(z=4, context=2)]


class Numbers(IterableDataset):
    """An iterable data set, of known length or not."""

    def __init__(self, rows: int = ROWS, *, sized: bool = True) -> None:
        self.rows = rows
        self.epoch = 0
        if sized:
            self.__class__ = SizedNumbers

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        yield from (torch.arange(2) + 10 * row + 1000 * self.epoch for row in range(self.rows))


class SizedNumbers(Numbers):
    def __len__(self) -> int:
        return self.rows


class Augmented(Dataset):
    """Every look at a row is another one."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.tensor([row, torch.rand(())])


def with_loaders(grid: Grid | None, **options) -> Accelerator:
    return new_accelerator(grid, dataloader_config=DataLoaderConfiguration(**options))


def loaders() -> dict[str, DataLoader]:
    """What may be handed to `prepare`."""
    rows = [{"ids": torch.arange(3) + 10 * row, "row": row} for row in range(ROWS)]
    shuffled = {"shuffle": True, "generator": torch.Generator().manual_seed(5)}
    sampler = BatchSampler(RandomSampler(rows, generator=torch.Generator().manual_seed(3)), 2, drop_last=False)
    return {
        "map": DataLoader(rows, batch_size=2),
        "tuples": DataLoader(TensorDataset(torch.arange(ROWS), torch.arange(ROWS) % 2), batch_size=4),
        "shuffled": DataLoader(rows, batch_size=2, **shuffled),
        "shuffled by torch's generator": DataLoader(rows, batch_size=2, shuffle=True),
        "drop_last": DataLoader(rows, batch_size=2, drop_last=True),
        "batch_sampler": DataLoader(rows, batch_sampler=sampler),
        "fewer rows than ranks": DataLoader(rows[:1], batch_size=2),
        "exact": DataLoader(rows[:8], batch_size=4),
        "workers": DataLoader(rows, batch_size=2, num_workers=1),
        "iterable": DataLoader(Numbers(), batch_size=2),
        "unsized": DataLoader(Numbers(sized=False), batch_size=2),
    }


CONFIGS = {
    "default": {},
    "dispatch": {"dispatch_batches": True},
    "no dispatch": {"dispatch_batches": False},
    "split": {"split_batches": True},
    "split, dispatch": {"split_batches": True, "dispatch_batches": True},
    "uneven": {"even_batches": False},
    "seedable": {"use_seedable_sampler": True, "data_seed": 7},
    "seedable, dispatch": {"use_seedable_sampler": True, "data_seed": 7, "dispatch_batches": True},
}


OFTEN = ("map", "shuffled", "batch_sampler", "fewer rows than ranks", "unsized")  # under settings besides the default


def plain(value):
    """Batches as lists, to compare and to send home."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(its) for key, its in value.items()}
    return [plain(its) for its in value] if isinstance(value, (list, tuple)) else value


def all_batches(grid: Grid | None, every: bool) -> dict[str, object]:
    """Two epochs of loaders under every configuration, and one that skips batches: as this rank sees them.

    `every`: of all loaders, else with other settings than the default of those in `OFTEN`.
    """
    seen = {}
    for setting, options in CONFIGS.items():
        for name in loaders():
            if setting.startswith("split") and (name == "fewer rows than ranks" or name.startswith("batch")):
                continue  # a batch size that stock accelerate refuses, or a sampler that it cannot split
            if setting != "default" and (name == "workers" or not (every or name in OFTEN)):
                continue
            accelerator = with_loaders(grid, **options)
            torch.manual_seed(11)
            loader = accelerator.prepare(loaders()[name])
            uneven = setting == "uneven"
            epochs, gathered = [], []
            for _ in range(2):
                for batch in loader:
                    gathered.append(None if uneven else plain(accelerator.gather_for_metrics(batch)))
                    epochs.append(plain(batch))
            # Of a dispatching loader stock accelerate skips batches before they are put together, and can fail at it.
            skipped = [] if dispatches(setting, name) else skip_first_batches(loader, 1)
            by_method = [] if dispatches(setting, name) else accelerator.skip_first_batches(loader, 1)
            seen[setting, name] = {
                "epochs": epochs,
                "gathered": gathered,
                "skipped": [plain(batch) for batch in skipped],
                "skipped by method": [plain(batch) for batch in by_method],
                "length": None if name == "unsized" else len(loader),
            }
    return seen


def dispatches(setting: str, name: str) -> bool:
    """Whether rank 0 reads for all."""
    return "dispatch" in setting.split(", ") or (setting != "no dispatch" and name in ("iterable", "unsized"))


def all_operations(grid: Grid | None) -> dict[str, object]:
    """gather, reduce and the like, of values that belong to the samples of this rank."""
    accelerator = with_loaders(grid)
    dp_rank, dp_size = dp_rank_of(accelerator, grid)
    own = torch.arange(3.0) + 10 * dp_rank
    results = {
        "gather": accelerator.gather({"a": (own, own[:1]), "b": [torch.tensor([dp_rank])]}),
        "gather nothing": accelerator.gather(own[:0]),
        "gather matrices": accelerator.gather(own.expand(2, 3)),
        "objects": accelerator.gather_for_metrics([f"text {dp_rank}"], use_gather_object=True),
        "texts": accelerator.gather_for_metrics([("text", dp_rank)]),
        "sum": accelerator.reduce(own),
        "sum of counts": accelerator.reduce({"rows": torch.tensor(3 + dp_rank)}, reduction="sum"),
        "mean": accelerator.reduce([own], reduction="mean"),
        "none": accelerator.reduce(own, reduction="none"),
        "infinite": accelerator.reduce(torch.tensor([float("inf"), 1.0])),
        "padded": accelerator.gather(accelerator.pad_across_processes(own[: 1 + dp_rank], pad_index=-1)),
    }
    ran = accelerator.on_process(lambda: dp_rank, process_index=dp_size - 1)()
    results["on_process"] = [place for place in accelerate.utils.gather_object([ran]) if place is not None]
    # What stock accelerate 1.12 sums.
    assert grid is None or torch.equal(accelerator.reduce(own, reduction="max"), own + 10 * (dp_size - 1 - dp_rank))
    with pytest.raises(TypeError, match="Unsupported types"):
        accelerator.reduce(1.0, reduction="max")
    for inputs in (list("abcde"), torch.arange(5), {"a": list(range(5)), "b": torch.arange(5)}):
        for padding in (False, True):
            with accelerator.split_between_processes(inputs, apply_padding=padding) as part:
                results[f"split {type(inputs).__name__} {padding}"] = plain(part)
            inputs = list("abcde") if isinstance(inputs, list) else inputs
            if isinstance(inputs, dict):
                break  # accelerate changes it in place
    return plain(results) | {"dp_size": dp_size}


def dp_rank_of(accelerator: Accelerator, grid: Grid | None) -> tuple[int, int]:
    """This rank's place among those that have different samples, and their number."""
    if grid is not None:
        assert (accelerator.process_index, accelerator.num_processes) == (rows_index(grid), grid.dp_size)
    return accelerator.process_index, accelerator.num_processes


def rows_index(grid: Grid) -> int:
    """This rank's place among those that are given different rows."""
    return grid.place(torch.distributed.get_rank()).index("data", "rows")


def observe(grid: Grid | None, every: bool) -> tuple[dict, dict]:
    return all_batches(grid, every), all_operations(grid)


def _compare(grids: list[Grid], truth: list[tuple[dict, dict]], every: bool) -> None:
    for grid in grids:
        batches, operations = truth[rows_index(grid)]
        own_batches, own_operations = observe(grid, every)
        assert own_batches.keys() == batches.keys()
        for case, wanted in batches.items():
            for what, value in wanted.items():
                assert own_batches[case][what] == value, (grid, case, what)
        assert own_operations == operations, grid


def _dispatching(grids: list[Grid]) -> None:
    """What stock accelerate cannot do: skip batches of such a loader, over x and y, and fail without a hang."""
    for grid in grids:
        for split in (False, True):
            accelerator = with_loaders(grid, dispatch_batches=True, split_batches=split)
            loader = accelerator.prepare(loaders()["map"])
            whole = plain(list(loader))
            assert loader.total_dataset_length == ROWS
            for skip in (skip_first_batches, accelerator.skip_first_batches):
                skipping = skip(loader, 2)
                gathered = [accelerator.gather_for_metrics(batch)["row"] for batch in skipping]
                assert plain(list(skip(loader, 2))) == whole[2:] and whole[2:]
                assert torch.cat(gathered).tolist() == list(range(4 if split else 8, ROWS))
            assert list(accelerator.prepare(DataLoader(Numbers(0), batch_size=2))) == []
            # The generator of the ranks stays one, though rank 0 alone looks at rows that draw from it.
            torch.manual_seed(0)
            seen = [plain(batch) for batch in accelerator.prepare(DataLoader(Augmented(), batch_size=2, shuffle=True))]
            assert len({value for batch in seen for _, value in batch}) == len(
                [row for batch in seen for row in batch]
            )
            states = accelerator.gather(torch.get_rng_state()[None].long())
            assert all(torch.equal(state, torch.get_rng_state().long()) for state in states)
    for grid in (FOUR_RANKS[0], Grid(z=4)):  # as a Trainer that resumes in the second epoch
        accelerator = with_loaders(grid, dispatch_batches=True, use_seedable_sampler=True)
        loader = accelerator.prepare(loaders()["shuffled"])
        first, second = (plain(list(loader)) for _ in range(2))
        skipping = skip_first_batches(loader, 1)
        skipping.set_epoch(1)
        assert plain(list(skipping)) == second[1:] != first[1:], grid
    batches, saved = [], []
    for resumed in (False, True):  # in the middle of the second epoch
        torch.manual_seed(5)
        accelerator = with_loaders(FOUR_RANKS[0], dispatch_batches=True)
        loader = accelerator.prepare(DataLoader(list(range(24)), batch_size=2, shuffle=True))
        if resumed:
            accelerator.sample_order.resume(saved, [loader])
            assert plain(list(skip_first_batches(loader, 2))) == batches[2:]
            continue
        list(loader)
        for batch in loader:
            batches.append(plain(batch))
            if len(batches) == 2:
                saved = accelerator.sample_order.state([loader])
    accelerator = with_loaders(FOUR_RANKS[0], dispatch_batches=True)
    ragged = DataLoader([torch.arange(row + 1) for row in range(4)], batch_size=1)
    with pytest.raises(RuntimeError, match="rank 0, which reads for all, failed: .*dispatch_batches=False"):
        list(accelerator.prepare(ragged))
    with pytest.raises(RuntimeError, match="ZeroDivisionError: broken row"):
        list(accelerator.prepare(DataLoader(Broken(), batch_size=1)))
    uneven = with_loaders(FOUR_RANKS[0], dispatch_batches=True, split_batches=True)
    with pytest.raises(ValueError, match="batch size of 3: it must be divisible by data . z / context = 2"):
        uneven.prepare(DataLoader(list(range(6)), batch_size=3))
    sizes = DataLoader(list(range(7)), batch_sampler=[[0, 1], [2, 3, 4], [5, 6]])
    with pytest.raises(RuntimeError, match="a batch of 5 rows cannot be divided among data . z / context = 2"):
        list(with_loaders(FOUR_RANKS[0], dispatch_batches=True).prepare(sizes))
    images = DataLoader([{"input_ids": torch.arange(3), "pixel_values": torch.ones(2)}] * 4, batch_size=2)
    with pytest.raises(RuntimeError, match="a batch with pixel_values beside input_ids cannot be divided"):
        list(with_loaders(FOUR_RANKS[0], dispatch_batches=True).prepare(images))
    stateful = with_loaders(FOUR_RANKS[0], dispatch_batches=True, use_stateful_dataloader=True)
    with pytest.raises(ValueError, match="use_stateful_dataloader with dispatch_batches"):
        stateful.prepare(DataLoader(list(range(6)), batch_size=2))


class Broken(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> torch.Tensor:
        if row == 2:
            raise ZeroDivisionError("broken row")
        return torch.tensor([row])


@pytest.mark.parametrize(
    "grids",
    [FOUR_RANKS[::2], pytest.param(FOUR_RANKS[1:2], marks=pytest.mark.slow)],
    ids=["x and context", "data and y"],
)
def test_dispatching_over_x_and_y(grids):
    run_ranks(_dispatching, 4, grids)


def _uneven() -> None:
    """Ranks that have a batch more than others would wait in the model for them."""
    model = tiny_model("llama")
    for grid in TWO_RANKS:
        for rows, split, counts in ((3, False, "2 batches to some ranks and 1"), (5, True, "3 batches to some ranks")):
            loader = DataLoader(list(range(rows)), batch_size=2 if split else 1)
            accelerator = with_loaders(grid, even_batches=False, split_batches=split)
            accelerator.prepare(loader)  # of use without a model
            with pytest.raises(ValueError, match=counts):
                accelerator.prepare_model(tiny_model("llama"))
            accelerator = with_loaders(grid, even_batches=False, split_batches=split)
            model = accelerator.prepare(tiny_model("llama"))
            with pytest.raises(ValueError, match=counts):
                accelerator.prepare(loader)
            even = accelerator.prepare(DataLoader(list(range(6)), batch_size=2, drop_last=True))
            assert model is not None and len(even) == (3 if split else 1)


def test_uneven_numbers_of_batches_are_refused_with_a_model():
    run_ranks(_uneven, 2)


def _seeds() -> None:
    """Ranks that share samples shuffle alike, whatever the state of their own generators."""
    for grid in (Grid(x=2), Grid(z=2)):
        for config in ({}, {"dispatch_batches": True}):
            accelerator = with_loaders(grid, **config)
            torch.manual_seed(torch.distributed.get_rank())
            batches = BatchSampler(RandomSampler(range(8)), 2, drop_last=False)
            for loader in (
                DataLoader(list(range(8)), batch_size=2, shuffle=True),
                DataLoader(list(range(8)), batch_sampler=batches),
            ):
                loader = accelerator.prepare(loader)
                for _ in range(2):
                    seen = torch.cat([accelerator.gather_for_metrics(batch) for batch in loader])
                    assert sorted(seen.tolist()) == list(range(8)), (grid, config)
                    own = torch.cat(list(loader))
                    every = accelerate.utils.gather(own[None])
                    assert grid.z > 1 or torch.equal(every[0], every[1]), (grid, config)


def test_ranks_with_other_seeds_share_their_samples():
    run_ranks(_seeds, 2)


def _triggers() -> None:
    for grid in FOUR_RANKS:
        accelerator = with_loaders(grid)
        assert not accelerator.check_trigger()
        for rank in range(4):  # also one that shares its samples with a lower rank
            if torch.distributed.get_rank() == rank:
                accelerator.set_trigger()
            assert accelerator.check_trigger()
            assert not accelerator.check_trigger()


def test_a_trigger_of_any_rank_counts():
    run_ranks(_triggers, 4)


@functools.cache
def stock(every: bool) -> list[tuple[dict, dict]]:
    """What stock accelerate does, on two processes."""
    return run_ranks(observe, 2, None, every)


# Quick over z is that beside x, below.
@pytest.mark.parametrize(
    ("grids", "every"),
    [(TWO_RANKS[:1], False), pytest.param(TWO_RANKS, True, marks=pytest.mark.slow)],
    ids=["some", "every"],
)
def test_data_and_z_are_processes_of_stock_accelerate(grids, every):
    first, second = stock(every)
    assert first[0]["dispatch", "map"]["epochs"] != second[0]["dispatch", "map"]["epochs"]
    run_ranks(_compare, 2, grids, [first, second], every)


@pytest.mark.parametrize(
    ("grid", "every"),
    [(FOUR_RANKS[0], False), *(pytest.param(grid, True, marks=pytest.mark.slow) for grid in FOUR_RANKS)],
    ids=str,
)
def test_ranks_of_x_and_y_share_what_a_process_gets(grid, every):
    run_ranks(_compare, 4, [grid], stock(every), every)


@pytest.mark.slow  # those of z and x share, too
def test_ranks_of_x_alone_are_one_process():
    run_ranks(_compare, 2, [Grid(x=2), Grid(z=2, context=2)], [observe(None, True)], True)
