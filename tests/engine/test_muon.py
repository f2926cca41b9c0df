"""torch's Muon over a grid: the same steps as on one process, and each matrix orthogonalized once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Muon

from hf_axonn import Grid, load_sharded, parallelize, save_sharded, sync_gradients
from hf_axonn.checkpoint.state_dicts import flat_optimizer_state
from hf_axonn.compat.accelerate import forget_state
from hf_axonn.engine import muon
from hf_axonn.engine.dtensors import local
from tests.helpers.adapting import adapted_model
from tests.helpers.equality import copied, rows_of
from tests.helpers.float64 import Float64, relative_errors
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import make_trainer, numbers, worst_difference
from tests.tools.documents import blocks


BOUND = 1e-10
GRIDS = [Grid(data=2, x=2), Grid(data=2, y=2), Grid(data=2, z=2), Grid(z=2, x=2), Grid(x=2, y=2), Grid(data=4)]
GRIDS += [Grid(z=2, x=2, context=2), Grid(z=4), Grid(y=4)]
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: tiny_model("llama"),
    "tied": lambda: tiny_model("smollm2"),
    "gpt2": lambda: tiny_model(
        "gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),  # its Linears are stored as [K, N]
    "adapted": lambda: adapted_model("llama"),  # ranks of 3, which 2 does not divide
}


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.dim() == 2]


def fit(model: nn.Module, optimizer: Muon, grid: Grid | None, seeds: range) -> None:
    """Train a step for each seed. Muon multiplies in bfloat16, which is taken from it to see all digits."""
    with mock.patch.object(Tensor, "bfloat16", lambda self: self), Float64():
        for seed in seeds:
            batch = tiny_batch(4, 8, seed=seed)
            model(**(rows_of(batch, grid, dist.get_rank()) if grid else batch)).loss.backward()
            sync_gradients(model)
            optimizer.step()
            model.zero_grad()


def made(name: str, grid: Grid | None, **options) -> tuple[nn.Module, Muon]:
    model = MODELS[name]().train()
    if grid:
        parallelize(model, grid)
    return model, Muon(matrices(model), lr=1e-2, **options)


def values(model: nn.Module, optimizer: Muon) -> dict[str, Tensor]:
    """Matrices, and what Muon keeps of them."""
    own = {name: parameter for name, parameter in model.named_parameters() if parameter in optimizer.state}
    kept = {f"{name}.momentum": optimizer.state[each]["momentum_buffer"] for name, each in own.items()}
    return {name: copied(value) for name, value in (own | kept).items()}


def _on_grids(truths: dict, grids: list[Grid], options: dict) -> list[tuple[str, Grid, int, int]]:
    """Count the matrices of each model that this rank orthogonalizes on each grid, and those that are sharded."""
    counts = []
    for grid in grids:
        for name, truth in truths.items():
            model, optimizer = made(name, grid, **options)
            with mock.patch.object(muon, "orthogonalize", wraps=muon.orthogonalize) as called:
                fit(model, optimizer, grid, range(1))
            fit(model, optimizer, grid, range(1, 2))
            errors = relative_errors(values(model, optimizer), truth)
            assert max(errors.values()) < BOUND, (name, grid, errors)
            each = matrices(model)
            sharded = [one for one in each if isinstance(one, DTensor) and any(p.is_shard() for p in one.placements)]
            counts.append((name, grid, called.call_count - len(each) + len(sharded), len(sharded)))
    return counts


def check(names: list[str], grids: list[Grid], **options) -> None:
    truths = {}
    for name in names:
        model, optimizer = made(name, None, **options)
        fit(model, optimizer, None, range(2))
        truths[name] = values(model, optimizer)
    ranks = run_ranks(_on_grids, 4, truths, grids, options, timeout=500)
    for row in zip(*ranks, strict=True):
        name, grid, _, sharded = row[0]
        owned = [count for _, _, count, _ in row]
        assert sum(owned) == sharded * grid.data, (name, grid, owned)
        assert max(owned) - min(owned) <= 1, (name, grid, owned)
        assert sharded or grid.data == 4 or name == "adapted"


@pytest.mark.slow
def test_muon_equals_one_process_and_deals_matrices() -> None:
    check([*MODELS], GRIDS)


@pytest.mark.slow
def test_rates_are_those_of_whole_matrices() -> None:
    check(["llama"], GRIDS[3:4], adjust_lr_fn="match_rms_adamw", weight_decay=0.3, ns_steps=3)


def _resume(folder: Path, truth: dict) -> None:
    grids = Grid(z=2, x=2), Grid(data=2, y=2)
    model, optimizer = made("llama", grids[0])
    fit(model, optimizer, grids[0], range(2))
    save_sharded(model, folder, optimizer=optimizer)
    model, optimizer = made("llama", grids[1])
    load_sharded(model, folder, optimizer=optimizer)
    fit(model, optimizer, grids[1], range(2, 3))
    assert max(relative_errors(values(model, optimizer), truth).values()) < BOUND


@pytest.mark.slow
def test_muon_resumes_on_another_grid(tmp_path: Path) -> None:
    model, optimizer = made("llama", None)
    fit(model, optimizer, None, range(3))
    run_ranks(_resume, 4, tmp_path / "saved", values(model, optimizer))


def _same_bits() -> None:
    """A step in the precision that training has, from gradients that are the same."""
    whole, sharded = tiny_model("llama", dtype=torch.float32), tiny_model("llama", dtype=torch.float32)
    parallelize(sharded, Grid(z=2, x=2))
    optimizers = [Muon(matrices(model)) for model in (whole, sharded)]
    for step in range(2):
        for parameter, own in zip(whole.parameters(), sharded.parameters(), strict=True):
            torch.manual_seed(step)
            parameter.grad = torch.randn_like(parameter)
            own.grad = DTensor.from_local(
                parameter.grad[muon.local_slices(own.shape, own.placements, sharded.axonn.grid_mesh)],
                own.device_mesh,
                own.placements,
                run_check=False,
                shape=own.shape,
                stride=own.stride(),
            )
        for optimizer in optimizers:
            optimizer.step()
    for parameter, own in zip(whole.parameters(), sharded.parameters(), strict=True):
        at = muon.local_slices(own.shape, own.placements, sharded.axonn.grid_mesh)
        assert torch.equal(local(own), parameter[at])


@pytest.mark.slow
def test_the_step_is_that_of_one_process_to_the_bit() -> None:
    run_ranks(_same_bits, 4)


def run_trainer(folder: Path, grid: Grid | None) -> list[dict]:
    """A Trainer that is handed Muon, made on the plain model; the other parameters are not trained."""
    model = tiny_model("llama")
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 2)
    optimizer = Muon(matrices(model), lr=1e-2)
    trainer = make_trainer(folder, grid, model=model, stock=True, max_steps=3, eval_strategy="no")
    trainer.optimizer = optimizer  # as Trainer(optimizers=(optimizer, None))
    with mock.patch.object(Tensor, "bfloat16", lambda self: self), Float64():
        trainer.train()
    return [entry for entry in numbers(trainer.state.log_history) if "train_loss" not in entry]


def _train(folder: Path, truth: list[dict]) -> None:
    for grid in (Grid(pipe=2, x=2), Grid(z=2, y=2)):
        assert worst_difference(run_trainer(folder / str(grid), grid), truth) < BOUND, grid


@pytest.mark.slow
def test_a_trainer_that_is_handed_muon_equals_one_process(tmp_path: Path) -> None:
    run_ranks(_train, 4, tmp_path, run_trainer(tmp_path / "one", None))


def of_the_page() -> dict[str, Any]:
    """The optimizer of Muon and AdamW together that docs/trainer.md writes."""
    names: dict[str, Any] = {"__name__": "page"}
    (block,) = [each for each in blocks() if each.place.startswith("docs/trainer.md") and "class Both" in each.text]
    exec(block.text, names)
    return names


def run_both(folder: Path, grid: Grid | None, kind: str, **more) -> list[dict]:
    """A run of Trainer with a schedule, which saves after its second step."""
    forget_state()
    model = tiny_model(kind, num_hidden_layers=1)
    options = dict(stock=True, max_steps=4, save_steps=2, eval_strategy="no", lr_scheduler_type="cosine")
    given = dict(optimizers=(of_the_page()["muon_and_adamw"](model), None))
    trainer = make_trainer(folder, grid, model=model, given=given, warmup_steps=1, **options)
    with mock.patch.object(Tensor, "bfloat16", lambda self: self), Float64():
        trainer.train(**more)
    assert len(trainer.optimizer.state) == len([*trainer.model.parameters()])
    return [entry for entry in numbers(trainer.state.log_history) if "train_loss" not in entry]


def _train_both(folder: Path, truths: dict[str, list[dict]]) -> None:
    for kind, truth in truths.items():
        assert worst_difference(run_both(folder / kind, Grid(z=2, x=2), kind), truth) < BOUND, kind
        checkpoint = folder / kind / "checkpoint-2"
        resumed = run_both(folder / "on", Grid(data=2, y=2), kind, resume_from_checkpoint=str(checkpoint))
        assert worst_difference(resumed, truth) < BOUND, kind


@pytest.mark.slow
def test_muon_and_adamw_as_one_equal_one_process_and_resume(tmp_path: Path) -> None:
    run_ranks(
        _train_both, 4, tmp_path, {kind: run_both(tmp_path / "one", None, kind) for kind in ("llama", "smollm2")}
    )


def test_muon_and_adamw_as_one_are_those_two() -> None:
    models = [tiny_model("llama", num_hidden_layers=1) for _ in range(2)]
    both = of_the_page()["muon_and_adamw"](models[0])
    alone = of_the_page()["muon_and_adamw"](models[1]).optimizers
    for step in range(3):
        for model in models:
            torch.manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
        if step == 1:
            both.load_state_dict(both.state_dict())
        for each in (both, *alone):
            for group in each.param_groups:
                group["lr"] *= 0.5
            each.step()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_an_optimizer_whose_state_is_not_that_of_its_parameters_says_so() -> None:
    class Apart(Muon):
        """Has a dictionary of its own."""

        def state_dict(self) -> dict:
            return {"muon": super().state_dict()}

    model = tiny_model("llama", num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"the state_dict\(\) of Apart has no 'state', .*[(]Both in docs/trainer.md"):
        flat_optimizer_state(model, Apart(matrices(model)))


def test_parameters_that_are_no_matrices_are_refused_as_by_torch() -> None:
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        Muon(tiny_model("mixtral", num_local_experts=4, num_experts_per_tok=2).parameters())
