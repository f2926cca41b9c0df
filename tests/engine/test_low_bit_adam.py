"""bitsandbytes' AdamW over a grid: its own steps on shards, checkpoints that fit AdamW and every grid, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import torch.distributed as dist
from bitsandbytes.optim import AdamW8bit, GlobalOptimManager, PagedAdamW8bit
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer

from hf_axonn import Grid, load_sharded, parallelize, save_sharded, sync_gradients
from hf_axonn.checkpoint.single_process import load_plain_optimizer
from hf_axonn.compat.low_bit_adam import MOMENTS, moments_of, state_of
from hf_axonn.engine.dtensors import local
from hf_axonn.engine.low_bit_adam import in_float32, quantize_moments
from hf_axonn.engine.optimizer_steps import refuse_unserved, step_low_bit, step_on_shards
from tests.helpers.equality import full, rows_of
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import make_trainer, numbers


SMALL = {"lr": 1e-2, "min_8bit_size": 128}  # the default, 4,096, is more than a tiny model has
HALF_A_LEVEL = 0.0071  # of a block's largest magnitude: the highest levels are 0.0141 apart
LOOKED_UP = 2.3e-5  # likewise: what the kernel for CPUs reads in the place of 8.9e-5


def stepped(sizes: list[tuple[int, ...]], kind: Any = AdamW8bit, steps: int = 3, **options) -> tuple[list, Optimizer]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(size)) for size in sizes]
    optimizer = kind(parameters, lr=1e-2, **options)
    for seed in range(steps):
        torch.manual_seed(seed)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter) * torch.rand_like(parameter) ** 8
        optimizer.step()
    return parameters, optimizer


def largest(values: Tensor) -> Tensor:
    """The largest magnitude of the block of each value."""
    blocks = nn.functional.pad(values.flatten(), (0, -values.numel() % 256)).view(-1, 256)
    return blocks.abs().amax(1, keepdim=True).expand_as(blocks).flatten()[: values.numel()].view_as(values)


def test_moments_leave_in_float32_and_come_back_as_they_were() -> None:
    for size, kind in (((64, 100), torch.uint8), ((7, 90), torch.float32)):
        (parameter,), optimizer = stepped([size])
        state = optimizer.state[parameter]
        assert state["state1"].dtype == state["state2"].dtype == kind
        back = state_of(optimizer, parameter, (0, 0), moments_of(state))
        assert back["step"] == 3 and back.keys() == state.keys()
        assert all(torch.equal(back[key], state[key]) for key in state if key not in ("step", "state1"))
        again = moments_of(back)["exp_avg"]
        moved = (again - moments_of(state)["exp_avg"]).abs()
        assert (moved <= LOOKED_UP * largest(again)).all() and (moved > 0).float().mean() < 0.01


def test_quantizing_is_off_by_half_a_level_at_most() -> None:
    (parameter,), optimizer = stepped([(64, 100)], AdamW)
    moments = in_float32(optimizer.state[parameter])
    low = AdamW8bit([parameter])
    low.state[parameter] = moments
    quantize_moments(low)
    assert low.state[parameter]["state1"].dtype == torch.uint8
    for name in MOMENTS.values():
        found = in_float32(low.state[parameter])[name]
        off = ((found - moments[name]).abs() / largest(moments[name])).max()
        assert HALF_A_LEVEL / 10 < off <= HALF_A_LEVEL * (2 if name == "exp_avg" else 1), name  # -1 is one level off


def test_steps_of_one_process_are_their_own() -> None:
    plain, _ = stepped([(64, 100), (3,)])
    step_on_shards()
    assert AdamW8bit.step.take_step is step_low_bit and bnb.optim.Lion8bit.step.take_step is step_low_bit
    wrapped, optimizer = stepped([(64, 100), (3,)])
    assert all(torch.equal(own, other) for own, other in zip(plain, wrapped, strict=True))
    assert bnb.optim.Lion8bit(wrapped).step() is None
    # Whatever else a state may be, it is not taken for moments.
    for state in ({"momentum_buffer": torch.ones(64, 100)}, {"step": 1, "state1": {}, "state2": {}}):
        optimizer.state[wrapped[0]] = state
        with pytest.raises(ValueError, match=r"the state of a parameter \(64, 100\) has .* not step, exp_avg"):
            optimizer.step()


def test_others_are_refused_by_name() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    for kind in (bnb.optim.AdamW, AdamW8bit, PagedAdamW8bit, bnb.optim.Adam8bit):
        refuse_unserved(kind(parameters))
    for kind in (bnb.optim.Lion8bit, bnb.optim.LAMB, bnb.optim.AdEMAMix8bit, bnb.optim.RMSprop8bit):
        with pytest.raises(ValueError, match=f"bitsandbytes's {kind.__name__} is not supported over a grid"):
            refuse_unserved(kind(parameters))


def made(grid: Grid | None, kind: Any = AdamW8bit, seed: int = 0, **options) -> tuple[nn.Module, Optimizer]:
    model = tiny_model("llama", dtype=torch.float32, seed=seed).train()
    if grid:
        parallelize(model, grid)
    return model, kind(
        model.parameters(), **(SMALL | options if kind not in (Adam, AdamW) else {"lr": 1e-2} | options)
    )


def fit(model: nn.Module, optimizer: Optimizer, grid: Grid | None, seeds: range) -> None:
    for seed in seeds:
        batch = tiny_batch(4, 8, seed=seed)
        model(**(rows_of(batch, grid, dist.get_rank()) if grid else batch)).loss.backward()
        if grid:
            sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


def _steps_are_those_of_the_shards() -> None:
    """Each shard alone, as a parameter of one process, with the same gradients and the same override."""
    model, optimizer = made(Grid(x=2))
    head = model.lm_head
    manager = GlobalOptimManager.get_instance()
    except_embedding(model)
    manager.override_config(head.weight, "optim_bits", 32)
    twins = {name: nn.Parameter(local(each).detach().clone()) for name, each in model.named_parameters()}
    exempt = [twins["model.embed_tokens.weight"], twins["lm_head.weight"]]
    others = [each for each in twins.values() if all(each is not one for one in exempt)]
    alone = [AdamW8bit(others, **SMALL), AdamW8bit(exempt, **SMALL | {"min_8bit_size": 2**40})]
    for seed in range(3):
        model(**tiny_batch(4, 8, seed=seed)).loss.backward()
        sync_gradients(model)
        for name, parameter in model.named_parameters():
            twins[name].grad = local(parameter.grad).detach().clone()
        manager.index2config.clear()  # it is of places in groups, whatever the optimizer
        for each in alone:
            each.step()
        optimizer.step()
        optimizer.zero_grad()
    kinds = set()
    for name, parameter in model.named_parameters():
        twin = twins[name]
        assert torch.equal(local(parameter), twin), name
        state = optimizer.state[parameter]
        truth = next(each.state[twin] for each in alone if twin in each.state)
        assert state.keys() == truth.keys()
        assert all(isinstance(state[key], DTensor) for key in MOMENTS)
        assert all(
            value == truth[key] if key == "step" else torch.equal(local(value), truth[key])
            for key, value in state.items()
        ), name
        kinds.add((local(state["state1"]).dtype, twin is exempt[0] or twin is exempt[1], twin.numel() < 128))
    assert kinds >= {(torch.uint8, False, False), (torch.float32, True, False), (torch.float32, False, True)}
    manager.override_config(head.weight, "max_unorm", 1.0)
    with pytest.raises(ValueError, match="max_unorm of bitsandbytes' GlobalOptimManager is not supported"):
        optimizer.step()
    manager.initialize()
    model, optimizer = made(Grid(x=2), bnb.optim.Lion8bit)
    model(**tiny_batch(4, 8)).loss.backward()
    sync_gradients(model)
    with pytest.raises(ValueError, match="bitsandbytes's Lion8bit is not supported over a grid"):
        optimizer.step()


def test_a_step_is_their_own_on_each_shard() -> None:
    run_ranks(_steps_are_those_of_the_shards, 2)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The relative distance of two models, as vectors of all their weights."""
    squares = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    return (squares / sum(float(value.double().square().sum()) for value in other.values())) ** 0.5


