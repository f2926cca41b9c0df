"""Measures of a membership score that should tell members from controls: AUC, TPR at a low FPR, with intervals.

Intervals are closed forms in which documents are trials, by Kish's effective number where they have several samples.
docs/evaluation.md has the formulas, docs/results/coverage_attack.md what share of them holds the truth.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import ceil, floor
from typing import Any

import numpy as np
from scipy.special import ndtri
from scipy.stats import binom

from hf_axonn_eval.analysis.intervals import Interval, check_confidence, clopper_pearson, kish, number_documents


FALSE_POSITIVE_RATES = (0.001, 0.01)
FALSE_POSITIVES = 10  # that are expected at a rate, for it to be measured at all
_ROUNDING = 1e-12  # 0.01 * 300 is not quite 3


def auc(members: Sequence[float] | np.ndarray, controls: Sequence[float] | np.ndarray) -> float:
    """Compute the chance that a member scores higher than a control, ties counted half: the area under the ROC curve.

    Raises:
        ValueError: no members, no controls, or a score that is NaN.
    """
    return float(placements(*_check_scores(members, controls)).mean())


def tpr_at_fpr(members: Sequence[float] | np.ndarray, controls: Sequence[float] | np.ndarray, rate: float) -> float:
    """Find the largest share of members above a threshold that at most the share `rate` of the controls is above.

    It is of these controls: with fewer than 1 / rate it is the share of members that score higher than every control,
    which says nothing of the true rate. `attack` gives it only where there are enough.

    Raises:
        ValueError: as `auc`, or not 0 <= rate <= 1.
    Source: Carlini et al. 2022, arXiv 2112.03570.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"the false positive rate is {rate!r}, but it is a share between 0 and 1.")
    ours, others = _check_scores(members, controls)
    return _share_above(ours, others, np.sort(others)[::-1], _allow(rate, len(others)))


def attack(
    members: Sequence[float] | np.ndarray,
    controls: Sequence[float] | np.ndarray,
    *,
    member_documents: Sequence[Hashable],
    control_documents: Sequence[Hashable],
    rates: Sequence[float] = FALSE_POSITIVE_RATES,
    confidence: float = 0.95,
) -> dict[str, Any]:
    """Measure how well a score parts members from controls, with intervals.

    Args:
        members: score of every member.
        controls: score of every control.
        member_documents: the document of every member.
        control_documents: the document of every control.
        rates: false positive rates at which the true positive rate is given.
        confidence: of the intervals.
    Returns:
        `members` and `controls`, how many samples these are; `auc`, and for every rate `tpr_at_<rate>`, each with
        `value`, `low` and `high`; the ends are None where members or controls come from one document. A rate has also
        `false_positive_rate`: `count`, how many controls are above the threshold, their share `value`, and the exact
        interval `low` to `high` of the chance that a control is. With fewer than 10 / rate independent controls
        `value`, `low` and `high` are None and `why` says why.
    Raises:
        ValueError: as `auc`; a rate that is not above 0 and at most 1, another number of documents than of scores, or
            not 0 < confidence < 1.
    """
    check_confidence(confidence)
    if not all(0 < rate <= 1 for rate in rates):
        raise ValueError(f"the false positive rates are {list(rates)!r}, but they are shares above 0 and at most 1.")
    scores = ours, others = _check_scores(members, controls)
    documents = [_documents(*side) for side in zip(scores, (member_documents, control_documents), strict=True)]
    trials = [kish(np.bincount(index)) for index in documents]
    fewest = min(int(index.max()) + 1 for index in documents)
    won = placements(ours, others), 1 - placements(others, ours)
    area = float(won[0].mean())
    ends: Interval | None = None
    if fewest > 1:
        variance = sum(_variance(*side) for side in zip(won, documents, strict=True))
        ends = auc_interval(area, variance, min(trials), confidence=confidence)
    entry: dict[str, Any] = {"members": len(ours), "controls": len(others), "auc": _estimate(area, ends)}
    for rate in rates:
        entry[f"tpr_at_{rate:g}"] = _true_positives(ours, others, trials, rate, confidence, has_ends=fewest > 1)
    return entry


