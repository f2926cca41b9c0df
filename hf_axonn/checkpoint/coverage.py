"""Check that the shards of a checkpoint are all of it: every slice of every tensor in one file, and nothing else.

The manifest says what was saved and on which grid, from which follows what stands in each file (partition.py). That is
compared with the files that there are, and with the header of each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from hf_axonn.checkpoint.partition import Box, SavedTensor, Writers, find_shards
from hf_axonn.checkpoint.shard_files import SHARDING, byte_sizes, file_name, shards_of
from hf_axonn.topology.grid import Grid


class Coverage:
    """Contents that each file of one sharded state must have. No communication.

    Args:
        tensors: what was saved.
        grid: on which it was saved.
    """

    def __init__(self, tensors: Mapping[str, SavedTensor], grid: Grid) -> None:
        self.tensors, self.grid = tensors, grid
        self._writers = Writers(tensors, grid, byte_sizes(tensors))

    def missing(self, files: Collection[str], *, share: int = 0, shares: int = 1) -> str | None:
        """Return the first slice that none of these files can hold, and the number of tensors with gaps; else None.

        Args:
            files: names of the files that there are.
            share, shares: look at every `shares`-th tensor only, from number `share` on.
        """
        names = sorted(self.tensors)[share::shares]
        lacking = [(name, *gap) for name in names if (gap := self._first_gap(name, files)) is not None]
        if not lacking:
            return None
        name, file, box = lacking[0]
        gaps = f"{len(lacking)} of {len(names)} tensors have gaps"
        return f"{file} is missing, which holds {slice_of(name, box)}: {gaps}"

    def _first_gap(self, name: str, files: Collection[str]) -> tuple[str, Box] | None:
        """Return file and box of the first missing shard. Each shard before it is in one file, so that this ends."""
        for place, box in find_shards(self.tensors[name], self.grid, self.tensors[name].full_box):
            file = file_name(self._writers.rank(name, place))
            if file not in files:
                return file, box
        return None

    def problem_of(self, path: Path) -> str | None:
        """Describe what is wrong with the tensors of a file, by its header; None if they are as they must be."""
        from safetensors import SafetensorError, safe_open

        found = re.fullmatch(r"shard-(\d+)-.*", path.name)
        rank = int(found[1]) - 1 if found else -1
        if not 0 <= rank < self.grid.size or path.name != file_name(rank):
            return f"is no file that the grid {self.grid} writes"
        expected = shards_of(self.tensors, self._writers, rank)
        try:
            with safe_open(path, framework="pt") as file:
                starts = json.loads((file.metadata() or {}).get(SHARDING, "{}"))
                names = set(file.keys())
                if more := sorted(names - expected.keys()):
                    return f"holds {more[0]}, of which it has to hold nothing"
                if less := sorted(expected.keys() - names):
                    first = slice_of(less[0], expected[less[0]])
                    return f"lacks {len(less)} of its {len(expected)} tensors, the first {first}"
                for name, box in expected.items():
                    part = file.get_slice(name)
                    shape, dtype = tuple(part.get_shape()), self.tensors[name].dtype
                    if part.get_dtype() != dtype:
                        return f"holds {name} as {part.get_dtype()} and not as {dtype}"
                    if shape != tuple(stop - start for start, stop in box):
                        return f"holds a part of {name} of the shape {shape} and not {slice_of(name, box)}"
                    if starts and starts[name]["saved_offsets"] != [start for start, _ in box]:
                        return f"says that {slice_of(name, box)} lies at {starts[name]}"
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            return f"does not hold the shards that it has to: {type(problem).__name__}: {problem}"
        return None


def slice_of(name: str, box: Box) -> str:
    """Return a slice of a tensor as one writes it."""
    return f"{name}[{', '.join(f'{start}:{stop}' for start, stop in box)}]" if box else name
