"""The auxiliary loss of mixtures of experts over pipe against one process, in float64: sums of routers travel with the
residual stream."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_axonn import AxonnPlugin, Grid, parallelize, sync_gradients
from hf_axonn.compat.torch import fake_world
from hf_axonn.config import AxonnConfig
from hf_axonn.losses.router_aux import carried_experts
from hf_axonn.trainer.accumulation import AccumulatedStep
from tests.helpers.equality import rows_of
from tests.helpers.float64 import Float64, relative_errors
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import make_trainer, numbers, worst_difference
from tests.layers.test_moe import moe
from tests.parallel.pipeline.test_pipeline import BOUND, SCHEDULES, train


LAYERS = 4
CHANGES = {"dense": dict(mlp_only_layers=[0, 1])}  # whose first stage has no router
KINDS = {"dense": "qwen3_moe"}
UNEQUAL = ("granitemoeshared", "deepseek_v3")  # with shared experts; the second has no auxiliary loss
GRIDS = [Grid(pipe=2, x=2), Grid(pipe=2, y=2), Grid(pipe=2, z=2), Grid(pipe=2, data=2), Grid(pipe=4)]
GRIDS.append(Grid(pipe=2, z=2, context=2))


def make(kind: str, **changes) -> nn.Module:
    return moe(KINDS.get(kind, kind), num_hidden_layers=LAYERS, **CHANGES.get(kind, {}) | changes).train()


def batches(masked: bool) -> list[list[dict[str, Tensor]]]:
    """Two steps of batches of several shapes; the second step is too short for a schedule of two stages."""
    found = [[tiny_batch(4, 7), tiny_batch(8, 5, seed=4), tiny_batch(4, 6, seed=5), tiny_batch(4, 7, seed=6)]]
    found.append([tiny_batch(4, 7, seed=7)])
    for step in found:
        items = sum((batch["labels"][:, 1:] != -100).sum() for batch in step)
        for batch in step:
            batch["num_items_in_batch"] = items
            if not masked:
                del batch["attention_mask"]
    return found


def losses_of(model: nn.Module, step: list[dict[str, Tensor]], grid: Grid | None) -> list[Tensor]:
    """The losses of the batches of a step, whose gradients have been added, as Trainer does both."""
    if grid is None:
        losses = [model(**batch).loss for batch in step]
        sum(losses).backward()
        return losses
    items = {"num_items_in_batch": step[0]["num_items_in_batch"]}
    rows = [{name: its for name, its in batch.items() if name not in items} for batch in step]
    step = [rows_of(batch, grid, dist.get_rank()) | items for batch in rows]
    accelerator = SimpleNamespace(
        autocast=contextlib.nullcontext, backward=lambda loss: (loss * grid.dp_size).backward()
    )
    trainer = SimpleNamespace(processing_class=None, accelerator=accelerator)
    together = AccumulatedStep(model.axonn, step)
    together.run(trainer, lambda batch: model(**batch).loss)
    return [together.next(trainer, batch) for batch in step]


def trained(model: nn.Module, steps: list[list[dict[str, Tensor]]], grid: Grid | None = None) -> dict:
    """Losses, gradients of the first step, and parameters after a step of AdamW for each of `steps`."""
    return train(model, len(steps), lambda index: losses_of(model, steps[index], grid))


def passed(model: nn.Module, grid: Grid | None = None) -> dict:
    """Of a loop's own passes: losses with and without gradients, and gradients of a loss of logits and `aux_loss`."""
    batch = tiny_batch(8, 7)
    batch = rows_of(batch, grid, dist.get_rank()) if grid else batch
    with Float64():
        output = model(**batch)
        output.loss.backward()
        losses = [output.loss.detach(), output.aux_loss.detach()]
        output = model(**{name: its for name, its in batch.items() if name != "labels"})
        loss = output.aux_loss + output.logits.square().mean()
        loss.backward()
        losses.append(loss.detach())
        sync_gradients(model)
    gradients = {name: its.grad.clone() for name, its in model.named_parameters() if its.grad is not None}
    return {"losses": torch.stack(losses), "gradients": gradients}


