"""Every collective, forward and backward, against its definition: what one process makes of all ranks' parts."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_axonn.distributed import collectives
from tests.helpers.ranks import run_ranks


def parts(shape, world, seed=0):
    """What each rank holds: the same list on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(world)]


def expected_forward(name, inputs, rank):
    world = len(inputs)
    return {
        "all_gather": lambda: torch.stack(inputs),
        "gather_replicated": lambda: torch.stack(inputs),
        "reduce_scatter": lambda: sum(blocks[rank] for blocks in inputs),
        "all_to_all": lambda: torch.stack([inputs[sender][rank] for sender in range(world)]),
        "all_reduce": lambda: sum(inputs),
        "all_reduce_backward": lambda: inputs[rank],
        "take_replicated": lambda: inputs[rank][rank],
    }[name]()


def expected_backward(name, grads, rank):
    world = len(grads)
    return {
        "all_gather": lambda: sum(grad[rank] for grad in grads),
        "gather_replicated": lambda: grads[rank][rank],
        "reduce_scatter": lambda: torch.stack(grads),
        "all_to_all": lambda: torch.stack([grads[sender][rank] for sender in range(world)]),
        "all_reduce": lambda: grads[rank],
        "all_reduce_backward": lambda: sum(grads),
        "take_replicated": lambda: torch.stack(grads),
    }[name]()


STACKED = ("reduce_scatter", "all_to_all", "take_replicated")  # their input has a leading dim of ranks
NAMES = ("all_gather", "gather_replicated", *STACKED, "all_reduce", "all_reduce_backward")


def check_all():
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    for name in NAMES:
        for shape in ((3, 2), (1,), (0, 4)):
            inputs = parts((world, *shape) if name in STACKED else shape, world)
            leaf = inputs[rank].clone().requires_grad_()
            before = leaf.detach().clone()
            output = getattr(collectives, name)(leaf, group)
            torch.testing.assert_close(output, expected_forward(name, inputs, rank), msg=f"{name} {shape}")
            grads = parts(output.shape, world, seed=1)
            given = grads[rank].clone()
            output.backward(given)
            torch.testing.assert_close(leaf.grad, expected_backward(name, grads, rank), msg=f"{name} {shape}")
            assert torch.equal(leaf, before) and torch.equal(given, grads[rank]), f"{name} changed its argument"
        # what is not contiguous arrives as it is written
        inputs = [part.transpose(-1, -2) for part in parts((world, 3, 2) if name in STACKED else (3, 2), world)]
        output = getattr(collectives, name)(inputs[rank], group)
        torch.testing.assert_close(output, expected_forward(name, inputs, rank))
    for op, expected in (("sum", 6.0), ("max", 3.0), ("mean", 1.5)) if world == 4 else ():
        value = torch.tensor([float(rank)])
        assert collectives.reduce_(value, group, op=op) is value and value.item() == expected
    value = torch.tensor([float(rank)])
    assert collectives.broadcast_(value) is value and value.item() == 0
    sizes = {"small": (3,), "turned": (2, 3), "large": (collectives.FUSED_BYTES // 8 + 1,), "none": (0,)}
    values = [torch.full(size, rank, dtype=torch.float64) for size in sizes.values()]
    values[1] = values[1].t()
    values += [torch.tensor(rank), torch.tensor([rank > 0]), nn.Parameter(torch.full((4,), rank).bfloat16())]
    sent = []
    with collectives.observe(lambda kind, payload, group: sent.append((kind, payload))):
        collectives.broadcast_all([*values, torch.empty(2, device="meta")])
    assert not any(value.any() for value in values)
    large = values[2].nbytes
    assert sent == [("broadcast", large), ("broadcast", sum(value.nbytes for value in values) - large)]


def check_started():
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        block = torch.full((2, 3), rank + 1).to(dtype)
        pending = collectives.start_all_gather(block, group)
        assert pending.wait().shape == (world, 2, 3)
        assert pending.wait() is pending.wait()
        assert pending.wait()[:, 0, 0].tolist() == [peer + 1 for peer in range(world)]
        pending = collectives.start_reduce_scatter(torch.arange(world).to(dtype).view(-1, 1) * (rank + 1), group)
        total = sum(range(1, world + 1))
        assert pending.wait().tolist() == [rank * total] and pending.wait().tolist() == [rank * total]


def check_alone():
    """Groups of one rank: no communication, the value itself."""
    for name in NAMES:
        value = torch.randn(1, 3)
        output = getattr(collectives, name)(value, dist.group.WORLD)
        assert output.data_ptr() == value.data_ptr(), name
        shapes = {"gather": (1, 1, 3), "reduce_scatter": (3,), "take": (3,)}  # those with a dim of ranks more, or less
        assert output.shape == next((shape for part, shape in shapes.items() if part in name), (1, 3)), name
    assert torch.equal(collectives.start_all_gather(value, dist.group.WORLD).wait(), value[None])
    assert torch.equal(collectives.start_reduce_scatter(value, dist.group.WORLD).wait(), value[0])


@pytest.mark.parametrize("world", [2, 3, 4])
def test_forward_and_backward_are_as_defined(world):
    run_ranks(check_all, world)


def test_what_is_started_can_be_waited_for_again_and_again():
    run_ranks(check_started, 3)


def test_a_group_of_one_rank_costs_nothing():
    run_ranks(check_alone, 1)


def test_pending_finishes_once():
    calls = []

    def finish(value):
        calls.append(value)
        return value + 1

    pending = collectives.Pending(torch.zeros(1), finish=finish)
    assert not calls
    assert pending.wait().item() == pending.wait().item() == 1
    assert len(calls) == 1
