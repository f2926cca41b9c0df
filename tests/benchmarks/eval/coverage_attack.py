"""How often the intervals of a membership attack hold the truth, over many drawn data sets whose truth is known.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.eval.coverage_attack --output docs/results/coverage_attack.md

Scores come from latent normal numbers: one of the document and one of the window, so that windows of a document
correlate as asked. With a correlation of 1 all windows of a document are equal and say what one of them says (a test
holds that), so such cases are those with one window.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import betaincinv, ndtr, ndtri

from hf_axonn_eval.analysis.membership_attack import thresholds, trials_at_end
from tests.helpers.pages import show


AREAS = (0.5, 0.7, 0.9, 0.99, 0.999)
SIZES = ((2, 2), (12, 12), (12, 100), (100, 12), (50, 50), (200, 1000))
WINDOWS = ((1, 0.0), (10, 0.0), (10, 0.5))  # windows of a document, and the correlation of their latent numbers
RATES = ((0.1, 100), (0.01, 1000), (0.001, 10_000))  # and documents of controls
MEMBERS = (12, 1000)
CONFIDENCE = 0.95
_Z = float(ndtri(0.5 + CONFIDENCE / 2))
_AT_ONCE = 100_000


class Kind(NamedTuple):
    """Scores out of normal numbers: `base` of both sides, `members` by the AUC, `controls`; and the true positive rate
    by the AUC and the false positive rate."""

    base: Callable[[np.ndarray], np.ndarray]
    members: Callable[[np.ndarray, float], np.ndarray]
    caught: Callable[[float, float], float]
    controls: Callable[[np.ndarray], np.ndarray] = np.asarray
    ties: bool = False


def _uniform(latent: np.ndarray) -> np.ndarray:
    return np.asarray(ndtr(latent.astype(np.float64)))


def _log_exponential(latent: np.ndarray) -> np.ndarray:
    return np.asarray(np.log(-np.log1p(-_uniform(latent))))


def _cauchy(latent: np.ndarray) -> np.ndarray:
    return np.asarray(np.tan(np.pi * (_uniform(latent) - 0.5)))


def _cauchy_shift(area: float) -> float:
    return float(2 * np.tan(np.pi * (area - 0.5)))


def _chances_of_ties(shift: float) -> tuple[np.ndarray, np.ndarray]:
    """Chances of the whole numbers from -60 to 60, of members and of controls, that are rounded normal numbers."""
    ends = np.arange(-60, 62) - 0.5
    return np.diff(ndtr(ends - shift)), np.diff(ndtr(ends))


@cache
def _shift_with_ties(area: float) -> float:
    def excess(shift: float) -> float:
        members, controls = _chances_of_ties(shift)
        return float(members @ (controls.cumsum() - controls / 2)) - area

    return float(brentq(excess, -1, 20))


def _caught_with_ties(area: float, rate: float) -> float:
    members, controls = _chances_of_ties(_shift_with_ties(area))
    above = controls[::-1].cumsum()[::-1] - controls
    return float(members[np.argmax(above <= rate) + 1 :].sum())


KINDS = {
    "normal": Kind(
        np.asarray,
        lambda base, area: base + np.float32(np.sqrt(2) * ndtri(area)),
        lambda area, rate: float(ndtr(np.sqrt(2) * ndtri(area) + ndtri(rate))),
    ),
    "exponential": Kind(
        _log_exponential,
        lambda base, area: base + np.log(area / (1 - area)),
        lambda area, rate: rate ** ((1 - area) / area),
    ),
    "Cauchy": Kind(
        _cauchy,
        lambda base, area: base + _cauchy_shift(area),
        lambda area, rate: float(0.5 - np.arctan(np.tan(np.pi * (0.5 - rate)) - _cauchy_shift(area)) / np.pi),
    ),
    "a part known": Kind(  # of the members, which are above all controls; the others are like controls
        _uniform,
        lambda base, area: base / (2 - 2 * area),
        lambda area, rate: 2 * area - 1 + (2 - 2 * area) * rate,
    ),
    "above or below all": Kind(  # a member is one or the other: the variance is the largest that there is
        _uniform,
        lambda base, area: np.where(base < 1 - area, base - 2, base + 2),
        lambda area, rate: area,
    ),
    "normal, rounded": Kind(
        np.asarray,
        lambda base, area: np.round(base + np.float32(_shift_with_ties(area))),
        _caught_with_ties,
        np.round,
        ties=True,
    ),
}


class Drawn(NamedTuple):
    """A case: documents of members and controls, windows of each, and the correlation of these."""

    documents: tuple[int, int]
    windows: int
    correlation: float

    @property
    def text(self) -> str:
        members, controls = self.documents
        windows = "" if self.windows == 1 else f", {self.windows} windows, {self.correlation:g}"
        return f"{members:,} / {controls:,}{windows}"


def drawings(kind: Kind, case: Drawn, replicates: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Base of the members, and scores of the controls, [data sets, samples], some data sets at a time."""
    generator = np.random.default_rng(0)
    at_once = max(1, _AT_ONCE // (sum(case.documents) * case.windows))
    for start in range(0, replicates, at_once):
        some, sides = min(at_once, replicates - start), []
        for documents in case.documents:
            own = generator.standard_normal((some, documents, case.windows), dtype=np.float32)
            if case.correlation:
                shared = generator.standard_normal((some, documents, 1), dtype=np.float32)
                own = own * np.float32((1 - case.correlation) ** 0.5) + shared * np.float32(case.correlation**0.5)
            sides.append(kind.base(own.reshape(some, -1)))
        yield sides[0], kind.controls(sides[1])


def placed(first: np.ndarray, second: np.ndarray, sort: str) -> tuple[np.ndarray, np.ndarray]:
    """Of many data sets at once: the share of `second` below each of `first`, and of `first` below each of `second`.

    If `sort` is stable, the first ones of a tie are below the second ones.
    """
    count = first.shape[1]
    order = np.argsort(np.concatenate([first, second], axis=1), axis=1, kind=sort)  # type: ignore[call-overload]
    is_first = order < count
    passed = is_first.cumsum(axis=1, dtype=np.int32)
    below = np.empty_like(passed)
    others = np.arange(1, order.shape[1] + 1, dtype=np.int32) - passed
    np.put_along_axis(below, order, np.where(is_first, others, passed), axis=1)
    return below[:, :count] / second.shape[1], below[:, count:] / count


def areas_and_variances(members: np.ndarray, controls: np.ndarray, case: Drawn, *, ties: bool) -> np.ndarray:
    """AUC and variance of each data set, [2, data sets]."""
    of_members, of_controls = placed(members, controls, "stable" if ties else "quicksort")
    if ties:  # half of them this way, half the other
        others = placed(controls, members, "stable")[::-1]
        of_members, of_controls = (of_members + others[0]) / 2, (of_controls + others[1]) / 2
    won = of_members, 1 - of_controls
    area, variance = won[0].mean(axis=1), np.zeros(len(members))
    for side, documents in zip(won, case.documents, strict=True):
        sums = (side - area[:, None]).reshape(len(side), documents, case.windows).sum(axis=2)
        variance += documents / (documents - 1) * (sums * sums).sum(axis=1) / side.shape[1] ** 2
    return np.stack([area, variance])


def exact(share: np.ndarray, trials: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """`intervals.clopper_pearson` of many shares."""
    tail, trials = (1 - CONFIDENCE) / 2, np.broadcast_to(trials, share.shape)
    yes, no = share * trials, (1 - share) * trials
    low, high = (
        betaincinv(np.maximum(yes, 1e-300), no + 1, tail),
        betaincinv(yes + 1, np.maximum(no, 1e-300), 1 - tail),
    )
    return np.where(yes > 0, low, 0.0), np.where(no > 0, high, 1.0)


def ours(area: np.ndarray, variance: np.ndarray, documents: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """`membership_attack.auc_interval` of many data sets."""
    with np.errstate(divide="ignore", invalid="ignore"):
        lows = [
            exact(share, np.where(share > 0, trials_at_end(share, variance, min(documents), _Z), 1.0))[0]
            for share in (area, 1 - area)
        ]
    return lows[0], 1 - lows[1]


def newcombe(area: np.ndarray, variance: np.ndarray, documents: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Newcombe 2006, Statistics in Medicine 25, 559-573, method 5."""
    half = sum(documents) / 2 - 1
    ends = []
    for end in (0.0, 1.0):
        inside, outside = area.copy(), np.full_like(area, end)
        for _ in range(25):
            t = (inside + outside) / 2
            spread = t * (1 - t) * (1 + half * (1 - t) / (2 - t) + half * t / (1 + t)) / np.prod(documents)
            holds = (t - area) ** 2 <= _Z * _Z * spread
            inside, outside = np.where(holds, t, inside), np.where(holds, outside, t)
        ends.append(outside)
    return ends[0], ends[1]


def delong(area: np.ndarray, variance: np.ndarray, documents: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """DeLong's variance, clustered (Obuchowski 1997), on the logit; the AUC itself where that has no spread."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logit, half = np.log(area / (1 - area)), _Z * np.sqrt(variance) / (area * (1 - area))
        low, high = (1 / (1 + np.exp(-(logit + sign * half))) for sign in (-1, 1))
    return np.where(variance > 0, low, area), np.where(variance > 0, high, area)


def fewer_documents(area: np.ndarray, variance: np.ndarray, documents: tuple[int, int]) -> tuple:
    """Clopper and Pearson's with the fewer documents as trials: the largest variance (Birnbaum and Klose 1957)."""
    return exact(area, float(min(documents)))


def korn_graubard(area: np.ndarray, variance: np.ndarray, documents: tuple[int, int]) -> tuple:
    """Clopper and Pearson's with trials from the variance at the estimate, at least the fewer documents."""
    least = float(min(documents))
    return exact(area, np.clip(area * (1 - area) / np.maximum(variance, 1e-300), least, 1e9 * (variance > 0) + least))


METHODS = {
    "ours": ours,
    "Clopper-Pearson, the fewer documents as trials": fewer_documents,
    "Clopper-Pearson, trials from the variance at the estimate (Korn and Graubard; Mee)": korn_graubard,
    "Newcombe 2006, method 5": newcombe,
    "DeLong, clustered, on the logit": delong,
}


class Found(NamedTuple):
    """What share of the intervals held the truth, how wide they were on average, and of how many data sets."""

    coverage: float
    width: float
    data_sets: int


def held(ends: tuple[np.ndarray, np.ndarray], truth: float) -> Found:
    """Intervals with the truth, and their mean width."""
    low, high = ends
    return Found(float(((low <= truth) & (truth <= high)).mean()), float((high - low).mean()), len(low))


def areas(kind: Kind, case: Drawn, replicates: int) -> dict[float, dict[str, Found]]:
    """Coverage by AUC and method; all AUCs have the same latent numbers."""
    drawn: dict[float, list[np.ndarray]] = {area: [] for area in AREAS}
    for members, controls in drawings(kind, case, replicates):
        for area in AREAS:
            drawn[area].append(areas_and_variances(kind.members(members, area), controls, case, ties=kind.ties))
    found = {}
    for area, parts in drawn.items():
        measured, variance = np.concatenate(parts, axis=1)
        found[area] = {
            name: held(method(measured, variance, case.documents), area) for name, method in METHODS.items()
        }
    return found


def rates(kind: Kind, case: Drawn, rate: float, replicates: int) -> dict[float, Found]:
    """Coverage by AUC of the interval of the true positive rate at exactly `rate`."""
    of_members, of_controls = case.documents
    allowed = thresholds(rate, of_controls * case.windows, of_controls, CONFIDENCE)
    drawn: dict[float, list[np.ndarray]] = {area: [] for area in AREAS}
    for members, controls in drawings(kind, case, replicates):
        levels = np.sort(controls, axis=1)[:, ::-1][:, [allowed[0], allowed[2]]]
        for area in AREAS:
            above = kind.members(members, area)[:, :, None] > levels[:, None]
            drawn[area].append(above.mean(axis=1).T)
    found = {}
    for area, parts in drawn.items():
        few, many = np.concatenate(parts, axis=1)
        found[area] = held((exact(few, of_members)[0], exact(many, of_members)[1]), kind.caught(area, rate))
    return found


class Effort(NamedTuple):
    """How many data sets are drawn of a case, and how many samples in all of them: large ones are drawn less often."""

    data_sets: int = 10_000
    samples: int = 12_000_000

    def times(self, case: Drawn) -> int:
        """Data sets of a case."""
        return max(100, min(self.data_sets, self.samples // (sum(case.documents) * case.windows)))


def measure(effort: Effort) -> tuple[dict, dict]:
    """Coverage of AUCs, by kind and case, and of true positive rates, by kind, rate and case."""
    of_areas, of_rates = {}, {}
    for name, kind in KINDS.items():
        for documents in SIZES:
            for windows, correlation in WINDOWS:
                case = Drawn(documents, windows, correlation)
                of_areas[name, case] = areas(kind, case, effort.times(case))
                print("AUC", name, case.text, file=sys.stderr, flush=True)
        for rate, controls in RATES:
            for windows, correlation in WINDOWS:
                if controls * windows > 20_000:
                    continue
                for count in MEMBERS:
                    case = Drawn((count, controls), windows, correlation)
                    of_rates[name, rate, case] = rates(kind, case, rate, effort.times(case))
                print("TPR", name, rate, case.text, file=sys.stderr, flush=True)
    return of_areas, of_rates


def report(of_areas: dict, of_rates: dict, command: str) -> str:
    """All of it as Markdown."""
    lines = [
        "# Coverage of the intervals of a membership attack",
        "",
        f"    {command}",
        "",
        f"Share of intervals for {CONFIDENCE:.0%} that hold the true value, and in brackets their mean width, over",
        "drawn data sets, fewer of large cases. Rows: documents of members / of",
        "controls, windows of a document if more than one, and the correlation of these by a normal random effect.",
        "With a correlation of 1 it is one window. *A part known*: some members are above all controls, the others",
        "like them. *Above or below all*: each member is one or the other, which has the largest possible variance.",
        "",
        "## Methods for an AUC",
        "",
        "| method | lowest coverage | where | cases below 0.93 | mean width |",
        "|---|---|---|---|---|",
    ]
    cases = [(name, case, area) for (name, case), by_area in of_areas.items() for area in by_area]
    for method in METHODS:
        found = {(n, case, area): of_areas[n, case][area][method] for n, case, area in cases}
        name, case, area = worst = min(found, key=lambda key: found[key].coverage)
        below = sum(one.coverage < 0.93 for one in found.values())
        width = statistics.mean(one.width for one in found.values())
        lines.append(
            f"| {method} | {found[worst].coverage:.3f} | {name}, {case.text}, AUC {area:g} | "
            f"{below} of {len(found)} | {width:.3f} |"
        )
    head = [
        "",
        f"| scores | documents | data sets | {' | '.join(f'AUC {area:g}' for area in AREAS)} |",
        "|---" * 8 + "|",
    ]
    lines += ["", "## The interval of an AUC", *head]
    for (name, case), by_area in of_areas.items():
        lines.append(_row(name, case.text, [by_area[area]["ours"] for area in AREAS]))
    lines += [
        "",
        "## The interval of a true positive rate",
        "",
        "Truth: the share of all members above the quantile of all controls, not above the threshold found. The",
        "threshold's own error is in the interval. Columns are the AUC of the scores.",
        "",
        f"Lowest coverage: {min(one.coverage for by_area in of_rates.values() for one in by_area.values()):.3f}.",
        *head,
    ]
    for (name, rate, case), by_area in of_rates.items():
        lines.append(_row(f"{name}, FPR {rate:g}", case.text, [by_area[area] for area in AREAS]))
    return "\n".join(lines) + "\n"


def _row(name: str, case: str, found: list[Found]) -> str:
    cells = " | ".join(f"{one.coverage:.3f} ({one.width:.3f})" for one in found)
    return f"| {name} | {case} | {found[0].data_sets:,} | {cells} |"


def main() -> int:
    """Draw, print the tables, and write them where `--output` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_sets", type=int, default=Effort().data_sets, help="of a case, at most")
    parser.add_argument("--samples", type=int, default=Effort().samples, help="in all data sets of a case, at most")
    parser.add_argument("--output", type=Path, help="Markdown file")
    args = parser.parse_args()
    command = shlex.join(["python", "-m", "tests.benchmarks.eval.coverage_attack", *sys.argv[1:]])
    effort = Effort(args.data_sets, args.samples)
    show(report(*measure(effort), command), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
