"""What `prepare` does with models and optimizers that were made before the grid was known."""

import logging
from types import SimpleNamespace

import torch
import torch.distributed as dist

from hf_axonn.accelerator import prepare
from hf_axonn.engine.state import parallel_state
from hf_axonn.topology.grid import Grid
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks


def check_plain_model() -> list[str]:
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    prepare.logger.addHandler(handler)
    plugin, model = SimpleNamespace(grid=Grid(x=dist.get_world_size()), config=None), tiny_model("llama")
    assert prepare.shard_plain_model(model, plugin, torch.device("cpu"))
    assert str(parallel_state(model).grid) == str(plugin.grid)
    assert not prepare.shard_plain_model(model, plugin, torch.device("cpu")), "it is sharded already"
    return messages


def test_a_model_that_was_loaded_on_every_rank_is_sharded_with_one_warning():
    (message,), none = run_ranks(check_plain_model, 2)
    assert "from_pretrained(name, grid=...) reads only each rank's own slices" in message and not none


def test_a_grid_of_one_leaves_the_model_alone():
    model = tiny_model("llama")
    assert not prepare.shard_plain_model(model, SimpleNamespace(grid=Grid(), config=None), torch.device("cpu"))
    assert parallel_state(model) is None
