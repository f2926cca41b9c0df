"""sync_gradients: averages over the ranks that saw different samples, once and for all."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from hf_axonn import AxonnPlugin, parallelize
from hf_axonn.config import AxonnConfig
from hf_axonn.distributed import collectives
from hf_axonn.engine import gradient_sync as gradients
from hf_axonn.engine.gradient_sync import sync_gradients, syncing
from hf_axonn.engine.state import parallel_state
from hf_axonn.topology.grid import Grid
from tests.helpers.devices import rank_device, seeded
from tests.helpers.float64 import Float64
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks


pytestmark = pytest.mark.usefixtures("device")


def trained(model, grid):
    model.train()
    index = model.axonn.grid_mesh.index("data", "z")
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


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))

    def forward(self, value, *, branch):
        value = self.always(value)
        return self.sometimes(value) if branch else value


def unused_parameters():
    """Reached on no rank: None, as on one process. Reached on some: zeros count on the others."""
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


class Shared(nn.Module):
    """A layer that is used twice, each time in a checkpoint: with reentrant ones its gradient arrives in two parts."""

    def __init__(self, *, use_reentrant):
        super().__init__()
        self.first, self.shared, self.last = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, value):
        value = self.first(value)
        for _ in range(2):
            value = checkpoint(self.shared, value, use_reentrant=self.use_reentrant).tanh()
        return self.last(value)


def gradients_of(model, value, *, ahead):
    model.zero_grad()
    with syncing(model) if ahead else contextlib.nullcontext():
        model(value).square().sum().backward()
    if not ahead:
        sync_gradients(model)
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def arrive_in_parts():
    """An average that was launched before the gradient was complete is taken again, by all ranks."""
    generator = seeded(dist.get_rank())
    value = torch.randn(3, 4, dtype=torch.float64, generator=generator)
    for use_reentrant in (True, False):
        for nbytes in (1, 300, 64 * 2**20):  # one weight a bucket, averaged in place; two of them; all of them
            gradients.BUCKET_BYTES = nbytes
            torch.manual_seed(0)
            model, _ = parallelize(Shared(use_reentrant=use_reentrant), Grid(data=4))
            expected = gradients_of(model, value, ahead=False)
            with counted() as payloads:
                found = gradients_of(model, value, ahead=True)
            for ours, its in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, its, rtol=1e-13, atol=1e-15)
            again = {1: 128, 300: 256}.get(nbytes, 0) if use_reentrant else 0  # the bucket of the shared weight
            assert sum(payloads["data"]) == 3 * 128 + again, (use_reentrant, nbytes)


@contextlib.contextmanager
def counted():
    """Bytes of each average of sharded gradients that is launched inside, and of all other all-reduces."""
    payloads = {"data": [], "other": []}
    launch = gradients._Bucket.launch

    def noting(bucket):
        sharded = bucket.parameters[0].dim() == 2
        payloads["data" if sharded else "other"].append(bucket.nbytes)
        launch(bucket)

    gradients._Bucket.launch = noting
    try:
        yield payloads
    finally:
        gradients._Bucket.launch = launch


def reached_here_and_there():
    """Averages begun during backward on ranks that reach a weight, and after it on those that do not."""
    for nbytes in (1, 300, 64 * 2**20):
        gradients.BUCKET_BYTES = nbytes
        torch.manual_seed(0)
        model, _ = parallelize(Branches(), Grid(data=4))
        rank = dist.get_rank()
        with syncing(model):
            model(torch.ones(1, 4, dtype=torch.float64), branch=rank == 2).sum().backward()
        assert model.never.weight.grad is None and model.never.bias.grad is None
        torch.testing.assert_close(model.sometimes.bias.grad.full_tensor(), torch.full((4,), 0.25).double())
        weight = model.always.weight.grad.full_tensor()
        every = [torch.empty_like(weight) for _ in range(4)]
        dist.all_gather(every, weight)
        assert all(torch.equal(weight, other) for other in every) and weight.count_nonzero() == 16


def only_after_the_last_micro_batch():
    """What accelerate's `backward` sends over data and over the world, micro-batch by micro-batch."""
    AcceleratorState._reset_state(True)
    grid = Grid(data=2, y=2)
    gradients.BUCKET_BYTES = 64 * 2**20
    on_cpu = rank_device().type == "cpu"
    accelerator = Accelerator(cpu=on_cpu, parallelism_config=AxonnPlugin(grid=grid), gradient_accumulation_steps=3)
    model, _ = parallelize(tiny_model("llama"), grid)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.arange(6), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model.train(), optimizer, loader)
    sent = []
    for _ in loader:
        with accelerator.accumulate(model):
            loss = model(**tiny_batch(2, 7)).loss
            groups = []
            with collectives.observe(lambda kind, payload, group, groups=groups: groups.append(group)):
                accelerator.backward(loss)
            data = model.axonn.grid_mesh.group("data")
            assert data is not dist.group.WORLD and groups
            sent.append((groups.count(data), groups.count(dist.group.WORLD)))
            optimizer.step()
            optimizer.zero_grad()
        if len(sent) == 3:
            break
    assert sent == [(0, 0), (0, 0), (1, 2)], sent  # sharded gradients; flags and replicated gradients


