"""Memory that a collective still uses is never reused: planted reuse is found, and what finds it is right itself.

That the engine reuses nothing is shown by tests/end_to_end/test_worst_order.py, which watches every buffer in all its
runs: every grid of four ranks, pipelines, LoRA, accumulated gradients, checkpointed layers, others' loops.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from hf_axonn.compat import pipelining
from hf_axonn.compat.replaced import replace_attributes
from hf_axonn.distributed import collectives
from hf_axonn.engine import gathering, matmul3d
from hf_axonn.topology.grid import Grid
from tests.end_to_end.test_worst_order import made, trained
from tests.helpers.adversary import backend
from tests.helpers.buffers import Buffers, ReusedTooEarly
from tests.helpers.ranks import run_ranks


@pytest.fixture
def buffers():
    with Buffers() as found:
        yield found


def begin(buffers, *, inputs=(), outputs=()):
    return buffers.begin("all_gather", inputs=inputs, outputs=outputs)


WRITES = {
    "in place": lambda value: value.add_(1),
    "through a view": lambda value: value[1:].zero_(),
    "through what it was cut from": lambda value: value._base.zero_(),
    "behind autograd": lambda value: value.data.mul_(2),
    "as an output": lambda value: torch.add(torch.ones(4), 1, out=value),
    "of many": lambda value: torch._foreach_mul_([torch.ones(2), value], 2.0),
}


@pytest.mark.parametrize("write", WRITES)
def test_no_buffer_is_written(buffers, write):
    for kind in ("inputs", "outputs"):
        travels = begin(buffers, **{kind: [value := torch.ones(6)[2:]]})
        name = rf"the {kind[:-1]} \[4\] torch.float32 of all_gather"
        with pytest.raises(ReusedTooEarly, match=rf"writes {name} at tests/end_to_end/test_buffers.py:\d+ .*lambda"):
            WRITES[write](value)
        travels.arrive()
        WRITES[write](value)  # now everyone may


def test_an_output_is_not_read_and_an_input_is(buffers):
    sent, full = torch.ones(3), torch.ones(2, 3)
    travels = begin(buffers, inputs=[sent], outputs=[full])
    assert sent.sum() == 3
    assert full.view(-1).detach().split(3)[1].shape == (3,) and torch.empty_like(full).shape == (2, 3)
    with pytest.raises(
        ReusedTooEarly, match=r"aten.sum.default reads the output \[2, 3\] torch.float32 of all_gather"
    ):
        full[1].sum()
    assert full.new_zeros(3).sum() == 0 and torch.ones(3).sum() == 3
    travels.run(lambda sent, room: room[0].copy_(2 * sent[0]))
    assert full.sum() == 12 and buffers.count == 2


def test_a_part_is_no_other_part(buffers):
    whole = torch.zeros(8)
    travels = begin(buffers, outputs=[whole[:4]])
    whole[4:].add_(1)
    assert whole[4:].sum() == 4
    travels.run(lambda _, room: room[0].fill_(5))
    assert whole.tolist() == [5] * 4 + [1] * 4


@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_no_buffer_is_freed(buffers, kind):
    travels = begin(buffers, **{kind: [torch.ones(4)]})  # which nobody holds
    with pytest.raises(ReusedTooEarly, match=r"put \[4\] torch.float32 of all_gather was freed at .*test_buffers"):
        travels.arrive()


def test_what_is_never_waited_for_is_not_freed_either():
    with pytest.raises(ReusedTooEarly, match="was freed"), Buffers() as buffers:
        begin(buffers, inputs=[torch.ones(4)])


def test_no_buffer_is_resized_or_changed_behind_torch(buffers):
    value = torch.ones(4)
    travels = begin(buffers, inputs=[value])
    value.untyped_storage().resize_(0)
    with pytest.raises(ReusedTooEarly, match="was resized before the wait"):
        travels.arrive()
    value = torch.ones(4)
    travels = begin(buffers, inputs=[value])
    value.numpy()[0] = 3
    with pytest.raises(ReusedTooEarly, match="was written before the wait"):
        travels.arrive()


def test_no_collective_uses_what_another_one_fills(buffers):
    travels = begin(buffers, outputs=[value := torch.ones(4)])
    for kind, done in (("inputs", "reads"), ("outputs", "writes")):
        with pytest.raises(ReusedTooEarly, match=f"the launch of all_gather {done} the output"):
            begin(buffers, **{kind: [value[:1]]})
    travels.arrive()


def test_backward_is_watched_too(buffers):
    travels = begin(buffers, inputs=[grad := torch.ones(4)])
    leaf = torch.ones(4, requires_grad=True)
    leaf.register_hook(lambda _: grad.zero_())
    with pytest.raises(ReusedTooEarly, match="writes the input"):
        leaf.sum().backward()
    travels.arrive()


def one_buffer_for_all(start):
    """Gathers into the memory of the gather before, which may be in use."""
    pool, made = {}, torch.Tensor.new_empty

    def again(like, *size, **options):
        shape = torch.Size(size[0] if isinstance(size[0], tuple) else size)
        return pool.setdefault(like.dtype, made(like, 50_000))[: shape.numel()].view(shape)

    def start_all_gathers(*args):
        with replace_attributes({(torch.Tensor, "new_empty"): again}):
            return start(*args)

    return start_all_gathers


def changed_under_way(start):
    """Changes the weight gradients whose reduction it has launched."""

    def start_reduction(grads, *args):
        pending = start(grads, *args)
        for grad in grads:
            grad.mul_(3)
        return pending

    return start_reduction


def overwritten_by_its_stage(batch_p2p):
    """Overwrites what it has begun to send."""

    def begin_and_overwrite(ops, desc=None):
        works = batch_p2p(ops, desc)
        for op in ops:
            if op.op is dist.isend:
                op.tensor.detach().zero_()
        return works

    return begin_and_overwrite


def without_what_is_sent(work):
    """A collective that does not hold what it sends."""

    class WithoutSent(work):
        def __init__(self, *args):
            super().__init__(*args)
            self._sent = ()

    return WithoutSent


def without_tensors(messages):
    """Messages that do not hold what they send."""

    class WithoutTensors(messages):
        def __init__(self, works, tensors):
            super().__init__(works, [])

    return WithoutTensors


# What is replaced, by what, how it is run, and what is said of it.
PLANTED = {
    "a gather": (
        gathering,
        "start_all_gathers",
        one_buffer_for_all,
        Grid(z=2),
        "(rea|writ).* the output .* all_gather",
    ),
    "a reduction": (
        *(matmul3d, "start_reduction", changed_under_way, Grid(z=2)),
        r"aten.mul_.Tensor writes the input .* of reduce_scatter of .*test_buffers.py:\d+ grad.mul_",
    ),
    "a pipeline buffer": (
        *(schedules, "_batch_p2p", overwritten_by_its_stage, Grid(pipe=2)),
        "aten.zero_.default writes the input .* of a message between stages",
    ),
    "what a gather sends": (
        *(collectives, "_Work", without_what_is_sent, Grid(z=2)),
        "the input .* of all_gather of .* was freed at hf_axonn/engine/gathering.py",
    ),
    "what a stage sends": (
        *(pipelining, "_Messages", without_tensors, Grid(pipe=2)),
        "the input .* of a message between stages .* was freed at",
    ),
}


def step_with(name):
    owner, attribute, plant, grid, _ = PLANTED[name]
    with backend("nccl", tracked=True), replace_attributes({(owner, attribute): plant(getattr(owner, attribute))}):
        trained(made("zero bubble" if grid.pipe > 1 else "plain", grid), grid, steps=1)


@pytest.mark.parametrize("name", PLANTED)
def test_planted_reuse_is_found(name):
    with pytest.raises(AssertionError) as error:
        run_ranks(step_with, 2, name)
    found = re.findall(r"ReusedTooEarly: .*", str(error.value))
    assert found and re.search(PLANTED[name][-1], found[0]), found or str(error.value)[-2000:]
