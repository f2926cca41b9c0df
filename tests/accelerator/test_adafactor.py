"""Adafactor on shards of odd shapes against Transformers' own on whole tensors."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor

from hf_axonn.accelerator.adafactor import GridAdafactor, follow_grid
from hf_axonn.distributed.mesh import grid_mesh
from hf_axonn.engine.dtensors import distribute_parameter, shard_of, shard_placements
from hf_axonn.topology.grid import Grid
from tests.helpers.equality import full
from tests.helpers.ranks import all_grids, run_ranks


SHAPES = {
    "column": (11, 6),
    "row": (5, 3),
    "vocabulary": (13, 4),
    "experts": (5, 3, 7),
    "whole_experts": (7, 3, 5),
    "replicated": (9,),
}
OPTIONS = {
    "as Trainer makes it": dict(lr=1e-2, scale_parameter=False, relative_step=False, weight_decay=0.1),
    "relative": dict(scale_parameter=True, relative_step=True, warmup_init=True),
    "with a first moment": dict(lr=1e-2, scale_parameter=True, relative_step=False, beta1=0.9, clip_threshold=0.1),
}
STEPS = 4


def values(name: str, step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + len(name))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64).to(dtype)


def whole(options: dict, dtype: torch.dtype, *, steps: int = STEPS) -> tuple[dict[str, nn.Parameter], Adafactor]:
    parameters = {name: nn.Parameter(values(name, 0, dtype)) for name in SHAPES}
    optimizer = Adafactor(parameters.values(), **options)
    for step in range(1, steps + 1):
        for name, parameter in parameters.items():
            parameter.grad = values(name, step, dtype)
        optimizer.step()
    return parameters, optimizer


def sharded(options: dict, dtype: torch.dtype, grid, *, resume: bool) -> dict[str, torch.Tensor]:
    """The same steps on a grid; half of them on one process, whose state is whole, if `resume`."""
    mesh = grid_mesh(grid, "cpu")
    before, old = whole(options, dtype, steps=STEPS // 2)
    parameters = {}
    for name in SHAPES:
        start = before[name] if resume else nn.Parameter(values(name, 0, dtype))
        parameters[name] = distribute_parameter(start, shard_placements(name, grid), mesh)
    optimizer = Adafactor(parameters.values(), **options)
    if resume:
        for name, parameter in parameters.items():
            optimizer.state[parameter] = dict(old.state[before[name]])
    if "lr" in options:  # a schedule wraps the step of the class as it is now
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    follow_grid(optimizer)
    assert type(optimizer) is GridAdafactor
    for step in range(STEPS // 2 + 1 if resume else 1, STEPS + 1):
        for name, parameter in parameters.items():
            local = shard_of(values(name, step, dtype), parameter.placements, mesh)
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad.to_local().copy_(local)
        optimizer.step()
    found = {name: full(parameter) for name, parameter in parameters.items()}
    states = {
        f"{name} {key}": full(value)
        for name, parameter in parameters.items()
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor)
    }
    return found | states


def differences(truths: dict, grids: list[Grid]) -> list[str]:
    wrong = []
    for grid, (name, dtype), resume in itertools.product(grids, truths, (False, True)):
        found = sharded(OPTIONS[name], dtype, grid, resume=resume)
        # A rounding to bfloat16 may fall to the other side.
        bound = 1e-12 if dtype == torch.float64 else 2e-2
        for key, value in truths[name, dtype].items():
            if not torch.allclose(found[key].double(), value.double(), rtol=bound, atol=bound):
                wrong.append(f"{grid} {name} {dtype} resume={resume}: {key}")
        assert found.keys() == truths[name, dtype].keys()
    return wrong


EVERY_GRID = [grid for grid in all_grids(4) if grid.data == 1]


@pytest.mark.parametrize(
    "grids",
    [[Grid(z=2, x=2)], pytest.param(EVERY_GRID, marks=pytest.mark.slow)],
    ids=["two axes", "every grid"],
)
def test_a_grid_of_four_equals_whole_tensors(grids):
    truths = {}
    for name, dtype in itertools.product(OPTIONS, (torch.float64, torch.bfloat16)):
        parameters, optimizer = whole(OPTIONS[name], dtype)
        truths[name, dtype] = {key: value.detach() for key, value in parameters.items()} | {
            f"{key} {its}": value
            for key, parameter in parameters.items()
            for its, value in optimizer.state[parameter].items()
            if isinstance(value, torch.Tensor)
        }
    for wrong in run_ranks(differences, 4, truths, grids):
        assert not wrong, wrong[:5]


def test_plain_parameters_and_other_optimizers_are_left_alone():
    for optimizer in (Adafactor([nn.Parameter(torch.ones(2, 2))]), torch.optim.SGD([nn.Parameter(torch.ones(2))])):
        kind = type(optimizer)
        follow_grid(optimizer)
        assert type(optimizer) is kind


def test_a_schedule_made_before_the_class_changed_notices_the_steps():
    """torch warns where it sees a scheduler step before its optimizer."""
    from hf_axonn.compat.torch import ask_class_for_step

    parameter = nn.Parameter(torch.ones(3))
    optimizer = Adafactor([parameter], lr=1e-2, scale_parameter=False, relative_step=False)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    optimizer.__class__ = GridAdafactor
    ask_class_for_step(optimizer)
    parameter.grad = torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(lambda: 0.0)
        schedule.step()
    assert optimizer.state[parameter]["step"] == 1 and not parameter.eq(1).any()


def test_hooks_of_the_optimizer_run():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = Adafactor([parameter], lr=1e-2, scale_parameter=False, relative_step=False)
    optimizer.__class__ = GridAdafactor
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert seen == ["after"]
