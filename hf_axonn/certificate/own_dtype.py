"""A case compared in the run's own dtype: each step beside what float64 makes of the run's own parameters before it.

From the run's own parameters, so that a step is not blamed for the rounding of those before. The truth of a step is
that of the rows that the ranks saw (steps.py); how far rounding may take a run from it is known from replicas
(rounding.py). Before anything is said of the ranks, the run of one process, which is in float64, has to have made the
same steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

import torch

from hf_axonn.certificate.compare import (
    KINDS,
    RATE,
    CaseResult,
    Error,
    Runs,
    compare,
    find_absent,
    find_sample_problem,
    is_filled_up,
    norm_at,
    relative_error,
    shard_errors,
)
from hf_axonn.certificate.explain import OPTIMIZER, REPEATED, SAMPLES, Cause, Explainer
from hf_axonn.certificate.float64 import Float64, error_floor
from hf_axonn.certificate.hypotheses import (
    BATCH_MEANS,
    FITS,
    TOKENS,
    Positions,
    average,
    find_fit,
    length_of_difference,
    list_wrong,
)
from hf_axonn.certificate.job import Job
from hf_axonn.certificate.launch_plan import LaunchPlan
from hf_axonn.certificate.loading import load_model
from hf_axonn.certificate.recording import Record
from hf_axonn.certificate.rounding import (
    ALARMS,
    RUNS,
    OtherSums,
    Precision,
    Step,
    length_bound,
    length_error,
    number_bound,
    replicate,
)
from hf_axonn.certificate.shards import Shard, assemble
from hf_axonn.certificate.steps import Steps, average_step, put, weigh_inputs


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
KEPT = ("samples", "start", "copy", "saved")  # exact in any dtype, as RATE is
NEAR = 3.0  # how many times the rounding of all gradients a cause may leave
DRIFT = 1e-3  # relative; of a step beside the run's own gradients, from the rounding of parameters
Key = tuple[str, tuple[int, ...], tuple[int, ...]]
Found = tuple[str, Error]  # the kind of an error, and the error
Known = tuple[Cause, Found]  # a cause, and the first error that it has


def compare_in_own_dtype(job: Job, plan: LaunchPlan, runs: Runs, path: str, optimizer: str) -> CaseResult:
    """Compare one case, and find the cause of what differs.

    Raises:
        ValueError: the steps of one process are not known here (`check_on_one_process`).
    """
    result = compare(job, runs, path, optimizer)
    comparison = _Comparison(job, plan, runs, result)
    check_on_one_process(comparison.explainer.steps)
    errors = [found for found in result.errors if found[0] in KEPT or found[1].name == RATE]
    causes: list[Known] = [(Cause(), found) for found in errors if found[1].wrong and found[0] != "samples"]
    for step in range(1, job.steps + 1):
        of_step, known = comparison.compare_step(step)
        errors += of_step
        causes += known
    if runs.one.evaluation:
        evaluated, known = comparison.compare_evaluation()
        errors += evaluated
        causes += known
    result.set_errors(errors)
    conclude(result, sorted(causes, key=lambda known: (known[1][1].step, KINDS.index(known[1][0]))))
    return result


def conclude(result: CaseResult, causes: list[Known]) -> None:
    """Set the cause of a case: its mistakes, or where there are none what is documented; each error has a cause."""
    mistakes = [known for known in causes if not known[0].documented]
    listed = mistakes or causes
    if not listed:
        return
    result.first = listed[0][1]
    result.cause = "; ".join(dict.fromkeys(cause.text for cause, _ in listed if cause.text))
    result.documented = not mistakes
    if result.documented and (steps := {error.step for _, (kind, error) in causes if kind == "samples"}):
        left = [error for kind, error in result.errors if kind == "samples" and error.step not in steps]
        result.worst["samples"] = max(left, key=lambda error: error.size, default=Error(0.0, 0, "samples", 0))


def _find_first(wrong: Sequence[Found]) -> Found:
    """Find the kind that the others in a step follow from, and the error of it that is farthest from its bound."""
    kind = wrong[0][0]
    return kind, max((error for other, error in wrong if other == kind), key=lambda error: error.size / error.bound)


class _Comparison:
    """Compare the steps of a case with what replicas of them are off by.

    Args:
        job, plan, runs: the case.
        result: of the comparison in float64, with the groups of ranks that share samples.
    """

    def __init__(self, job: Job, plan: LaunchPlan, runs: Runs, result: CaseResult) -> None:
        self.job, self.runs, self.groups = job, runs, result.groups
        self.explainer = Explainer(job, runs, result, plan.factors)
        self.precision = find_precision(job, plan)
        self.unit, self.number_unit = self.precision.unit, self.precision.number_unit
        self.rounded = load_model(job, parallel=False, dtype=self.precision.weights)
        tensors = sum(len(record.gradients(1)) + len(record.parameters(1)) for record in runs.many)
        answers = sum(len(record.logits()) for record in runs.many)
        comparisons = job.steps * (tensors + 3 * job.ranks) + answers + job.ranks
        self.tail = ALARMS / (len(job.cases) * comparisons)

    def compare_step(self, step: int) -> tuple[list[Found], list[Known]]:
        """Return the errors of a step, and what is known of them."""
        steps, runs, positions = self.explainer.steps, self.runs, self.job.positions
        problem = find_sample_problem(runs, self.groups, positions, step)
        where = ("samples", Error(math.inf, step, "samples", 0, problem))
        seen = [steps.inputs(runs.many[group[0]], step) for group in self.groups]
        if not any(seen):
            return [], [(Cause(), where)]
        batches = steps.compute(steps.before(step), seen)
        errors, truth, whole = self._find_errors(batches, step)
        wrong = [found for found in errors if found[1].wrong]
        causes: list[Known] = []
        if problem:
            filled = is_filled_up(runs, self.groups, positions, step, self.job.steps)
            other = "" if wrong else f"{SAMPLES} not for those of one process"
            causes.append((Cause(REPEATED, True) if filled else Cause(other), where))
        if wrong:
            causes.append((Cause(self._explain(step, wrong, truth, whole, batches)), _find_first(wrong)))
        elif steps.mean != TOKENS and positions * self.job.accumulation > 1:
            off = truth.distance(average(batches, TOKENS))
            if off > FITS:
                cause = Cause(f"gradients are {steps.mean}, not {TOKENS}", True)
                causes.append((cause, ("gradient", Error(off, step, "all", 0))))
        return errors, causes

    def _find_errors(self, batches: Positions, step: int) -> tuple[list[Found], Step, float]:
        """Compare one step.

        Returns:
            The errors, the truth, and the largest error of all gradients of a replica in one.
        Raises:
            ValueError: a replica is not finite.
        """
        job, many, steps = self.job, self.runs.many, self.explainer.steps
        truth, before = average_step(batches, steps.mean), steps.before(step)
        true = {"gradient": truth.gradients, "parameter": steps.change(truth, before, step - 1)}
        floors = {kind: float(error_floor(tensors.values())) for kind, tensors in true.items()}
        shards = {"gradient": [record.gradients(step) for record in many]}
        shards["parameter"] = [_find_changes(record, step) for record in many]
        known = {
            (kind, _key(shard)): shard
            for kind, ranks in shards.items()
            for shard in chain(*ranks)
            if shard.name in true[kind] and tuple(true[kind][shard.name].shape) == shard.shape
        }
        sizes: dict[tuple[str, Key], list[float]] = defaultdict(list)  # of each replica
        losses: list[float] = []
        norms: list[float] = []
        whole = 0.0
        put(self.rounded.train(), before)
        single = {name: weight.float() for name, weight in before.items()}
        inputs, seed = weigh_inputs(batches, steps.mean), job.seed + 1000 * step
        for replica in replicate(self.rounded, inputs, self.precision, parts=job.ranks, seed=seed, runs=RUNS):
            if not math.isfinite(replica.loss + replica.norm):
                raise ValueError(
                    f"--dtype {job.dtype}: on one process loss and gradients of step {step} are not finite in it, so "
                    "that there is nothing to compare with: certify in float64."
                )
            tensors = {"gradient": replica.gradients, "parameter": steps.change(replica, single, step - 1)}
            for (kind, key), shard in known.items():
                here, there = shard.within(tensors[kind][shard.name]), shard.within(true[kind][shard.name])
                sizes[kind, key].append(length_error(here, there, floors[kind]))
            losses.append(replica.loss / truth.loss - 1)
            norms.append(replica.norm / truth.norm - 1)
            whole = max(whole, truth.distance(replica.gradients))
        loss_bound, norm_bound = (number_bound(errors, self.tail, self.number_unit) for errors in (losses, norms))
        mean = sum(sum(record.losses[step - 1]) for record in many) / len(many)
        found = [("loss", Error(relative_error(mean, truth.loss), step, "loss", 0, bound=loss_bound))]
        for kind, ranks in shards.items():
            if kind == "parameter" and job.norms and self.runs.one.norms[step - 1] is not None:
                off = [relative_error(norm_at(record, step - 1), truth.norm) for record in many]
                found += [("norm", Error(size, step, "norm", rank, bound=norm_bound)) for rank, size in enumerate(off)]
            for rank, held in enumerate(ranks):
                for shard in held:
                    if (kind, _key(shard)) not in known:
                        found += [(kind, error) for error in shard_errors([shard], true[kind], step, rank)]
                        continue
                    size = length_error(shard.values, shard.within(true[kind][shard.name]), floors[kind])
                    bound = length_bound(sizes[kind, _key(shard)], self.tail, self.unit)
                    found.append((kind, Error(size, step, shard.name, rank, bound=bound)))
            found += [(kind, error) for error in find_absent(ranks, true[kind], step)]
        for rank, record in enumerate(many):
            if record.logged:
                size = relative_error(record.logged[step - 1].get("loss", math.nan), truth.loss)
                found.append(("logged", Error(size, step, "logged loss", rank, bound=loss_bound)))
        return found, truth, whole

    def _explain(self, step: int, wrong: list[Found], truth: Step, whole: float, batches: Positions) -> str:
        """Explain the errors of a step that are above their bounds."""
        kind, error = _find_first(wrong)
        gradients = [error for other, error in wrong if other == "gradient"]
        if not gradients:
            if kind == "norm":
                return self.explainer.explain_norm(error, error.bound)
            if kind == "parameter":
                return self.explainer.replay(step, DRIFT) or OPTIMIZER
            return "the gradients are right"
        ranks = [record.gradients(step) for record in self.runs.many]
        mean, factors = self.explainer.steps.mean, self.explainer.factors
        limit, distance = NEAR * max(whole, self.unit), length_of_difference
        fit = find_fit(ranks, batches, self.groups, expected=mean, distance=distance, limit=limit)
        if fit is not None and (text := fit.describe(mean, factors, limit)):
            return text
        places = [(error.rank, error.name, NEAR * error.bound) for error in gradients]
        return list_wrong(places, ranks, truth.gradients, factors, distance)

    def compare_evaluation(self) -> tuple[list[Found], list[Known]]:
        """Return the errors of the evaluation of the run's own parameters, and what is known of them."""
        job, many, steps = self.job, self.runs.many, self.explainer.steps
        after = steps.before(job.steps + 1)
        put(steps.model.eval(), after)
        put(self.rounded.eval(), after)
        loss, truth = steps.compute_logits(steps.model, Float64)
        floor = float(error_floor(truth.values()))
        losses: list[float] = []
        sizes: dict[int, list[float]] = {}
        for run in range(RUNS):
            with OtherSums(torch.Generator().manual_seed(job.seed + run), job.ranks):
                value, logits = steps.compute_logits(self.rounded, self.precision.autocast)
            losses.append(value / loss - 1)
            for row, values in logits.items():
                sizes.setdefault(row, []).append(length_error(values, truth[row], floor))
        bounds = {row: length_bound(errors, self.tail, self.unit) for row, errors in sizes.items()}
        found = []
        for rank, record in enumerate(many):
            for row, values in record.logits().items():
                if row not in truth or values.shape != truth[row].shape:
                    error = Error(math.inf, job.steps, f"row {row}", rank, "other rows, or other shapes")
                else:
                    size = length_error(values, truth[row], floor)
                    error = Error(size, job.steps, f"row {row}", rank, bound=bounds[row])
                found.append(("logits", error))
        causes: list[Known] = [(Cause(), logits) for logits in found if logits[1].wrong][:1]
        bound = number_bound(losses, self.tail, self.number_unit)
        off = {
            kind: max(relative_error(record.evaluation["loss"], expected) for record in many)
            for kind, expected in steps.known_evaluations(self.groups).items()
        }
        kind = min(off, key=lambda kind: off[kind])
        kind = kind if off[kind] <= bound else "one"
        error = Error(off["one"], job.steps, "evaluation loss", 0, bound=bound)
        measured = Error(off["filled"], job.steps, "evaluation loss", 0, bound=bound) if kind == "filled" else error
        found.append(("evaluation", measured))
        if kind == "filled" or error.wrong:
            causes.append((self.explainer.explain_evaluation(kind), ("evaluation", error)))
        return found, causes


