"""Elementwise optimizers step on shards: the same bits as on DTensors, and DTensors before and after."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop
from torch.optim.lr_scheduler import ConstantLR

from hf_axonn import AxonnPlugin, Grid, parallelize
from hf_axonn.accelerator.prepare import point_to_shards
from hf_axonn.compat.accelerate import forget_state
from hf_axonn.engine import optimizer_steps
from hf_axonn.engine.gradient_sync import sync_gradients
from hf_axonn.engine.host_moments import HostMoments
from hf_axonn.engine.optimizer_steps import ELEMENTWISE, shards_of, step_elementwise, step_on_shards
from tests.helpers.equality import rows_of
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks


KINDS = (
    (Adam, {}),
    (Adam, {"amsgrad": True, "maximize": True}),
    (AdamW, {"weight_decay": 0.1}),
    (AdamW, {"fused": True}),
    (AdamW, {"foreach": True}),
    (SGD, {}),
    (SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
    (Adagrad, {"lr_decay": 0.1}),
    (RMSprop, {"momentum": 0.9, "centered": True}),
    (NAdam, {}),
    (RAdam, {}),
    (Adamax, {}),
    (ASGD, {}),
    (Adadelta, {}),
)


def model_of(grid):
    model, _ = parallelize(tiny_model("llama"), grid)
    model.model.embed_tokens.weight.requires_grad_(False)
    return model


def backward(model, grid, seed):
    model.zero_grad()
    model(**rows_of(tiny_batch(2 * grid.dp_size, 7, seed=seed), grid, torch.distributed.get_rank())).loss.backward()
    sync_gradients(model)


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def check_bits(grid):
    for kind, options in KINDS:
        ours, theirs = model_of(grid), model_of(grid)
        optimizers = [kind(model.parameters(), lr=0.01, **options) for model in (ours, theirs)]
        for seed in range(3):
            backward(theirs, grid, seed)
            kind.step.__wrapped__(optimizers[1])  # DTensors step
            if seed == 1:
                assert optimizers[0].step(lambda model=ours, seed=seed: backward(model, grid, seed) or 5.0) == 5.0
            else:
                backward(ours, grid, seed)
                optimizers[0].step()
        for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(local(mine), local(its)), (kind, options)
            assert shapes(optimizers[0].state[mine]) == shapes(optimizers[1].state[its]), (kind, options)
            for name, value in optimizers[1].state[its].items():
                assert value is None or torch.equal(local(optimizers[0].state[mine][name]), local(value)), name
        files = [optimizer.state_dict() for optimizer in optimizers]
        assert files[0]["param_groups"] == files[1]["param_groups"]
        assert files[0]["state"].keys() == files[1]["state"].keys()


def shapes(state):
    return {
        name: (value.placements, value.shape) if isinstance(value, DTensor) else type(value)
        for name, value in state.items()
    }


def check_inside(grid):
    model = model_of(grid)
    optimizer = AdamW([{"params": [parameter]} for parameter in model.parameters()])
    backward(model, grid, 0)
    optimizer.step()
    backward(model, grid, 1)
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    before = {parameter: dict(optimizer.state[parameter]) for parameter in trained}

    def broken():
        with shards_of(optimizer):
            for parameter in [parameter for group in optimizer.param_groups for parameter in group["params"]]:
                assert isinstance(parameter, DTensor) == (parameter.grad is None)
                for value in [parameter.grad, *optimizer.state.get(parameter, {}).values()]:
                    assert not isinstance(value, DTensor)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        broken()
    assert [group["params"][0] for group in optimizer.param_groups] == list(model.parameters())
    assert list(optimizer.state) == trained
    for parameter in trained:
        assert local(parameter).grad is None and parameter.grad is not None
        now = optimizer.state[parameter]
        assert now.keys() == before[parameter].keys()
        assert all(now[name] is value for name, value in before[parameter].items())
    # A gradient that lies otherwise is left to DTensor.
    trained[0].grad = DTensor.from_local(trained[0].grad.full_tensor(), trained[0].device_mesh)
    with shards_of(optimizer):
        assert [group["params"][0] for group in optimizer.param_groups] == list(model.parameters())


def check(grid):
    check_bits(grid)
    check_inside(grid)


@pytest.mark.parametrize("grid", [Grid(x=2), pytest.param(Grid(z=2, y=2), marks=pytest.mark.slow)], ids=str)
def test_a_step_on_shards_is_that_on_dtensors(grid):
    run_ranks(check, grid.size, grid)


def steps_on_shards(*, offload: str = "none", schedule_first: bool) -> float:
    """Count the parameters that a step has on shards; a schedule wraps it before or after there is an Accelerator."""
    forget_state()
    own = getattr(AdamW.step, "__wrapped__", AdamW.step)
    AdamW.step = own  # type: ignore[method-assign]  # as in a process that knows of no grid yet
    model = tiny_model("llama", num_hidden_layers=1)
    optimizer = AdamW(model.parameters())
    if schedule_first:
        schedule = ConstantLR(optimizer)
    accelerator = Accelerator(cpu=True, parallelism_config=AxonnPlugin(grid=Grid(x=2), offload=offload))
    if not schedule_first:
        schedule = ConstantLR(optimizer)
    model, prepared, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.backward(model(**tiny_batch(2, 7)).loss)
    with (
        mock.patch.object(optimizer_steps, "_take_back", wraps=optimizer_steps._take_back) as taken,
        mock.patch.object(HostMoments, "take_step", autospec=True, side_effect=HostMoments.take_step) as moved,
    ):
        prepared.step()
    assert moved.call_count == (offload == "optimizer")
    return taken.call_count / len(list(model.parameters()))


def check_prepared():
    assert steps_on_shards(schedule_first=False) == steps_on_shards(schedule_first=True) == 1
    assert steps_on_shards(schedule_first=True, offload="optimizer") == 1


def test_an_optimizer_whose_schedule_was_made_before_the_grid():
    run_ranks(check_prepared, 2)


def check_followed():
    model = tiny_model("llama", num_hidden_layers=1)
    optimizer = AdamW([{"params": model.model.parameters()}, {"params": model.lm_head.parameters()}])
    model, _ = parallelize(model, Grid(x=2))
    count = len(list(model.parameters()))
    backward(model, Grid(x=2), 0)
    whole = f"AdamW holds {count} of {count} parameters as they were before .* the first of shape .131, 48.*: make the"
    with pytest.raises(ValueError, match=whole):
        optimizer.step()
    point_to_shards(optimizer)
    optimizer.step()
    assert len(optimizer.state) == count


def test_an_optimizer_that_does_not_follow_its_model_onto_the_grid_is_refused():
    """Without an error its steps would train nothing."""
    run_ranks(check_followed, 2)


def test_a_step_that_is_part_of_a_graph_is_left_alone():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = SGD([weight], lr=1.0, differentiable=True)
    with shards_of(optimizer):
        assert optimizer.param_groups[0]["params"] == [weight]


def test_hooks_of_steps_are_around_it_and_plain_models_are_left_alone():
    step_on_shards()
    step_on_shards()
    assert all(kind.step.take_step is step_elementwise for kind in ELEMENTWISE)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, seen = AdamW([weight]), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    weight.grad = torch.ones(2)
    optimizer.step()
    assert seen == ["before", "after"] and weight[0] < 1
