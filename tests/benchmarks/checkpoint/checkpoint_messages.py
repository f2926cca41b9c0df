"""Messages and files of a save and a load at thousands of ranks, counted on torch's `fake` backend.

    python -m tests.benchmarks.checkpoint.checkpoint_messages                  2,816 ranks and a fourth of them

This process is rank 0 of the world. The files and reports of the other ranks are written beside it, from the same
weights, where rank 0 would wait for them; a load of the checkpoint is counted as rank 0 and as the last rank. Tensors
are small, but as many ranks write them as write large ones. Counted are the collectives with the bytes that a rank
gives to and gets from each, the files that it opens and those that it asks for (`stat`).
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch

from hf_axonn import Grid, load_sharded, parallelize, save_sharded
from hf_axonn.checkpoint import partition, sharded
from hf_axonn.checkpoint import save as saving
from hf_axonn.checkpoint.manifest import SHARDS
from hf_axonn.checkpoint.partition import SavedTensor, Writers
from hf_axonn.checkpoint.shard_files import byte_sizes, describe, file_name, shards_of, write_shards
from hf_axonn.compat.torch import fake_world
from hf_axonn.distributed import consistency
from hf_axonn.distributed.collectives import observe
from tests.helpers.models import tiny_model


WRITTEN = "shards of all ranks"
COLUMNS = ("collectives", "bytes sent", "bytes received", "files opened", "files asked for", WRITTEN)


class Counts:
    """Messages and files of this process inside of `counting`, by COLUMNS; nothing inside of `paused`."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._paused = False

    def add(self, **numbers: int) -> None:
        if not self._paused:
            self.found.update({name.replace("_", " "): number for name, number in numbers.items()})

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        yield
        self._paused = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        stat, opened = os.stat, io.open

        def reducing(value, group, *, op):
            self.add(collectives=1, bytes_sent=value.nbytes, bytes_received=value.nbytes)
            return value  # no other rank has a problem

        def asking(*args, **kwargs):
            self.add(files_asked_for=1)
            return stat(*args, **kwargs)

        def opening(*args, **kwargs):
            self.add(files_opened=1)
            return opened(*args, **kwargs)

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(consistency, "reduce_quietly", reducing))
            stack.enter_context(mock.patch.object(consistency, "barrier", lambda: self.add(collectives=1)))
            stack.enter_context(mock.patch("os.stat", asking))
            stack.enter_context(mock.patch("builtins.open", opening))
            stack.enter_context(mock.patch("io.open", opening))
            stack.enter_context(observe(lambda kind, payload, group: self.add(collectives=1, bytes_sent=payload)))
            yield


def write_others(save: saving.Save, whole: dict[str, torch.Tensor], saved: dict[str, SavedTensor]) -> None:
    """Write what the other ranks would have written by now."""
    writers = Writers(saved, save.grid, byte_sizes(saved))
    states = save._states_digest()
    for rank in range(1, save.grid.size):
        files = {}
        if boxes := shards_of(saved, writers, rank):
            parts = {name: (whole[name][tuple(slice(*each) for each in box)], box) for name, box in boxes.items()}
            files = {file_name(rank): write_shards(save.stage / file_name(rank), parts)}
        part = {"save": save.save_id, "states": states, "files": files, "problem": ""}
        save._part(rank).write_text(json.dumps(part))
    for rank in range(saving.JOINED, save.grid.size, saving.JOINED):
        other = copy.copy(save)
        other.rank = rank
        other._join_reports()


def count(grid: Grid, folder: Path) -> dict[str, Counter[str]]:
    """Count a save as rank 0, and loads as rank 0 and as the last rank."""
    model = tiny_model("llama", dtype=torch.float32, hidden_size=64, intermediate_size=128, num_attention_heads=8)
    whole = {name: value.detach().clone() for name, value in model.state_dict().items()}
    found = {}
    with fake_world(grid.size), mock.patch.object(partition, "SMALL_BYTES", 0):
        parallelize(model, grid)
        saved = {name: describe(tensor) for name, tensor in sharded.model_tensors(model)[0].items()}
        counts, arrived = Counts(), saving.Save._parts_arrived

        def all_arrive(save: saving.Save) -> bool:
            with counts.paused():
                write_others(save, whole, saved)
            return arrived(save)

        with counts.counting(), mock.patch.object(saving.Save, "_parts_arrived", all_arrive):
            save_sharded(model, folder)
        found["save, rank 0"] = counts.found
        for rank in (0, grid.size - 1):
            counts = Counts()
            with counts.counting(), mock.patch.object(sharded, "world_rank", return_value=rank):
                load_sharded(model, folder)
            found[f"load, rank {rank:,}"] = counts.found
    for each in found.values():
        each[WRITTEN] = len(list(folder.glob(SHARDS)))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Messages and files of checkpoints at thousands of ranks.")
    parser.add_argument("--ranks", default="704,2816", help="multiples of 64")
    options = parser.parse_args()
    print(f"| ranks | | {' | '.join(COLUMNS)} |\n|{' --: |' * (2 + len(COLUMNS))}")
    for ranks in map(int, options.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            for what, found in count(Grid(data=ranks // 64, z=8, y=2, x=4), Path(folder) / "checkpoint").items():
                print(f"| {ranks:,} | {what} | {' | '.join(f'{found[name]:,}' for name in COLUMNS)} |", flush=True)


if __name__ == "__main__":
    main()
