"""The cause of a difference: gradients that a run would have if it averaged otherwise, beside those that it has.

For a step of the parallel run the gradients of every micro-batch of every position are computed here, on one process,
from the parameters that the run itself had before the step. What follows from them is tried: the mean over all tokens,
means of means, a rank's own samples only, each times any number. So one step does not hide what the next one does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.trainer_pt_utils import LabelSmoother

from hf_axonn.certificate.compare import (
    BOUND,
    CaseResult,
    Runs,
    norm_at,
    piece_errors,
    repeated_at_the_end,
    sample_problem,
)
from hf_axonn.certificate.float64 import Float64
from hf_axonn.certificate.job import WITNESS, Job
from hf_axonn.certificate.loading import load_model, load_saved, script_model
from hf_axonn.certificate.mixture import FITS, Share, mixture_of, name_mixtures, only_rounded, other_losses
from hf_axonn.certificate.pieces import Piece, assembled
from hf_axonn.certificate.recording import Record
from hf_axonn.certificate.rows import Row, collate, labels_of, pack, tokens_of


REPEATED = "Accelerate fills the last batch of an epoch with the samples of its beginning (even_batches)"
TOKENS = "the mean over the tokens of a step"
RANK_MEANS = "the mean over the ranks of their means over tokens"
BATCH_MEANS = "the mean over micro-batches of their means over tokens"
OWN = "the share of a rank's own samples alone: nothing is averaged over the ranks"


@dataclass(frozen=True)
class Scaling:
    """By which number a gradient is a multiple of another, and how far it is from that multiple."""

    ratio: float
    left: float


def explain(job: Job, runs: Runs, result: CaseResult, factors: Mapping[str, int]) -> None:
    """Fill in `cause` and `documented` of a case that differs."""
    if result.first is None:
        return
    kind, error = result.first
    finders: dict[str, Callable[[Job, Runs, CaseResult, dict[str, int]], tuple[str, bool]]] = {
        "samples": _of_training,
        "start": _of_start,
        "loss": _of_training,
        "gradient": _of_training,
        "norm": _of_norm,
        "parameter": _of_update,
        "evaluation": _of_evaluation,
        "saved": _of_saved,
    }
    if kind in finders:
        text, documented = finders[kind](job, runs, result, dict(factors))
    else:
        text, documented = "", False
    result.cause, result.documented = text, documented
    if documented:
        result.before(error.step if kind != "evaluation" else error.step + 1)


def _of_training(job: Job, runs: Runs, result: CaseResult, factors: dict[str, int]) -> tuple[str, bool]:
    """Why losses and gradients differ, step by step from the first on."""
    assert result.first is not None
    begin = result.first[1].step
    causes: list[str] = []
    documented = True
    for step in range(begin, job.steps + 1):
        text, known = _of_step(job, runs, result, factors, step)
        causes += [text] if text and text not in causes else []
        documented = documented and (known or not text)  # no text: the step is right
        if text and not known:  # what follows is of parameters that are wrong
            break
    after = _after(job, runs, result, begin) if documented and causes else ""
    return "; ".join([*causes, *([after] if after else [])]), documented and bool(causes) and not after


def _after(job: Job, runs: Runs, result: CaseResult, begin: int) -> str:
    """What is wrong besides gradients that differ as documented: from there on no step is that of one process."""
    problem = _replay(job, runs, result, begin) or drift(runs, begin, job.steps)
    if not problem and runs.one.evaluation and _evaluation(job, runs, result) == "other":
        problem = "the evaluation loss is not that of the run's own parameters"
    if not problem and "saved" in result.worst and not result.worst["saved"].size <= BOUND:
        problem, _ = _of_saved(job, runs, result, {})
    return problem


def drift(runs: Runs, begin: int, end: int) -> str:
    """Which rank's parameters are not those of its copies, from which step on."""
    for step in range(begin, end + 1):
        each = [record.parameters(step) for record in runs.many]
        truth = assembled(each)
        for rank, pieces in enumerate(each):
            for error in piece_errors(pieces, truth, step, rank):
                if error.wrong:
                    return f"{error.name} of rank {rank} is not that of the other ranks after step {step}"
    return ""