def several_models():
    """Nothing is begun ahead, everything is averaged."""
    grid = Grid(data=4)
    models = [parallelize(tiny_model("llama", seed=seed), grid)[0].train() for seed in (0, 1)]
    batch = {key: value[dist.get_rank() : dist.get_rank() + 1] for key, value in tiny_batch(4, 7).items()}
    found = []
    for together in (True, False):
        for model in models:
            model.zero_grad()
        with syncing(*models, nn.Linear(2, 2)) if together else contextlib.nullcontext(), Float64():
            sum(model(**batch).loss for model in models).backward()
        for model in () if together else models:
            sync_gradients(model)
        found.append([parameter.grad.to_local() for model in models for parameter in model.parameters()])
    assert all(torch.equal(ours, its) for ours, its in zip(*found, strict=True))


def in_reduce_dtype():
    """One rank's gradients are 256 times those of the others, which a sum in bfloat16 would lose."""
    grid, right = Grid(data=4), torch.tensor((256 + 3) / 4).bfloat16()
    for reduce_dtype in ("float32", "bfloat16"):
        model = tiny_model("llama", dtype=torch.bfloat16)
        model, _ = parallelize(model, grid, config=AxonnConfig(grid=grid, reduce_dtype=reduce_dtype))
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 256.0 if dist.get_rank() == 0 else 1.0)
        sync_gradients(model)
        averages = torch.cat([gradient.flatten() for gradient in local_gradients(model).values()])
        assert averages.dtype == torch.bfloat16
        assert (averages == right).all() == (reduce_dtype == "float32"), averages.unique()


def left_by_an_exception():
    """Hooks are taken away again."""
    model, _ = parallelize(Shared(use_reentrant=False), Grid(data=4))
    with pytest.raises(KeyError), syncing(model):
        raise KeyError
    with counted() as payloads:
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    assert not payloads["data"]


def inside_of_wrappers():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    model, _ = parallelize(tiny_model("llama"), Grid(data=2))
    assert parallel_state(Wrapper(Wrapper(model))) is model.axonn
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    sync_gradients(model)  # nothing is trained


def all_of(functions):
    for function in functions:
        function()


def test_on_four_ranks():
    run_ranks(
        functools.partial(all_of, [twice_is_once, buckets_change_nothing, unused_parameters, in_reduce_dtype]), 4
    )


def test_averages_that_begin_during_backward():
    cases = [arrive_in_parts, reached_here_and_there, several_models, left_by_an_exception]
    run_ranks(functools.partial(all_of, [*cases, only_after_the_last_micro_batch]), 4)


def test_on_two_ranks():
    run_ranks(inside_of_wrappers, 2)


def test_a_plain_model_is_left_alone():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.grad.clone()
    assert parallel_state(model) is None
    sync_gradients(model)
    assert torch.equal(model.weight.grad, before)
