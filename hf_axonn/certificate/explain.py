"""The cause of a difference: gradients that a run would have if it averaged otherwise, beside those that it has.

For a step of the parallel run the gradients of every micro-batch of every position are computed (steps.py). The
averages that follow from them are tried (hypotheses.py), then any other weights (mixture.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch

from hf_axonn.certificate.compare import (
    BOUND,
    RATE,
    CaseResult,
    Error,
    Runs,
    find_sample_problem,
    is_filled_up,
    norm_at,
    shard_errors,
)
from hf_axonn.certificate.divided_rows import explain_division
from hf_axonn.certificate.hypotheses import (
    FITS,
    OWN,
    TOKENS,
    Positions,
    Ranks,
    Tensors,
    average,
    close,
    find_fit,
    fit_multiple,
    largest_error,
    list_wrong,
    name_factor,
)
from hf_axonn.certificate.job import WITNESS, Job
from hf_axonn.certificate.loading import load_saved
from hf_axonn.certificate.mixture import describe_mixtures, describe_rounding, find_mixture, find_other_losses
from hf_axonn.certificate.recording import Record
from hf_axonn.certificate.shards import assemble
from hf_axonn.certificate.steps import Steps


REPEATED = "Accelerate fills the last batch of an epoch with the samples of its beginning (even_batches)"
OPTIMIZER = "gradients and their norm are right, what the optimizer makes of them is not"
SAMPLES = "gradients are right for the samples that the ranks saw, but"


class Cause(NamedTuple):
    """The reason of a difference, empty if not known, and whether the framework documents that it computes so."""

    text: str = ""
    documented: bool = False


def explain(job: Job, runs: Runs, result: CaseResult, factors: Mapping[str, int]) -> None:
    """Set the cause of a case that differs in float64, and whether it is documented."""
    if result.first is None:
        return
    kind, error = result.first
    result.cause, result.documented = Explainer(job, runs, result, factors).explain(kind, error)
    if result.documented:
        result.keep_before(error.step if kind != "evaluation" else error.step + 1)


class Explainer:
    """Find the causes of a case.

    Args:
        job, runs, result: the case.
        factors: numbers by which a gradient may be off, by their names.
    """

    def __init__(self, job: Job, runs: Runs, result: CaseResult, factors: Mapping[str, int]) -> None:
        self.job, self.runs, self.result, self.factors = job, runs, result, factors

    @cached_property
    def steps(self) -> Steps:
        """The steps computed again; KeyError where a script's model is not known."""
        return Steps(self.job, self.runs, self.result.path)

    def explain(self, kind: str, error: Error) -> Cause:
        """Find the cause of the first error."""
        match kind:
            case "samples" | "loss" | "gradient":
                return self._explain_training(error.step)
            case "start":
                return self._explain_start(error.step)
            case "norm":
                return Cause(self.explain_norm(error))
            case "parameter":
                return Cause(self.replay(error.step) or OPTIMIZER)
            case "evaluation":
                return self.explain_evaluation(self.steps.find_evaluation(self.result.groups))
            case "saved":
                return Cause(self._explain_saved())
        return Cause()

    def _explain_training(self, begin: int) -> Cause:
        """Explain losses and gradients that differ, step by step from the first on."""
        texts: dict[str, None] = {}
        documented = True
        for step in range(begin, self.job.steps + 1):
            cause = self._explain_step(step, first=step == begin)
            if cause.text:  # otherwise the step is right
                texts[cause.text] = None
                documented = documented and cause.documented
                if not cause.documented:  # what follows is of parameters that are wrong
                    break
        after = self._find_more(begin) if documented and texts else ""
        return Cause("; ".join([*texts, *([after] if after else [])]), documented and bool(texts) and not after)

    def _find_more(self, begin: int) -> str:
        """Find what is wrong besides gradients that differ as documented: from there on no step is that of one
        process."""
        problem = self._find_norm(begin) or self._find_rate() or self.replay(begin)
        problem = problem or self._find_standstill(begin) or self._find_drift(begin)
        if not problem and self.runs.one.evaluation and self.steps.find_evaluation(self.result.groups) == "other":
            problem = "the evaluation loss is not that of the run's own parameters"
        if not problem and "saved" in self.result.worst and not self.result.worst["saved"].size <= BOUND:
            problem = self._explain_saved()
        return problem

    def _find_norm(self, begin: int) -> str:
        """Find a norm that is not that of the run's gradients, where one process has that of its own."""
        for step in range(begin, self.job.steps + 1) if self.job.norms else ():
            truth, *norms = (norm_at(record, step - 1) for record in (self.runs.one, *self.runs.many))
            gradients = [[self.runs.one.gradients(step)], [record.gradients(step) for record in self.runs.many]]
            one, many = (float(torch.nn.utils.get_total_norm([*assemble(ranks).values()])) for ranks in gradients)
            for rank, norm in enumerate(norms if close(truth, one) else ()):
                if not close(norm, many):
                    factor = name_factor(norm / many, self.factors)
                    return f"the norm of rank {rank} in step {step} is that of the gradients times {factor}"
        return ""

    def _find_rate(self) -> str:
        wrong = (error for _, error in self.result.errors if error.name == RATE and error.wrong)
        return next((f"step {each.step} of rank {each.rank} has another learning rate" for each in wrong), "")

    def _find_standstill(self, begin: int) -> str:
        """Find a step that one process makes and no rank."""
        for step in range(begin, self.job.steps + 1):
            moves = []
            for ranks in ([self.runs.one], self.runs.many):
                before, after = (assemble(each.parameters(at) for each in ranks) for at in (step - 1, step))
                moves.append(any(not torch.equal(before[name], after[name]) for name in after))
            if moves == [True, False]:
                return f"no rank makes step {step}"
        return ""

    def _find_drift(self, begin: int) -> str:
        """Find a rank whose parameters are not those of its copies, or of the run that it goes on from."""
        others = "the run that was not interrupted" if self.runs.whole else "the other ranks"
        for step in range(begin, self.job.steps + 1):
            ranks = [record.parameters(step) for record in self.runs.many]
            truth = assemble(record.parameters(step) for record in self.runs.whole or self.runs.many)
            for rank, shards in enumerate(ranks):
                for error in shard_errors(shards, truth, step, rank):
                    if error.wrong:
                        return f"{error.name} of rank {rank} is not that of {others} after step {step}"
        return ""

    def _explain_step(self, step: int, *, first: bool) -> Cause:
        """Explain the gradients of a step; without a text, they are as on one process."""
        ranks = [record.gradients(step) for record in self.runs.many]
        if first and self.job.script:
            one = {shard.name: shard.values for shard in self.runs.one.gradients(step)}
            fit = fit_multiple("those of one process", ranks, one, largest_error)
            if fit.left <= FITS and fit.is_scaled():
                return Cause(fit.describe(TOKENS, self.factors))
        groups = self.result.groups
        try:
            seen = [self.steps.inputs(self.runs.many[group[0]], step) for group in groups]
            positions = self.steps.compute(self.steps.before(step), seen)
        except KeyError:
            return Cause("the script's model is no more the one that it has loaded, so that no cause is looked for")
        unused = {name: torch.zeros_like(weight) for name, weight in self.steps.model.named_parameters()}
        right = unused | average(positions, TOKENS)
        held = {shard.name for shards in ranks for shard in shards}
        trained = {shard.name for shard in self.runs.one.gradients(step)}
        missing = {name for name in trained & right.keys() if name not in held and bool(right[name].any())}
        best = None if missing else find_fit(ranks, positions, groups, expected=TOKENS, distance=largest_error)
        if best is None:
            if len(groups) < self.job.positions:
                return Cause(self._describe_samples(step))
            return Cause(self._explain_others(ranks, positions, right, missing, step))
        if best.name != OWN and best.is_scaled() and close(best.ratio, self._find_scale(best.name, step)):
            best = replace(best, ratio=1.0)
        text = best.describe(TOKENS, self.factors)
        if best.is_scaled() or best.name == OWN:
            return Cause(text)
        filled = is_filled_up(self.runs, groups, self.job.positions, step, self.job.steps)
        samples = "" if filled else self._describe_samples(step)
        if not text:
            return Cause(REPEATED, True) if filled else Cause(samples, not samples)
        return Cause("; ".join(filter(None, (text, samples))), best.name in self.steps.documented and not samples)

    def _find_scale(self, mean: str, step: int) -> float:
        """Return the number by which a script multiplies a mean on one process, too; NaN where it is none."""
        one = self.runs.one
        batches = self.steps.compute(assemble([one.parameters(step - 1)]), [self.steps.inputs(one, step)])
        fit = fit_multiple(mean, [one.gradients(step)], average(batches, mean), largest_error)
        return fit.ratio if fit.left <= FITS else math.nan

    def _explain_others(self, ranks: Ranks, positions: Positions, right: Tensors, missing: set[str], step: int) -> str:
        """Explain gradients that are no multiple of an average that is known."""
        groups, many = self.result.groups, self.runs.many
        before = [record.gradients(step - 1) if step > record.after + 1 else [] for record in many]
        found = [find_mixture(shards, kept, positions) for shards, kept in zip(ranks, before, strict=True)]
        mixtures = [mixture for mixture in found if mixture is not None]
        if len(mixtures) == len(found) and not all(mixture.right for mixture in mixtures):
            return describe_mixtures(mixtures, positions, groups)
        if text := explain_division(self.steps, step, ranks, positions, self.factors):
            return text
        if text := find_other_losses([record.losses[step - 1] for record in many], positions, groups):
            return text
        if text := describe_rounding(ranks, right):
            return f"gradients are {TOKENS}, {text}"
        errors = [error for rank, shards in enumerate(ranks) for error in shard_errors(shards, right, step, rank)]
        wrong = [(error.rank, error.name, FITS) for error in errors if not error.size <= FITS]
        wrong += [(rank, name, FITS) for name in missing for rank in range(len(ranks))]
        return list_wrong(wrong, ranks, right, self.factors, largest_error)

    def _describe_samples(self, step: int) -> str:
        groups, positions = self.result.groups, self.job.positions
        problem = find_sample_problem(self.runs, groups, positions, step)
        if len(groups) == 1 < positions:
            return f"every rank has the same samples, as of a loader that Accelerator.prepare was not given: {problem}"
        return f"{SAMPLES} {problem}" if problem else ""

    def _explain_start(self, step: int) -> Cause:
        """Explain other weights at the start: those of a run that went before may differ as documented."""
        if self.runs.whole and (cause := self._explain_training(step + 1)).documented:
            return cause
        wrong = sorted({error.rank for kind, error in self.result.errors if kind == "start" and error.wrong})
        if len(wrong) == len(self.runs.many):
            return Cause("every rank begins with other weights than one process")
        listed = ", ".join(map(str, wrong))
        return Cause(f"rank(s) {listed} begin with other weights, the others with those of one process")

    def _explain_saved(self) -> str:
        """Find the step whose weights were saved."""
        folder = self.runs.many[0].folder / "saved"
        if not any(folder.glob("*.safetensors*")):
            return ""
        loaded = {name: weight.detach() for name, weight in load_saved(self.job, folder).named_parameters()}
        for step in range(self.runs.many[0].after, self.job.steps):
            weights = assemble(record.parameters(step) for record in self.runs.many)
            if all(name in loaded and torch.equal(loaded[name], weight) for name, weight in weights.items()):
                return f"what is saved are the weights after step {step}, and not after step {self.job.steps}"
        return "what is saved is not what was trained, in any step"

    def explain_norm(self, error: Error, limit: float = FITS) -> str:
        """Explain a norm that differs, though the gradients are right."""
        truth, *norms = (norm_at(record, error.step - 1) for record in (self.runs.one, *self.runs.many))
        same = [rank for rank, norm in enumerate(norms) if close(norm, truth, limit)]
        where = "on every rank" if not same else f"but not on rank(s) {', '.join(map(str, same))}"
        factor = name_factor(norms[error.rank] / truth, self.factors, limit)
        return f"the gradients are right, their norm is that of one process times {factor}, {where}"

    def replay(self, begin: int, limit: float = FITS) -> str:
        """Make SGD's steps once more, from the run's own gradients; returns what is wrong with them."""
        if self.result.optimizer != WITNESS:
            return ""
        most = float(self.job.trainer.get("max_grad_norm", 1.0))
        for step in range(begin, self.job.steps + 1):
            for record in self.runs.many:
                rate = record.logged[step - 1]["learning_rate"] if record.logged else self.job.rate(WITNESS)
                norm = norm_at(record if self.job.norms else self.runs.one, step - 1)
                clip = min(1.0, most / (norm + 1e-6)) if most > 0 else 1.0
                ratio = self._find_step_ratio(record, step, rate)
                if ratio is None or close(ratio, clip, limit):
                    continue
                if close(ratio, 1, limit):
                    return f"rank {record.rank} does not clip in step {step}, though the norm is {norm:.4g}"
                if abs(ratio) <= limit:
                    return f"rank {record.rank} makes no step {step}"
                text = f"step {step} of rank {record.rank} is that of its gradients times {ratio / clip:.6g}"
                text += f", as if its learning rate were {rate * ratio / clip:.4g} and not {rate:.4g}"
                return text + (f", or it clipped at {ratio * norm:.4g} and not at {most:.4g}" if ratio < 1 else "")
        return ""

    def _find_step_ratio(self, record: Record, step: int, rate: float) -> float | None:
        """Return the ratio of a step to -rate * gradient; None where it is none, or weights decay."""
        decays = self.result.path == "trainer" and float(self.job.trainer.get("weight_decay", 0.0))
        if decays or not rate:
            return None
        before = {shard.name: shard.values for shard in record.parameters(step - 1)}
        gradients = {shard.name: shard.values for shard in record.gradients(step)}
        above = below = 0.0
        for shard in record.parameters(step):
            if shard.name in gradients:
                above += float(((before[shard.name] - shard.values) / rate * gradients[shard.name]).sum())
                below += float((gradients[shard.name] ** 2).sum())
        return above / below if below else None

    def explain_evaluation(self, kind: str) -> Cause:
        """Explain an evaluation loss of a kind that `find_evaluation` returns."""
        if kind == "filled":
            split = self.job.loaders["split_batches"]
            counts = ", and split_batches lets it count full ones several times" if split else ""
            return Cause(f"Trainer's evaluation loss is a mean over batches{counts}, and {REPEATED}", True)
        if kind == "counted":
            same = self.job.ranks // self.job.positions
            return Cause(
                f"the evaluation loss counts full batches {same} times, as so many ranks have them, the last one once"
            )
        return Cause()