def _of_step(job: Job, runs: Runs, result: CaseResult, factors: dict[str, int], step: int) -> tuple[str, bool]:
    """The cause in one step, and whether it is documented; nothing where the step is as on one process."""
    ranks = [record.gradients(step) for record in runs.many]
    assert result.first is not None
    if job.script and step == result.first[1].step:
        scaling = _scaling(ranks, {piece.name: piece.values for piece in runs.one.gradients(step)})
        if scaling.left <= FITS and not close(scaling.ratio, 1):
            return f"gradients are those of one process times {_named(scaling.ratio, factors)}", False
    try:
        model = _model_at(job, runs, step)
    except KeyError:
        return "the script's model is no more the one that it has loaded, so that no cause is looked for", False
    shares = _shares(job, runs, result, model, step)
    tokens = max(1, sum(share.counted for batches in shares for share in batches))
    number = sum(len(batches) for batches in shares)

    def total(
        weight: Callable[[Share, Sequence[Share]], float], positions: Sequence[Sequence[Share]] = shares
    ) -> dict[str, Tensor]:
        found = {name: torch.zeros_like(its) for name, its in model.named_parameters()}
        for batches in positions:
            for share in batches:
                for name, gradient in share.gradient.items():
                    found[name] += gradient * weight(share, batches)
        return found

    right = total(lambda share, batches: 1 / tokens)
    by_rank = total(lambda share, batches: 1 / (max(1, sum(its.counted for its in batches)) * len(shares)))
    micro = total(lambda share, batches: 1 / (max(1, share.tokens) * number))
    filled = repeated_at_the_end(runs, result.groups, job.positions, step, job.steps)
    held = {piece.name for pieces in ranks for piece in pieces}
    missing = any(name not in held and bool(its.any()) for name, its in right.items())
    for truth, said in ((right, ""), (by_rank, RANK_MEANS), (micro, BATCH_MEANS)):
        scaling = _scaling(ranks, truth)
        if scaling.left <= FITS and not missing:
            if not close(scaling.ratio, 1):
                return f"gradients are {said or TOKENS} times {_named(scaling.ratio, factors)}", False
            extra = "" if filled else _extra_samples(runs, result, job, step)
            if said:
                means = f"gradients are {said}, not {TOKENS}"
                return "; ".join(filter(None, (means, extra))), _is_documented(job, runs, said) and not extra
            return (REPEATED, True) if filled else (extra, not extra)
    own = [total(lambda share, batches: 1 / tokens, [batches]) for batches in shares]
    group_of = {rank: index for index, group in enumerate(result.groups) for rank in group}
    alone = [_scaling([pieces], own[group_of[rank]]) for rank, pieces in enumerate(ranks)]
    if len(shares) > 1 and all(each.left <= FITS for each in alone):
        return f"gradients are {OWN} (times {_named(alone[0].ratio, factors)})", False
    if len(result.groups) < job.positions:
        return _extra_samples(runs, result, job, step), False
    return _of_other_gradients(runs, result, ranks, shares, right, factors, step), False


def _of_other_gradients(
    runs: Runs,
    result: CaseResult,
    ranks: Sequence[Sequence[Piece]],
    shares: Sequence[Sequence[Share]],
    right: dict[str, Tensor],
    factors: dict[str, int],
    step: int,
) -> str:
    """The cause where gradients are no multiple of an average that is known."""
    before = [record.gradients(step - 1) if step > record.after + 1 else [] for record in runs.many]
    found = [mixture_of(pieces, held, shares) for pieces, held in zip(ranks, before, strict=True)]
    known = [mixture for mixture in found if mixture is not None]
    if len(known) == len(found) and not all(mixture.right for mixture in known):
        return name_mixtures(known, shares, result.groups)
    if wrong := other_losses([record.losses[step - 1] for record in runs.many], shares, result.groups):
        return wrong
    if rounded := only_rounded(ranks, right):
        return f"gradients are {TOKENS}, {rounded}"
    return _by_parameter(ranks, right, factors, step)


def _is_documented(job: Job, runs: Runs, said: str) -> bool:
    """Whether the user, or the model's class, has asked for a mean of means."""
    facts = runs.one.facts
    if job.script and said == RANK_MEANS:  # a loop's loss is what its script says; a Trainer's is what it is told
        return not facts["trainer"] or not facts["averages"] or not facts["sums_tokens"]
    if said == RANK_MEANS:
        return job.trainer.get("average_tokens_across_devices") is False
    return not runs.one.facts["sums_tokens"]


def _extra_samples(runs: Runs, result: CaseResult, job: Job, step: int) -> str:
    problem = sample_problem(runs, result.groups, job.positions, step)
    if len(result.groups) == 1 < job.positions:
        return f"every rank has the same samples, as of a loader that Accelerator.prepare was not given: {problem}"
    return f"gradients are right for the samples that the ranks saw, but {problem}" if problem else ""


