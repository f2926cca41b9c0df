"""What building the process groups of a large grid takes on one rank: seconds, memory, calls.

On the `fake` backend nothing travels, so this is what each rank of a real job computes before the first message does.
A rank that named every group of the world, as torch's `new_group` asks, would make thousands. Called by simulate.py.
"""

from __future__ import annotations

import subprocess
import sys

from hf_axonn import Grid


# Run in a process of its own, which says what the groups alone took.
BUILD = """
import psutil, sys, time
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from hf_axonn.distributed.mesh import grid_mesh
from hf_axonn.topology.grid import Grid
grid = Grid(**dict(zip(("data", "z", "y", "x"), map(int, sys.argv[1:]))))
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=grid.size)
made, new_group = [0], dist.distributed_c10d._new_process_group_helper
def counting(*args, **kwargs):
    made[0] += 1
    return new_group(*args, **kwargs)
dist.distributed_c10d._new_process_group_helper = counting
resident = psutil.Process().memory_info
before, begin = resident().rss, time.monotonic()
grid_mesh(grid, "cpu").storage_mesh
print(time.monotonic() - begin, resident().rss - before, made[0])
"""


def build_groups(grid: Grid) -> tuple[float, float, int]:
    """Seconds, MiB and calls that the process groups of a grid take on one rank, without waiting for others."""
    sizes = [str(size) for size in grid.as_dict().values()]
    done = subprocess.run([sys.executable, "-c", BUILD, *sizes], capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(done.stderr)
    seconds, size, calls = done.stdout.split()
    return float(seconds), float(size) / 2**20, int(calls)


def groups_table(counts: list[int]) -> list[str]:
    """Markdown: what building the groups takes by number of ranks."""
    lines = ["| ranks | grid | groups asked for | seconds | MiB |", "| --: | --- | --: | --: | --: |"]
    for count in counts:
        grid = Grid(data=max(1, count // 4096), z=min(64, count // 64), y=8, x=8)
        seconds, mib, calls = build_groups(grid)
        lines.append(f"| {grid.size:,} | {grid} | {calls:,} | {seconds:.3f} | {mib:.0f} |")
    return [*lines, ""]
