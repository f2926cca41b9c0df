"""Numbers made of parameters and gradients meet plain tensors: penalties in a loss, norms of shards beside others."""

from __future__ import annotations

import itertools
import operator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

from hf_axonn import AxonnPlugin, Grid, parallelize
from hf_axonn.compat.accelerate import forget_state
from tests.helpers.equality import rows_of
from tests.helpers.float64 import Float64, relative_errors
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import refused, run_ranks
from tests.helpers.training import collate, numbers, token_data, training_options, worst_difference


BOUND = 1e-10
TWO = [Grid(x=2), Grid(z=2)]
OTHERS = [Grid(y=2), Grid(data=2)]
FOUR = [Grid(z=2, x=2), Grid(data=2, z=2), Grid(y=2, x=2), Grid(data=2, y=2)]
PENALTIES = {
    "squares": lambda model: 0.1 * sum(each.pow(2).sum() for each in model.parameters()),
    "norms": lambda model: sum(0.1 * torch.norm(each) for each in model.parameters()),
    "norm of norms": lambda model: torch.stack([each.norm() for each in model.parameters()]).norm(),
    "absolute": lambda model: 1e-3 * sum(each.abs().sum() for each in model.parameters()),
    "means": lambda model: sum((each**2).mean() for each in model.parameters()),
}
MEETINGS = {
    "add": lambda loss, penalty: loss + penalty,
    "radd": lambda loss, penalty: penalty + loss,
    "sub": lambda loss, penalty: loss - (-penalty),
    "mul": lambda loss, penalty: loss + penalty * torch.ones(()),
    "iadd": lambda loss, penalty: operator.iadd(loss, penalty),
    "isub": lambda loss, penalty: operator.isub(loss, -penalty),
    "stack": lambda loss, penalty: torch.stack([loss, penalty]).sum(),  # stays a DTensor
}


def loop(grid: Grid | None) -> list[dict]:
    """Losses as a script gathers and adds them up, and gradients; of each penalty, met in some way."""
    forget_state()
    accelerator = Accelerator(cpu=True, parallelism_config=AxonnPlugin(grid=grid) if grid else None)
    model = accelerator.prepare_model(tiny_model("llama").train())
    batch = rows_of(tiny_batch(4, 7), grid, dist.get_rank()) if grid else tiny_batch(4, 7)
    found = []
    for way, penalty in zip(MEETINGS, itertools.cycle(PENALTIES)):
        with Float64():
            loss = MEETINGS[way](model(**batch).loss, PENALTIES[penalty](model))
            accelerator.backward(loss)
        assert way == "stack" or not isinstance(loss, DTensor)
        total = torch.zeros((), dtype=torch.float64)
        values = {"gathered": accelerator.gather(loss.detach()).mean(), "for metrics": loss.detach().reshape(1)}
        values["for metrics"] = accelerator.gather_for_metrics(values["for metrics"]).mean()
        if way != "stack":
            total += loss.detach()
            values["reduced"] = accelerator.reduce(total, "mean")
        found.append(values | {name: its.grad.clone() for name, its in model.named_parameters()})
        model.zero_grad()
    return found


