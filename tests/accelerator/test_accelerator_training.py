"""The training loop of accelerate over a grid: equal to one process, and averaged when accelerate averages."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from torch.utils.data import DataLoader

from hf_axonn import Grid, parallelize
from hf_axonn.engine.gradient_sync import sync_gradients
from tests.helpers.equality import rows_of
from tests.helpers.float64 import Float64, recompute_in_float64, relative_errors
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import collate, new_accelerator, token_data


GRIDS = {
    2: [Grid(x=2), Grid(y=2), Grid(z=2), Grid(data=2), Grid(z=2, context=2)],
    4: [Grid(z=2, x=2), Grid(data=2, y=2), Grid(y=2, x=2), Grid(z=4, context=2), Grid(z=2, x=2, context=2)],
}
ROWS = 16


def small_model():
    """Make a model of one layer: a loop does the same with each."""
    return tiny_model("llama", num_hidden_layers=1)


def whole(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else getattr(value, "full_tensor", lambda: value)().detach().clone()


def two_groups(model) -> torch.optim.AdamW:
    """An optimizer with settings of its own, on the parameters as they are now."""
    norms = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    return torch.optim.AdamW(
        [{"params": others, "weight_decay": 0.1}, {"params": norms, "lr": 3e-3, "weight_decay": 0.0}],
        lr=1e-2, betas=(0.8, 0.9),
    )  # fmt: skip


ORDERS = ("together", "optimizer first", "model first", "sharded before", "made after")


def loop(grid: Grid | None, *, order: str = "together", clip: str = "norm", **options) -> dict:
    """What a loop does to a model: losses, norms before clipping, rates, parameters and groups afterwards."""
    accelerator = new_accelerator(grid, gradient_accumulation_plugin=GradientAccumulationPlugin(2, **options))
    samples = accelerator.num_processes  # as scripts multiply by it
    model = small_model().train()
    optimizer = two_groups(model) if order != "made after" else None
    if order == "sharded before" and grid:
        parallelize(model, grid)
    if order == "optimizer first":
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
    elif order in ("model first", "made after"):
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer or two_groups(model))
    else:
        optimizer, model = accelerator.prepare(optimizer, model)
    # The schedule of a script is for one process, on which a step is one batch; there each batch has `samples` times
    # as many rows, so the schedule moves on as fast.
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1 / (1 + step / samples))
    loader = DataLoader(token_data(ROWS, seed=2), batch_size=4 // samples, collate_fn=collate)
    loader, rates = accelerator.prepare(loader, rates)
    losses, norms, learning_rates = [], [], []
    with Float64():
        for batch in loader:
            with accelerator.accumulate(model):
                # The rows of a batch differ in length: a sum over a known count does not depend on how they are cut.
                loss = model(**batch, num_items_in_batch=50).loss * samples
                losses.append(float(accelerator.gather(loss.detach()).mean()))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    if clip == "value":
                        accelerator.clip_grad_value_(model.parameters(), 1e-3)
                    else:
                        kind = {"norm": 2, "sum": 1, "largest": float("inf")}[clip]
                        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1, norm_type=kind)
                        assert type(norm) is torch.Tensor
                        norms.append(norm.item())
                optimizer.step()
                rates.step()
                optimizer.zero_grad()
                learning_rates.append(rates.get_last_lr())
    parameters = {name: whole(value) for name, value in accelerator.unwrap_model(model).named_parameters()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"losses": losses, "norms": norms, "rates": learning_rates, "parameters": parameters, "groups": groups}


def assert_equal(ours: dict, truth: dict, case: object) -> None:
    for numbers in ("losses", "norms", "rates"):
        assert len(ours[numbers]) == len(truth[numbers])
        for own, true in zip(ours[numbers], truth[numbers], strict=True):
            assert own == pytest.approx(true, rel=1e-10), (case, numbers)
    assert ours["groups"] == truth["groups"], case
    for name, value in ours["parameters"].items():
        difference = float((value - truth["parameters"][name]).abs().max())
        assert difference < 1e-10 * max(1.0, float(truth["parameters"][name].abs().max())), (case, name, difference)


def _loops(truths: dict[str, dict], grids: list[Grid]) -> None:
    for number, grid in enumerate(grids):
        assert_equal(loop(grid), truths["norm"], grid)
        clip = ("sum", "largest", "value")[number % 3]
        order = ORDERS[1 + number % 4]
        assert_equal(loop(grid, clip=clip, order=order, sync_each_batch=True), truths[clip], (grid, clip, order))


@pytest.fixture(scope="module")
def truths() -> dict[str, dict]:
    return {clip: loop(None, clip=clip) for clip in ("norm", "sum", "largest", "value")}


@pytest.mark.parametrize(
    "grids",
    [[Grid(x=2), Grid(z=2)], *(pytest.param(grids, marks=pytest.mark.slow) for grids in GRIDS.values())],
    ids=["some of two", "two", "four"],
)
def test_a_loop_equals_one_process(truths, grids):
    assert truths["norm"]["norms"][0] > 0.1 and truths["norm"]["losses"][0] > truths["norm"]["losses"][-1]
    run_ranks(_loops, grids[0].size, truths, grids)


def batch_of(grid: Grid, rows: int = 2) -> dict[str, torch.Tensor]:
    """The samples of this rank's position."""
    place = grid.coordinates(torch.distributed.get_rank())
    first = (place["data"] * grid.z + place["z"]) * rows
    return collate([token_data(16, seed=4)[first + row] for row in range(rows)])


