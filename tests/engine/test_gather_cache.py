"""Kept weights: what is gathered how often, when it is let go, and that stale weights are never used."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import nn
from transformers import GenerationConfig, StoppingCriteria

from hf_axonn import parallelize
from hf_axonn.config import AxonnConfig
from hf_axonn.engine import gathering
from hf_axonn.engine.gather_cache import GatherCache, GatheredBlocks
from hf_axonn.engine.gradient_sync import sync_gradients
from hf_axonn.topology.grid import Grid
from tests.helpers.equality import exact
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks


pytestmark = pytest.mark.usefixtures("device")


def test_what_nobody_holds_is_not_found():
    kept = GatherCache()
    gathered = GatheredBlocks([torch.zeros(1)], 3)
    kept.add("a", gathered)
    assert kept.find("a", 3) is gathered and "a" in kept
    assert kept.find("a", 4) is None  # the weights have changed
    del gathered
    assert kept.find("a", 3) is None and "a" not in kept


def test_what_is_held_stays_until_it_is_released_or_a_new_pass_begins():
    kept = GatherCache()
    for name in "ab":
        kept.add(name, GatheredBlocks([], 0), hold=True)
    kept.release("a")
    assert "a" not in kept and "b" in kept
    kept.begin_pass()
    assert "b" not in kept


def test_a_whole_call_keeps_everything_to_its_end():
    kept = GatherCache()
    with pytest.raises(KeyError), kept.keep_everything():
        kept.add("a", GatheredBlocks([], 0))
        kept.release("a")
        kept.begin_pass()
        with kept.keep_everything():  # one inside of another ends nothing
            pass
        assert "a" in kept and kept.everything
        raise KeyError
    assert "a" not in kept and not kept.everything


@contextlib.contextmanager
def counting():
    """How many gathers over z are begun inside."""
    count, original = [], gathering.start_all_gathers

    def start(bundle, group):
        count.extend(bundle)
        return original(bundle, group)

    gathering.start_all_gathers = start
    try:
        yield count
    finally:
        gathering.start_all_gathers = original


def gathers_of_a_step(model):
    """Of the second and the third step, when their order is known; nothing may be left at hand afterwards."""
    counts = []
    for _ in range(3):
        with counting() as count:
            loss = model(**tiny_batch(2, 7)).loss
            loss.backward()
        counts.append(len(count))
        assert (
            not len(model.axonn.context.gather_cache._alive) and not model.axonn.context.gather_cache._held
        )  # though the loss is still held
    assert counts[0] >= counts[1] == counts[2]
    return counts[1]


# Two layers of four groups (q k v, o, gate up, down), and embedding and head, which are not gathered in backward.
FORWARD, OF_LAYER = 10, 4
GATHERS = {
    "none": (FORWARD + 2 * OF_LAYER, FORWARD + 4 * OF_LAYER),  # without and with recomputation
    0: (FORWARD + 2 * OF_LAYER, FORWARD + 4 * OF_LAYER),
    "recomputed": (FORWARD + 2 * OF_LAYER, FORWARD + 2 * OF_LAYER),
    1: (FORWARD + OF_LAYER, FORWARD + 2 * OF_LAYER),
    "all": (FORWARD, FORWARD),
    7: (FORWARD, FORWARD),
}


def count_in_training():
    for keep, (plain, recomputed) in GATHERS.items():
        grid = Grid(z=2)
        model, _ = parallelize(tiny_model("llama"), grid, config=AxonnConfig(grid=grid, keep_gathered=keep))
        assert gathers_of_a_step(model.train()) == plain, keep
        for reentrant in (True, False):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            assert gathers_of_a_step(model) == recomputed, (keep, reentrant)
        # What a forward pass without backward has left is let go by the next pass, or with its loss.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        loss = model(**tiny_batch(2, 7)).loss
        assert len(model.axonn.context.gather_cache._held) == {1: 4, "all": 8, 7: 8}.get(keep, 0)
        del loss
        with torch.no_grad():
            model.eval()(**tiny_batch(2, 7))
        gc.collect()
        assert not len(model.axonn.context.gather_cache._alive) and not model.axonn.context.gather_cache._held


def count_with_a_pass_between():
    grid = Grid(z=2)
    model, _ = parallelize(tiny_model("llama"), grid)
    for reentrant in (True, False):
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        for _ in range(2):
            with counting() as calls:
                loss = model(**tiny_batch(2, 7)).loss
                forward = len(calls)
                with torch.no_grad():  # as of a reference model that is this one without its adapters
                    model(**tiny_batch(2, 7, seed=1))
                between = len(calls)
                loss.backward()
        assert len(calls) - between == 2 * OF_LAYER, reentrant
        assert not model.axonn.context.gather_cache._held, (reentrant, forward)


def test_a_pass_without_gradients_before_backward_costs_no_gathers():
    run_ranks(count_with_a_pass_between, 2)


class OfShards(torch.optim.Optimizer):
    """Writes the local tensors, by `.data`, which leaves no trace."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.to_local().data.sub_(parameter.grad.to_local())


