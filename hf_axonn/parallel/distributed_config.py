"""Transformers' DistributedConfig as a grid.

    model = hf_axonn.from_pretrained(name, distributed_config=DistributedConfig(tp_size=2, fsdp_size=2))

Every field is fulfilled by the grid, or refused by its name. Sizes: topology/upstream_sizes.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hf_axonn.config import AxonnConfig
from hf_axonn.topology.grid import Grid
from hf_axonn.topology.upstream_sizes import TRANSFORMERS_SIZES, grid_with_sizes


NAME = "distributed_config"
# What a field asks for that a grid does otherwise, and what to write; those of sizes and experts are not here.
REFUSED = {
    "tp_plan": "the plan of a grid is found in the model: omit it, or write auto",
    "fsdp_plan": "every weight is divided over z: omit it",
    "ep_plan": "experts are found in the model: omit it",
    "fsdp_cpu_offload": "weights stay on the device (offload: optimizer is for moments): take a larger z or x",
    "fsdp_mixed_precision": "mixed_precision of the launch file or of TrainingArguments is read instead",
}
IMPLEMENTATIONS = ("auto", "all_to_all")  # of experts to which tokens travel


def config_of_distributed(given: Any, grid: Grid | None, config: AxonnConfig | None) -> AxonnConfig | None:
    """Return the settings of a DistributedConfig, or of a mapping with its fields, joined with those beside it.

    `enable_sequence_parallel` is fulfilled by every grid: its residual stream is divided over x and y.

    Raises:
        ValueError: it means another grid than `grid` or `config`, or a field that no grid fulfils; a mapping has a
            field that DistributedConfig has not, which Transformers drops.
    """
    if isinstance(given, Mapping):
        from transformers.distributed.configuration_utils import DistributedConfig

        try:
            given = DistributedConfig(**given)  # which reads one field by the others
        except TypeError as problem:
            raise ValueError(f"{NAME}: {problem}.") from None
    fields = dict(vars(given))
    for name, remedy in REFUSED.items():
        # tp_size alone stands for the model's own plan, {} for none.
        if fields.get(name) not in (None, False, "auto"):
            raise ValueError(f"{NAME}.{name} is {fields[name]!r}: {remedy}.")
    beside = config.grid if grid is None and config is not None else grid
    sizes = {name: fields.get(name) or 1 for name in TRANSFORMERS_SIZES}
    meant = grid_with_sizes(sizes, beside, NAME)
    if (experts := fields.get("ep_size") or 1) > 1:
        if meant is None or experts != meant.z * meant.x:
            raise ValueError(
                f"{NAME}.ep_size is {experts}: an expert lies whole on one rank of z and x, fsdp_size * tp_size = "
                f"{sizes['fsdp_size'] * sizes['tp_size']}: write that number, or omit it for experts: gather."
            )
        if fields.get("ep_implementation", "auto") not in IMPLEMENTATIONS:
            raise ValueError(
                f"{NAME}.ep_implementation is {fields['ep_implementation']}: tokens travel by all_to_all; write auto."
            )
    if meant is None:
        return config
    config = config or AxonnConfig(grid=meant)
    return dataclasses.replace(config, experts="move" if experts > 1 else config.experts)
