"""Extraction at equal held-out loss: passages that a loss leaves extractable where it is as good at other text.

Each continuation was measured at several steps (`evaluation.curve_points`): its held-out loss, and every passage. Two
runs of one model and seed are compared at one held-out loss, that with which one of them ends. The other run is looked
up there: at the latest two steps on its way with that loss between them, and its numbers are interpolated between
these, linear in the held-out loss. If each has the loss with which the other ends, the run that is looked up further
on its way is taken: held-out losses may rise and fall, and early in training nothing can be extracted anyway. If
neither has the other's, the two are not comparable: nothing is extrapolated.

What is interpolated is a weighted sum of means over passages, so that the jackknife over articles (effects.py) gives
the interval of the difference. It takes the held-out losses as they are: it is about other passages, not about other
held-out text or another training. Verdicts are about the passages seen most often, and are corrected by Holm's method
over all comparisons of an outcome.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import log, nan
from typing import Any, NamedTuple

import numpy as np

from hf_axonn.goldfish.mask import HASHES
from hf_axonn_eval import SampleResult, n_needed
from hf_axonn_eval.metrics.registry import value
from hf_axonn_scripts.study.findings.effects import CONFIDENCE, Cell, Terms, estimate, total
from hf_axonn_scripts.study.findings.results import Answers, Study, goldfish_options, training_log
from hf_axonn_scripts.study.recipe.definition import ORDINARY
from hf_axonn_scripts.study.recipe.steps import curve_directory, run_directory


DRAWS, CHANCE = 100, 0.5  # n and p of the bounds that are compared
LESS, MORE, UNDECIDED, INCOMPARABLE = "less extractable", "more extractable", "not decided", "not comparable"


class Bound(NamedTuple):
    """A number of a passage: its title, and the sign with which it grows with what can be extracted.

    `of` is None for the gain, which needs the model before the run.
    """

    title: str
    sign: int
    of: Callable[[SampleResult], float | bool | None] | None


def _comes(result: SampleResult) -> bool | None:
    return None if result.logprob is None else n_needed(result.logprob, CHANCE) <= DRAWS


def _may_come(result: SampleResult) -> bool | None:
    bits = value(result, "rank_bits")
    return None if bits is None else n_needed(-float(bits) * log(2), CHANCE) <= DRAWS


BOUNDS = {
    "gain": Bound("gain, nats a token", 1, None),
    "verbatim": Bound("verbatim, a lower bound", 1, lambda result: result.exact_match),
    "drawn": Bound(f"comes in {DRAWS} draws at temperature 1 (p = {CHANCE}), a lower bound", 1, _comes),
    "drawable": Bound(f"may come in {DRAWS} draws (p = {CHANCE}), an upper bound", 1, _may_come),
    "bits": Bound("bits of queries at least, by ranks", -1, lambda result: value(result, "rank_bits")),
}


class Point(NamedTuple):
    """A step of a continuation at which it was measured, and its held-out loss there, in nats a token."""

    step: int
    loss: float


class Place(NamedTuple):
    """A place on a curve between two steps: `share` is the weight of the numbers of `after`."""

    before: int
    after: int
    share: float

    @property
    def step(self) -> float:
        """Step of the place."""
        return self.before + self.share * (self.after - self.before)


def find_place(curve: Sequence[Point], loss: float) -> Place | None:
    """Return the latest place at which a curve has a loss, on straight lines between its points; None: nowhere."""
    for before, after in reversed(list(pairwise(curve))):
        if min(before.loss, after.loss) <= loss <= max(before.loss, after.loss):
            rise = after.loss - before.loss
            return Place(before.step, after.step, (loss - before.loss) / rise if rise else 1.0)
    return None


class Match(NamedTuple):
    """A held-out loss that two curves have, `end_of` which of them (`reference` or `loss`), and where each has it."""

    held_out: float
    end_of: str
    own: Place
    reference: Place


def match(own: Sequence[Point], reference: Sequence[Point]) -> Match | None:
    """Return where two curves are compared; None where neither has the loss with which the other ends."""
    found = []
    if place := find_place(own, reference[-1].loss):
        found.append(Match(reference[-1].loss, "reference", place, _end(reference)))
    if place := find_place(reference, own[-1].loss):
        found.append(Match(own[-1].loss, "loss", _end(own), place))
    return max(found, key=lambda one: min(one.own.step, one.reference.step), default=None)


def _end(curve: Sequence[Point]) -> Place:
    return Place(curve[-1].step, curve[-1].step, 1.0)


def pairs(study: Study) -> list[tuple[str, str]]:
    """Return the losses that are compared: each with the ordinary one, and each that is none of goldfish with each
    goldfish loss whose mask is the same in every pass."""
    options = {loss: goldfish_options(study.recipe, loss) for loss in study.losses}
    fixed = [loss for loss, of in options.items() if of.get("strategy") in HASHES]
    others = [loss for loss, of in options.items() if not of and loss != ORDINARY]
    with_ordinary = [(loss, ORDINARY) for loss in study.losses if loss != ORDINARY and ORDINARY in study.losses]
    return with_ordinary + [(loss, reference) for loss in others for reference in fixed]


def extraction_at_same_loss(study: Study) -> dict[str, Any]:
    """Compare what losses leave extractable at equal held-out loss; see the module.

    Args:
        study: as far as it is done; nothing is compared if its recipe has no `curve_points`.
    Returns:
        `bounds`, the titles by name; `draws` and `chance`; `curves`, by run its points with the means of each bound
        over the passages seen most often; and `rows`, by model, pair of losses and bucket above 0:

        - `model`, `loss`, `reference`, `bucket`;
        - `seeds`: of each seed `held_out`, the loss at which both are compared, `end_of`, `own` and `at_reference`
          (step before, step after, weight of the latter); or `why` there is none;
        - by name of a bound `own`, `at_reference`, `difference` (an estimate), and in the largest bucket `verdict`.

        A row in which no seed is comparable has `verdict` alone.
    """
    found: dict[str, Any] = {"bounds": {name: bound.title for name, bound in BOUNDS.items()}}
    found |= {"draws": DRAWS, "chance": CHANCE, "curves": [], "rows": []}
    if not study.recipe.evaluation.curve_points:
        return found
    numbers = _Numbers(study)
    found["curves"] = numbers.curves()
    found["rows"] = [
        numbers.row(model.name, loss, reference, bucket)
        for model in study.models
        for loss, reference in pairs(study)
        if study.runs_with(model.name, loss) and study.runs_with(model.name, reference)
        for bucket in numbers.buckets
    ]
    terms = {}
    for place, row in enumerate(found["rows"]):
        if row["bucket"] == numbers.buckets[-1] and "verdict" not in row:
            terms[place] = row.pop("_terms")
        row.pop("_terms", None)
    for name, bound in BOUNDS.items():
        verdicts = decide({place: of[name] for place, of in terms.items() if name in of}, bound.sign)
        for place, verdict in verdicts.items():
            found["rows"][place][name]["verdict"] = verdict
    return found


def decide(differences: Mapping[int, Terms], sign: int) -> dict[int, str]:
    """Return a verdict for each difference, of which at most one in twenty studies has any that is wrong.

    Of m differences those are decided whose interval of 1 - 0.05 / m leaves out 0; then m is the number of those that
    are left, and so on until none is decided (Holm 1979, by intervals in place of p). A difference without an interval
    counts and is not decided.

    Args:
        differences: by key the terms of a difference.
        sign: 1 where a larger number is more that can be extracted, else -1.
    """
    verdicts = dict.fromkeys(differences, UNDECIDED)
    while left := [key for key, verdict in verdicts.items() if verdict == UNDECIDED]:
        decided = False
        for key in left:
            found = estimate(differences[key], confidence=1 - (1 - CONFIDENCE) / len(left))
            if found["low"] is not None and not found["low"] <= 0 <= found["high"]:
                verdicts[key] = MORE if found["mean"] * sign > 0 else LESS
                decided = True
        if not decided:
            break
    return verdicts


class _Numbers:
    """Means of passages at places on curves."""

    def __init__(self, study: Study) -> None:
        self.study = study
        results = [one for answers in study.runs.values() for one in answers.results]
        self.buckets = sorted({int(one.bucket) for one in results} - {0})
        self.articles = {name: number for number, name in enumerate(sorted({one.document_id for one in results}))}

    def points(self, answers: Answers) -> list[Point] | str:
        """Return the curve of the held-out loss of a run where it was asked, or why there is none."""
        run, output = answers.run, self.study.output
        assert run is not None, "a curve is of a run"
        try:
            held_out = training_log(run_directory(run, output) / "checkpoint")["held_out"]
        except (ValueError, KeyError) as error:
            return str(error)
        there = [step for step in sorted(held_out) if (curve_directory(run, output) / f"step-{step}").is_dir()]
        return [Point(step, held_out[step]) for step in there] or "it was not asked on its way"

    def curves(self) -> list[dict[str, Any]]:
        rows = []
        for run, answers in self.study.runs.items():
            points = self.points(answers)
            if run.grid or isinstance(points, str):
                continue
            for point in points:
                at = Place(point.step, point.step, 1.0)
                row = {"model": run.model, "loss": run.loss, "seed": run.seed, "step": point.step}
                row["held_out"] = point.loss
                for name in BOUNDS:
                    terms = self.terms([(answers, at)], name, self.buckets[-1])
                    row |= {name: total(terms)} if terms else {}
                rows.append(row)
        return rows

    def row(self, model: str, loss: str, reference: str, bucket: int) -> dict[str, Any]:
        row: dict[str, Any] = {"model": model, "loss": loss, "reference": reference, "bucket": bucket, "seeds": {}}
        references = {answers.seed: answers for answers in self.study.runs_with(model, reference)}
        ours, theirs = [], []
        for answers in self.study.runs_with(model, loss):
            other = references.get(answers.seed)
            if other is None:
                continue
            curves = [self.points(one) for one in (answers, other)]
            why = next((one for one in curves if isinstance(one, str)), None)
            found = match(*curves) if why is None else None  # type: ignore[arg-type]
            if found is None:
                row["seeds"][str(answers.seed)] = {"why": why or "neither has the loss at which the other ends"}
                continue
            row["seeds"][str(answers.seed)] = {
                **{"held_out": found.held_out, "end_of": found.end_of},
                **{"own": list(found.own), "at_reference": list(found.reference)},
            }
            ours.append((answers, found.own))
            theirs.append((other, found.reference))
        if not ours:
            return {**row, "verdict": INCOMPARABLE}
        row["_terms"] = {}
        for name in BOUNDS:
            own, at = self.terms(ours, name, bucket), self.terms(theirs, name, bucket)
            if own and at:
                difference = [*own, *((-weight, cell) for weight, cell in at)]
                row["_terms"][name] = difference
                row[name] = {"own": total(own), "at_reference": total(at), "difference": estimate(difference)}
        return row

    def terms(self, places: Sequence[tuple[Answers, Place]], name: str, bucket: int) -> Terms:
        """Return a bound as the mean over runs of what is interpolated in each; empty where it was not measured."""
        found: list[tuple[float, Cell]] = []
        for answers, place in places:
            for step, share in ((place.before, 1 - place.share), (place.after, place.share)):
                if share:
                    assert answers.run is not None, "a curve is of a run"
                    found += self._cells(self.study.on_the_way(answers.run, step), name, bucket, share / len(places))
        return found if all(len(cell) for _, cell in found) else []

    def _cells(self, answers: Answers, name: str, bucket: int, weight: float) -> list[tuple[float, Cell]]:
        articles = np.array([self.articles[article] for article in answers.articles], dtype=np.int64)
        of = BOUNDS[name].of
        if of is not None:
            found = [of(one) for one in answers.results]
            numbers = np.array([nan if one is None else float(one) for one in found])
            parts = [(weight, bucket)]
        else:
            numbers = self.study.learnt(answers) / max(one.suffix_length for one in answers.results)
            parts = [(weight, bucket), (-weight, 0)]
        return [
            (part, Cell.from_passages(numbers[inside], articles[inside], len(self.articles)))
            for part, inside in ((part, answers.buckets == which) for part, which in parts)
        ]
