"""What planning a checkpoint costs at thousands of ranks: ours, and that of torch.distributed.checkpoint.

    python -m tests.benchmarks.checkpoint.checkpoint_planning          256, 1,024 and 4,096 ranks, a Llama of 80 layers
    python -m tests.benchmarks.checkpoint.checkpoint_planning --ranks 64,512 --layers 8
    python -m tests.benchmarks.checkpoint.checkpoint_planning --manifest-only --ranks 2816,64512

Ours, of one rank: to derive from the layout what it writes, and from which files it reads again, on the same grid and
on one twice as large; and of rank 0: to read what all ranks say they wrote, and to write and read the manifest. The
model is real and lies on torch's `fake` backend. Theirs, of rank 0: to make the global plan of the plans of all ranks
and to check it, after it has received them all (of `--dcp-tensors` tensors, as many objects as tensors times ranks).
With `--manifest-only`: lines, bytes and seconds of the manifest of a training checkpoint, with AdamW's moments and the
random state of each rank, on the usual grid and on one where every rank has shards of its own.
"""

from __future__ import annotations

import argparse
import json
import pickle
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_axonn import Grid, parallelize
from hf_axonn.checkpoint.manifest import Manifest
from hf_axonn.checkpoint.partition import MOST_WRITERS, SavedTensor, box_at, shards_in
from hf_axonn.checkpoint.save import JOINED, PARTS, Save
from hf_axonn.checkpoint.shard_files import ShardReader, describe, file_name, shards_to_write


def timed(function: Callable, *args) -> tuple[float, object]:
    """Seconds, and the result."""
    start = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - start, result