def _model_at(job: Job, runs: Runs, step: int) -> nn.Module:
    """The model with the parameters that the parallel run had before a step.

    Raises:
        KeyError: a script has changed the model after it was loaded, or its class is its own.
    """
    model = script_model(runs.one.facts["models"][0]) if job.script else load_model(job, parallel=False)
    before = assembled(record.parameters(step - 1) for record in runs.many)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])
    model.train()
    return model


def _count(runs: Runs, rows: Sequence[Row], shifts: bool = True) -> Callable[[Mapping[str, Tensor]], int]:
    """How the run counts tokens: Trainer those that are predicted, or all labels, as it knows the model's loss; a loop
    those that the loss is a mean over, which is of all labels where it does not shift them."""
    counted = runs.one.facts.get("counted") or [None]
    if runs.one.facts.get("models"):
        if counted[0] is None:
            return tokens_of if shifts else labels_of
        return labels_of if counted[0] == labels_of(runs.one.batches(1)[0]) else tokens_of
    at = 0
    for batches in runs.one.samples:  # the first step in which both differ
        whole = collate([rows[index] for batch in batches for index in batch])
        if tokens_of(whole) != labels_of(whole):
            return labels_of if counted[at] == labels_of(whole) else tokens_of
        at += len(batches) if len(counted) > 1 else 0
    return tokens_of


def _shifts(model: nn.Module) -> bool:
    """Whether a model's loss is of the token after each, and not of the label at its place."""
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return not encodes and not type(model).__name__.endswith(("ForMaskedLM", "ForTokenClassification"))


def _shares(job: Job, runs: Runs, result: CaseResult, model: nn.Module, step: int) -> list[list[Share]]:
    """For each position its micro-batches."""
    rows = [] if job.script else job.rows
    shifts = not job.script or _shifts(model)
    count = _count(runs, rows, shifts)
    made = pack if job.packing else collate
    smoothing = _smoothing(job, result)
    found = []
    for group in result.groups:
        record, batches = runs.many[group[0]], []
        known = record.batches(step) if job.script else []
        for index, seen in enumerate(record.samples[step - 1]):
            if not seen or min(seen) < 0:
                continue
            batch = known[index] if job.script else made([rows[row] for row in seen])
            number = tokens_of(batch) if shifts else labels_of(batch)
            model.zero_grad()
            with Float64():
                summed = mean_loss(model, batch, smoothing) * number
                summed.backward()
            gradients = {name: its.grad.clone() for name, its in model.named_parameters() if its.grad is not None}
            batches.append(Share(gradients, float(summed.detach()), number, count(batch)))
        found.append(batches)
    return found


def _smoothing(job: Job, result: CaseResult) -> float:
    """By which Trainer smooths labels; a loop of Accelerate does not."""
    return 0.0 if result.path == "loop" else float(job.trainer.get("label_smoothing_factor") or 0.0)


def mean_loss(model: nn.Module, batch: Mapping[str, Tensor], smoothing: float) -> Tensor:
    """The mean loss of a batch: the model's own, or that of smoothed labels, as Trainer has it of causal models."""
    if not smoothing:
        own: Tensor = model(**batch).loss
        return own
    outputs = model(**{name: value for name, value in batch.items() if name != "labels"})
    smoothed: Tensor = LabelSmoother(epsilon=smoothing)(outputs, batch["labels"], shift_labels=True)
    return smoothed


def _scaling(ranks: Sequence[Sequence[Piece]], truth: Mapping[str, Tensor]) -> Scaling:
    """By which number the gradients of some ranks are multiples of `truth`."""
    above = below = 0.0
    for pieces in ranks:
        for piece in pieces:
            part = piece.within(truth[piece.name])
            above += float((piece.values * part).sum())
            below += float((part * part).sum())
    if not below:
        return Scaling(math.nan, math.inf)
    ratio = above / below
    scaled = {name: value * ratio for name, value in truth.items()}
    errors = [error.size for pieces in ranks for error in piece_errors(pieces, scaled, 0, 0)]
    return Scaling(ratio, max(errors, default=math.inf))


