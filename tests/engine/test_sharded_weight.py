"""The slot and the placeholder of a weight's gradient."""

import torch

from hf_axonn.engine.sharded_weight import GradientSlot, placeholder


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