def _averages(grids: list[Grid]) -> None:
    """Of a norm's gradient, which every rank has a share of until it is averaged."""
    for grid in grids:
        accelerator = new_accelerator(grid)
        model = accelerator.prepare(small_model().train())
        weight = model.model.norm.weight

        def averaged(accelerator=accelerator, weight=weight) -> bool:
            every = accelerator.gather(whole(weight.grad)[None])
            return bool(torch.allclose(every[0], every[1], rtol=1e-12))

        def loss(grid=grid, model=model):
            return model(**batch_of(grid)).loss

        def backward(accelerator=accelerator, loss=loss) -> None:
            accelerator.backward(loss())

        backward()
        assert averaged()
        alone = whole(weight.grad)
        model.zero_grad()
        with accelerator.no_sync(model):
            backward()
        assert not averaged()
        with accelerator.no_sync(model), accelerator.no_sync(model):
            held = loss()
        backward()  # what was kept back is averaged, too
        assert averaged() and torch.allclose(whole(weight.grad), 2 * alone, rtol=1e-12)
        model.zero_grad()
        with accelerator.no_sync(model):
            held = loss()
        accelerator.backward(held)  # decided where the forward pass began
        assert not averaged()
        with accelerator.no_sync(model):
            held = loss()
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(held)
        assert averaged() and torch.allclose(whole(weight.grad), 2 * alone, rtol=1e-12)
        for each in (False, True):
            accumulating = new_accelerator(
                grid, gradient_accumulation_plugin=GradientAccumulationPlugin(2, sync_each_batch=each)
            )
            accumulating.prepare(model)
            model.zero_grad()
            with accumulating.accumulate(model):
                accumulating.backward(loss())
            assert averaged() is each
            with accumulating.accumulate(model):
                accumulating.backward(loss())
            assert averaged() and torch.allclose(whole(weight.grad), alone, rtol=1e-12)


@pytest.mark.parametrize(
    "grids", [[Grid(data=2), Grid(z=2)], pytest.param(GRIDS[4][:2], marks=pytest.mark.slow)], ids=["two", "four"]
)
def test_gradients_are_averaged_when_accelerate_does_it(grids):
    run_ranks(_averages, grids[0].size, grids)