def _by_parameter(
    ranks: Sequence[Sequence[Piece]], truth: dict[str, Tensor], factors: dict[str, int], step: int
) -> str:
    """Which gradients differ, where others are right: their ranks, and their factors."""
    wrong: dict[tuple[str, str], list[str]] = {}
    right = 0
    held = {piece.name for pieces in ranks for piece in pieces}
    for rank, pieces in enumerate(ranks):
        far = {error.name for error in piece_errors(pieces, truth, step, rank) if not error.size <= FITS}
        for name, its in truth.items():
            missing = name not in held and bool(its.any())
            if name not in far and not missing:
                right += 1
                continue
            part = [piece for piece in pieces if piece.name == name]
            scaling = _scaling([part], truth)
            if not any(bool(piece.values.any()) for piece in part):
                what = "missing"
            else:
                what = f"times {_named(scaling.ratio, factors)}" if scaling.left <= FITS else "other values"
            wrong.setdefault((name, what), []).append(str(rank))
    if not right or not wrong:
        return f"the gradients of step {step} are no multiple of an average that is known"
    said = [f"{name} {what} on rank(s) {', '.join(of)}" for (name, what), of in list(wrong.items())[:3]]
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return f"of the gradients, these are not {TOKENS}: {'; '.join(said)}{more}"


def _of_start(job: Job, runs: Runs, result: CaseResult, factors: dict[str, int]) -> tuple[str, bool]:
    """Which ranks begin with other weights."""
    wrong = sorted({error.rank for kind, error in result.errors if kind == "start" and error.wrong})
    if len(wrong) == len(runs.many):
        return "every rank begins with other weights than one process", False
    listed = ", ".join(map(str, wrong))
    return f"rank(s) {listed} begin with other weights, the others with those of one process", False


def _of_saved(job: Job, runs: Runs, result: CaseResult, factors: dict[str, int]) -> tuple[str, bool]:
    """Of which step the weights are that were saved."""
    folder = runs.many[0].folder / "saved"
    if not any(folder.glob("*.safetensors*")):
        return "", False
    loaded = {name: weight.detach() for name, weight in load_saved(job, folder).named_parameters()}
    for step in range(runs.many[0].after, job.steps):
        held = assembled(record.parameters(step) for record in runs.many)
        if all(name in loaded and torch.equal(loaded[name], weight) for name, weight in held.items()):
            return f"what is saved are the weights after step {step}, and not after step {job.steps}", False
    return "what is saved is not what was trained, in any step", False


def _of_norm(
    job: Job, runs: Runs, result: CaseResult, factors: dict[str, int], fits: float = FITS
) -> tuple[str, bool]:
    """Why the norm differs, though the gradients are right."""
    assert result.first is not None
    _, error = result.first
    truth, *norms = (norm_at(record, error.step - 1) for record in (runs.one, *runs.many))
    ratio = norms[error.rank] / truth
    same = [rank for rank, norm in enumerate(norms) if close(norm, truth, fits)]
    where = "on every rank" if not same else f"but not on rank(s) {', '.join(map(str, same))}"
    return (
        f"the gradients are right, their norm is that of one process times {_named(ratio, factors, fits)}, {where}",
        False,
    )


def _of_update(job: Job, runs: Runs, result: CaseResult, factors: dict[str, int]) -> tuple[str, bool]:
    """Why parameters differ after a step, though gradients and norm are right."""
    assert result.first is not None
    _, error = result.first
    text = _replay(job, runs, result, error.step)
    return (text or "gradients and their norm are right, what the optimizer makes of them is not"), False


def _replay(job: Job, runs: Runs, result: CaseResult, begin: int, fits: float = FITS) -> str:
    """SGD's steps once more, from the run's own gradients: what is wrong with them, if anything is."""
    if result.optimizer != WITNESS:
        return ""
    most = float(job.trainer.get("max_grad_norm", 1.0))
    decay = float(job.trainer.get("weight_decay", 0.0)) if result.path == "trainer" else 0.0
    for step in range(begin, job.steps + 1):
        for record in runs.many:
            rate = record.logged[step - 1]["learning_rate"] if record.logged else job.rate(WITNESS)
            norm = norm_at(record if job.norms else runs.one, step - 1)
            clip = min(1.0, most / (norm + 1e-6)) if most > 0 else 1.0
            ratio = _step_taken(record, step, rate, decay)
            if ratio is None or close(ratio, clip, fits):
                continue
            if close(ratio, 1, fits):
                return f"rank {record.rank} does not clip in step {step}, though the norm is {norm:.4g}"
            if abs(ratio) <= fits:
                return f"rank {record.rank} makes no step {step}"
            said = f"step {step} of rank {record.rank} is that of its gradients times {ratio / clip:.6g}"
            at = f", as if its learning rate were {rate * ratio / clip:.4g} and not {rate:.4g}"
            return said + at + (f", or it clipped at {ratio * norm:.4g} and not at {most:.4g}" if ratio < 1 else "")
    return ""


