"""What rounding may do, without processes: the bounds, by numbers that are drawn, and sums in another order."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import t
from torch import nn

from hf_axonn.certificate.certify import certify, check_comparable, check_dtype
from hf_axonn.certificate.launch_plan import read_launch_plan
from hf_axonn.certificate.rounding import (
    ALARMS,
    RUNS,
    OtherSums,
    Precision,
    length_bound,
    length_error,
    number_bound,
    replicate,
    student,
)
from hf_axonn.certificate.shrinking import config_of
from tests.certificate.runs import launch_file


TENSORS, CERTIFICATES = 40, 300
UNIT = 1e-9


def drawn_errors(generator: torch.Generator, runs: int) -> torch.Tensor:
    """[run, tensor]: lengths of differences of tensors with 1 to 1000 numbers, of which some always have a share."""
    found = []
    for tensor in range(TENSORS):
        numbers = torch.randn(runs, int(10 ** (3 * tensor / (TENSORS - 1))), generator=generator)
        found.append((numbers + (1.0 if tensor % 3 == 0 else 0.0)).norm(dim=1) * 10.0 ** -(tensor % 5))
    return torch.stack(found, dim=1)


def certificates(times: float) -> list[list[bool]]:
    """Of many certificates which tensors are called different, of a run whose errors are so many times the usual."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(CERTIFICATES):
        errors = drawn_errors(generator, RUNS + 1)
        bounds = [length_bound(column, ALARMS / TENSORS, UNIT) for column in errors[:-1].T.tolist()]
        found.append([times * float(error) > bound for error, bound in zip(errors[-1], bounds, strict=True)])
    return found


def test_students_quantiles_are_those_of_scipy():
    for tail, freedom in ((1e-6, 15), (5e-5, 16), (0.01, 3), (0.3, 1)):
        assert student(tail, freedom) == pytest.approx(float(t.isf(tail, freedom)), rel=1e-5)


def test_identical_runs_are_called_different_in_less_than_one_of_a_hundred_certificates():
    assert sum(any(each) for each in certificates(1.0)) <= CERTIFICATES * ALARMS


def test_twice_the_usual_error_is_found():
    found = certificates(2.0)
    of_many_numbers = range(2 * TENSORS // 3, TENSORS)  # a single number is now and then twice as far off
    for tensor in of_many_numbers:
        assert sum(each[tensor] for each in found) >= 0.99 * CERTIFICATES, tensor


@pytest.mark.parametrize("mean", [0.0, 5.0])
def test_numbers_have_a_bound_of_both_signs_and_may_be_off_as_all_are(mean):
    generator = torch.Generator().manual_seed(1)
    tail, alarms, found = 1e-3, 0, 0
    for _ in range(3000):
        *known, one = (torch.randn(RUNS + 1, generator=generator) + mean).tolist()
        bound = number_bound(known, tail, UNIT)
        alarms += abs(one) > bound
        found += abs(one) + 20 * (1 + mean) > bound
    assert alarms <= 3 and found > 2900


def test_nothing_is_below_what_a_number_of_the_dtype_can_say():
    unit = Precision(torch.bfloat16).unit
    assert length_bound([0.0] * RUNS, 1e-4, unit) > unit and number_bound([0.0] * RUNS, 1e-4, unit) > unit
    assert length_error(torch.ones(3), torch.ones(3, dtype=torch.float64), 1.0) == 0.0
    assert length_error(torch.ones(0), torch.ones(0, dtype=torch.float64), 1.0) == 0.0
    assert length_error(torch.tensor([float("nan")]), torch.ones(1, dtype=torch.float64), 1.0) == float("inf")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_sums_are_the_same_but_for_rounding(dtype):
    generator = torch.Generator().manual_seed(2)
    layer = nn.Linear(40, 30)
    given = torch.randn(5, 40, generator=generator, dtype=torch.float64)
    truth = layer.double()(given)
    truth.square().sum().backward()
    exact = layer.weight.grad.clone()
    layer.zero_grad()
    low = layer.to(dtype)
    results = []
    for seed in range(4):
        mode = OtherSums(torch.Generator().manual_seed(seed), parts=3)
        mode.share = 1.0
        with mode:
            found = low(given.to(dtype))
            found.square().sum().backward()
        results.append((found.detach().double(), low.weight.grad.double()))
        low.zero_grad()
    near = 1e-13 if dtype == torch.float64 else 0.03
    for found, gradient in results:
        assert length_error(found, truth.detach(), 0.0) < near and length_error(gradient, exact, 0.0) < near
    assert not torch.equal(results[0][0], results[1][0]) and not torch.equal(results[0][1], results[1][1])


class _Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, given: torch.Tensor):
        return type("Found", (), {"loss": self.linear(given).float().square().mean()})


def test_replicas_differ_and_are_near_the_truth():
    torch.manual_seed(3)
    model = _Squares()
    batches = [({"given": torch.randn(4, 16)}, 0.5) for _ in range(3)]
    steps = list(replicate(model, batches, Precision(torch.bfloat16), parts=2, seed=0, runs=6))
    again = list(replicate(model, batches, Precision(torch.bfloat16), parts=2, seed=0, runs=6))
    assert len({step.loss for step in steps}) > 1 and [step.loss for step in steps] == [step.loss for step in again]
    exact = next(iter(replicate(model, batches, Precision(torch.float32), parts=1, seed=0, runs=1)))
    scaled = next(iter(replicate(model, batches, Precision(torch.float32, scale=1024.0), parts=1, seed=0, runs=1)))
    for step in (*steps, scaled):
        for name, gradient in exact.gradients.items():
            assert length_error(step.gradients[name], gradient.double(), 1e-3) < 0.03
        assert step.norm == pytest.approx(exact.norm, rel=0.03)


def test_what_cannot_be_compared_is_refused(tmp_path):
    with pytest.raises(ValueError, match="ignores fp16 and its loss scaler without a word: give bf16 or fp32"):
        check_dtype("fp16", [])
    with pytest.raises(ValueError, match="--dtype half: give float64, bf16 or fp32"):
        check_dtype("half", [])
    with pytest.raises(ValueError, match="a script is compared in float64"):
        check_dtype("bf16", ["train.py"])
    with pytest.raises(ValueError, match="mixtral has experts"):
        check_comparable(config_of("mixtral"), "bf16")
    check_comparable(config_of("mixtral"), "fp32")
    check_comparable(config_of("llama"), "bf16")
    options = {"trainer_args": None, "script": [], "steps": 1, "output": tmp_path / "new", "command_line": []}
    with pytest.raises(ValueError, match="fp16"):
        certify(launch_file(tmp_path, 2), "llama", dtype="fp16", **options)
    assert not (tmp_path / "new").exists()


def test_the_launch_file_has_the_mixed_precision_of_the_dtype(tmp_path):
    path = launch_file(tmp_path, 2, mixed_precision="fp16")
    plan = read_launch_plan(path, "bf16")
    assert plan.settings["mixed_precision"] == "bf16"
    assert "mixed_precision (fp16) is bf16: it is compared in bf16." in plan.notes
    assert read_launch_plan(path, "fp32").settings["mixed_precision"] == "no"
    assert read_launch_plan(launch_file(tmp_path, 2, mixed_precision="bf16"), "bf16").notes == ()
