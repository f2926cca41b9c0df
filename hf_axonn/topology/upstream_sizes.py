"""The sizes of Accelerate's ParallelismConfig and of Transformers' DistributedConfig, as axes of a grid.

    ParallelismConfig    DistributedConfig    axis of the grid
    tp_size              tp_size              x
    dp_shard_size        fsdp_size            z, with cp_size times as many ranks
    cp_size                                   context, which divides z
    dp_replicate_size    dp_replicate_size    data
                         pp_size              pipe

Accelerate shards weights over dp_shard_size * cp_size ranks, as a grid does over z. Plain Python: the launcher asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_axonn.topology.grid import Grid


# Of ParallelismConfig; in a launch file and on the command line with PREFIX, in the environment with it in capitals.
ACCELERATE_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
TRANSFORMERS_SIZES = ("dp_replicate_size", "fsdp_size", "tp_size", "pp_size")
PREFIX = "parallelism_config_"


def read_sizes(given: Mapping[str, Any], prefix: str = "") -> dict[str, int]:
    """Return the sizes of ParallelismConfig that are given, without their prefix; numbers may be written as text.

    Args:
        given: values by name; None and an empty text count as not given.
        prefix: what stands before each name.
    Raises:
        ValueError: a size is not a whole number of at least 1.
    """
    sizes = {}
    for name in ACCELERATE_SIZES:
        if (value := given.get(prefix + name)) in (None, ""):
            continue
        text = str(value)
        if isinstance(value, bool) or not text.isdecimal() or int(text) < 1:
            raise ValueError(f"{prefix}{name} is {value!r}, but it is a whole number of at least 1.")
        sizes[name] = int(text)
    return sizes


def grid_with_sizes(sizes: Mapping[str, int], grid: Grid | None, place: str) -> Grid | None:
    """Return the grid that these sizes mean; `grid` where none is above 1.

    Args:
        sizes: by their names in ParallelismConfig or DistributedConfig.
        grid: a grid that stands beside them, or None.
        place: where the sizes stand, for messages.
    Raises:
        ValueError: they mean another grid than `grid`, or sp_size is above 1.
    """
    used = {name: size for name, size in sizes.items() if size > 1}
    if not used:
        return grid
    words = ", ".join(f"{name}={size}" for name, size in used.items())
    if "sp_size" in used:
        raise ValueError(
            f"{place} has sp_size={used['sp_size']}, DeepSpeed's sequence parallelism: write cp_size, or context in "
            "the grid; context_attention: heads exchanges heads as it does."
        )
    context = used.get("cp_size", 1)
    meant = Grid(
        data=used.get("dp_replicate_size", 1),
        pipe=used.get("pp_size", 1),
        z=used.get("dp_shard_size", used.get("fsdp_size", 1)) * context,
        x=used.get("tp_size", 1),
        context=context,
    )
    if grid is not None and grid != meant:
        raise ValueError(
            f"{place} has {words}, which is the grid {meant}, and beside it stands the grid {grid}: omit one of them."
        )
    return meant
