"""Shared experts are computed while tokens travel to the others, once, with hooks and adapters."""

from __future__ import annotations

import contextlib
import functools
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_axonn import Grid, parallelize
from hf_axonn.config import AxonnConfig, Overlap
from hf_axonn.distributed.collectives import observe, watch_waits
from hf_axonn.layers.base import patch_forward
from hf_axonn.layers.computed_ahead import ComputedAhead
from tests.helpers.adapting import adapt
from tests.helpers.equality import Case, exact, rows_of
from tests.helpers.float64 import checkpointed
from tests.helpers.models import tiny_batch
from tests.helpers.ranks import run_ranks
from tests.layers.test_moe import Planned, errors, moe, moved
from tests.layers.test_moving_experts import case


class Mixture(nn.Module):
    """Calls an Identity as experts, then two Linears, one of them with what `second` makes of its input."""

    def __init__(self, second=lambda hidden: hidden):
        super().__init__()
        self.experts, self.first, self.then = nn.Identity(), nn.Linear(3, 3), nn.Linear(3, 3)
        self.second = second

    def forward(self, hidden_states):
        hidden = hidden_states
        flat = hidden.view(-1, 3)
        routed = self.experts(flat).view(hidden.shape)
        assert self.first.weight.shape == (3, 3)
        return routed + self.first(hidden) + self.then(self.second(flat)).view(hidden.shape)


def ahead(mixture) -> list[str]:
    """Let both Linears be computed when the experts are called; returns what is then called, in order."""
    computed = ComputedAhead(mixture, {"first": True, "then": False})
    seen: list[str] = []

    def experts(original, hidden):
        seen.append("experts")
        computed.compute(hidden)
        seen.append("experts are done")
        return original(hidden)

    patch_forward(mixture.experts, experts)
    for name in ("first", "then"):
        module = mixture.get_submodule(name)
        module.register_forward_pre_hook(lambda *_, name=name: seen.append(name))
    return seen


def test_modules_run_once_while_experts_do():
    mixture, hidden = Mixture(), torch.randn(2, 5, 3)
    expected = mixture(hidden)
    seen = ahead(mixture)
    assert torch.equal(mixture(hidden), expected) and torch.equal(mixture(hidden_states=hidden), expected)
    assert seen == 2 * ["experts", "first", "then", "experts are done"]
    assert not any(isinstance(value, nn.Module) for value in vars(mixture).values())


@pytest.mark.parametrize("change", [torch.Tensor.add, torch.Tensor.add_])
def test_another_input_is_computed_as_ever(change):
    mixture, hidden = Mixture(lambda hidden: change(hidden, 1)), torch.randn(2, 5, 3)
    expected = mixture(hidden.clone())
    seen = ahead(mixture)
    assert torch.equal(mixture(hidden), expected)
    assert seen == ["experts", "first", "then", "experts are done", "then"]


def test_after_an_error_nothing_is_left():
    mixture, hidden = Mixture(), torch.randn(2, 5, 3)
    seen = ahead(mixture)
    hook = mixture.then.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mixture(hidden)
    hook.remove()
    seen.clear()
    mixture(hidden)
    assert seen == ["experts", "first", "then", "experts are done"] and "first" not in vars(mixture)


def launches(overlap, reentrant=None):
    """The events of forward and of backward of one layer with experts."""
    grid = Grid(z=2)
    model = moe("deepseek_v3").train()
    if reentrant is not None:
        checkpointed(model, reentrant=reentrant)
    parallelize(model, config=AxonnConfig(grid=grid, experts="move", overlap=Overlap(all_to_all=overlap)))
    seen = []

    def note(module, args, output):
        seen.append("shared")
        if output.requires_grad:
            output.register_hook(lambda _: seen.append("shared"))

    @contextlib.contextmanager
    def wait(kind, _):
        if kind == "exchange":
            seen.append("wait")
        yield

    mixture = model.model.layers[1].mlp
    mixture.shared_experts.act_fn.register_forward_hook(note)
    own = rows_of(tiny_batch(8, 7), grid, dist.get_rank())
    with exact(), observe(lambda kind, *_: seen.append("start") if kind == "exchange" else None), watch_waits(wait):
        loss = model(**own).loss
        forward = seen.copy()
        seen.clear()
        loss.backward()
    return forward, seen


def _in_order():
    there = ["start", "start", "shared", "wait", "wait"]
    assert launches(True) == (there + ["start", "wait"], ["start", "wait"] + there)
    one_by_one = 2 * ["start", "wait"] + ["shared"]
    assert launches(False) == (one_by_one + ["start", "wait"], ["start", "wait"] + one_by_one)
    forward, backward = launches(True, reentrant=False)
    # Recomputed as far as the experts' results, which travel back no more.
    assert forward == there + ["start", "wait"] and backward == ["start", "wait"] + there + there


def test_shared_experts_run_between_start_and_wait_and_in_backward_too():
    run_ranks(_in_order, 2)


def _gone():
    """A step that recomputes its layers leaves no tensor for the garbage collector."""
    grid = Grid(z=2)
    model = moe("deepseek_v3").train()
    checkpointed(model, reentrant=False)
    parallelize(model, config=AxonnConfig(grid=grid, experts="move"))
    seen = []
    shared = model.model.layers[1].mlp.shared_experts
    shared.register_forward_hook(lambda *call: seen.append(StorageWeakRef(call[-1].untyped_storage())))
    own = rows_of(tiny_batch(8, 7), grid, dist.get_rank())
    gc.disable()
    with exact():
        model(**own).loss.backward()
    assert len(seen) == 2 and all(storage.expired() for storage in seen)


def test_results_are_freed_at_once():
    run_ranks(_gone, 2)


def adapted():
    """LoRA on all Linears, those of the shared experts included."""
    return adapt(moe("deepseek_v3"))


@pytest.mark.slow
@pytest.mark.parametrize("grid", [Grid(z=4), Grid(z=2, x=2), Grid(y=2, x=2), Grid(z=2, context=2, x=2)], ids=str)
def test_ways_of_training_equal_one_process(grid):
    again = functools.partial(checkpointed, reentrant=True)
    ways = [case("deepseek_v3", "three steps", steps=3), case("deepseek_v3", "reentrant", before=again)]
    lora = Case("LoRA", adapted, config=moved)
    linears = [] if grid.context > 1 else [Planned(ways, [grid], by_blocks=False)]
    assert not errors(Planned([*ways, lora], [grid]), *linears)
