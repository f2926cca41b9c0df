"""The steps of a case made anew on this process: their truth in float64, and replicas in the run's own dtype.

Before anything is said of the ranks, the run of one process, which is in float64, has to have made the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from hf_axonn.certificate.compare import Runs, piece_errors
from hf_axonn.certificate.explain import BATCH_MEANS, RANK_MEANS, TOKENS, _count
from hf_axonn.certificate.float64 import Float64, error_floor
from hf_axonn.certificate.job import WITNESS, Job
from hf_axonn.certificate.launch_plan import LaunchPlan
from hf_axonn.certificate.loading import load_model
from hf_axonn.certificate.mixture import FITS
from hf_axonn.certificate.pieces import Piece, assembled
from hf_axonn.certificate.rounding import RUNS, Batch, Precision, Step, length_error, replicas, step_of
from hf_axonn.certificate.rows import collate, pack, tokens_of


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Key = tuple[str, tuple[int, ...], tuple[int, ...]]
Seen = Sequence[Sequence[Sequence[int]]]  # of each position and micro-batch the rows


def precision_of(job: Job, plan: LaunchPlan) -> Precision:
    """How the ranks of a job compute."""
    dtype = DTYPES[job.dtype]
    if job.fsdp:  # Accelerate lets FSDP2 cast parameters and reduce gradients in the dtype of mixed precision
        return Precision(dtype, dtype, dtype)
    if job.zero:
        return Precision(dtype, dtype, dtype, casts=False)
    section = plan.settings.get("axonn_config") or {}
    sums = torch.bfloat16 if section.get("reduce_dtype") == "bfloat16" else torch.float32
    return Precision(dtype, sums=sums)


@dataclass
class Reference:
    """The truth of a step, and the errors of the replicas.

    Args:
        truth: loss and gradients.
        moved: by how much SGD changes each parameter.
        floors: of "gradient" and "parameter", see `length_error`.
        errors: by kind and part of a tensor, of each replica.
        numbers: by kind, of each replica.
        whole: the largest error of a replica's gradients, all in one.
    """

    truth: Step
    moved: dict[str, Tensor]
    floors: dict[str, float]
    errors: dict[tuple[str, Key], list[float]] = field(default_factory=dict)
    numbers: dict[str, list[float]] = field(default_factory=dict)
    whole: float = 0.0

    def of(self, kind: str) -> dict[str, Tensor]:
        """The true tensors of a kind."""
        return self.truth.gradients if kind == "gradient" else self.moved


def key_of(piece: Piece) -> Key:
    """What makes two pieces the same part."""
    return piece.name, piece.offsets, tuple(piece.values.shape)


class Steps:
    """Makes the steps of a case anew, on this process.

    Args:
        job, runs, path: the case.
        precision: of the ranks.
        count: how tokens are counted.
    """

    def __init__(self, job: Job, runs: Runs, path: str, precision: Precision) -> None:
        self.job, self.runs, self.path, self.precision = job, runs, path, precision
        self.exact = load_model(job, parallel=False).train()
        self.rounded = load_model(job, parallel=False, dtype=precision.weights).train()
        self.count = _count(runs, job.rows)
        self.decay = float(job.trainer.get("weight_decay", 0.0)) if path == "trainer" else 0.0
        unused: Any = None  # the method asks nothing of its Trainer
        self.decayed = set(Trainer.get_decay_parameter_names(unused, self.exact))

    @property
    def mean(self) -> str:
        """Which mean of the losses the ranks are asked for."""
        if not self.runs.one.facts["sums_tokens"]:
            return BATCH_MEANS
        apart = self.path == "trainer" and self.job.trainer.get("average_tokens_across_devices") is False
        return RANK_MEANS if apart else TOKENS

    def batches(self, seen: Seen, mean: str) -> list[list[tuple[Batch, float]]]:
        """Of each position its micro-batches, with what each one's mean loss is multiplied by."""
        made = pack if self.job.packing else collate
        known = [[rows for rows in position if rows and min(rows) >= 0] for position in seen]
        each = [[made([self.job.rows[row] for row in rows]) for rows in position] for position in known]
        counts = [max(1, sum(self.count(batch) for batch in position)) for position in each]
        number = sum(map(len, each))

        def factor(batch: Batch, position: int) -> float:
            if mean == BATCH_MEANS:
                return 1 / number
            return tokens_of(batch) / (sum(counts) if mean == TOKENS else counts[position] * len(each))

        return [[(batch, factor(batch, index)) for batch in position] for index, position in enumerate(each)]

    def true_step(self, before: dict[str, Tensor], batches: Iterable[Iterable[tuple[Batch, float]]]) -> Step:
        """In float64."""
        put(self.exact, before)
        flat = [batch for position in batches for batch in position]
        return step_of(self.exact, flat, context=Float64, weights=torch.float64, sums=torch.float64)

    def moved(self, step: Step, before: dict[str, Tensor], index: int) -> dict[str, Tensor]:
        """By how much SGD changes each parameter, computed in the dtype of `before`."""
        one = self.runs.one
        rate = one.logged[index]["learning_rate"] if one.logged else self.job.rate(WITNESS)
        most = float(self.job.trainer.get("max_grad_norm", 1.0))
        clip = min(1.0, most / (step.norm + 1e-6)) if most > 0 else 1.0
        found = {}
        for name, its in before.items():
            change = torch.zeros_like(its)
            if name in step.gradients:
                change = step.gradients[name].to(its.dtype) * clip
                change = change + self.decay * its if self.decay and name in self.decayed else change
            found[name] = torch.add(its, change, alpha=-rate).double() - its.double()
        return found

    def reference(
        self, before: dict[str, Tensor], seen: Seen, mean: str, index: int, parts: Iterable[tuple[str, Piece]]
    ) -> Reference:
        """The truth of a step, and what replicas make of it.

        Args:
            before: the parameters before it.
            seen: the rows.
            mean: of the losses.
            index: of the step, from 0.
            parts: "gradient" or "parameter", and what ranks hold of a tensor.
        Raises:
            ValueError: a replica is not finite.
        """
        batches = self.batches(seen, mean)
        truth = self.true_step(before, batches)
        moved = self.moved(truth, before, index)
        floors = {
            "gradient": float(error_floor(truth.gradients.values())),
            "parameter": float(error_floor(moved.values())),
        }
        found = Reference(truth, moved, floors)
        shapes = {kind: {name: tuple(its.shape) for name, its in found.of(kind).items()} for kind in floors}
        known = {(kind, key_of(its)): its for kind, its in parts if shapes[kind].get(its.name) == its.shape}
        put(self.rounded, before)
        single = {name: its.float() for name, its in before.items()}
        flat = [batch for position in batches for batch in position]
        ranks, seed = self.job.ranks, self.job.seed + 1000 * (index + 1)
        for step in replicas(self.rounded, flat, self.precision, parts=ranks, seed=seed, runs=RUNS):
            if not math.isfinite(step.loss + step.norm):
                raise ValueError(
                    f"--dtype {self.job.dtype}: on one process loss and gradients of step {index + 1} are not finite "
                    "in it, so that there is nothing to compare with: certify in float64."
                )
            its = {"gradient": step.gradients, "parameter": self.moved(step, single, index)}
            for (kind, key), piece in known.items():
                here, there = piece.within(its[kind][key[0]]), piece.within(found.of(kind)[key[0]])
                found.errors.setdefault((kind, key), []).append(length_error(here, there, floors[kind]))
            for name, value, true in (("loss", step.loss, truth.loss), ("norm", step.norm, truth.norm)):
                found.numbers.setdefault(name, []).append(value / true - 1)
            off = {name: step.gradients[name].double() - true for name, true in truth.gradients.items()}
            found.whole = max(found.whole, Step(0.0, off).norm / truth.norm)
        return found


@torch.no_grad()
def put(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Give a model these parameters."""
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])


def check_on_one_process(steps: Steps) -> None:
    """Raise ValueError if the run of one process did not make the steps that are computed here."""
    one = steps.runs.one
    mean = BATCH_MEANS if steps.mean == BATCH_MEANS else TOKENS
    for index, seen in enumerate(one.samples):
        before = assembled([one.parameters(index)])
        truth = steps.true_step(before, steps.batches([seen], mean))
        moved = steps.moved(truth, before, index)
        after = {name: its + moved[name] for name, its in before.items()}
        errors = piece_errors(one.gradients(index + 1), truth.gradients, index + 1, 0)
        errors += piece_errors(one.parameters(index + 1), after, index + 1, 0)
        worst = max(errors, key=lambda error: error.size)
        if worst.size > FITS:
            raise ValueError(
                f"--dtype {steps.job.dtype}: on one process in float64, step {index + 1} of {steps.path} is not SGD's "
                f"step of the mean loss ({worst.name} is off by {worst.size:.0e}), so that no bound of rounding is "
                "known: omit the arguments that change loss or step, or certify in float64."
            )
