"""fp16's GradScaler on a grid: steps are skipped, and scales change, on all ranks as on one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from bitsandbytes.optim import AdamW8bit
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.optimization import Adafactor

from hf_axonn import Grid, parallelize, sync_gradients
from hf_axonn.engine.dtensors import local
from hf_axonn.engine.loss_scaling import check_gradients_together
from hf_axonn.engine.optimizer_steps import keep_moments_on_host
from tests.engine import test_low_bit_adam as low_bit
from tests.engine.test_low_bit_adam import SMALL
from tests.helpers.equality import full, mean_over_world, rows_of
from tests.helpers.float64 import Float64, relative_errors
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks


GRIDS = [Grid(data=2), Grid(z=2), Grid(y=2), Grid(x=2)]
BATCHES = [tiny_batch(4, 7, seed=seed) for seed in range(6)]
PLANTED, PLACE = 3, "model.layers.0.mlp.up_proj.weight"  # the step in which a gradient is inf, and whose
OVERFLOW = 2.0**26  # the scale at first, which gradients in fp16 do not bear; a skipped step multiplies by BACKOFF
BACKOFF = 2.0**-14
FP16 = functools.partial(torch.autocast, "cpu", torch.float16)


def adamw(groups: list[dict], *, fused: bool = False) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=fused)


def sgd(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.05)


def scaled_run(model, batches, make_optimizer, context, *, dp_size: int = 1, plants: bool = True):
    """(skipped, scale) of each step, losses, and the parameters in the end; each second step clips."""
    # Norms first: replicated, so that the first gradient says nothing of which ranks have to be asked.
    norms = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    optimizer = make_optimizer([{"params": norms}, {"params": others}])
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    scaler = torch.amp.GradScaler("cpu", init_scale=OVERFLOW, backoff_factor=BACKOFF, growth_interval=2)
    log, losses = [], []
    for step, batch in enumerate(batches):
        with context():
            loss = model(**batch, num_items_in_batch=17).loss * dp_size
        scaler.scale(loss).backward()
        sync_gradients(model)
        if step == PLANTED and plants:  # after the averages: on this rank alone, which no other can know
            local(dict(model.named_parameters())[PLACE].grad).view(-1)[-1] = float("inf")
        before = [local(parameter).detach().clone() for parameter in parameters]
        if step % 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = [not torch.equal(local(new).detach(), old) for new, old in zip(parameters, before, strict=True)]
        assert all(moved) or not any(moved)
        log.append((not any(moved), scaler.get_scale()))
        losses.append(loss.detach())
    return log, losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def a_model(dtype):
    return tiny_model("llama", dtype=dtype, num_hidden_layers=1).train()


def on_grids(name, truth):
    """On each grid the log of a run, and the largest distance of parameters and losses from the truth."""
    dtype, make_optimizer, context = RUNS[name]
    measure = TRUTHS[name].measure if name in TRUTHS else distance
    found = {}
    for grid in GRIDS:
        model, _ = parallelize(a_model(dtype), grid)
        batches = [rows_of(batch, grid, dist.get_rank()) for batch in BATCHES]
        given = (model, batches, make_optimizer, context)
        log, losses, parameters = scaled_run(*given, dp_size=grid.dp_size, plants=dist.get_rank() == 1)
        found[str(grid)] = log, measure(parameters, [mean_over_world(loss) for loss in losses], truth)
    return found, foreign()


def distance(parameters, losses, truth) -> float:
    _, its, theirs = truth
    worst = max(relative_errors({name: value.double() for name, value in parameters.items()}, theirs).values())
    return max(worst, *(float((mine - one).abs() / one) for mine, one in zip(losses, its, strict=True)))


def distance_of_vectors(parameters, losses, truth) -> float:
    """Distance of all parameters as one vector: AdamW turns the sign of single small gradients into steps."""
    return low_bit.distance({name: full(value) for name, value in parameters.items()}, truth[2])


def foreign() -> list[float]:
    """A GradScaler on gradients that are none of ours, with inf on rank 1: torch decides, as without us."""
    check_gradients_together()
    mesh, found = init_device_mesh("cpu", (2,)), []
    for placed in (Shard(0), None):
        parameter = torch.nn.Parameter(torch.ones(4))
        if placed:
            parameter = torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placed]))
        optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        parameter.grad = parameter.detach().clone()
        if dist.get_rank() == 1:
            local(parameter.grad)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return found


def on_host(groups: list[dict], *, fused: bool = False) -> torch.optim.Optimizer:
    optimizer = adamw(groups, fused=fused)
    keep_moments_on_host(optimizer, torch.device("cpu"))
    return optimizer


def adafactor(groups: list[dict]) -> torch.optim.Optimizer:
    return Adafactor(groups, lr=1e-2, beta1=0.9, relative_step=False, scale_parameter=False)


def muon(groups: list[dict]) -> torch.optim.Optimizer:
    """Muon of the matrices; norms, which it refuses, stay what they are."""
    return torch.optim.Muon(groups[1:], lr=1e-2)


def eight_bits(groups: list[dict]) -> torch.optim.Optimizer:
    return AdamW8bit(groups, **SMALL)


RUNS = {
    "AdamW": (torch.float64, adamw, Float64),
    "fused AdamW": (torch.float64, functools.partial(adamw, fused=True), Float64),
    "AdamW, moments on the host": (torch.float64, on_host, Float64),
    "fused AdamW, moments on the host": (torch.float64, functools.partial(on_host, fused=True), Float64),
    "Adafactor": (torch.float64, adafactor, Float64),
    "Muon": (torch.float64, muon, Float64),
    "fp16": (torch.float32, sgd, FP16),
    "fp16, AdamW in 8 bits": (torch.float32, eight_bits, FP16),
}


class Truth(NamedTuple):
    """The truth of a run in fp16: an optimizer in float64, in a measure, of which a grid is so many times as
    far away as one process."""

    make_optimizer: Callable
    measure: Callable
    times: float


TRUTHS = {
    "fp16": Truth(sgd, distance, 3),
    "fp16, AdamW in 8 bits": Truth(functools.partial(torch.optim.AdamW, lr=SMALL["lr"]), distance_of_vectors, 1.2),
}


def float64_truth(make_optimizer):
    """What fp16 is near to: float64, without the steps that fp16 skips."""
    model = a_model(torch.float32).double()
    optimizer, losses = make_optimizer([{"params": model.parameters()}]), []
    for step, batch in enumerate(BATCHES):
        with Float64():
            loss = model(**batch, num_items_in_batch=17).loss
        loss.backward()
        losses.append(loss.detach())
        if step % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if step not in (0, PLANTED):
            optimizer.step()
        optimizer.zero_grad()
    return None, losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * ("8" in name)) for name in TRUTHS])
def test_steps_are_skipped_and_scaled_as_on_one_process(name):
    """fp16 is compared with float64: a grid is no further from it than three times one process, as without a scale."""
    alone = scaled_run(a_model(torch.float32), BATCHES, RUNS[name][1], FP16)
    truth = float64_truth(TRUTHS[name].make_optimizer)
    assert [skipped for skipped, _ in alone[0]] == [step in (0, PLANTED) for step in range(6)]
    bound = TRUTHS[name].times * TRUTHS[name].measure(alone[2], alone[1], truth)
    assert 1e-4 < bound < 0.05
    for rank, (found, (of_torch, plain)) in enumerate(run_ranks(on_grids, 2, name, truth)):
        for grid, (log, error) in found.items():
            print(f"{name} {grid}: {error:.2e}, at most {bound:.2e}")
            assert log == alone[0] and error <= bound, (grid, log, error, bound)
        assert of_torch == 2.0 and plain == (2.0 if rank == 1 else 4.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RUNS if name not in TRUTHS])
def test_scaled_steps_are_those_of_one_process(name, monkeypatch):
    """A scale is a power of two, so that in float64 it changes no number. Muon multiplies in bfloat16, which is taken
    from it to see all digits."""
    dtype, make_optimizer, context = RUNS[name]
    if name == "Muon":
        monkeypatch.setattr(torch.Tensor, "bfloat16", lambda its: its)
    truth = scaled_run(a_model(dtype), BATCHES, make_optimizer, context)
    assert [skipped for skipped, _ in truth[0]] == [step == PLANTED for step in range(6)]
    for found, _ in run_ranks(on_grids, 2, name, truth):
        for grid, (log, error) in found.items():
            assert log == truth[0] and error < 1e-10, (grid, log, error)
