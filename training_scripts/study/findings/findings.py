"""Numbers of a study, made from its table: study.json holds them, and figures, page and Markdown show them."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from math import log2, log10
from typing import Any, NamedTuple

import numpy as np

from hf_axonn_eval import SampleResult, attack_cost, summarize
from hf_axonn_eval.analysis.estimates import ends, estimates
from hf_axonn_eval.analysis.goldfish_tokens import TokenMasks, by_document_numbers
from hf_axonn_eval.analysis.intervals import difference_interval, mean_intervals
from hf_axonn_scripts.study.findings.at_same_loss import extraction_at_same_loss
from hf_axonn_scripts.study.findings.effects import CONFIDENCE, Cell, Terms, estimate, line, ratio, total
from hf_axonn_scripts.study.findings.exposed import canaries, membership
from hf_axonn_scripts.study.findings.results import Answers, Study, goldfish_options, read_json, training_log
from hf_axonn_scripts.study.findings.same_loss import tokens_for_same_loss
from hf_axonn_scripts.study.recipe.definition import ORDINARY, Run
from hf_axonn_scripts.study.recipe.steps import run_directory


BASE = "base"  # the model before its continuations, beside the losses
SHORTEST = 8  # tokens of the shortest part of a suffix whose exact match is reported
TRIES = (1, 100, 10_000, 1_000_000)  # draws of each suffix
BUDGETS = (1_000_000, 1_000_000_000)  # tokens, prefixes and suffixes, over all passages of a bucket
FULL_SOFTMAX = "temperature=1"  # the sampler of the log-probability itself
OVERALL = "overall"  # of every bucket but 0


class Outcome(NamedTuple):
    """A number of a passage, whose mean is compared over sizes, repetitions and losses.

    `column` of `Answers`, or `learnt`; `controlled`: bucket 0 of the same runs is subtracted.
    """

    title: str
    unit: str
    column: str
    controlled: bool
    least: float
    most: float


OUTCOMES = {
    "gain": Outcome("gain in log-probability of the suffix", "nats a token", "learnt", True, -np.inf, np.inf),
    "verbatim": Outcome("given back verbatim", "share of passages", "exact_match", False, 0, 1),
    "near_verbatim": Outcome("given back near-verbatim", "share of passages", "near_verbatim", False, 0, 1),
    "extraction_strength": Outcome("extraction strength", "share of the suffix", "extraction_strength", False, 0, 1),
    "rougeL": Outcome("ROUGE-L", "F1", "rougeL", False, 0, 1),
}
PRIMARY = "gain"


def measure(study: Study) -> dict[str, Any]:
    """Compute every number of a study, JSON-ready.

    Args:
        study: as far as it is done.
    Returns:
        Lists of rows, each a dict that says of what it is (`model`, `loss`, `bucket`, ...):

        - `cells`: by model, loss and bucket the estimate of every outcome and, under `seeds`, its mean in each seed;
          `verbatim_at`, by length the share whose first tokens come back. Losses are those of the recipe and `base`.
        - `slopes`: by outcome, loss and bucket (`overall`: the mean over all but 0) a `line` against log10 of the
          parameters, without models that are plotted apart.
        - `doublings`: by outcome, model and loss a `line` against log2 of the repetitions.
        - `goldfish`: by model, loss and bucket the change against the ordinary loss, on the same passages and seeds:
          `gain_difference`, `gain_kept` (a ratio), `verbatim_difference`.
        - `tokens`: by model, mask, bucket and `who` (the mask's own loss, the ordinary one, `base`) what is known of
          dropped and of supervised tokens.
        - `attacks`, `membership`: by model, loss and bucket.
        - `again`: the gain over the same passage in another seed in which it is unseen.
        - `grids`: a run on another grid beside its twin.
        - `training`: held-out loss before and after each run.
        - `canaries`: exposure after each run.

        and `same_loss` and `at_same_loss` (what `tokens_for_same_loss` and `extraction_at_same_loss` return), `pilot`
        and `utility` (what their files say), `missing`,
        `models`, `losses` (with what each leaves out), `suffix`, `sampler` and the like.
    """
    numbers = _Numbers(study)
    return {
        "name": study.recipe.name,
        "confidence": CONFIDENCE,
        "suffix": numbers.suffix,
        "asked_for": max((answers.requested for answers in study.runs.values()), default=0),
        "length": study.recipe.documents.length,
        "buckets": numbers.buckets,
        "outcomes": {name: {"title": one.title, "unit": one.unit} for name, one in OUTCOMES.items()},
        "models": [
            {"model": model.name, "parameters": study.parameters[model.name], "apart": model.apart}
            for model in study.models
        ],
        "losses": {loss: goldfish_options(study.recipe, loss) for loss in study.losses},
        "missing": [asdict(one) for one in study.missing],
        "runs": {"asked": len(study.recipe.runs), "done": len(study.runs)},
        "sampler": numbers.sampler,
        "cells": numbers.cells(),
        "slopes": numbers.slopes(),
        "doublings": numbers.doublings(),
        "goldfish": numbers.goldfish(),
        "tokens": numbers.tokens(),
        "attacks": numbers.attacks(),
        "membership": numbers.membership(),
        "again": numbers.again(),
        "grids": _grids(study),
        "training": _training(study),
        "pilot": _file(study, "pilot", "chosen.json") if study.recipe.pilot else None,
        "utility": {model.name: _file(study, "utility", f"{model.name}.json") for model in study.recipe.models},
        "same_loss": tokens_for_same_loss(study.recipe, study.output),
        "at_same_loss": extraction_at_same_loss(study),
        "canaries": _canaries(study),
    }


def size_text(parameters: float) -> str:
    """Write a number of parameters in three digits: 304k, 29.9M, 1.1B."""
    scale, letter = next(
        ((scale, of) for scale, of in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if parameters >= scale), (1, "")
    )
    return f"{float(f'{parameters / scale:.3g}'):g}{letter}"


class _Numbers:
    """The parts of `measure` that are made of passages."""

    def __init__(self, study: Study) -> None:
        self.study = study
        everyone = [*study.bases.values(), *study.runs.values()]
        articles = sorted({one.document_id for answers in everyone for one in answers.results})
        self.articles = {article: number for number, article in enumerate(articles)}
        self.suffix = max((one.suffix_length for answers in everyone for one in answers.results), default=0)
        self.buckets = sorted({int(bucket) for answers in study.runs.values() for bucket in answers.buckets})
        # the sampler's log-probability of a suffix that is cut is not known
        drawn = any(one.sampled_logprob is not None for answers in everyone for one in answers.results)
        self.sampler = (study.recipe.evaluation.sampler or "the protocol's") if drawn else FULL_SOFTMAX
        self._drawn = drawn

    def terms(self, some: Sequence[Answers], outcome: str, bucket: int) -> Terms:
        """Return an outcome of a bucket of some runs as a weighted sum of cells; empty where it was not measured."""
        about = OUTCOMES[outcome]
        scale = 1 / self.suffix if about.controlled else 1.0  # nats of the suffix to nats a token
        found = [(scale, self._cell(some, about.column, bucket))]
        if about.controlled:
            found.append((-scale, self._cell(some, about.column, 0)))
        return found if all(len(cell) for _, cell in found) else []

    def _cell(self, some: Sequence[Answers], column: str, bucket: int) -> Cell:
        values, articles = [np.zeros(0)], [np.zeros(0, dtype=np.int64)]
        for answers in some:
            numbers = self.study.learnt(answers) if column == "learnt" else answers.column(column)
            inside = answers.buckets == bucket
            values.append(numbers[inside])
            articles.append(self._number(answers.articles[inside]))
        return Cell.from_passages(np.concatenate(values), np.concatenate(articles), len(self.articles))

    def _number(self, articles: np.ndarray) -> np.ndarray:
        return np.array([self.articles[article] for article in articles], dtype=np.int64)

    def cells(self) -> list[dict[str, Any]]:
        rows = []
        for about, some in self._groups():
            groups = summarize(self._pool(some), tries=TRIES, confidence=CONFIDENCE)["buckets"]
            for bucket in (bucket for bucket in self.buckets if str(bucket) in groups):
                group = groups[str(bucket)]
                row = {"model": about["model"], "parameters": self.study.parameters[about["model"]], **about}
                row |= {"bucket": bucket, "passages": group["samples"], "articles": group["documents"], "seeds": {}}
                for name, outcome in OUTCOMES.items():
                    terms = self.terms(some, name, bucket)
                    if not terms or (outcome.controlled and bucket == 0):
                        continue
                    row[name] = estimate(terms) if outcome.controlled else group["metrics"][outcome.column]
                    for answers in some:
                        of_seed = self.terms([answers], name, bucket)
                        if answers.run is not None and of_seed:
                            row["seeds"].setdefault(str(answers.seed), {})[name] = total(of_seed)
                row["verbatim_at"] = self._verbatim_at(some, bucket)
                more = {**group, "token_accuracy": group["metrics"].get("token_accuracy")}
                names = ("discoverability", "inextractability", "token_accuracy")
                rows.append(row | {name: more[name] for name in names if more.get(name) is not None})
        return rows

    def slopes(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        sizes = [model.name for model in self.study.models if not model.apart]
        for outcome, about in OUTCOMES.items():
            for loss in self.study.losses:
                by_bucket: dict[Any, dict[str, Terms]] = {
                    bucket: self._over(sizes, loss, outcome, [bucket]) for bucket in self.buckets if bucket
                }
                by_bucket[OVERALL] = self._over(sizes, loss, outcome, [bucket for bucket in self.buckets if bucket])
                for bucket, terms in by_bucket.items():
                    places = [log10(self.study.parameters[name]) for name in terms]
                    if len(set(places)) < 2:
                        continue
                    found = line(places, list(terms.values()), list(terms))
                    rows.append({"outcome": outcome, "unit": about.unit, "loss": loss, "bucket": bucket, **found})
        return rows

    def _over(self, sizes: Sequence[str], loss: str, outcome: str, buckets: Sequence[int]) -> dict[str, Terms]:
        """Return the mean over some buckets by model, without models that lack one of these."""
        found: dict[str, Terms] = {}
        for model in sizes:
            each = [self.terms(self.study.runs_with(model, loss), outcome, bucket) for bucket in buckets]
            if each and all(each):
                found[model] = [(weight / len(each), cell) for some in each for weight, cell in some]
        return found

    def doublings(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for outcome, about in OUTCOMES.items():
            for model in self.study.models:
                for loss in self.study.losses:
                    some = self.study.runs_with(model.name, loss)
                    terms = {bucket: self.terms(some, outcome, bucket) for bucket in self.buckets if bucket}
                    terms = {bucket: each for bucket, each in terms.items() if each}
                    if len(terms) < 2:
                        continue
                    found = line([log2(bucket) for bucket in terms], list(terms.values()), list(map(str, terms)))
                    about_row = {"outcome": outcome, "unit": about.unit, "model": model.name, "loss": loss}
                    rows.append({**about_row, **found})
        return rows

    def goldfish(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for model in self.study.models:
            ordinary = {answers.seed: answers for answers in self.study.runs_with(model.name, ORDINARY)}
            for loss in self.study.losses:
                own = [answers for answers in self.study.runs_with(model.name, loss) if answers.seed in ordinary]
                if loss == ORDINARY or not own:
                    continue
                others = [ordinary[answers.seed] for answers in own]
                options = goldfish_options(self.study.recipe, loss)
                for bucket in self.buckets:
                    row: dict[str, Any] = {"model": model.name, "parameters": self.study.parameters[model.name]}
                    row |= {"loss": loss, "bucket": bucket, **options}
                    row["seeds"] = [answers.seed for answers in own]
                    row["verbatim_difference"] = _share_difference(own, others, bucket)
                    ours, theirs = (self.terms(some, PRIMARY, bucket) for some in (own, others))
                    if bucket and ours and theirs:
                        less = [(-weight, cell) for weight, cell in theirs]
                        row["gain_difference"] = estimate([*ours, *less])
                        row["gain_kept"] = ratio(ours, theirs)
                    rows.append(row)
        return rows

    def tokens(self) -> list[dict[str, Any]]:
        rows = []
        for model in self.study.models:
            for loss in self.study.losses:
                masks = self.study.masks(model.name, loss)
                if masks is None:
                    continue
                own = self.study.runs_with(model.name, loss)
                seeds = {answers.seed for answers in own}
                ordinary = [answers for answers in self.study.runs_with(model.name, ORDINARY) if answers.seed in seeds]
                base = self.study.bases.get(model.name)
                whom = {
                    loss: self.study.runs_with(model.name, loss),
                    ORDINARY: ordinary,
                    BASE: [base] if base else [],
                }
                for who, some in whom.items():
                    for bucket in self.buckets:
                        found = self._by_token(some, masks, bucket)
                        if found:
                            about = {"model": model.name, "mask": loss, "who": who, "bucket": bucket}
                            rows.append({**about, **found})
        return rows

    def _by_token(self, some: Sequence[Answers], masks: TokenMasks, bucket: int) -> dict[str, Any]:
        sums = np.zeros((len(self.articles), 2, 3))
        for answers in some:
            for result in answers.results:
                if result.bucket == bucket and result.hits is not None:
                    dropped = masks.select(result)
                    hits, nll = np.array(result.hits), -np.array(result.logprobs)
                    for side, kind in enumerate((1, 0)):
                        of_kind = dropped == kind
                        place = self.articles[result.document_id]
                        sums[place, side] += of_kind.sum(), hits[of_kind].sum(), nll[of_kind].sum()
        there = sums[:, :, 0].sum(axis=1) > 0
        return by_document_numbers(sums[there], CONFIDENCE) if there.any() else {}

    def attacks(self) -> list[dict[str, Any]]:
        rows = []
        for about, some in self._groups():
            drawn = [one for one in self._pool(some) if one.sampled_logprob is not None]
            costs = attack_cost(drawn, tries=TRIES, tokens=BUDGETS, confidence=CONFIDENCE) if drawn else {}
            measured = (bucket for bucket in self.buckets if str(bucket) in costs)
            rows += [{**about, "bucket": bucket, **costs[str(bucket)]} for bucket in measured]
        return rows

    def membership(self) -> list[dict[str, Any]]:
        rows = []
        for about, some in self._groups():
            if about["loss"] == BASE or any(one.logprob is None for answers in some for one in answers.results):
                continue
            for name, scores in membership(self._pool(some)).items():
                bucket = int(name) if name.isdecimal() else name
                rows += [{**about, "bucket": bucket, "score": score, **found} for score, found in scores.items()]
        return rows

    def again(self) -> list[dict[str, Any]]:
        rows = []
        for about, some in self._groups():
            for bucket in self.buckets if about["loss"] != BASE else ():
                if bucket == 0:
                    continue
                others = [(answers, other) for answers in some for other in some if other is not answers]
                pairs = [pair for two in others for pair in _unseen_in(*two, bucket)]
                values, articles = [value / self.suffix for value, _ in pairs], [article for _, article in pairs]
                row = {**about, "bucket": bucket, "pairs": len(values)}
                if values:
                    (found,) = mean_intervals(np.array(values)[:, None], articles, confidence=CONFIDENCE)
                    row |= {"articles": len(set(articles)), "gain": {"mean": float(np.mean(values)), **ends(found)}}
                rows.append(row)
        return rows

    def _groups(self) -> list[tuple[dict[str, Any], list[Answers]]]:
        """Return model and loss, and their runs; those before any continuation first."""
        found: list[tuple[dict[str, Any], list[Answers]]] = []
        for model in (model.name for model in self.study.models):
            if model in self.study.bases:
                found.append(({"model": model, "loss": BASE}, [self.study.bases[model]]))
            for loss in self.study.losses:
                if some := self.study.runs_with(model, loss):
                    found.append(({"model": model, "loss": loss}, some))
        return found

    def _verbatim_at(self, some: Sequence[Answers], bucket: int) -> dict[str, Any]:
        """Return the shares of passages whose first tokens come back, by number, up to all that were asked for."""
        longest = min(answers.requested for answers in some)
        lengths = sorted({*(2**power for power in range(20)), self.suffix, longest})
        right = np.concatenate([answers.right[answers.buckets == bucket] for answers in some])
        articles = [article for answers in some for article in answers.articles[answers.buckets == bucket]]
        shares = {str(length): (right >= length) * 1.0 for length in lengths if SHORTEST <= length <= longest}
        return estimates(shares, {}, articles, {"confidence": CONFIDENCE})

    def _pool(self, some: Sequence[Answers]) -> list[SampleResult]:
        """Return the results of several seeds as of one run, with reference attack, and a sampler if it had none."""
        found = []
        for answers in some:
            base = self.study.bases.get(answers.model) if answers.run else None
            for result in answers.results:
                scores = result.membership
                if base is not None and scores and result.sample_id in base.place:
                    before = base.results[base.place[result.sample_id]].membership
                    if before and "loss" in before and "loss" in scores:
                        scores = {**scores, "reference": scores["loss"] - before["loss"]}
                drawn = result.sampled_logprob if self._drawn else result.logprob
                name = f"{result.sample_id} {answers.seed}"
                found.append(replace(result, sample_id=name, membership=scores, sampled_logprob=drawn))
        return found


def _share_difference(own: Sequence[Answers], others: Sequence[Answers], bucket: int) -> dict[str, Any]:
    """Return the difference of the shares given back verbatim, passage by passage, and the numbers gained and lost."""
    after, before, articles = [], [], []
    for answers, other in zip(own, others, strict=True):
        for result in answers.results:
            if result.bucket == bucket and result.sample_id in other.place:
                after.append(result.exact_match)
                before.append(other.results[other.place[result.sample_id]].exact_match)
                articles.append(result.document_id)
    if not after:
        return {"difference": None, "passages": 0}
    now, was = np.array(after), np.array(before)
    found = difference_interval(now, was, articles, confidence=CONFIDENCE)
    counts = {"gained": int((now & ~was).sum()), "lost": int((was & ~now).sum()), "passages": len(now)}
    counts |= {"mine": int(now.sum()), "ordinary": int(was.sum())}
    return {"difference": float(now.mean() - was.mean()), **ends(found), **counts}


def _unseen_in(answers: Answers, other: Answers, bucket: int) -> list[tuple[float, str]]:
    """Return the gain and the article of each passage of a bucket that another seed does not see."""
    found = []
    for result in answers.results:
        place = other.place.get(result.sample_id)
        if result.bucket == bucket and place is not None and other.results[place].bucket == 0:
            unseen = other.results[place].logprob
            if result.logprob is not None and unseen is not None:
                found.append((result.logprob - unseen, result.document_id))
    return found


def _grids(study: Study) -> list[dict[str, Any]]:
    """Return runs on another grid than their model's, beside the same run on that."""
    rows = []
    for run, answers in study.runs.items():
        twin = replace(run, grid=())
        if not run.grid or twin not in study.runs:
            continue
        other = study.runs[twin]
        places = [(one, other.place.get(one.sample_id)) for one in answers.results]
        both = [(one, other.results[place]) for one, place in places if place is not None]
        pairs = ((one.logprob, two.logprob) for one, two in both)
        apart = [abs(one - two) for one, two in pairs if one is not None and two is not None]
        row = {
            **_about(run),
            "passages": len(both),
            "largest_logprob": max(apart, default=None),
            "mean_logprob": float(np.mean(apart)) if apart else None,
            "changed_verbatim": sum(one.exact_match != two.exact_match for one, two in both),
        }
        try:
            logs = [training_log(run_directory(one, study.output) / "checkpoint") for one in (run, twin)]
        except (ValueError, KeyError) as error:
            rows.append({**row, "losses": str(error)})
            continue
        steps = sorted(set(logs[0]["losses"]) & set(logs[1]["losses"]))
        losses = [abs(logs[0]["losses"][step] - logs[1]["losses"][step]) for step in steps]
        evaluated = set(logs[0]["held_out"]) & set(logs[1]["held_out"])
        held_out = [abs(logs[0]["held_out"][step] - logs[1]["held_out"][step]) for step in evaluated]
        row |= {"steps": len(steps), "largest_loss": max(losses, default=None)}
        rows.append({**row, "largest_held_out": max(held_out, default=None)})
    return rows


def _training(study: Study) -> list[dict[str, Any]]:
    rows = []
    for run in study.runs:
        try:
            log = training_log(run_directory(run, study.output) / "checkpoint")
        except (ValueError, KeyError) as error:
            rows.append({**_about(run), "why": str(error)})
            continue
        last = max(log["losses"], default=0)
        held_out = list(log["held_out"].values())
        before, after = (held_out[0], held_out[-1]) if held_out else (None, None)
        row = {**_about(run), "steps": last, "last_loss": log["losses"].get(last)}
        rows.append({**row, "held_out_before": before, "held_out": after})
    return rows


def _canaries(study: Study) -> list[dict[str, Any]]:
    rows = []
    for run in study.runs if study.recipe.evaluation.canaries else ():
        try:
            rows.append({**_about(run), **canaries(run_directory(run, study.output) / "canaries.json")})
        except ValueError as error:
            rows.append({**_about(run), "why": str(error).replace(f"{study.output}/", "")})
    return rows


def _about(run: Run) -> dict[str, Any]:
    grid = " ".join(f"{axis}={size}" for axis, size in run.grid if size > 1)
    return {"model": run.model, "loss": run.loss, "seed": run.seed, "grid": grid}


def _file(study: Study, *parts: str) -> Any:
    """Return the contents of a JSON file of the study; None where it is not there, and `missing` names it."""
    try:
        return read_json(study.output.joinpath(*parts))
    except ValueError:
        return None