def bare_loop(grid: Grid | None, mode: str) -> dict[str, torch.Tensor]:
    """Parameters after two steps of a loop that calls `loss.backward()` itself."""
    accelerator = new_accelerator(grid)
    model = small_model().train()
    if mode == "reentrant":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        model.model.layers.apply(recompute_in_float64)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    batch = rows_of(tiny_batch(4, 7), grid or Grid(), rank())

    def loss():
        if mode == "logits":
            inner = getattr(model, "module", model)  # as under DistributedDataParallel
            return inner(input_ids=batch["input_ids"]).logits.square().mean()
        if mode == "penalty":
            return model(**batch).loss + 0.1 * sum(parameter.pow(2).sum() for parameter in model.parameters())
        return model(**batch).loss

    with Float64():
        for _ in range(2):
            if mode == "accumulated":
                with getattr(model, "no_sync", contextlib.nullcontext)():
                    loss().backward()
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


MODES = ("plain", "logits", "accumulated", "reentrant", "penalty")


def _bare(truths: dict[str, dict[str, torch.Tensor]]) -> None:
    """Each mode on a grid of two ranks, of x or of z; slow, on four ranks, each on both axes at once."""
    some = {
        Grid(x=2): ("plain", "reentrant", "penalty"),
        Grid(z=2): ("logits", "accumulated"),
        Grid(z=2, context=2): MODES[1:-1],
        Grid(z=2, x=2): MODES,
    }
    for grid in GRIDS[torch.distributed.get_world_size()]:
        for mode in some.get(grid, ("plain",)):
            worst = max(relative_errors(bare_loop(grid, mode), truths[mode]).values())
            assert worst < 1e-10, (grid, mode, worst)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_are_averaged_without_accelerates_backward(ranks):
    run_ranks(_bare, ranks, {mode: bare_loop(None, mode) for mode in MODES})


def read_by_hand(grid: Grid | None) -> list[float]:
    """Norms and sums as scripts read them for their logs."""
    accelerator = new_accelerator(grid)
    model = accelerator.prepare(small_model().train())
    with Float64():
        accelerator.backward(model(**rows_of(tiny_batch(4, 7), grid or Grid(), rank())).loss)
    gradients = [parameter.grad for parameter in model.parameters()]
    return [
        *(gradient.norm().item() for gradient in gradients),
        *(gradient.detach().data.norm(2).item() for gradient in gradients),
        float(sum(gradient.pow(2).sum() for gradient in gradients)),
        *(parameter.detach().abs().max().item() for parameter in model.parameters()),
        *(bool(parameter.detach().sum() > 0) for parameter in model.parameters()),
    ]


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _read(truth: list[float], grids: list[Grid]) -> None:
    for grid in grids:
        assert read_by_hand(grid) == pytest.approx(truth, rel=1e-10), grid


@pytest.mark.parametrize(
    "grids",
    [[Grid(x=2), Grid(z=2)], *(pytest.param(grids, marks=pytest.mark.slow) for grids in GRIDS.values())],
    ids=["some of two", "two", "four"],
)
def test_norms_and_sums_by_hand_are_of_the_whole_tensors(grids):
    run_ranks(_read, grids[0].size, read_by_hand(None), grids)


def _unaveraged(grids: list[Grid]) -> None:
    """No optimizer steps with the gradients of one rank."""
    batch = tiny_batch(2, 7)
    for grid in grids:
        model, _ = parallelize(small_model().train(), grid)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(**batch).loss.backward()
        with pytest.raises(RuntimeError, match="have not been averaged over the grid"):
            optimizer.step()
        sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        (model(**batch).logits / 2).logsumexp(-1).mean().backward()  # a loss of one's own beside that of the model
        with pytest.raises(RuntimeError, match="have not been averaged over the grid"):
            optimizer.step()
        sync_gradients(model)
        other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        model(**batch).loss.backward()
        other.step()  # of something else
        optimizer.zero_grad()
        optimizer.step()  # there is nothing to step with
        with pytest.raises(RuntimeError, match="have not been averaged over the grid"):
            optimizer.step(lambda model=model: model(**batch).loss.backward())
        sync_gradients(model)

        accelerator = new_accelerator(grid)
        model, optimizer = accelerator.prepare(model, optimizer)
        with accelerator.no_sync(model):
            accelerator.backward(model(**batch).loss)
        with pytest.raises(RuntimeError, match="take the last one of a step out of no_sync"):
            optimizer.step()
        optimizer.zero_grad()
        with pytest.raises((RuntimeError, ValueError), match="(?i)local ?SGD.* is not possible over a grid"):
            with LocalSGD(accelerator, model, local_sgd_steps=2):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
        optimizer.zero_grad()
        # A pass that fails has not averaged, and does not keep the next one from it.
        hook = model.model.embed_tokens.register_full_backward_hook(fail)
        with pytest.raises(KeyError):
            model(**batch).loss.backward()
        hook.remove()
        model(**batch).loss.backward()
        optimizer.step()


