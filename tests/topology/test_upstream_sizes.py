"""The sizes of Accelerate's ParallelismConfig and Transformers' DistributedConfig, as a grid."""

from __future__ import annotations

import dataclasses

import pytest
from accelerate.parallelism_config import ParallelismConfig
from transformers.distributed.configuration_utils import DistributedConfig

from hf_axonn.config import AxonnConfig
from hf_axonn.parallel.distributed_config import NAME, REFUSED, config_of_distributed
from hf_axonn.parallel.from_pretrained import from_pretrained
from hf_axonn.topology.grid import Grid
from hf_axonn.topology.upstream_sizes import (
    ACCELERATE_SIZES,
    PREFIX,
    TRANSFORMERS_SIZES,
    grid_with_sizes,
    read_sizes,
)


@pytest.mark.parametrize(
    ("sizes", "grid"),
    [
        ({"tp_size": 4}, Grid(x=4)),
        ({"dp_shard_size": 4, "cp_size": 1}, Grid(z=4)),
        ({"dp_replicate_size": 3}, Grid(data=3)),
        ({"cp_size": 2}, Grid(z=2, context=2)),
        (dict(tp_size=2, dp_shard_size=3, dp_replicate_size=5, cp_size=7), Grid(x=2, z=21, context=7, data=5)),
        (dict(tp_size=2, fsdp_size=3, pp_size=4), Grid(x=2, z=3, pipe=4)),
    ],
)
def test_each_size_is_an_axis(sizes, grid):
    assert grid_with_sizes(sizes, None, "here") == grid_with_sizes(sizes, grid, "here") == grid
    with pytest.raises(ValueError, match="^here has .*, which is the grid .*, and beside it stands the grid .*: omit"):
        grid_with_sizes(sizes, Grid(y=2), "here")


def test_as_many_ranks_as_accelerate_and_transformers_start():
    """Accelerate multiplies all of its sizes, Transformers those of its mesh."""
    stock = ParallelismConfig(tp_size=2, dp_shard_size=3, dp_replicate_size=2, cp_size=2)
    grid = grid_with_sizes({name: getattr(stock, name) for name in ACCELERATE_SIZES}, None, "")
    assert grid.size == stock.total_size and grid.dp_size == stock.data_parallel_size
    native = DistributedConfig(tp_size=2, fsdp_size=3, dp_replicate_size=2)
    assert config_of_distributed(native, None, None).grid.dp_size == native.dp_size


def test_sizes_of_one_mean_nothing():
    assert grid_with_sizes(dict.fromkeys(ACCELERATE_SIZES, 1), None, "") is None
    assert grid_with_sizes({}, Grid(z=2), "") == Grid(z=2)


def test_sizes_are_whole_numbers():
    given = {f"{PREFIX}tp_size": "2", f"{PREFIX}cp_size": 4, f"{PREFIX}sp_size": "", f"{PREFIX}cp_backend": "torch"}
    assert read_sizes(given, PREFIX) == {"tp_size": 2, "cp_size": 4}
    for wrong in ("two", 0, -1, 1.5, True):
        with pytest.raises(ValueError, match=f"{PREFIX}tp_size is {wrong!r}, but it is a whole number"):
            read_sizes({f"{PREFIX}tp_size": wrong}, PREFIX)


def test_sequence_parallelism_of_deepspeed_is_refused():
    with pytest.raises(ValueError, match="sp_size=2, DeepSpeed's sequence parallelism: write cp_size"):
        grid_with_sizes({"sp_size": 2}, None, "ParallelismConfig")


def test_every_field_of_distributed_config_is_fulfilled_or_refused():
    """A field that a release adds is in none of the lists."""
    fulfilled = {"enable_sequence_parallel", "enable_expert_parallel", "ep_size", "ep_implementation"}
    fields = {item.name for item in dataclasses.fields(DistributedConfig)}
    assert fields == fulfilled | set(TRANSFORMERS_SIZES) | set(REFUSED)
    for name in REFUSED:
        value = True if name.startswith("fsdp_") and name != "fsdp_plan" else {"layers.*": "colwise"}
        with pytest.raises(ValueError, match=f"^{NAME}.{name} is "):
            config_of_distributed(DistributedConfig(tp_size=2, **{name: value}), None, None)
    with pytest.raises(ValueError, match="tp_plan is {}"):  # no tensor parallelism of the dense part
        config_of_distributed({"tp_size": 2, "tp_plan": {}}, None, None)


def test_distributed_config_is_joined_with_what_stands_beside_it():
    assert config_of_distributed(DistributedConfig(), None, None) is None
    tensor = DistributedConfig(tp_size=2, tp_plan="auto", enable_sequence_parallel=True)
    assert config_of_distributed(tensor, None, None) == AxonnConfig(grid=Grid(x=2))
    beside = AxonnConfig(grid=Grid(x=2), layout="token")
    assert config_of_distributed(tensor, None, beside) == beside
    with pytest.raises(ValueError, match=f"{NAME} has tp_size=2, which is the grid .*x=2, and beside it .*z=2"):
        config_of_distributed(tensor, Grid(z=2), None)
    with pytest.raises(ValueError, match="grid is data=1,z=1,y=1,x=2, config.grid is data=1,z=2"):
        from_pretrained("nothing", grid=Grid(x=2), config=AxonnConfig(grid=Grid(z=2)), distributed_config=tensor)


def test_a_mapping_is_read_as_transformers_reads_it(monkeypatch):
    """Some fields stand for others; a misspelt one is dropped by Transformers in silence."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert config_of_distributed({"tp_plan": "auto", "fsdp_size": 2}, None, None).grid == Grid(z=2, x=2)
    with pytest.raises(ValueError, match="tp_plan is {}"):
        config_of_distributed({"tp_size": 2, "enable_expert_parallel": True}, None, None)
    with pytest.raises(ValueError, match="tp_sizes"):
        config_of_distributed({"tp_sizes": 2}, Grid(z=2), None)


def test_experts_travel_where_each_rank_has_its_own():
    whole = {"fsdp_size": 2, "tp_size": 2, "ep_size": 4}
    assert config_of_distributed(whole, None, None) == AxonnConfig(grid=Grid(z=2, x=2), experts="move")
    with pytest.raises(ValueError, match=r"ep_size is 2: .* fsdp_size \* tp_size = 4: write that number"):
        config_of_distributed(whole | {"ep_size": 2}, None, None)
    with pytest.raises(ValueError, match="ep_implementation is all_reduce: tokens travel by all_to_all"):
        config_of_distributed(whole | {"ep_implementation": "all_reduce"}, None, None)
