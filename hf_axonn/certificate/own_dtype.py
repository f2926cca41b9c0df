"""A case compared in the run's own dtype: each step beside what float64 makes of the run's own parameters before it.

From the run's own parameters, so that a step is not blamed for the rounding of those before. The truth of a step is
that of the rows that the ranks saw (steps.py); how far rounding may take a run from it is known from replicas
(rounding.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_axonn.certificate.compare import (
    KINDS,
    CaseResult,
    Error,
    Runs,
    _relative,
    compare,
    norm_at,
    on_no_rank,
    piece_errors,
    read_runs,
    repeated_at_the_end,
    sample_problem,
    settle,
)
from hf_axonn.certificate.explain import (
    BATCH_MEANS,
    OWN,
    RANK_MEANS,
    REPEATED,
    TOKENS,
    _evaluations,
    _named,
    _of_norm,
    _replay,
    close,
)
from hf_axonn.certificate.float64 import Float64, error_floor
from hf_axonn.certificate.job import Job
from hf_axonn.certificate.launch_plan import LaunchPlan
from hf_axonn.certificate.mixture import FITS
from hf_axonn.certificate.pieces import Piece, assembled
from hf_axonn.certificate.recording import Record
from hf_axonn.certificate.rounding import ALARMS, RUNS, OtherSums, Step, length_bound, length_error, number_bound
from hf_axonn.certificate.rows import collate, pack, seen_in, spans, tokens_of
from hf_axonn.certificate.steps import Reference, Seen, Steps, check_on_one_process, key_of, precision_of, put


KEPT = ("samples", "start", "copy", "saved")  # exact in any dtype
RATE = "logged learning_rate"  # too
NEAR = 3.0  # how many times the rounding of all gradients a cause may leave
DRIFT = 1e-3  # relative; of a step beside the run's own gradients, from the rounding of parameters
Cause = tuple[str, bool, tuple[str, Error]]  # what it is, whether it is documented, and where


def compare_in_own_dtype(job: Job, plan: LaunchPlan, path: str, optimizer: str) -> CaseResult:
    """Compare one case, and find the cause of what differs.

    Raises:
        ValueError: the steps of one process are not known here (`check_on_one_process`).
    """
    runs = read_runs(job, path, optimizer)
    steps = Steps(job, runs, path, precision_of(job, plan))
    check_on_one_process(steps)
    result = compare(job, path, optimizer)
    found = [each for each in result.errors if each[0] in KEPT or each[1].name == RATE]
    causes: list[Cause] = [("", False, each) for each in found if each[1].wrong and each[0] != "samples"]
    tail = ALARMS / (len(job.cases) * _comparisons(job, runs))
    for step in range(1, job.steps + 1):
        problem = sample_problem(runs, result.groups, job.positions, step)
        seen = [runs.many[group[0]].samples[step - 1] for group in result.groups]
        if not any(rows and min(rows) >= 0 for position in seen for rows in position):
            causes.append(("", False, ("samples", Error(math.inf, step, "samples", 0, problem))))
            continue
        judged, reference = _judged(steps, seen, step, tail)
        found += judged
        wrong = [each for each in judged if each[1].wrong]
        if problem:
            where = ("samples", Error(math.inf, step, "samples", 0, problem))
            filled = repeated_at_the_end(runs, result.groups, job.positions, step, job.steps)
            right = "gradients are right for the samples that the ranks saw, but not for those of one process"
            causes.append((REPEATED, True, where) if filled else ("" if wrong else right, False, where))
        if wrong:
            causes.append((_cause(steps, plan, result, step, judged, reference, seen), False, _first(wrong)))
        elif steps.mean != TOKENS and job.positions * job.accumulation > 1:
            size = _apart(steps, step, seen, reference)
            if size > FITS:
                where = ("gradient", Error(size, step, "all", 0))
                causes.append((f"gradients are {steps.mean}, not {TOKENS}", True, where))
    if runs.one.evaluation:
        evaluated, documented = _evaluated(steps, plan, result, tail)
        found += evaluated
        causes += documented
    settle(result, found)
    _conclude(result, sorted(causes, key=lambda each: (each[2][1].step, KINDS.index(each[2][0]))))
    return result


def _conclude(result: CaseResult, causes: list[Cause]) -> None:
    """What is said of a case: its mistakes, or where there are none what is documented; each error has a cause."""
    mistakes = [each for each in causes if not each[1]]
    said = mistakes or causes
    if said:
        result.first = said[0][2]
        result.cause = "; ".join(dict.fromkeys(text for text, _, _ in said if text))
        result.documented = not mistakes
        if result.documented:
            at = {(where[0], where[1].step) for _, _, where in causes if where[0] == "samples"}
            for kind in {kind for kind, _ in at}:
                left = [its for what, its in result.errors if what == kind and (kind, its.step) not in at]
                result.worst[kind] = max(left, key=lambda error: error.size, default=Error(0.0, 0, kind, 0))


def _first(wrong: Sequence[tuple[str, Error]]) -> tuple[str, Error]:
    """Of what is wrong in a step, what the others follow from, and of that the farthest from its bound."""
    kind = wrong[0][0]
    return kind, max((its for what, its in wrong if what == kind), key=lambda error: error.size / error.bound)


def _comparisons(job: Job, runs: Runs) -> int:
    """How many numbers and tensors of a case are compared."""
    tensors = sum(len(record.gradients(1)) + len(record.parameters(1)) for record in runs.many)
    answers = sum(len(record.logits()) for record in runs.many)
    return job.steps * (tensors + 3 * job.ranks) + answers + job.ranks


def _judged(steps: Steps, seen: Seen, step: int, tail: float) -> tuple[list[tuple[str, Error]], Reference]:
    """The errors of one step, and what they were compared with."""
    runs, unit = steps.runs, steps.precision.unit
    pieces = {"gradient": [record.gradients(step) for record in runs.many]}
    pieces["parameter"] = [_changed(record, step) for record in runs.many]
    before = assembled(record.parameters(step - 1) for record in runs.many)
    parts = [(kind, piece) for kind, each in pieces.items() for held in each for piece in held]
    reference = steps.reference(before, seen, steps.mean, step - 1, parts)
    bounds = {part: length_bound(errors, tail, unit) for part, errors in reference.errors.items()}
    numbers = {
        kind: number_bound(errors, tail, steps.precision.number_unit) for kind, errors in reference.numbers.items()
    }
    truth = reference.truth
    mean = sum(sum(record.losses[step - 1]) for record in runs.many) / len(runs.many)
    found = [("loss", Error(_relative(mean, truth.loss), step, "loss", 0, bound=numbers["loss"]))]
    for kind, each in pieces.items():
        true = reference.of(kind)
        if kind == "parameter":
            found += _norms(steps, step, truth, numbers)
        for rank, held in enumerate(each):
            for piece in held:
                if piece.name not in true or tuple(true[piece.name].shape) != piece.shape:
                    found += [(kind, error) for error in piece_errors([piece], true, step, rank)]
                    continue
                size = length_error(piece.values, piece.within(true[piece.name]), reference.floors[kind])
                found.append((kind, Error(size, step, piece.name, rank, bound=bounds[kind, key_of(piece)])))
        found += [(kind, error) for error in on_no_rank(each, true, step)]
    for rank, record in enumerate(runs.many):
        if record.logged:
            size = _relative(record.logged[step - 1].get("loss", math.nan), truth.loss)
            found.append(("logged", Error(size, step, "logged loss", rank, bound=numbers["loss"])))
    return found, reference


def _norms(steps: Steps, step: int, truth: Step, bounds: dict[str, float]) -> list[tuple[str, Error]]:
    if not steps.job.norms or steps.runs.one.norms[step - 1] is None:
        return []
    sizes = [_relative(norm_at(record, step - 1), truth.norm) for record in steps.runs.many]
    return [("norm", Error(size, step, "norm", rank, bound=bounds["norm"])) for rank, size in enumerate(sizes)]


def _changed(record: Record, step: int) -> list[Piece]:
    """By how much a step has changed what a rank holds."""
    before = {key_of(piece): piece.values for piece in record.parameters(step - 1)}
    after = record.parameters(step)
    return [
        Piece(its.name, its.shape, its.offsets, its.values.double() - before[key_of(its)].double()) for its in after
    ]


def _apart(steps: Steps, step: int, seen: Seen, reference: Reference) -> float:
    """How far the mean that is asked for is from that over all tokens."""
    before = assembled(record.parameters(step - 1) for record in steps.runs.many)
    other = steps.true_step(before, steps.batches(seen, TOKENS)).gradients
    off = {name: its - other[name] for name, its in reference.truth.gradients.items()}
    return Step(0.0, off).norm / reference.truth.norm


def _fit(ranks: Sequence[Sequence[Piece]], truth: dict[str, Tensor]) -> tuple[float, float]:
    """By which number the gradients of some ranks are a multiple of a truth, and how far they are from that one."""
    above = below = square = 0.0
    for pieces in ranks:
        for piece in pieces:
            if piece.name in truth:
                part, values = piece.within(truth[piece.name]), piece.values.double()
                above += float((values * part).sum())
                below += float((part * part).sum())
                square += float((values * values).sum())
    if not below or not above:
        return math.nan, math.inf
    ratio = above / below
    return ratio, math.sqrt(max(0.0, square - above * ratio)) / (abs(ratio) * math.sqrt(below))


def _cause(
    steps: Steps,
    plan: LaunchPlan,
    result: CaseResult,
    step: int,
    judged: list[tuple[str, Error]],
    reference: Reference,
    seen: Seen,
) -> str:
    """Why a step is wrong."""
    job, runs, factors = steps.job, steps.runs, dict(plan.factors)
    kind, error = _first([each for each in judged if each[1].wrong])
    bad = [its for what, its in judged if what == "gradient" and its.wrong]
    if not bad:
        aside = CaseResult(result.path, result.optimizer, first=(kind, error))
        if kind == "norm":
            return _of_norm(job, runs, aside, factors, error.bound)[0]
        if kind == "parameter":
            said = _replay(job, runs, aside, step, DRIFT)
            return said or "gradients and their norm are right, what the optimizer makes of them is not"
        return "the gradients are right"
    ranks = [record.gradients(step) for record in runs.many]
    limit = NEAR * max(reference.whole, steps.precision.unit)
    before = assembled(record.parameters(step - 1) for record in runs.many)
    tried = {steps.mean: _fit(ranks, reference.truth.gradients)}
    for mean in (TOKENS, RANK_MEANS, BATCH_MEANS):
        if mean not in tried:
            tried[mean] = _fit(ranks, steps.true_step(before, steps.batches(seen, mean)).gradients)
    if len(seen) > 1:
        positions = steps.batches(seen, TOKENS)
        own = [steps.true_step(before, [batches]).gradients for batches in positions]
        group_of = {rank: index for index, group in enumerate(result.groups) for rank in group}
        alone = [_fit([pieces], own[group_of[rank]]) for rank, pieces in enumerate(ranks)]
        tried[OWN] = max(alone, key=lambda each: each[1])
    best = min(tried, key=lambda mean: tried[mean][1])
    ratio, left = tried[best]
    if left <= limit and best == OWN:
        return f"gradients are {OWN} (times {_named(ratio, factors, limit)})"
    if left <= limit and not close(ratio, 1, limit):
        return f"gradients are {best} times {_named(ratio, factors, limit)}"
    if left <= limit and best != steps.mean:
        return f"gradients are {best}, not {steps.mean}"
    return _by_tensor(ranks, bad, reference, factors, len(ranks), limit)


def _by_tensor(
    ranks: Sequence[Sequence[Piece]],
    bad: Sequence[Error],
    reference: Reference,
    factors: dict[str, int],
    number: int,
    limit: float,
) -> str:
    """Which gradients differ, where others are right: their ranks, and their factors."""
    wrong: dict[tuple[str, str], list[str]] = {}
    truth = reference.truth.gradients
    for error in bad:
        its = [piece for piece in ranks[error.rank] if piece.name == error.name]
        if error.text or not any(bool(piece.values.any()) for piece in its):
            what = "missing"
        else:
            ratio, left = _fit([its], truth)
            what = f"times {_named(ratio, factors, limit)}" if left <= NEAR * error.bound else "other values"
        wrong.setdefault((error.name, what), []).append(str(error.rank))
    if len({error.name for error in bad}) == len(truth):
        return "the gradients are no multiple of an average that is known"
    said = [f"{name} {what} on rank(s) {', '.join(of)}" for (name, what), of in list(wrong.items())[:3]]
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return f"of the gradients, these are not {TOKENS}: {'; '.join(said)}{more}"


@torch.no_grad()
def _answers(steps: Steps, model: nn.Module, context: Any) -> tuple[float, dict[int, Tensor]]:
    """The mean loss over the tokens of the evaluation, and the logits of its rows."""
    job = steps.job
    total, tokens, logits = 0.0, 0, {}
    for rows in steps.runs.one.evaluation["rows"]:
        batch = (pack if job.packing else collate)([job.asked[row] for row in rows])
        with context():
            found = model(**batch)
        total += float(found.loss.to(next(model.parameters()).dtype)) * tokens_of(batch)
        tokens += tokens_of(batch)
        for index, (line, places) in zip(seen_in(batch, job.asked), spans(batch), strict=True):
            logits[index] = found.logits[line, places]
    return total / tokens, logits


def _evaluated(
    steps: Steps, plan: LaunchPlan, result: CaseResult, tail: float
) -> tuple[list[tuple[str, Error]], list[Cause]]:
    """The errors of the evaluation of the run's own parameters, and what is known of them."""
    job, runs, unit = steps.job, steps.runs, steps.precision.unit
    after = assembled(record.parameters(job.steps) for record in runs.many)
    put(steps.exact.eval(), after)
    put(steps.rounded.eval(), after)
    loss, truth = _answers(steps, steps.exact, Float64)
    floor = float(error_floor(truth.values()))
    losses: list[float] = []
    errors: dict[int, list[float]] = {}
    for run in range(RUNS):
        with OtherSums(torch.Generator().manual_seed(job.seed + run), job.ranks):
            value, logits = _answers(steps, steps.rounded, steps.precision.autocast)
        losses.append(value / loss - 1)
        for row, its in logits.items():
            errors.setdefault(row, []).append(length_error(its, truth[row], floor))
    bounds = {row: length_bound(its, tail, unit) for row, its in errors.items()}
    bound = number_bound(losses, tail, steps.precision.number_unit)
    found = []
    for rank, record in enumerate(runs.many):
        for row, values in record.logits().items():
            if row not in truth or values.shape != truth[row].shape:
                error = Error(math.inf, job.steps, f"row {row}", rank, "other rows, or other shapes")
            else:
                size = length_error(values, truth[row], floor)
                error = Error(size, job.steps, f"row {row}", rank, bound=bounds[row])
            found.append(("logits", error))
    expected = _evaluations(job, runs, result)
    given = [record.evaluation["loss"] for record in runs.many]
    sizes = {what: max(_relative(value, its) for value in given) for what, its in expected.items()}
    what = min(sizes, key=lambda its: sizes[its])
    what = what if sizes[what] <= bound else "one"
    where = ("evaluation", Error(sizes["one"], job.steps, "evaluation loss", 0, bound=bound))
    measured = sizes["filled"] if what == "filled" else sizes["one"]
    found.append(("evaluation", Error(measured, job.steps, "evaluation loss", 0, bound=bound)))
    causes = [("", False, ("logits", error)) for _, error in found if error.wrong and error.name.startswith("row")][:1]
    if what == "filled":
        causes.append((f"Trainer's evaluation loss is a mean over batches, and {REPEATED}", True, where))
    elif sizes["one"] > bound:
        same = job.ranks // job.positions
        counted = (
            f"the evaluation loss counts full batches {same} times, as so many ranks have them, the last one once"
        )
        causes.append((counted if what == "counted" else "", False, where))
    return found, causes