def _step_taken(record: Record, step: int, rate: float, decay: float) -> float | None:
    """By which number the step is a multiple of -rate * gradient; None where it is none, or nothing can be said."""
    before = {piece.name: piece.values for piece in record.parameters(step - 1)}
    above = below = 0.0
    gradients = {piece.name: piece.values for piece in record.gradients(step)}
    for piece in record.parameters(step):
        if piece.name in gradients and rate and not decay:
            taken = (before[piece.name] - piece.values) / rate
            above += float((taken * gradients[piece.name]).sum())
            below += float((gradients[piece.name] ** 2).sum())
    return above / below if below else None


def _of_evaluation(job: Job, runs: Runs, result: CaseResult, factors: dict[str, int]) -> tuple[str, bool]:
    """Whether the evaluation loss is Trainer's mean over batches, of which Accelerate has filled up the last ones, or
    of which it counts the full ones once for each rank that has them, and the last one once."""
    what = _evaluation(job, runs, result)
    if what == "filled":
        of_split = ", and split_batches lets it count full ones several times" if job.loaders["split_batches"] else ""
        return f"Trainer's evaluation loss is a mean over batches{of_split}, and {REPEATED}", True
    same = job.ranks // job.positions
    counted = f"the evaluation loss counts full batches {same} times, as so many ranks have them, the last one once"
    return (counted if what == "counted" else ""), False


def _evaluation(job: Job, runs: Runs, result: CaseResult) -> str:
    """What the evaluation loss is, of the run's own parameters: that of "one" process, of batches that are "filled" or
    "counted" (`_of_evaluation`), or some "other" number."""
    for what, expected in _evaluations(job, runs, result).items():
        if all(close(record.evaluation["loss"], expected) for record in runs.many):
            return what
    return "other"


def _evaluations(job: Job, runs: Runs, result: CaseResult) -> dict[str, float]:
    """The evaluation losses that are known, of the run's own parameters."""
    model = _model_at(job, runs, job.steps + 1).eval()
    averaged = runs.one.facts["sums_tokens"] and job.trainer.get("average_tokens_across_devices") is not False
    whole, split = job.batch * job.positions, job.loaders["split_batches"]
    count = _count(runs, job.rows)

    def usual(rounds: Sequence[Sequence[Sequence[int]]], same: int) -> float:
        losses: list[float] = []
        for each in rounds:  # the batches that the positions have at a time
            sums, tokens = [], []
            for seen in each:
                batch = (pack if job.packing else collate)([job.asked[index] for index in seen])
                with Float64(), torch.no_grad():
                    sums.append(float(mean_loss(model, batch, _smoothing(job, result))) * tokens_of(batch))
                tokens.append(count(batch) if runs.one.facts["sums_tokens"] else tokens_of(batch))
            found: list[float] = []
            for total, number, seen in zip(sums, tokens, each, strict=True):
                value = total * len(each) / sum(tokens) if averaged else total / number
                found += [value] * (whole if split else len(seen)) * same
            losses += found if each is not rounds[-1] else found[: len(job.asked) % whole or whole]
        return sum(losses) / len(losses)

    alone = [[batch] for batch in runs.one.evaluation["rows"]]
    together = list(zip(*(runs.many[group[0]].evaluation["rows"] for group in result.groups), strict=False))
    filled = [[batch for batch in each if batch] for each in together]
    return {
        "one": usual(alone, 1),
        "filled": usual(filled, 1),
        "counted": usual(filled, job.ranks // job.positions),
    }


def close(value: float, other: float, fits: float = FITS) -> bool:
    """Whether two numbers are the same but for rounding."""
    return abs(value - other) <= fits * max(abs(value), abs(other))


def _named(ratio: float, factors: Mapping[str, int], fits: float = FITS) -> str:
    """A factor, with the names of what it may be: 2 is the number of ranks, 1/2 one over it."""
    names = {f"the number of {name}": value for name, value in factors.items() if value > 1}
    known = [name for name, value in names.items() if close(ratio, value, fits)]
    known += [f"1 / {name}" for name, value in names.items() if close(ratio, 1 / value, fits)]
    return f"{ratio:.{6 if fits <= FITS else 3}g}" + (f" ({' = '.join(known)})" if known else "")