def _distances(grids: list[Grid], low: dict, exact: dict) -> list[tuple[Grid, float, float]]:
    found = []
    for grid in grids:
        model, optimizer = made(grid)
        fit(model, optimizer, grid, range(6))
        found.append((grid, distance(weights(model), low), distance(weights(model), exact)))
    return found


@pytest.mark.slow
def test_a_grid_is_no_further_from_adamw_than_one_process() -> None:
    truths = []
    for kind in (AdamW8bit, AdamW):
        model, optimizer = made(None, kind)
        fit(model, optimizer, None, range(6))
        truths.append(weights(model))
    own = distance(*truths)
    assert 1e-4 < own < 0.05
    grids = [Grid(x=2, z=2), Grid(data=2, x=2), Grid(y=2, z=2), Grid(data=4)]
    for grid, to_low, to_exact in run_ranks(_distances, 4, grids, *truths)[0]:
        print(f"{grid}: {to_low:.2e} from one process, {to_exact:.2e} from AdamW, which one process is {own:.2e} from")
        assert to_exact < 1.2 * own and to_low < (1e-3 if grid.data == 4 else own), grid


def moments(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Both moments of each trained parameter in full, as they are in a checkpoint."""
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        state = in_float32(optimizer.state[parameter])
        assert float(state["step"]) == 3, name
        found |= {f"{name}.{key}": full(state[key]) for key in MOMENTS.values()}
    return found


def check_close(found: dict[str, Tensor], truth: dict[str, Tensor], bound: float) -> None:
    """Blocks of another grid are other ones: the largest magnitude of the whole tensor bounds theirs."""
    assert found.keys() == truth.keys()
    for name, value in truth.items():
        assert (found[name] - value).abs().max() <= bound * value.abs().max(), name


def except_embedding(model: nn.Module) -> None:
    """Ask for moments in 32 bits of an embedding, as Trainer does."""
    manager = GlobalOptimManager.get_instance()
    manager.initialize()  # without what was asked for other models
    manager.register_module_override(model.model.embed_tokens, "weight", {"optim_bits": 32})


def _resume(folder: Path) -> None:
    grids = Grid(x=2, z=2), Grid(data=2, y=2)
    model, optimizer = made(grids[0])
    fit(model, optimizer, grids[0], range(3))
    save_sharded(model, folder, optimizer=optimizer)
    truth, trained = moments(model, optimizer), weights(model)
    stored = json.loads((folder / "axonn_checkpoint.json").read_text())["optimizer"]
    assert stored["state.lm_head.weight.exp_avg"][0] == "F32" and not any("absmax" in name for name in stored)
    for grid, kind, bound in (
        (grids[0], AdamW8bit, LOOKED_UP),
        (grids[1], AdamW8bit, 2 * HALF_A_LEVEL),
        (grids[0], AdamW, 0.0),
        (grids[1], Adam, 0.0),
        (grids[1], PagedAdamW8bit, 2 * HALF_A_LEVEL),
    ):
        model, optimizer = made(grid, kind, seed=5)
        optimizer.param_groups[0]["lr"] = 7.0
        except_embedding(model)
        load_sharded(model, folder, optimizer=optimizer)
        if kind is AdamW8bit:
            states = [optimizer.state[each.weight] for each in (model.model.embed_tokens, model.lm_head)]
            assert [local(state["state1"]).dtype for state in states] == [torch.float32, torch.uint8]
        assert optimizer.param_groups[0]["lr"] == 1e-2
        assert distance(weights(model), trained) == 0
        check_close(moments(model, optimizer), truth, bound)
        fit(model, optimizer, grid, range(3, 4))
    # From AdamW to 8 bits; then by torch's own functions.
    model, optimizer = made(grids[1], AdamW)
    fit(model, optimizer, grids[1], range(3))
    truth = moments(model, optimizer)
    save_sharded(model, folder / "adamw", optimizer=optimizer)
    model, optimizer = made(grids[0])
    load_sharded(model, folder / "adamw", optimizer=optimizer)
    check_close(moments(model, optimizer), truth, 2 * HALF_A_LEVEL)
    truth, options = moments(model, optimizer), StateDictOptions(full_state_dict=True)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    found = {f"{name}.{key}": entries[key] for name, entries in saved["state"].items() for key in MOMENTS.values()}
    check_close(found, truth, 0.0)
    model, optimizer = made(grids[1])
    fit(model, optimizer, grids[1], range(1))
    set_optimizer_state_dict(model, optimizer, saved, options=options)
    check_close(moments(model, optimizer), truth, 0.0)
    fit(model, optimizer, grids[1], range(3, 4))
    assert local(optimizer.state[model.lm_head.weight]["state1"]).dtype == torch.uint8


def _from_one_process(folder: Path, truth: dict[str, Tensor]) -> None:
    for grid, kind in ((Grid(x=2), AdamW8bit), (Grid(z=2), AdamW)):
        model, optimizer = made(grid, kind, seed=5)
        load_plain_optimizer(model, optimizer, folder)
        check_close(moments(model, optimizer), truth, 0.0)
        if kind is AdamW8bit:
            quantize_moments(optimizer)
            check_close(moments(model, optimizer), truth, 2 * HALF_A_LEVEL)
        fit(model, optimizer, grid, range(3, 4))


@pytest.mark.slow
def test_checkpoints_fit_every_grid_one_process_and_adamw(tmp_path: Path) -> None:
    run_ranks(_resume, 4, tmp_path / "saved")
    model, optimizer = made(None, seed=5)
    except_embedding(model)
    load_sharded(model, tmp_path / "saved", optimizer=optimizer)
    assert optimizer.state[model.lm_head.weight]["state1"].dtype == torch.uint8
    assert optimizer.state[model.model.embed_tokens.weight]["state1"].dtype == torch.float32
    GlobalOptimManager.get_instance().initialize()
    model, optimizer = made(None)
    fit(model, optimizer, None, range(3))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    run_ranks(_from_one_process, 2, tmp_path, moments(model, optimizer))


def _train(folder: Path) -> list[list[dict]]:
    logs = []
    for name, grid, resume in (("first", Grid(x=2, z=2), None), ("then", Grid(data=2, y=2), "first/checkpoint-3")):
        options = dict(max_steps=6, save_steps=3, eval_strategy="no", optim="adamw_8bit", gradient_checkpointing=False)
        trainer = make_trainer(folder / name, grid, model=tiny_model("qwen3", dtype=torch.float32), **options)
        trainer.train(resume_from_checkpoint=str(folder / resume) if resume else None)
        optimizer = trainer.optimizer.optimizer
        assert type(optimizer) is bnb.optim.AdamW and optimizer.args.optim_bits == 8
        logs.append([entry for entry in numbers(trainer.state.log_history) if "loss" in entry])
    return logs


@pytest.mark.slow
def test_trainer_trains_and_resumes_with_its_name(tmp_path: Path) -> None:
    first, then = run_ranks(_train, 4, tmp_path)[0]
    trainer = make_trainer(
        tmp_path / "one",
        None,
        model=tiny_model("qwen3", dtype=torch.float32),
        max_steps=6,
        save_steps=3,
        eval_strategy="no",
        optim="adamw_8bit",
    )
    trainer.train()
    one = [entry["loss"] for entry in numbers(trainer.state.log_history) if "loss" in entry]
    for log in (first, then):
        assert [entry["loss"] for entry in log] == pytest.approx(one, rel=1e-3)
