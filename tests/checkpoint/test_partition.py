"""Who writes which piece: every element once, by the same rule everywhere, with work that does not grow with ranks."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hf_axonn import Grid
from hf_axonn.checkpoint.partition import MOST_WRITERS, SMALL_BYTES, SavedTensor, Writers, box_at, overlap, shards_in
from hf_axonn.checkpoint.shard_files import ShardReader
from tests.helpers import ROOT
from tests.helpers.ranks import all_grids


SHARDED_DIMS = [(1, 0, 0), (0, 1, 0), (0, 0, 0), (0, 0, 2), (None, None, None), (None, 1, None)]


def state(shape: tuple[int, ...]) -> dict[str, SavedTensor]:
    fitting = [dims for dims in SHARDED_DIMS if all(dim is None or dim < len(shape) for dim in dims)]
    return {f"t{index}": SavedTensor(shape, "F32", dims) for index, dims in enumerate(fitting)}


@pytest.mark.parametrize("shape", [(21, 8), (5, 3), (1, 1), (8, 6, 5), (7,), ()], ids=str)
@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
def test_every_element_is_written_once_by_a_rank_that_has_it(shape, small):
    for grid in [*all_grids(4), Grid(data=3, z=2, y=2, x=2)]:
        tensors = state(shape)
        writers = Writers(tensors, grid, dict.fromkeys(tensors, 8 if small else SMALL_BYTES))
        count = {name: torch.zeros(shape, dtype=torch.int) for name in tensors}
        for rank in range(grid.size):
            here = grid.coordinates(rank)
            for name in writers.names_of(here):
                box = box_at(tensors[name], grid, here)
                count[name][tuple(slice(*span) for span in box)] += 1
                for place, piece in shards_in(tensors[name], grid, box):
                    assert writers.rank(name, place) == rank and piece == box
        assert all((value == 1).all() for value in count.values()), (grid, count)


def test_a_box_is_found_in_the_pieces_that_hold_it():
    chance = random.Random(0)
    for _ in range(300):
        grid = chance.choice(all_grids(12))
        shape = tuple(chance.randint(1, 9) for _ in range(3))
        tensor = SavedTensor(shape, "F32", chance.choice(SHARDED_DIMS))
        starts = [chance.randrange(size) for size in shape]
        wanted = tuple((start, chance.randint(start + 1, size)) for start, size in zip(starts, shape, strict=True))
        expected = set()
        for rank in range(grid.size):
            box = box_at(tensor, grid, grid.coordinates(rank))
            if overlap(box, wanted) is not None:
                expected.add(box)
        found = [piece for _, piece in shards_in(tensor, grid, wanted)]
        assert sorted(found) == sorted(expected), (grid, tensor, wanted)


def test_copies_share_the_writing():
    grid = Grid(data=64, x=2)
    tensors = {f"layer.{index}": SavedTensor((4096, 4096), "F32", (1, 0, 0)) for index in range(64)}
    writers = Writers(tensors, grid, dict.fromkeys(tensors, 2**26))
    load = [sum(1 for _ in writers.names_of(grid.coordinates(rank))) for rank in range(grid.size)]
    assert sorted(set(load)) == [0, 4] and sum(count > 0 for count in load) == 2 * MOST_WRITERS


def layers(count: int) -> dict[str, SavedTensor]:
    tensors = {}
    for index in range(count):
        tensors |= {
            f"{index}.norm": SavedTensor((16384,), "F32", (None, None, None)),
            f"{index}.up": SavedTensor((53248, 16384), "BF16", (1, 0, 0)),
            f"{index}.down": SavedTensor((16384, 53248), "BF16", (0, 1, 0)),
        }
    return tensors


def plan(grid: Grid, tensors: dict[str, SavedTensor], rank: int) -> int:
    """What a rank works out to save, and to load on the same grid; returns the number of files that it would open."""
    shards_in.cache_clear()
    writers = Writers(tensors, grid, dict.fromkeys(tensors, 2**30))
    here = grid.coordinates(rank)
    assert list(writers.names_of(here)) or rank
    return files_read(grid, tensors, grid, rank)


def files_read(saved: Grid, tensors: dict[str, SavedTensor], now: Grid, rank: int) -> int:
    """How many files of a checkpoint from `saved` a rank of `now` opens."""
    here = now.coordinates(rank)
    reader = ShardReader(Path(), tensors, saved)
    return len(reader.plan({name: box_at(tensor, now, here) for name, tensor in tensors.items()}))


def test_the_work_of_a_rank_does_not_grow_with_their_number():
    """Of 4,096 ranks none hears of the others' pieces; a plan in common has 4,096 times as many as this one."""
    tensors = layers(126)
    seconds = {}
    for data in (4, 64):
        grid = Grid(data=data, z=8, y=2, x=4)
        started = time.process_time()
        files = [plan(grid, tensors, rank) for rank in (0, grid.size - 1)]
        seconds[grid.size] = time.process_time() - started
        assert max(files) <= 2 * MOST_WRITERS
    assert seconds[4096] < 4 * seconds[256] + 0.2, seconds


@pytest.mark.parametrize(
    "now", [Grid(data=64, z=16, y=2, x=2), Grid(data=32, z=8, y=4, x=4), Grid(z=512, x=8)], ids=str
)
def test_a_rank_opens_few_of_the_files_of_4096_ranks(now):
    """Also on another grid; of each piece that it needs a part of there are at most MOST_WRITERS files."""
    tensors, saved = layers(126), Grid(data=64, z=8, y=2, x=4)
    most = max(files_read(saved, tensors, now, rank) for rank in range(0, now.size, 511))
    assert most <= 4 * MOST_WRITERS + 1


@pytest.mark.parametrize(
    ("shape", "dims"),
    [((2, 2), (2, None, None)), ((2,), (0, 0)), ((-1,), (0, 0, 0)), ((True,), (0, 0, 0)), ((2,), (True, None, None))],
)
def test_impossible_tensors_are_refused(shape, dims):
    with pytest.raises(ValueError):
        SavedTensor(shape, "F32", dims)


@pytest.mark.slow
def test_the_benchmark_of_planning_runs():
    script = "tests.benchmarks.checkpoint.checkpoint_planning"
    command = [sys.executable, "-m", script, "--ranks", "64,128", "--layers", "2", "--dcp-tensors", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert [line.split("|")[1].strip() for line in done.stdout.splitlines()[2:]] == ["64", "128"]


@pytest.mark.slow
def test_rank_0_does_no_more_for_more_ranks():
    """The table of docs/checkpoints.md, on fewer ranks, all of which write: bytes, and files of a save and a load."""
    command = [sys.executable, "-m", "tests.benchmarks.checkpoint.checkpoint_messages", "--ranks", "64,512"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines())
    found = {(ranks, what): dict(zip(head[2:], map(_number, rest), strict=True)) for ranks, what, *rest in rows}
    for what in ("save, rank 0", "load, rank 0"):
        few, many = found["64", what], found["512", what]
        assert few["shards of all ranks"] == 64 and many["shards of all ranks"] > 400
        assert many["bytes received"] <= few["bytes received"] + 4 and many["bytes sent"] <= few["bytes sent"] + 16
        for files in ("files opened", "files asked for"):
            assert many[files] <= few[files] + 512 // 64, (what, files)


def _number(cell: str) -> int:
    return int(cell.replace(",", ""))