class Penalized(Trainer):
    """As users write it; every other loss stays a DTensor."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        penalty = PENALTIES["squares"](model)
        loss = MEETINGS["stack" if self.state.global_step else "add"](loss, penalty)
        return (loss, outputs) if return_outputs else loss


def trained(folder: Path, grid: Grid | None) -> list[dict]:
    rows = token_data(8, seed=1)
    size = 4 // (grid.dp_size if grid else 1)
    own = dict(
        max_steps=2, save_strategy="no", eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=2 * size
    )
    trainer = Penalized(
        model=tiny_model("qwen3"),
        args=TrainingArguments(**training_options(folder, grid, **own)),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=collate,
    )
    with Float64():
        trainer.train()
    return numbers(trainer.state.log_history)


def beside(grid: Grid | None) -> list[Tensor]:
    """Norms and clipped gradients of a model and a plain parameter beside it, as torch takes them."""
    model = tiny_model("llama").train()
    if grid:
        model, _ = parallelize(model, grid)
    plain = nn.Parameter(torch.arange(5.0, dtype=torch.float64))
    weight = next(model.parameters())
    written = f"{weight.norm():.6e} {weight.max():8.2e}"
    found = [torch.tensor([*map(float, written.split())], dtype=torch.float64)]
    for norm_type in (2.0, 1.0, torch.inf):
        for index, each in enumerate((*model.parameters(), plain)):
            each.grad = each.detach() * (index % 3 + 1)
        parameters = [*model.parameters(), plain]
        found.append(torch.nn.utils.get_total_norm([each.grad for each in parameters], norm_type))
        found.append(torch.nn.utils.clip_grad_norm_(iter(parameters), 0.5, norm_type))
        found += [plain.grad, torch.nn.utils.get_total_norm([each.grad for each in model.parameters()], norm_type)]
        assert not any(isinstance(its, DTensor) for its in found[-4:-1])
    return [its.full_tensor() if isinstance(its, DTensor) else its.clone() for its in found]


def _equal(folder: Path, grids: list[Grid], truth: tuple) -> None:
    losses, history, norms = truth
    for grid in grids:
        for number, (ours, its) in enumerate(zip(loop(grid), losses, strict=True)):
            errors = relative_errors(ours, its)
            worst = max(errors, key=errors.get)
            assert errors[worst] < BOUND, (str(grid), number, worst, errors[worst])
        ours = trained(folder / str(grid), grid)
        assert worst_difference(ours, history) < BOUND, (str(grid), ours, history)
        for ours, its in zip(beside(grid), norms, strict=True):
            torch.testing.assert_close(ours, its, rtol=1e-12, atol=0)


def check(folder: Path, grids: list[Grid]) -> None:
    forget_state()
    run_ranks(_equal, grids[0].size, folder, grids, (loop(None), trained(folder, None), beside(None)))


def test_two_ranks_equal_one_process(tmp_path) -> None:
    check(tmp_path, TWO)


@pytest.mark.slow
@pytest.mark.parametrize("grids", [OTHERS, FOUR], ids=["two ranks", "four ranks"])
def test_other_grids_equal_one_process(tmp_path, grids) -> None:
    check(tmp_path, grids)


def _refused() -> None:
    model, _ = parallelize(tiny_model("llama").train(), Grid(x=2))
    loss = model(**tiny_batch(2, 5)).loss
    with pytest.raises(TypeError, match="use loss \\+ penalty"):
        loss.add_(PENALTIES["squares"](model))
    head = model.lm_head.weight
    with pytest.raises(
        TypeError, match="a plain tensor of shape .131, 48. in place .* average of weights .EMA. of clones"
    ):
        torch.zeros(131, 48).add_(head.detach(), alpha=0.1)
    average = head.detach().clone().add_(head.detach(), alpha=0.5)
    assert torch.equal(average.to_local(), head.to_local() * 1.5)
    _write_to_parts()
    _draw_alike()
    model, _ = parallelize(tiny_model("llama").train(), Grid(pipe=2))
    message = refused(lambda: torch.zeros(()) + PENALTIES["squares"](model))
    assert "the parameters of its own stages only" in message and "weight_decay" in message


@torch.no_grad()
def _write_to_parts() -> None:
    """Write to parts of weights and gradients: all ranks have the change, or it is refused."""
    for grid in TWO:
        truth = torch.arange(35.0).view(7, 5)
        weight = parallelize(nn.Linear(5, 7), grid)[0].weight
        weight.data, weight.grad = truth, weight * 0
        for own in (truth, weight):
            own[:2] = 0
            own.data[-3:] = own[1:4].mean(dim=0)
            own[torch.tensor([1, 6]), 2:4] = torch.tensor([8.0, 9.0])
            own[own > 30] = -1.0
            own.t()[1] = 3.0
            own[4] = 2 * own[5]
        weight.grad[3:] = 1
        assert torch.equal(weight.full_tensor(), truth) and weight.grad.sum().item() == 20
        for part in (weight.data[5:, 2:], weight.grad.t()[1:, 1:]):
            message = refused(part.zero_)
            assert message == refused(operator.imul, part, 2).replace("imul", "zero_")
            assert "the tensor would not change" in message and "weight.grad[:8] = 0" in message
        with torch.enable_grad():
            assert "torch.no_grad()" in refused(operator.setitem, weight, 0, 1.0)
        weight.to_local().detach()[:1].zero_()


@torch.no_grad()
def _draw_alike() -> None:
    """Random numbers are those of one process with the same seed; sums of norms are those of whole norms."""
    for grid in TWO:
        truth, other = nn.Linear(5, 7), parallelize(nn.Linear(5, 7), grid)[0]
        drawn = []
        for linear in (truth, other):
            torch.manual_seed(2)
            weight = linear.weight
            nn.init.trunc_normal_(weight, std=0.3)
            linear.bias.uniform_(-1, 1)
            weight.add_(torch.randn_like(weight), alpha=torch.rand_like(linear.bias).sum().item())
            weight.mul_(torch.empty_like(weight).bernoulli_(0.7))
            with torch.enable_grad():
                penalty = weight.norm(dim=0).sum() + weight.norm(dim=1).sum() + weight.abs().amax(dim=0).sum(dim=0)
                (gradient,) = torch.autograd.grad(penalty, weight)
            drawn.append([weight.detach(), linear.bias.detach(), penalty.detach(), gradient])
        for expected, found in zip(*drawn, strict=True):
            torch.testing.assert_close(found.full_tensor(), expected)


def test_what_cannot_be_says_so() -> None:
    run_ranks(_refused, 2)
