"""What `prepare` does with models and optimizers that were made before the grid was known."""

import logging
from types import SimpleNamespace

import torch
import torch.distributed as dist

from hf_axonn.accelerator import prepare
from hf_axonn.config import AxonnConfig
from hf_axonn.engine.state import parallel_state
from hf_axonn.topology.grid import Grid
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks


def heard() -> list[str]:
    """What `prepare` says from here on."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    prepare.logger.addHandler(handler)
    return messages


def check_plain_model() -> list[str]:
    messages = heard()
    config = AxonnConfig(grid=Grid(x=dist.get_world_size()))
    plugin, model = SimpleNamespace(grid=config.grid, config=config), tiny_model("llama")
    assert prepare.shard_plain_model(model, plugin, torch.device("cpu"))
    assert str(parallel_state(model).grid) == str(plugin.grid)
    assert not prepare.shard_plain_model(model, plugin, torch.device("cpu")), "it is sharded already"
    second = tiny_model("gpt2")
    assert prepare.shard_plain_model(second, plugin, torch.device("cpu"))
    return messages


def check_what_no_other_way_loads() -> list[str]:
    """Copies of a model, which every rank of data has anyway, and a module that has no from_pretrained."""
    messages = heard()
    linear = torch.nn.Sequential(torch.nn.Linear(4, 4))
    for model, grid in ((tiny_model("llama"), Grid(data=2)), (linear, Grid(x=2))):
        plugin = SimpleNamespace(grid=grid, config=None)
        assert prepare.shard_plain_model(model, plugin, torch.device("cpu"))
    return messages


def test_nothing_is_advised_where_there_is_no_other_way():
    assert run_ranks(check_what_no_other_way_loads, 2) == [[], []]


def test_a_model_that_was_loaded_on_every_rank_is_sharded_with_one_warning():
    (message,), none = run_ranks(check_plain_model, 2)
    assert not none and "(name, grid=...), or load: sharded in the launch file, reads only each rank's own" in message


def test_a_grid_of_one_leaves_the_model_alone():
    model = tiny_model("llama")
    assert not prepare.shard_plain_model(model, SimpleNamespace(grid=Grid(), config=None), torch.device("cpu"))
    assert parallel_state(model) is None
