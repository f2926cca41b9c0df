"""sync_gradients: averages over the ranks that saw different samples, once and for all."""

import functools

import torch
import torch.distributed as dist
from float64 import Float64
from models import tiny_batch, tiny_model
from ranks import run_ranks
from torch import nn

from hf_axonn import gradients
from hf_axonn.gradients import find_state, sync_gradients
from hf_axonn.grid import Grid
from hf_axonn.parallelize import parallelize


def trained(model, grid):
    model.train()
    index = model.axonn.mesh.index("data", "z")
    batch = {key: value[index : index + 1] for key, value in tiny_batch(4, 7).items()}
    with Float64():
        model(**batch).loss.backward()
    return model


def local_gradients(model):
    return {name: parameter.grad.to_local().clone() for name, parameter in model.named_parameters()}


def twice_is_once():
    for grid in (Grid(data=2, y=2), Grid(z=2, x=2), Grid(data=2, z=2)):
        model = trained(parallelize(tiny_model("qwen2"), grid)[0], grid)
        before = local_gradients(model)
        sync_gradients(model)
        once = local_gradients(model)
        assert any(not torch.equal(before[name], once[name]) for name in once)
        sync_gradients(model)
        for name, gradient in local_gradients(model).items():
            torch.testing.assert_close(gradient, once[name], rtol=1e-14, atol=1e-18)


def buckets_change_nothing():
    grid = Grid(data=2, y=2)
    results = []
    for nbytes in (1, 5000, 64 * 2**20):
        gradients.BUCKET_BYTES = nbytes
        model = trained(parallelize(tiny_model("llama"), grid)[0], grid)
        sync_gradients(model)
        results.append(local_gradients(model))
    for other in results[1:]:
        for name, gradient in results[0].items():
            # Not the same bits: gloo sums the pieces of a buffer in different orders.
            torch.testing.assert_close(gradient, other[name], rtol=1e-12, atol=1e-15)


def unused_parameters():
    """Reached on no rank: None, as on one process. Reached on some: zeros count on the others."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.sometimes, self.never = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))

        def forward(self, value, *, branch):
            value = self.always(value)
            return self.sometimes(value) if branch else value

    grid = Grid(data=4)
    torch.manual_seed(0)
    model, _ = parallelize(Branches(), grid)
    rank = dist.get_rank()
    value = torch.ones(1, 4, dtype=torch.float64)
    model(value, branch=rank == 2).sum().backward()
    assert (model.sometimes.weight.grad is None) == (rank != 2)
    sync_gradients(model)
    assert model.never.weight.grad is None and model.never.bias.grad is None
    torch.testing.assert_close(model.sometimes.bias.grad.full_tensor(), torch.full((4,), 0.25, dtype=torch.float64))


def inside_of_wrappers():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    model, _ = parallelize(tiny_model("llama"), Grid(data=2))
    assert find_state(Wrapper(Wrapper(model))) is model.axonn
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    sync_gradients(model)  # nothing is trained


def all_of(functions):
    for function in functions:
        function()


def test_on_four_ranks():
    run_ranks(functools.partial(all_of, [twice_is_once, buckets_change_nothing, unused_parameters]), 4)


def test_on_two_ranks():
    run_ranks(inside_of_wrappers, 2)


def test_a_plain_model_is_left_alone():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.grad.clone()
    assert find_state(model) is None
    sync_gradients(model)
    assert torch.equal(model.weight.grad, before)