def saved_tensors(grid: Grid, layers: int) -> tuple[dict[str, SavedTensor], float]:
    """The layout of a model on a grid, and seconds that rank 0 takes to derive its share of it."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=grid.size)
    config = LlamaConfig(num_hidden_layers=layers, hidden_size=8192, intermediate_size=28672, num_attention_heads=64)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parallelize(model, grid)
    tensors = dict(model.named_parameters())
    saved = {name: describe(tensor) for name, tensor in tensors.items()}
    seconds, _ = timed(shards_to_write, tensors, saved, grid, 0)
    dist.destroy_process_group()
    return saved, seconds


def read_plan(tensors: dict[str, SavedTensor], saved: Grid, now: Grid, rank: int) -> int:
    """Work out where a rank of `now` finds its part of what was saved on another grid; the number of files."""
    shards_in.cache_clear()
    here = now.coordinates(rank)
    reader = ShardReader(Path(), tensors, saved)
    return len(reader.plan({name: box_at(tensor, now, here) for name, tensor in tensors.items()}))


def merge(tensors: dict[str, SavedTensor], grid: Grid) -> tuple[float, int]:
    """What rank 0 does when all have written, without the files themselves: seconds, and bytes of the manifest."""
    with tempfile.TemporaryDirectory() as folder:
        save = Save.__new__(Save)
        save.stage, save.grid, save.save_id, save._states = Path(folder), grid, "id", {"": tensors}
        states = save._states_digest()
        (save.stage / PARTS).mkdir()
        for rank in range(grid.size):
            (save.stage / file_name(rank)).touch()
            part = {"save": "id", "states": states, "problem": "", "files": {file_name(rank): (0, "0" * 64)}}
            save._part(rank).write_text(json.dumps(part))
        for save.rank in range(JOINED, grid.size, JOINED):
            save._cancelled, save.problem = threading.Event(), ""
            save._join_reports()
        save.rank = 0
        begin = time.perf_counter()
        text = Manifest("id", grid, save._files_of_parts()[0], [], tensors, {}).to_json()
        Manifest.from_json(text)
        return time.perf_counter() - begin, len(text)


def manifest_of_training(tensors: dict[str, SavedTensor], grid: Grid) -> tuple[int, int, float, float]:
    """Return lines and bytes of the manifest of a training checkpoint, and seconds to make and to read its text."""
    writers = min(grid.size, grid.size // grid.data * MOST_WRITERS)
    names = [folder + file_name(rank) for rank in range(writers) for folder in ("", "optimizer/")]
    names += [f"rng_state_{rank}.pth" for rank in range(grid.size)]
    files = {name: (2**30, "0" * 64) for name in names}
    moments = {f"{name}.{kind}": tensor for name, tensor in tensors.items() for kind in ("exp_avg", "exp_avg_sq")}
    write, text = timed(Manifest("id", grid, files, [], tensors, moments).to_json)
    read, _ = timed(Manifest.from_json, text)
    return len(files), len(text), write, read


def print_manifests(numbers: list[int], layers: int) -> None:
    """Print a row for each number of ranks and grid."""
    print("| ranks | grid | lines | bytes | written | read |\n|---|---|---|---|---|---|")
    for ranks in numbers:
        for grid in (Grid(data=ranks // 64, z=8, y=2, x=4), Grid(z=ranks // 64, y=8, x=8)):
            lines, nbytes, write, read = manifest_of_training(saved_tensors(grid, layers)[0], grid)
            print(f"| {ranks:,} | {grid} | {lines:,} | {nbytes:,} | {write:.2f} s | {read:.2f} s |", flush=True)


def theirs(tensors: dict[str, SavedTensor], grid: Grid) -> tuple[float, int]:
    """Seconds of the global plan of torch.distributed.checkpoint, and bytes of all local plans that it is made of."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    plans = []
    for rank in range(grid.size):
        here, items = grid.coordinates(rank), []
        for name, tensor in tensors.items():
            box = box_at(tensor, grid, here)
            offsets = torch.Size(start for start, _ in box)
            chunk = ChunkStorageMetadata(offsets, torch.Size(stop - start for start, stop in box))
            data = TensorWriteData(chunk, TensorProperties(torch.bfloat16), torch.Size(tensor.shape))
            items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
        plans.append(SavePlan(items))
    nbytes = len(pickle.dumps(plans[0])) * len(plans)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({}, is_coordinator=True)
    return timed(planner.create_global_plan, plans)[0], nbytes


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Planning of checkpoints at thousands of ranks.")
    parser.add_argument("--ranks", default="256,1024,4096")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--dcp-tensors", type=int, default=36, help="tensors of the global plan, for its memory")
    parser.add_argument("--manifest-only", action="store_true", help="the manifest of a training checkpoint alone")
    options = parser.parse_args()
    if options.manifest_only:
        print_manifests([int(ranks) for ranks in options.ranks.split(",")], options.layers)
        return
    ours = [
        "plan of a write",
        "of a read, same grid",
        "of a read, twice the ranks",
        "files read",
        "rank 0",
        "manifest",
    ]
    heads = ["ranks", "grid", *ours, "theirs: global plan", "of all tensors", "received by rank 0"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for ranks in map(int, options.ranks.split(",")):
        grid = Grid(data=ranks // 64, z=8, y=2, x=4)
        tensors, write = saved_tensors(grid, options.layers)
        same, files = timed(read_plan, tensors, grid, grid, ranks - 1)
        more, _ = timed(read_plan, tensors, grid, Grid(data=ranks // 64, z=16, y=2, x=4), ranks - 1)
        rank_0, manifest = merge(tensors, grid)
        some = dict(list(tensors.items())[1 : options.dcp_tensors + 1])
        plan, nbytes = theirs(some, grid)
        scale = len(tensors) / len(some)
        cells = [f"{ranks:,}", str(grid), *(f"{seconds:.3f} s" for seconds in (write, same, more)), str(files)]
        cells += [f"{rank_0:.2f} s", f"{manifest / 2**20:.2f} MiB", f"{plan:.1f} s", f"{plan * scale:.0f} s"]
        print(f"| {' | '.join([*cells, f'{nbytes * scale / 2**20:,.0f} MiB'])} |", flush=True)


if __name__ == "__main__":
    main()