def _compare(cases: list, truths: dict) -> None:
    for kind, grid, settings, masked in cases:
        model, _ = parallelize(make(kind), grid, config=AxonnConfig(grid=grid, **settings))
        if masked == "loop":
            ours, share = passed(model, grid), 1
        else:
            ours, share = trained(model, batches(masked), grid), grid.dp_size
        truth, case = truths[kind, masked], (kind, str(grid), settings, masked)
        losses = ours["losses"].clone()
        dist.all_reduce(losses)
        errors = {"losses": float(((losses * share / grid.size - truth["losses"]) / truth["losses"]).abs().max())}
        for what in ours.keys() - {"losses"}:
            assert any("gate" in name or "router" in name for name in ours[what]) or kind == "dense", case
            its = relative_errors(ours[what], {name: truth[what][name] for name in ours[what]})
            worst = max(its, key=its.get)
            errors[f"{what} {worst}"] = its[worst]
        assert max(errors.values()) < BOUND, (case, errors)


def check(world: int, cases: list) -> None:
    wanted = {(kind, masked) for kind, _, _, masked in cases}
    truths = {
        (kind, masked): passed(make(kind)) if masked == "loop" else trained(make(kind), batches(masked))
        for kind, masked in wanted
    }
    unrouted = trained(make("mixtral", router_aux_loss_coef=0.0), batches(True)[:1])["gradients"]
    routed = trained(make("mixtral"), batches(True)[:1])["gradients"]
    assert max(relative_errors(unrouted, routed).values()) > 0.1, "the auxiliary loss is a part that is seen"
    run_ranks(_compare, world, cases, truths, timeout=500)


def test_two_stages() -> None:
    kinds = ("mixtral", "dense", "qwen3_moe", "gpt_oss", "dense")
    cases = [
        (kind, Grid(pipe=2), schedule, masked)
        for kind, schedule, masked in zip(kinds, SCHEDULES, (True, False, True, True, True), strict=True)
    ]
    check(2, [*cases, ("qwen3_moe", Grid(pipe=2), SCHEDULES[2], "loop")])


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_with_other_axes(grid: Grid) -> None:
    schedules = [each for each in SCHEDULES if grid.pipe * each.get("stages_per_rank", 1) <= LAYERS]
    cases = [("qwen3_moe", grid, schedule, masked) for schedule in schedules for masked in (True, False)]
    cases += [(kind, grid, {}, True) for kind in ("mixtral", "olmoe", "gpt_oss", "dense", *UNEQUAL)]
    gathered = ("mixtral", "olmoe", "gpt_oss", "qwen3_moe", *UNEQUAL) if grid == Grid(pipe=2, z=2) else ("mixtral",)
    cases += [(kind, grid, {"experts": "gather"}, True) for kind in (*gathered, "dense")]
    check(4, cases + [(kind, grid, {}, "loop") for kind in ("mixtral", "dense")])


def test_what_is_not_made_of_sums_is_refused() -> None:
    assert carried_experts(make("qwen3_moe")) == carried_experts(make("gpt_oss")) == 4
    for kind in ("doge", "llama"):  # whose loss is another one; and of which none is known
        model = tiny_model(kind)
        model.config.output_router_logits = True
        assert carried_experts(model) == 0
        with fake_world(2), pytest.raises(ValueError, match="is not known to be made of sums over layers.*Set it to"):
            parallelize(model, Grid(pipe=2))


def _trainer(folder: Path, truth: tuple) -> None:
    for schedule in SCHEDULES[0], SCHEDULES[2]:
        history, parameters = _run(folder / schedule["schedule"], Grid(pipe=2), **schedule)
        assert worst_difference(history, truth[0]) < BOUND, (history, truth[0])
        assert max(relative_errors(parameters, {name: truth[1][name] for name in parameters}).values()) < BOUND


def _run(folder: Path, grid: Grid | None, **settings) -> tuple[list[dict], dict[str, Tensor]]:
    options = dict(max_steps=2, eval_steps=2, save_strategy="no", gradient_accumulation_steps=4)
    options |= dict(per_device_train_batch_size=2)
    if grid:
        options["parallelism_config"] = AxonnPlugin(grid=grid, **settings)
    trainer = make_trainer(folder, grid, model=make("mixtral"), stock=True, **options)
    with Float64():
        trainer.train()
    parameters = {name: its.detach() for name, its in trainer.model.named_parameters()}
    return numbers(trainer.state.log_history), parameters


@pytest.mark.slow
def test_trainer(tmp_path) -> None:
    """Its logged losses, also of evaluations, norms and parameters."""
    truth = _run(tmp_path / "one", None)
    assert any("eval_loss" in entry for entry in truth[0])
    run_ranks(_trainer, 2, tmp_path, truth, timeout=300)
