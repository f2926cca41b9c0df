"""From the table of a study to its numbers: what study.json holds, and what figures, page and Markdown show."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from math import log2, log10
from typing import Any, NamedTuple

import numpy as np

from hf_axonn_eval import SampleResult, attack_cost, summarize
from hf_axonn_eval.analysis.estimates import ends, estimates
from hf_axonn_eval.analysis.goldfish_tokens import TokenMasks, by_document_numbers
from hf_axonn_eval.analysis.intervals import difference_interval, mean_intervals
from hf_axonn_scripts.study.findings.effects import CONFIDENCE, Cell, Terms, estimate, line, ratio, total
from hf_axonn_scripts.study.findings.exposed import canaries, membership
from hf_axonn_scripts.study.findings.results import Asked, Study, goldfish_options, read_json, training_log
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

    `column` of `Asked`, or `learnt`; `controlled`: bucket 0 of the same runs is subtracted.
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
    """Every number of a study, JSON-ready.

    Args:
        study: As far as it is done.

    Returns:
        Lists of rows, each a dict that says of what it is (`model`, `loss`, `bucket`, ...):

        - `cells`: by model, loss and bucket the estimate of every outcome and, under `seeds`, its mean in each seed;
          `verbatim_at`, by length the share whose first tokens come back. Losses are those of the recipe and `base`.
        - `slopes`: by outcome, loss and bucket (`overall`: the mean over all but 0) a `line` against log10 of the
          parameters, without models that are plotted apart.
        - `doublings`: by outcome, model and loss a `line` against log2 of the repetitions.
        - `goldfish`: by model, loss and bucket what the loss changes against the ordinary one, on the same passages
          and seeds: `gain_difference`, `gain_kept` (a ratio), `verbatim_difference`.
        - `tokens`: by model, mask, bucket and `who` (the mask's own loss, the ordinary one, `base`) what is known of
          dropped and of supervised tokens.
        - `attacks`, `membership`: by model, loss and bucket.
        - `again`: the gain over the same passage in another seed in which it is unseen.
        - `grids`: a run on another grid beside its twin.
        - `training`: held-out loss before and after each run.
        - `canaries`: exposure after each run.

        and `same_loss` (what `tokens_for_same_loss` returns), `pilot` and `utility` (what their files say), `missing`,
        `models`, `losses` (with what each leaves out), `suffix`, `sampler` and the like.
    """
    numbers = _Numbers(study)
    return {
        "name": study.recipe.name,
        "confidence": CONFIDENCE,
        "suffix": numbers.suffix,
        "asked_for": max((asked.asked for asked in study.runs.values()), default=0),
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
        "canaries": _canaries(study),
    }


def size_text(parameters: float) -> str:
    """A number of parameters in three digits: 304k, 29.9M, 1.1B."""
    scale, letter = next(
        ((scale, of) for scale, of in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if parameters >= scale), (1, "")
    )
    return f"{float(f'{parameters / scale:.3g}'):g}{letter}"


class _Numbers:
    """The parts of `measure` that are made of passages."""

    def __init__(self, study: Study) -> None:
        self.study = study
        everyone = [*study.bases.values(), *study.runs.values()]
        articles = sorted({one.document_id for asked in everyone for one in asked.results})
        self.articles = {article: number for number, article in enumerate(articles)}
        self.suffix = max((one.suffix_length for asked in everyone for one in asked.results), default=0)
        self.buckets = sorted({int(bucket) for asked in study.runs.values() for bucket in asked.buckets})
        # of a shorter suffix than was asked for the sampler's log-probability is not known
        drawn = any(one.sampled_logprob is not None for asked in everyone for one in asked.results)
        self.sampler = (study.recipe.evaluation.sampler or "the protocol's") if drawn else FULL_SOFTMAX
        self._drawn = drawn
        self._summaries: dict[tuple[str, str], dict[str, Any]] = {}

    def terms(self, some: Sequence[Asked], outcome: str, bucket: int) -> Terms:
        """An outcome of a bucket of some runs as a weighted sum of cells; empty where it was not measured."""
        about = OUTCOMES[outcome]
        scale = 1 / self.suffix if about.controlled else 1.0  # nats of the suffix to nats a token
        found = [(scale, self._cell(some, about.column, bucket))]
        if about.controlled:
            found.append((-scale, self._cell(some, about.column, 0)))
        return found if all(len(cell) for _, cell in found) else []

    def _cell(self, some: Sequence[Asked], column: str, bucket: int) -> Cell:
        values, articles = [np.zeros(0)], [np.zeros(0, dtype=np.int64)]
        for asked in some:
            numbers = self.study.learnt(asked) if column == "learnt" else asked.column(column)
            mine = asked.buckets == bucket
            values.append(numbers[mine])
            articles.append(self._numbered(asked.articles[mine]))
        return Cell.of(np.concatenate(values), np.concatenate(articles), len(self.articles))

    def _numbered(self, articles: np.ndarray) -> np.ndarray:
        return np.array([self.articles[article] for article in articles], dtype=np.int64)

    def cells(self) -> list[dict[str, Any]]:
        rows = []
        for model, loss, some in self._groups():
            for bucket in self.buckets:
                group = self._summary(model, loss, some)["buckets"].get(str(bucket))
                if group is None:
                    continue
                row: dict[str, Any] = {"model": model, "parameters": self.study.parameters[model], "loss": loss}
                row |= {"bucket": bucket, "passages": group["samples"], "articles": group["documents"], "seeds": {}}
                for name, about in OUTCOMES.items():
                    terms = self.terms(some, name, bucket)
                    if not terms or (about.controlled and bucket == 0):
                        continue
                    row[name] = estimate(terms) if about.controlled else group["metrics"][about.column]
                    for asked in some:
                        mine = self.terms([asked], name, bucket)
                        if asked.run is not None and mine:
                            row["seeds"].setdefault(str(asked.seed), {})[name] = total(mine)
                row["verbatim_at"] = self._verbatim_at(some, bucket)
                if "discoverability" in group:
                    row["discoverability"] = group["discoverability"]
                if "token_accuracy" in group["metrics"]:
                    row["token_accuracy"] = group["metrics"]["token_accuracy"]
                rows.append(row)
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
        """By model the mean over some buckets; models that lack one of these are left out."""
        found: dict[str, Terms] = {}
        for model in sizes:
            each = [self.terms(self.study.of(model, loss), outcome, bucket) for bucket in buckets]
            if each and all(each):
                found[model] = [(weight / len(each), cell) for some in each for weight, cell in some]
        return found

    def doublings(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for outcome, about in OUTCOMES.items():
            for model in self.study.models:
                for loss in self.study.losses:
                    some = self.study.of(model.name, loss)
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
            ordinary = {asked.seed: asked for asked in self.study.of(model.name, ORDINARY)}
            for loss in self.study.losses:
                mine = [asked for asked in self.study.of(model.name, loss) if asked.seed in ordinary]
                if loss == ORDINARY or not mine:
                    continue
                others = [ordinary[asked.seed] for asked in mine]
                options = goldfish_options(self.study.recipe, loss)
                for bucket in self.buckets:
                    row: dict[str, Any] = {"model": model.name, "parameters": self.study.parameters[model.name]}
                    row |= {"loss": loss, "bucket": bucket, **options}
                    row["seeds"] = [asked.seed for asked in mine]
                    row["verbatim_difference"] = _share_difference(mine, others, bucket)
                    ours, theirs = (self.terms(some, PRIMARY, bucket) for some in (mine, others))
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
                seeds = {asked.seed for asked in self.study.of(model.name, loss)}
                ordinary = [asked for asked in self.study.of(model.name, ORDINARY) if asked.seed in seeds]
                base = self.study.bases.get(model.name)
                whom = {loss: self.study.of(model.name, loss), ORDINARY: ordinary, BASE: [base] if base else []}
                for who, some in whom.items():
                    for bucket in self.buckets:
                        found = self._by_token(some, masks, bucket)
                        if found:
                            about = {"model": model.name, "mask": loss, "who": who, "bucket": bucket}
                            rows.append({**about, **found})
        return rows

    def _by_token(self, some: Sequence[Asked], masks: TokenMasks, bucket: int) -> dict[str, Any]:
        sums = np.zeros((len(self.articles), 2, 3))
        for asked in some:
            for result in asked.results:
                if result.bucket == bucket and result.hits is not None:
                    dropped = masks.of(result)
                    hits, nll = np.array(result.hits), -np.array(result.logprobs)
                    for side, kind in enumerate((1, 0)):
                        of_kind = dropped == kind
                        place = self.articles[result.document_id]
                        sums[place, side] += of_kind.sum(), hits[of_kind].sum(), nll[of_kind].sum()
        there = sums[:, :, 0].sum(axis=1) > 0
        return by_document_numbers(sums[there], CONFIDENCE) if there.any() else {}

    def attacks(self) -> list[dict[str, Any]]:
        rows = []
        for model, loss, some in self._groups():
            drawn = [one for one in self._pooled(some) if one.sampled_logprob is not None]
            costs = attack_cost(drawn, tries=TRIES, tokens=BUDGETS, confidence=CONFIDENCE) if drawn else {}
            for bucket in self.buckets:
                if str(bucket) in costs:
                    rows.append({"model": model, "loss": loss, "bucket": bucket, **costs[str(bucket)]})
        return rows

    def membership(self) -> list[dict[str, Any]]:
        rows = []
        for model, loss, some in self._groups():
            if loss == BASE or not all(one.logprob is not None for asked in some for one in asked.results):
                continue
            for bucket, scores in membership(self._pooled(some)).items():
                about = {"model": model, "loss": loss, "bucket": int(bucket) if bucket.isdecimal() else bucket}
                rows += [{**about, "score": score, **found} for score, found in scores.items()]
        return rows

    def again(self) -> list[dict[str, Any]]:
        rows = []
        for model, loss, some in self._groups():
            for bucket in self.buckets if loss != BASE else ():
                if bucket == 0:
                    continue
                values, articles = [], []
                for asked in some:
                    for other in some:
                        if other is not asked:
                            pairs = _unseen_in(asked, other, bucket)
                            values += [value / self.suffix for value, _ in pairs]
                            articles += [article for _, article in pairs]
                row = {"model": model, "loss": loss, "bucket": bucket, "pairs": len(values)}
                if values:
                    (found,) = mean_intervals(np.array(values)[:, None], articles, confidence=CONFIDENCE)
                    row |= {"articles": len(set(articles)), "gain": {"mean": float(np.mean(values)), **ends(found)}}
                rows.append(row)
        return rows

    def _groups(self) -> list[tuple[str, str, list[Asked]]]:
        """Model, loss and runs, those before any continuation first."""
        found = []
        for model in self.study.models:
            if model.name in self.study.bases:
                found.append((model.name, BASE, [self.study.bases[model.name]]))
            of_losses = ((loss, self.study.of(model.name, loss)) for loss in self.study.losses)
            found += [(model.name, loss, some) for loss, some in of_losses if some]
        return found

    def _verbatim_at(self, some: Sequence[Asked], bucket: int) -> dict[str, Any]:
        """By length the share of passages whose first so many tokens come back, up to all that were asked for."""
        longest = min(asked.asked for asked in some)
        lengths = sorted({*(2**power for power in range(20)), self.suffix, longest})
        right = np.concatenate([asked.right[asked.buckets == bucket] for asked in some])
        articles = [article for asked in some for article in asked.articles[asked.buckets == bucket]]
        wanted = {str(length): (right >= length) * 1.0 for length in lengths if SHORTEST <= length <= longest}
        return estimates(wanted, {}, articles, {"confidence": CONFIDENCE})

    def _summary(self, model: str, loss: str, some: Sequence[Asked]) -> dict[str, Any]:
        if (model, loss) not in self._summaries:
            self._summaries[model, loss] = summarize(self._pooled(some), tries=TRIES, confidence=CONFIDENCE)
        return self._summaries[model, loss]

    def _pooled(self, some: Sequence[Asked]) -> list[SampleResult]:
        """Results of several seeds as of one run, with the reference attack and a sampler if the run had none."""
        found = []
        for asked in some:
            base = self.study.bases.get(asked.model) if asked.run else None
            for result in asked.results:
                scores = result.membership
                if base is not None and scores and result.sample_id in base.place:
                    before = base.results[base.place[result.sample_id]].membership
                    if before and "loss" in before and "loss" in scores:
                        scores = {**scores, "reference": scores["loss"] - before["loss"]}
                drawn = result.sampled_logprob if self._drawn else result.logprob
                name = f"{result.sample_id} {asked.seed}"
                found.append(replace(result, sample_id=name, membership=scores, sampled_logprob=drawn))
        return found


def _share_difference(mine: Sequence[Asked], others: Sequence[Asked], bucket: int) -> dict[str, Any]:
    """Difference of the shares given back verbatim, passage by passage, and how many were gained and lost."""
    after, before, articles = [], [], []
    for asked, other in zip(mine, others, strict=True):
        for result in asked.results:
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


def _unseen_in(asked: Asked, other: Asked, bucket: int) -> list[tuple[float, str]]:
    """Of passages of a bucket that another seed does not see: what more this one gives the suffix, and the article."""
    found = []
    for result in asked.results:
        place = other.place.get(result.sample_id)
        if result.bucket == bucket and place is not None and other.results[place].bucket == 0:
            unseen = other.results[place].logprob
            if result.logprob is not None and unseen is not None:
                found.append((result.logprob - unseen, result.document_id))
    return found


def _grids(study: Study) -> list[dict[str, Any]]:
    """Runs on another grid than their model's, beside the same run on that."""
    rows = []
    for run, asked in study.runs.items():
        twin = replace(run, grid=())
        if not run.grid or twin not in study.runs:
            continue
        other = study.runs[twin]
        both = [
            (one, other.results[other.place[one.sample_id]]) for one in asked.results if one.sample_id in other.place
        ]
        pairs = ((one.logprob, two.logprob) for one, two in both)
        apart = [abs(one - two) for one, two in pairs if one is not None and two is not None]
        row: dict[str, Any] = {"model": run.model, "loss": run.loss, "seed": run.seed, "passages": len(both)}
        row["grid"] = _grid(run)
        row["largest_logprob"] = max(apart, default=None)
        row["mean_logprob"] = float(np.mean(apart)) if apart else None
        row["changed_verbatim"] = sum(one.exact_match != two.exact_match for one, two in both)
        row |= _logs_apart(study, run, twin)
        rows.append(row)
    return rows


def _logs_apart(study: Study, run: Run, twin: Run) -> dict[str, Any]:
    try:
        logs = [training_log(run_directory(one, study.output) / "checkpoint") for one in (run, twin)]
    except (ValueError, KeyError) as error:
        return {"losses": str(error)}
    steps = sorted(set(logs[0]["losses"]) & set(logs[1]["losses"]))
    apart = [abs(logs[0]["losses"][step] - logs[1]["losses"][step]) for step in steps]
    held_out = [abs(one - two) for one, two in zip(logs[0]["held_out"], logs[1]["held_out"], strict=False)]
    found = {"steps": len(steps), "largest_loss": max(apart, default=None)}
    return found | {"largest_held_out": max(held_out, default=None)}


def _training(study: Study) -> list[dict[str, Any]]:
    rows = []
    for run in study.runs:
        row: dict[str, Any] = {"model": run.model, "loss": run.loss, "seed": run.seed, "grid": _grid(run)}
        try:
            log = training_log(run_directory(run, study.output) / "checkpoint")
        except (ValueError, KeyError) as error:
            rows.append({**row, "why": str(error)})
            continue
        last = max(log["losses"], default=0)
        row |= {"steps": last, "last_loss": log["losses"].get(last)}
        before, after = (log["held_out"][0], log["held_out"][-1]) if log["held_out"] else (None, None)
        rows.append({**row, "held_out_before": before, "held_out": after})
    return rows


def _canaries(study: Study) -> list[dict[str, Any]]:
    rows = []
    for run in study.runs if study.recipe.evaluation.canaries else ():
        row = {"model": run.model, "loss": run.loss, "seed": run.seed, "grid": _grid(run)}
        try:
            rows.append({**row, **canaries(run_directory(run, study.output) / "canaries.json")})
        except ValueError as error:
            rows.append({**row, "why": str(error).replace(f"{study.output}/", "")})
    return rows


def _grid(run: Run) -> str:
    return " ".join(f"{axis}={size}" for axis, size in run.grid if size > 1)


def _file(study: Study, *parts: str) -> Any:
    """What a JSON file of the study says, None where it is not there; `missing` names it then."""
    try:
        return read_json(study.output.joinpath(*parts))
    except ValueError:
        return None
