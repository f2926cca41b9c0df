"""Adafactor on shards of odd shapes against Transformers' own on whole tensors."""

from __future__ import annotations

import itertools
import warnings
from unittest import mock

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor

from hf_axonn.compat.torch import ask_class_for_step
from hf_axonn.distributed.mesh import grid_mesh
from hf_axonn.engine.dtensors import distribute_parameter, shard_of, shard_placements
from hf_axonn.engine.optimizer_steps import step_on_shards
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
    step_on_shards()
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
    if "lr" in options:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
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


def stepped(optimizer: Adafactor, parameter: nn.Parameter) -> torch.Tensor:
    """The parameter after a step."""
    parameter.grad = torch.arange(1.0, 4)
    optimizer.step(lambda: 0.0)
    return parameter.detach().clone()


def test_plain_parameters_have_transformers_own_step():
    options = dict(lr=1e-2, scale_parameter=False, relative_step=False)
    step_on_shards()
    ours = nn.Parameter(torch.ones(3))
    optimizer, seen = Adafactor([ours], **options), []
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    theirs = nn.Parameter(torch.ones(3))
    with mock.patch.object(Adafactor, "step", Adafactor.step.__wrapped__):
        truth = stepped(Adafactor([theirs], **options), theirs)
    assert torch.equal(stepped(optimizer, ours), truth) and not truth.eq(1).any() and seen == ["after"]


def test_a_schedule_made_before_notices_the_steps_of_the_class():
    """torch warns where it sees a scheduler step before its optimizer."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer, seen = Adafactor([parameter], lr=1e-2, scale_parameter=False, relative_step=False), []
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    own = Adafactor.step
    with mock.patch.object(Adafactor, "step", lambda self, closure=None: seen.append(own(self, closure))):
        stepped(optimizer, parameter)
        assert not seen
        ask_class_for_step(optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            stepped(optimizer, parameter)
            schedule.step()
    assert seen == [0.0] and optimizer.state[parameter]["step"] == 2


def test_torchs_adafactor_is_refused_on_shards():
    run_ranks(_refuse_torchs, 2)


def _refuse_torchs() -> None:
    step_on_shards()
    grid = Grid(x=2)
    parameter = distribute_parameter(
        nn.Parameter(torch.ones(4, 2)), shard_placements("column", grid), grid_mesh(grid, "cpu")
    )
    optimizer = torch.optim.Adafactor([parameter])
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match="torch.optim.Adafactor is not supported over a grid: .* Use Transformers'"):
        optimizer.step()
    plain = nn.Parameter(torch.ones(4, 2))
    plain.grad = torch.ones(4, 2)
    torch.optim.Adafactor([plain]).step()
    assert not plain.eq(1).any()
