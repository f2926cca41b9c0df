"""Moments in host memory: steps with the same bits, checkpoints of both kinds, and what is refused."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from lion_pytorch import Lion
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer

from hf_axonn import AxonnPlugin, Grid
from hf_axonn.compat.accelerate import forget_state
from hf_axonn.engine import host_moments
from hf_axonn.engine.host_weights import host_weight_of
from hf_axonn.engine.optimizer_steps import keep_moments_on_host, step_on_shards
from tests.helpers.float64 import Float64
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import make_trainer, numbers


CPU = torch.device("cpu")
KINDS = (
    (AdamW, {}),
    (AdamW, {"fused": True}),
    (Adam, {"amsgrad": True, "foreach": True}),
    (SGD, {"momentum": 0.9}),
)


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size, 4)) for size in (3, 8, 1, 5, 2)]


def step(optimizer: Optimizer, own: list[nn.Parameter], seed: int) -> None:
    """One of them never has a gradient."""
    torch.manual_seed(seed)
    for number, parameter in enumerate(own):
        parameter.grad = None if number == 3 else torch.randn_like(parameter)
    optimizer.step()


def test_steps_have_the_same_bits_bucket_by_bucket() -> None:
    step_on_shards()
    for kind, options in KINDS:
        ours, theirs = parameters(), parameters()
        optimizers = [kind([{"params": own[:2]}, {"params": own[2:]}], lr=0.1, **options) for own in (ours, theirs)]
        keep_moments_on_host(optimizers[0], CPU)
        keep_moments_on_host(optimizers[0], CPU)
        groups = [group["params"] for group in optimizers[0].param_groups]
        # Room for the moments of 8 rows: two buckets of the first three, and one of the last.
        with mock.patch.object(host_moments, "BUCKET_BYTES", 2 * 8 * 16):
            for seed in range(3):
                if seed == 2:
                    optimizers[0].load_state_dict(optimizers[0].state_dict())
                for own, optimizer in zip((ours, theirs), optimizers, strict=True):
                    step(optimizer, own, seed)
        assert [group["params"] for group in optimizers[0].param_groups] == groups
        for moved, true in zip(ours, theirs, strict=True):
            assert torch.equal(moved, true), (kind, options)
            assert optimizers[0].state[moved].keys() == optimizers[1].state[true].keys()
            for name, value in optimizers[1].state[true].items():
                other = optimizers[0].state[moved][name]
                assert torch.equal(other, value) if isinstance(value, Tensor) else other == value, (kind, name)


def test_moments_stay_where_they_are_in_host_memory() -> None:
    step_on_shards()
    own = parameters()
    optimizer, seen = AdamW(own), []
    keep_moments_on_host(optimizer, CPU)
    step(optimizer, own, 0)
    homes = {parameter: optimizer.state[parameter]["exp_avg"] for parameter in (own[0], own[1])}

    def note(*_: object, **__: object) -> None:
        members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        seen.append((len(members), [optimizer.state[each]["exp_avg"] is homes.get(each) for each in members]))

    with mock.patch.object(host_moments, "BUCKET_BYTES", 1), mock.patch("torch.optim.adam.adam", side_effect=note):
        step(optimizer, own, 1)
    assert {count for count, _ in seen} == {1} and not any(home for _, each in seen for home in each)
    assert all(optimizer.state[parameter]["exp_avg"] is home for parameter, home in homes.items())


def test_what_offload_cannot_serve_is_refused_by_name() -> None:
    own = parameters()
    for optimizer, name in ((Muon(own), "torch's Muon"), (Lion(own), "lion_pytorch's Lion")):
        with pytest.raises(ValueError, match=f"offload: optimizer is not possible with {name}, whose step .* AdamW"):
            keep_moments_on_host(optimizer, CPU)


def run(
    folder: Path,
    grid: Grid,
    offload: str,
    *,
    mixed: bool = False,
    checkpointed: bool = False,
    best: bool = False,
    **options,
) -> tuple[list[dict], list[Tensor]]:
    """Logs, moments and weights of a run with accumulation and clipping, which saves after its third step.

    In float64, or `mixed`: in bf16 with float32 weights, which then lie in host memory, too. `best`: the weights in
    the end are those of the third step.
    """
    forget_state()
    plugin = AxonnPlugin(grid=grid, offload=offload)
    changes = dict(max_steps=5, save_steps=3, bf16=mixed, gradient_checkpointing=checkpointed)
    changes |= dict(eval_strategy="steps" if mixed else "no", eval_steps=2)
    changes |= dict(eval_steps=3, load_best_model_at_end=True) if best else {}
    model = tiny_model("qwen3", dtype=torch.float32) if mixed else None
    trainer = make_trainer(folder, grid, model=model, parallelism_config=plugin, **changes)
    with nullcontext() if mixed else Float64(), mock.patch.object(host_moments, "BUCKET_BYTES", 2**14):
        trainer.train(**options)
    optimizer = trainer.optimizer.optimizer
    kept = [value for entries in optimizer.state.values() for name, value in entries.items() if name != "step"]
    kept += trainer.model.parameters()
    moved = [parameter for parameter in trainer.model.parameters() if host_weight_of(parameter) is not None]
    assert bool(moved) == (mixed and offload == "optimizer")
    history = [entry for entry in numbers(trainer.state.log_history) if "train_loss" not in entry]
    return history, [value.to_local().detach().clone() for value in kept]


def same(one: tuple[list[dict], list[Tensor]], other: tuple[list[dict], list[Tensor]], *, steps: int = 5) -> None:
    assert one[0][-steps:] == other[0][-steps:]
    assert all(torch.equal(moved, true) for moved, true in zip(one[1], other[1], strict=True))


def _train(folder: Path) -> None:
    for grid in (Grid(z=2, x=2), Grid(data=2, y=2)):
        _train_on(folder, grid)


def _train_on(folder: Path, grid: Grid, **how: bool) -> None:
    one = run(folder / f"{grid}-none", grid, "none", **how)
    same(run(folder / f"{grid}-optimizer", grid, "optimizer", **how), one)
    for saved, resumed in (("none", "optimizer"), ("optimizer", "none")):
        checkpoint = folder / f"{grid}-{saved}" / "checkpoint-3"
        same(run(folder / "on", grid, resumed, resume_from_checkpoint=str(checkpoint), **how), one)


@pytest.mark.slow
def test_a_trainer_with_offloaded_moments_has_the_same_bits_and_checkpoints(tmp_path: Path) -> None:
    run_ranks(_train, 4, tmp_path)


def _train_mixed(folder: Path) -> None:
    _train_on(folder, Grid(data=2, x=2), mixed=True)
    _train_on(folder, Grid(z=2, y=2), mixed=True, checkpointed=True)
    _train_on(folder, Grid(pipe=2, z=2), mixed=True)
    best = [run(folder / f"best-{how}", Grid(z=2, x=2), how, mixed=True, best=True) for how in ("optimizer", "none")]
    same(*best)


@pytest.mark.slow
def test_a_trainer_with_offloaded_weights_has_the_same_bits_and_checkpoints(tmp_path: Path) -> None:
    run_ranks(_train_mixed, 4, tmp_path)