def _find_changes(record: Record, step: int) -> list[Shard]:
    """Return by how much a step has changed the parameters of a rank."""
    before = {_key(shard): shard.values.double() for shard in record.parameters(step - 1)}
    return [
        Shard(shard.name, shard.shape, shard.offsets, shard.values.double() - before[_key(shard)])
        for shard in record.parameters(step)
    ]


def _key(shard: Shard) -> Key:
    """Return a key that is the same for two shards which are the same part."""
    return shard.name, shard.offsets, tuple(shard.values.shape)


def find_precision(job: Job, plan: LaunchPlan) -> Precision:
    """Return how the ranks of a job compute."""
    dtype = DTYPES[job.dtype]
    if job.fsdp:  # Accelerate lets FSDP2 cast parameters and reduce gradients in the dtype of mixed precision
        return Precision(dtype, dtype, dtype)
    if job.zero:
        return Precision(dtype, dtype, dtype, casts=False)
    section = plan.settings.get("axonn_config") or {}
    sums = torch.bfloat16 if section.get("reduce_dtype") == "bfloat16" else torch.float32
    return Precision(dtype, sums=sums)


def check_on_one_process(steps: Steps) -> None:
    """Raise ValueError if the run of one process did not make the steps that are computed here."""
    one = steps.runs.one
    mean = BATCH_MEANS if steps.mean == BATCH_MEANS else TOKENS
    for step in range(1, len(one.samples) + 1):
        before = assemble([one.parameters(step - 1)])
        truth = average_step(steps.compute(before, [steps.inputs(one, step)]), mean)
        changes = steps.change(truth, before, step - 1)
        after = {name: weight + changes[name] for name, weight in before.items()}
        errors = shard_errors(one.gradients(step), truth.gradients, step, 0)
        errors += shard_errors(one.parameters(step), after, step, 0)
        worst = max(errors, key=lambda error: error.size)
        if worst.size > FITS:
            raise ValueError(
                f"--dtype {steps.job.dtype}: on one process in float64, step {step} of {steps.path} is not SGD's "
                f"step of the mean loss ({worst.name} is off by {worst.size:.0e}), so that no bound of rounding is "
                "known: omit the arguments that change loss or step, or certify in float64."
            )