def local_tensors(model):
    for parameter in model.parameters():
        parameter.to_local().mul_(1.5)


def whole_parameters(model):
    for parameter in model.parameters():
        parameter.mul_(1.5)


def loaded(model):
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})


def by_data(model):
    for parameter in model.parameters():
        parameter.data.mul_(1.5)


def step_of(optimizer, **settings):
    return lambda model: optimizer(model.parameters(), **settings).step()


SEEN = [
    local_tensors,
    whole_parameters,
    loaded,
    step_of(torch.optim.SGD, lr=1),
    *(step_of(torch.optim.AdamW, lr=0.1, **how) for how in ({}, {"foreach": False}, {"fused": True})),
    step_of(OfShards),
]


def changed_weights():
    """The next forward pass has the weights as they are; backward through the one before is refused."""
    for grid in (Grid(z=2), Grid(x=2)):
        for keep in ("all", "none"):
            model, _ = parallelize(tiny_model("llama"), grid, config=AxonnConfig(grid=grid, keep_gathered=keep))
            other, _ = parallelize(tiny_model("llama"), grid)
            model.train(), other.train()
            model(**tiny_batch(2, 7)).loss.backward()
            sync_gradients(model)
            for change in [*SEEN, by_data]:
                held = model(**tiny_batch(2, 7)).loss
                with torch.no_grad():
                    change(model)
                other.load_state_dict(model.state_dict())
                assert torch.equal(model(**tiny_batch(2, 7)).loss, other(**tiny_batch(2, 7)).loss), (
                    grid,
                    keep,
                    change,
                )
                if change is not by_data:  # of which autograd knows nothing either
                    with pytest.raises(RuntimeError, match="modified"):
                        held.backward()
                    sync_gradients(model)  # an optimizer asks for it after every pass


def no_layers():
    grid = Grid(z=2)
    for keep in ("all", "none"):
        parallelize(nn.Linear(4, 4), grid, config=AxonnConfig(grid=grid, keep_gathered=keep))
    with pytest.raises(ValueError, match="keep_gathered is 2, a number of layers, but this model has no list"):
        parallelize(nn.Linear(4, 4), grid, config=AxonnConfig(grid=grid, keep_gathered=2))


def in_training():
    count_in_training()
    changed_weights()
    no_layers()


def test_training_gathers_what_is_not_kept():
    run_ranks(in_training, 2)


class Broken(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        raise KeyError("broken")


PROMPT = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 10]])}
WRITE = {"max_new_tokens": 5, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
GROUPS = {"llama": FORWARD, "smollm2": FORWARD - 1}  # tied: embedding and head are one group


def write(model, *args, **options):
    with torch.no_grad(), exact():
        return model.generate(*args, **(WRITE | options))


def count_in_generation(truths):
    for kind, groups in GROUPS.items():
        model, _ = parallelize(tiny_model(kind).eval(), Grid(z=2))
        for _ in range(2):
            with counting() as count:
                assert torch.equal(write(model, **PROMPT), truths[kind])
            assert len(count) == groups
            assert not len(model.axonn.context.gather_cache._alive)
        model.train()(**tiny_batch(2, 7)).loss.backward()  # has an order of its own
        with counting() as count:
            write(model.eval(), **PROMPT)
        assert len(count) == groups
        with pytest.raises(KeyError, match="broken"):
            write(model, **PROMPT, stopping_criteria=[Broken()])
        assert not len(model.axonn.context.gather_cache._alive) and not model.axonn.context.gather_cache.everything
        with counting() as count, torch.no_grad():
            for _ in range(2):
                model(**PROMPT)
        assert len(count) == 2 * FORWARD  # not a call of generate
    uncached = GenerationConfig(use_cache=False)
    with counting() as count:
        assert torch.equal(write(model, **PROMPT, generation_config=uncached), truths["smollm2"])
    assert len(count) == groups  # though every token is a forward pass over the whole sequence


def test_generate_gathers_once():
    run_ranks(count_in_generation, 2, {kind: write(tiny_model(kind).eval(), **PROMPT) for kind in GROUPS})
