"""What each rank reads when a big model is loaded: bytes and files, without weights and without the ranks.

    python -m tests.benchmarks.checkpoint.big_load --grid z=16,y=4,x=8           a model of the shape of Llama 3.1 405B
    python -m tests.benchmarks.checkpoint.big_load --grid z=2,x=4 --model DIR  config.json, and the index, if any

The model is built on the meta device and parallelized on torch's `fake` backend; what a rank reads follows from how
its parameters lie. Only for weights that a checkpoint has under the names of the model, as most dense models do.
tests/parallel/test_big_loads.py holds the numbers against what a real load reads.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from hf_axonn import Grid, parallelize
from hf_axonn.engine.dtensors import local_slices
from hf_axonn.topology.grid import SIZES


FILE_BYTES = 5 * 10**9  # of a file of the checkpoint, as save_pretrained cuts it
LLAMA_405B = {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "dtype": "bfloat16",
}


@dataclass
class Reads:
    """What one rank reads.

    Args:
        bytes: of all slices.
        largest: bytes of the largest slice.
        run: bytes of the shortest stretch that is read in one piece; under a page (4,096), more is read than needed.
        files: names of the files that it opens and reads from.
    """

    bytes: int = 0
    largest: int = 0
    run: int = sys.maxsize
    files: set[str] = field(default_factory=set)

    def add(self, name: str, shape: torch.Size, region: tuple[slice, ...], itemsize: int) -> None:
        """Count a slice of a row-major tensor."""
        sizes = [each.stop - each.start for each in region]
        if not math.prod(sizes):
            return
        nbytes = math.prod(sizes) * itemsize
        run = itemsize
        for size, full in zip(reversed(sizes), reversed(shape), strict=True):
            run *= size
            if size != full:
                break
        self.bytes += nbytes
        self.largest, self.run = max(self.largest, nbytes), min(self.run, run)
        self.files.add(name)


def meta_model(config: PreTrainedConfig, grid: Grid) -> nn.Module:
    """The model as a rank of the grid has it, without values; no other rank is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=grid.size)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        return parallelize(model, grid)[0]
    finally:
        dist.destroy_process_group()


def stored_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint has of a model: tied weights once."""
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def file_of_each(tensors: dict[str, torch.Tensor], file_bytes: int) -> dict[str, str]:
    """An index for a checkpoint that has none: files are filled in order."""
    index, used, number = {}, 0, 1
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if used and used + nbytes > file_bytes:
            used, number = 0, number + 1
        used += nbytes
        index[name] = f"model-{number:05d}.safetensors"
    return index


def reads_of(tensors: dict[str, torch.Tensor], index: dict[str, str], grid: Grid, rank: int) -> Reads:
    """What a rank reads of a checkpoint whose files are `index`."""
    reads = Reads()
    place = grid.place(rank)
    for name, tensor in tensors.items():
        region = tuple(slice(0, size) for size in tensor.shape)
        if isinstance(tensor, DTensor):
            region = local_slices(tensor.shape, tensor.placements, place)
        reads.add(index[name], tensor.shape, region, tensor.element_size())
    return reads


def report(tensors: dict[str, torch.Tensor], index: dict[str, str], grid: Grid, ranks: list[int]) -> str:
    """A table: what the ranks read, and how that compares with the checkpoint."""
    every = [reads_of(tensors, index, grid, rank) for rank in ranks]
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    parts = grid.x * grid.y * grid.z
    lines = [
        f"checkpoint: {total:,} bytes in {len(set(index.values())):,} files, {len(tensors):,} tensors",
        f"grid {grid}: {grid.size:,} ranks, of which {len(ranks):,} were worked out",
        "",
        "| of a rank | least | most |",
        "|---|--:|--:|",
    ]
    for title, values in {
        "bytes read": [read.bytes for read in every],
        "... times x * y * z / checkpoint": [read.bytes * parts / total for read in every],
        "bytes of the largest slice": [read.largest for read in every],
        "bytes of the shortest stretch": [read.run for read in every],
        "files touched": [len(read.files) for read in every],
    }.items():
        style = ",.3f" if isinstance(values[0], float) else ",d"
        lines.append(f"| {title} | {min(values):{style}} | {max(values):{style}} |")
    if len(ranks) == grid.size:
        lines += ["", f"read by all ranks together: {sum(read.bytes for read in every):,} bytes"]
    return "\n".join(lines)


def read_grid(text: str) -> Grid:
    """`z=2,x=4` as a grid."""
    try:
        sizes = dict(part.split("=") for part in text.split(","))
        unknown = set(sizes) - set(SIZES)
        if unknown:
            raise ValueError(f"no axis {', '.join(sorted(unknown))}")
        return Grid(**{axis: int(size) for axis, size in sizes.items()})
    except ValueError as problem:
        raise argparse.ArgumentTypeError(f"{text!r} is no grid such as z=2,x=4: {problem}") from None


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", type=read_grid, default="z=16,y=4,x=8", help="sizes, as in z=2,x=4")
    parser.add_argument("--model", type=Path, help="a directory with a config.json; the shape of 405B by default")
    parser.add_argument("--ranks", type=int, default=512, help="ranks to work out, spread over the grid")
    options = parser.parse_args(arguments)
    grid = options.grid
    if grid.size == 1 or options.ranks < 1:
        parser.error("--grid needs more than one rank, and --ranks is at least 1")
    config = LlamaConfig(**LLAMA_405B) if options.model is None else AutoConfig.from_pretrained(options.model)
    begin = time.monotonic()
    tensors = stored_tensors(meta_model(config, grid))
    index = options.model and options.model / "model.safetensors.index.json"
    if index and index.is_file():
        index = json.loads(index.read_text())["weight_map"]
        unknown = sorted(tensors.keys() - index.keys())
        if unknown:
            parser.error(f"the index of {options.model} has no {unknown[0]}: it names weights in another way")
    else:
        index = file_of_each(tensors, FILE_BYTES)
    count = min(options.ranks, grid.size)
    print(report(tensors, index, grid, [grid.size * k // count for k in range(count)]))
    print(f"\nworked out in {time.monotonic() - begin:.1f} s on one process, no weights on disk or in memory")
    return 0


if __name__ == "__main__":
    sys.exit(main())