def fail(*_: object) -> None:
    raise KeyError


@pytest.mark.parametrize(
    "grids",
    [[Grid(x=2), Grid(data=2)], pytest.param(GRIDS[2], marks=pytest.mark.slow)],
    ids=["some of two", "two"],
)
def test_a_step_with_gradients_that_were_not_averaged_is_refused(grids):
    run_ranks(_unaveraged, 2, grids)


def _autocast() -> None:
    for grid in GRIDS[4][:2]:
        accelerator = new_accelerator(grid, mixed_precision="bf16")
        with accelerator.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
        plain = small_model().float().eval()
        batch = batch_of(grid)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            truth = plain(**batch).logits.float()
        model = accelerator.prepare(small_model().float().eval())
        exact = plain(**batch).logits
        with torch.no_grad():
            own = model(**batch).logits
            assert own.dtype == torch.float32
            error = float((truth - exact).abs().max())
            assert 0 < float((own - exact).abs().max()) < 3 * error  # rounded, and no more than on one process
            unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
            assert unwrapped is model
            assert float((unwrapped(**batch).logits - exact).abs().max()) < 1e-4 * error + 1e-5


def test_autocast_is_in_the_model_and_unwrap_takes_it_out():
    run_ranks(_autocast, 4)


def _memory() -> None:
    grid = Grid(z=2)
    accelerator = new_accelerator(grid)
    model, optimizer = small_model().train(), None
    optimizer = two_groups(model)
    before = [weakref.ref(parameter) for parameter in model.parameters()]
    model, optimizer = accelerator.prepare(model, optimizer)
    gc.collect()
    assert not [parameter for parameter in before if parameter() is not None]  # the whole parameters are gone
    accelerator.backward(model(**batch_of(grid)).loss)
    optimizer.step()
    watched = weakref.ref(model), weakref.ref(optimizer.optimizer)
    model, optimizer = accelerator.free_memory(model, optimizer)
    gc.collect()
    assert (model, optimizer) == (None, None) and [its() for its in watched] == [None, None]
    assert accelerator.step == 0
    model = accelerator.prepare(small_model())  # and another training may begin
    assert model(**batch_of(grid)).loss > 0


def test_free_memory_lets_go_of_everything():
    run_ranks(_memory, 2)


def _schedules(caplog) -> None:
    grid = Grid(z=2, x=2)
    for split in (False, True):
        accelerator = new_accelerator(grid, dataloader_config=DataLoaderConfiguration(split_batches=split))
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=5)
        model, optimizer, cycle = accelerator.prepare(model, optimizer, cycle)
        for _ in range(4):  # more than the schedule has: it stays at its end, as with stock accelerate
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            cycle.step()
        assert cycle.scheduler.last_epoch == (4 if split else 5)
    alone = new_accelerator(grid, step_scheduler_with_optimizer=False)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = alone.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    schedule.step()
    assert schedule.get_last_lr() == [0.5]
    caplog.clear()
    accelerator.prepare(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0))
    warned = "none of the parameters of the models that were prepared" in caplog.text
    assert warned is accelerator.is_main_process


def test_schedules_and_idle_optimizers(caplog):
    run_ranks(_schedules, 4, caplog)