def placements(scores: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Compute the share of `others` that each score is above, ties counted half."""
    ranked = np.sort(others)
    below = np.searchsorted(ranked, scores, side="left") + np.searchsorted(ranked, scores, side="right")
    return np.asarray(below / (2 * len(others)))


def auc_interval(area: float, variance: float, documents: float, *, confidence: float = 0.95) -> Interval:
    """Compute Clopper and Pearson's interval of an AUC, with the trials that documents count as at each end.

    Args:
        area: the AUC.
        variance: its variance by placements, clustered in documents; 0 where all placements are equal.
        documents: members or controls, the fewer, in documents.
        confidence: of the interval.
    Source: Korn and Graubard 1998, Survey Methodology 24, 193-201, with `trials_at_end` in place of the variance at
        the estimate.
    """
    z = float(ndtri(0.5 + confidence / 2))
    lows = []
    for share in (area, 1 - area):
        trials = float(trials_at_end(share, variance, documents, z)) if share > 0 else documents
        lows.append(clopper_pearson(share * trials, trials, confidence=confidence).low)
    return Interval(lows[0], 1 - lows[1])


def trials_at_end(area: Any, variance: Any, documents: float, z: float) -> Any:
    """Compute the independent trials that documents count as at the lower end of an AUC's interval; arrays, too.

    That the AUC is t and not A takes 1 - t / A documents of another kind, which none of those seen are of, and
    which lose against all. Then it has the variance V(t) = t / A * (V + A (A - t) / documents), V that of those
    seen. The end t is where A - t = z sqrt(V(t)), and it is that of t (1 - t) / V(t) trials.
    """
    squared = z * z
    middle = 2 * area + squared * (variance / area + area / documents)
    root = np.sqrt(np.maximum(middle * middle - 4 * (1 + squared / documents) * area * area, 0))
    end = 2 * area * area / (middle + root)
    return squared * end * (1 - end) / (area - end) ** 2


def thresholds(rate: float, samples: int, documents: float, confidence: float) -> tuple[int, int, int]:
    """Count the controls that may be above the threshold of a rate: surely too few, by the rate, surely too many.

    The true quantile of the controls lies between the two outer thresholds with `confidence`, whatever the
    distribution and with ties: how many of `documents` are above it is binomial.
    """
    trials, tail = floor(documents), (1 - confidence) / 2
    few, many = binom.ppf([tail, 1 - tail], trials, rate) * (samples / trials)
    return floor(few) - 1, _allow(rate, samples), ceil(many)


def _true_positives(
    members: np.ndarray,
    controls: np.ndarray,
    trials: Sequence[float],
    rate: float,
    confidence: float,
    *,
    has_ends: bool,
) -> dict[str, Any]:
    of_members, of_controls = trials
    needed = ceil(FALSE_POSITIVES / rate * (1 - _ROUNDING))
    if of_controls < needed * (1 - _ROUNDING):
        why = f"{floor(of_controls):,} independent controls; {rate * 100:g}% needs {needed:,}"
        return {"value": None, "low": None, "high": None, "why": why}
    ranked = np.sort(controls)[::-1]
    allowed = thresholds(rate, len(controls), of_controls, confidence)
    fewer, share, more = (_share_above(members, controls, ranked, number) for number in allowed)
    ends = Interval(
        clopper_pearson(fewer * of_members, of_members, confidence=confidence).low,
        clopper_pearson(more * of_members, of_members, confidence=confidence).high,
    )
    false = _share_above(controls, controls, ranked, allowed[1])
    exact = clopper_pearson(false * of_controls, of_controls, confidence=confidence)
    return {
        **_estimate(share, ends if has_ends else None),
        "false_positive_rate": {"count": round(false * len(controls)), **_estimate(false, exact)},
    }


def _estimate(value: float, ends: Interval | None) -> dict[str, Any]:
    low, high = ends if ends is not None else (None, None)
    return {"value": float(value), "low": low, "high": high}


def _allow(rate: float, controls: int) -> int:
    return floor(rate * controls * (1 + _ROUNDING))


def _share_above(scores: np.ndarray, controls: np.ndarray, ranked: np.ndarray, allowed: int) -> float:
    """Compute the share of scores above the lowest threshold that at most `allowed` controls, `ranked`, exceed."""
    if allowed < 0 or allowed >= len(controls):
        return float(allowed >= 0)
    return float((scores > ranked[allowed]).mean())


def _variance(won: np.ndarray, documents: np.ndarray) -> float:
    """Compute the part of the AUC's variance that one side has, members or controls, by placements of its samples."""
    sums = np.bincount(documents, weights=won - won.mean())
    return float(len(sums) / (len(sums) - 1) * (sums @ sums) / len(won) ** 2)


def _documents(scores: np.ndarray, documents: Sequence[Hashable]) -> np.ndarray:
    if len(scores) != len(documents):
        raise ValueError(f"{len(scores)} scores of {len(documents)} documents: give the document of every score.")
    return number_documents(documents)[0]


def _check_scores(*sides: Sequence[float] | np.ndarray) -> tuple[np.ndarray, ...]:
    members, controls = map(len, sides)
    if not members or not controls:
        raise ValueError(f"{members} members and {controls} controls: one or more of both are needed.")
    scores = tuple(np.asarray(side, dtype=np.float64) for side in sides)
    if any(np.isnan(side).any() for side in scores):
        raise ValueError("a membership score is NaN.")
    return scores
