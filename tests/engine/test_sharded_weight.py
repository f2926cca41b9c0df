"""The slot and the placeholder of a weight's gradient."""

import pytest
import torch
from torch import nn

from hf_axonn.config import AxonnConfig
from hf_axonn.engine.sharded_weight import GradientSlot, ShardedWeight, only_multiplied, placeholder
from hf_axonn.engine.state import ParallelState
from hf_axonn.topology.grid import Grid
from tests.helpers.ranks import fake_mesh


def test_a_slot_sums_and_empties():
    slot = GradientSlot()
    assert slot.take() is None
    slot.add(lambda: torch.tensor(1.0))
    slot.add(lambda: torch.tensor(2.0))
    assert slot.take() == 3
    assert slot.take() is None
    slot.add(lambda: torch.tensor(1.0))
    slot.clear()
    assert slot.take() is None


def test_a_placeholder_holds_no_memory():
    like = torch.empty(1000, 1000)
    assert placeholder(like).shape == like.shape
    assert placeholder(like).untyped_storage().nbytes() == 4


def test_a_slot_hands_over_what_it_was_promised():
    slot, grad = GradientSlot(), torch.tensor(1.0)
    assert slot.take_or(grad) is grad  # nothing was promised: the gradient itself
    slot.add(lambda: torch.tensor(5.0))
    assert slot.take_or(grad) == 5


def test_a_pass_of_autograd_takes_only_what_it_has_left_itself():
    slot, shard = GradientSlot(), torch.tensor(3.0, requires_grad=True)
    product = 2 * shard
    product.register_hook(lambda grad: slot.add(lambda: grad))
    torch.autograd.grad(product, shard, retain_graph=True)  # leaves a gradient that nobody takes
    shard.register_hook(slot.take_or)
    product.backward()
    assert shard.grad == 1


def test_a_weight_that_modules_share_stays_one():
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    weight = ShardedWeight(embedding, "weight")
    weight.share_with(head, "weight")
    weight.begin_forward()
    embedding.weight = nn.Parameter(embedding.weight.detach().clone())
    with pytest.raises(ValueError, match=r"Embedding and Linear had one weight, of shape \[5, 4\], .* have two now"):
        weight.begin_forward()
    head.weight = embedding.weight
    weight.begin_forward()


def test_a_parameter_with_the_id_of_one_that_is_gone_has_a_record_of_its_own():
    grid = Grid(z=2)
    state, first, second = ParallelState(fake_mesh(grid, 0), AxonnConfig(grid=grid)), nn.Linear(2, 2), nn.Linear(2, 2)
    weight = state.weight_of(first)
    state._weight_of_parameter[id(second.weight)] = weight  # as if it lay where the first one's weight was
    assert state.weight_of(second).parameter is second.weight and state.weight_of(first) is weight


def test_a_head_that_is_tied_later_is_looked_up():
    embedding, head, linear = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False), nn.Linear(4, 4)
    weights = [ShardedWeight(module, "weight") for module in (embedding, head, linear)]
    weights[0].note_look_ups()
    assert only_multiplied(weights) == weights[1:]
    head.weight = embedding.weight
    assert only_multiplied(weights) == weights[2:]
