"""How often identical runs are called different in a dtype, and from which size on errors are found.

    python -m tests.benchmarks.certificate.rounding bf16 [--model gpt2] [--runs 400]

On one process. Of many replicas 16 are drawn, and one more that is compared with them, again and again: all are of
identical runs, so what is called different is a false alarm. Then the difference that a planted error makes in float64
(tests/certificate/planted.py) is added to replicas, whole and in smaller shares: the smallest share with which 99 of
100 are found says what the dtype hides. tests/certificate/test_own_dtype.py has the errors in real launches.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hf_axonn.certificate.certify import command, prepare
from hf_axonn.certificate.compare import Runs
from hf_axonn.certificate.float64 import error_floor
from hf_axonn.certificate.hypotheses import TOKENS, Positions, add_up, weigh
from hf_axonn.certificate.loading import load_model
from hf_axonn.certificate.recording import Record
from hf_axonn.certificate.rounding import (
    ALARMS,
    RUNS,
    Precision,
    Step,
    length_bound,
    length_error,
    number_bound,
    replicate,
)
from hf_axonn.certificate.shards import assemble
from hf_axonn.certificate.steps import Steps, average_step, put, weigh_inputs
from tests.certificate.runs import plan_of


PRECISIONS = {
    "bf16": Precision(torch.bfloat16),
    "bf16, FSDP2": Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "fp16": Precision(torch.float16, scale=2.0**12),
    "fp32": Precision(torch.float32),
}
STEPS, RANKS, DRAWN, PLANTED = 2, 2, 20_000, 100
Tensors = dict[tuple[str, str], Tensor]  # by kind and name
SHARES = [2.0**-power for power in range(0, 26)]


@dataclass
class Truth:
    """Of one step."""

    step: Step
    tensors: Tensors
    floors: dict[str, float]

    def errors_with(self, tensors: Tensors, change: Tensors, share: float) -> list[float]:
        """Of each tensor, after a share of a change."""
        changed = {key: tensors[key].double() + share * change.get(key, torch.zeros(())) for key in self.tensors}
        return [length_error(changed[key], true, self.floors[key[0]]) for key, true in self.tensors.items()]


def tensors_of(steps: Steps, step: Step, before: dict[str, Tensor], index: int) -> Tensors:
    """Gradients and what SGD changes."""
    found = {("gradient", name): gradient for name, gradient in step.gradients.items()}
    return found | {("parameter", name): change for name, change in steps.change(step, before, index).items()}


def main() -> None:
    """Print the rates of one dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dtype", choices=PRECISIONS)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--runs", type=int, default=400)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), options.dtype, options.model, options.runs)


def measure(folder: Path, dtype: str, model: str, number: int) -> None:
    """Make replicas of two steps on two data-parallel ranks, and compare them with one another."""
    plan = plan_of(folder, RANKS)
    job = prepare(folder / "job", plan, model, steps=STEPS, trainer={"max_grad_norm": 0.5}, dtype="fp32")
    subprocess.run(command(job, "one", ["trainer-sgd"]), check=True, capture_output=True)
    one = Record(folder / "job" / "one" / "trainer-sgd", 0)
    precision = PRECISIONS[dtype]
    steps = Steps(job, Runs(one, [one]), "trainer")
    rounded = load_model(job, parallel=False, dtype=precision.weights).train()
    lengths: list[Tensor] = []  # [replica, tensor], of each step
    numbers: list[Tensor] = []
    planted: dict[str, list[Tensor]] = {}
    for index in range(STEPS):
        before = {name: values.float().double() for name, values in assemble([one.parameters(index)]).items()}
        single = {name: its.float() for name, its in before.items()}
        rows = one.samples[index][0]
        half = max(1, len(rows) // 2)
        seen = [[rows[:half]], [rows[half:]]] if len(rows) > 1 else [[rows]]
        positions = compute(steps, before, seen)
        right = average_step(positions, TOKENS)
        exact = tensors_of(steps, right, before, index)
        floors = {kind: float(error_floor([its for key, its in exact.items() if key[0] == kind])) for kind, _ in exact}
        truth = Truth(right, exact, floors)
        put(rounded, before)
        errors, its_numbers, kept = [], [], []
        flat, seed = weigh_inputs(positions, TOKENS), 10_000 * (index + 1)
        for step in replicate(rounded, flat, precision, parts=RANKS, seed=seed, runs=number):
            found = tensors_of(steps, step, single, index)
            errors.append(truth.errors_with(found, {}, 0.0))
            its_numbers.append([step.loss / right.loss - 1, step.norm / right.norm - 1])
            if index == 0 and RUNS < len(errors) <= RUNS + PLANTED:  # the first ones set the bounds
                kept.append(found)
        lengths.append(torch.tensor(errors, dtype=torch.float64))
        numbers.append(torch.tensor(its_numbers, dtype=torch.float64))
        if index == 0:
            for name, change in changes(steps, right, before, seen, exact).items():
                planted[name] = [
                    torch.tensor([truth.errors_with(found, change, share) for found in kept]) for share in SHARES
                ]
    report(dtype, model, precision, lengths, numbers, planted)


def compute(steps: Steps, before: dict[str, Tensor], seen: list[list[list[int]]]) -> Positions:
    """Compute the micro-batches of rows, of each position."""
    rows = steps.job.rows
    return steps.compute(before, [[steps.collate([rows[row] for row in batch]) for batch in own] for own in seen])


def changes(steps: Steps, right: Step, before: dict[str, Tensor], seen: list, exact: Tensors) -> dict[str, Tensors]:
    """What each planted error changes in gradients and steps, in float64."""

    def gradients(other: dict[str, Tensor]) -> Tensors:
        return {("gradient", name): its - right.gradients[name] for name, its in other.items()}

    own = add_up((batch, by * len(seen)) for batch, by in weigh(compute(steps, before, seen), TOKENS)[0])
    twice = [seen[0], [[seen[1][0][-1], *seen[1][0][1:]]]]
    repeated = average_step(compute(steps, before, twice), TOKENS)
    clip = 0.5 / (right.norm + 1e-6)
    bias = next(
        name for name in right.gradients if name.endswith(("h.0.attn.c_attn.bias", "layers.0.input_layernorm.weight"))
    )
    return {
        "forgotten average": gradients(own),
        "loss times 2": gradients({name: 2 * its for name, its in right.gradients.items()}),
        "duplicated sample": gradients(repeated.gradients),
        "unclipped rank": {key: its * (1 / clip - 1) for key, its in exact.items() if key[0] == "parameter"},
        f"no gradient of {bias}": {("gradient", bias): -right.gradients[bias]},
    }


def report(dtype, model, precision, lengths, numbers, planted) -> None:
    """Draw, compare, print."""
    comparisons = STEPS * (RANKS * lengths[0].shape[1] + 3 * RANKS)
    tail = ALARMS / comparisons
    number = len(lengths[0])
    generator = torch.Generator().manual_seed(0)
    alarms, ever = 0, set()
    whole = torch.cat(lengths, dim=1)
    signed = torch.cat(numbers, dim=1)
    for _ in range(DRAWN):
        order = torch.randperm(number, generator=generator)[: RUNS + 1]
        known, one = order[:-1], int(order[-1])
        over = (whole[one] > bounds(whole[known], tail, precision.unit)).any()
        over_number = (signed[one].abs() > number_bounds(signed[known], tail, precision.number_unit)).any()
        alarms += int(over or over_number)
        ever |= {one} if over or over_number else set()
    print(f"{model}, {dtype}: {number} identical runs; of {DRAWN} drawings of 16 and 1 {alarms} are called different,")
    print(f"  {len(ever)} of the runs in any drawing")
    limits = bounds(lengths[0][:RUNS], tail, precision.unit)
    ratio = limits / lengths[0].log().mean(0).exp()
    print(
        f"  bounds {limits.min():.1e} to {limits.max():.1e}, {ratio.min():.2f} to {ratio.max():.2f} of the usual error"
    )
    for name, each in planted.items():
        found = [(errors > limits).any(1).double().mean().item() for errors in each]
        least = 0.0
        for share, rate in zip(SHARES, found, strict=True):
            if rate < 0.99:
                break
            least = share
        print(f"  {name}: found in {found[0]:.0%}; from {least:.1e} of it on in 99%")


def bounds(errors: Tensor, tail: float, unit: float) -> Tensor:
    """`length_bound` of each column."""
    return torch.tensor([length_bound(column, tail, unit) for column in errors.T.tolist()])


def number_bounds(errors: Tensor, tail: float, unit: float) -> Tensor:
    """`number_bound` of each column."""
    return torch.tensor([number_bound(column, tail, unit) for column in errors.T.tolist()])


if __name__ == "__main__":
    main()
