"""How well a membership score tells members from controls: AUC, TPR at a low FPR, with intervals."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hf_axonn_eval.analysis.intervals import Interval, interval_of, numbered, resampled_documents, wilson


FALSE_POSITIVE_RATES = (0.001, 0.01)


def auc(members: Sequence[float], controls: Sequence[float]) -> float:
    """Chance that a member scores higher than a control, ties counted half: the area under the ROC curve.

    Raises:
        ValueError: no members, no controls, or a score that is NaN.
    """
    return float(_area(_Ranking(members, controls).curve())[0])


def tpr_at_fpr(members: Sequence[float], controls: Sequence[float], rate: float) -> float:
    """Largest share of members above a threshold that at most the share `rate` of the controls reaches.

    With fewer than 1 / rate controls that is the share of members that score higher than every control.

    Raises:
        ValueError: as `auc`, or not 0 <= rate <= 1.
    Source: Carlini et al. 2022, arXiv 2112.03570.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"the false positive rate is {rate!r}, but it is a share between 0 and 1.")
    return float(_recall(_Ranking(members, controls).curve(), rate)[0])


def attack(
    members: Sequence[float] | np.ndarray,
    controls: Sequence[float] | np.ndarray,
    *,
    member_documents: Sequence[Hashable],
    control_documents: Sequence[Hashable],
    rates: Sequence[float] = FALSE_POSITIVE_RATES,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> dict[str, Any]:
    """How well a score parts members from controls, with bootstrap intervals.

    Documents are drawn among the members and among the controls apart, so that both keep their number.

    Args:
        members: score of every member.
        controls: score of every control.
        member_documents: the document of every member.
        control_documents: the document of every control.
        rates: false positive rates at which the true positive rate is given.
        confidence: of the intervals.
        resamples: draws of the bootstrap.
        seed: of the bootstrap.
    Returns:
        `members` and `controls`, how many samples these are; `auc`, and for every rate `tpr_at_<rate>`, each with
        `value`, `low` and `high`; the ends are None where members or controls come from one document.
    Raises:
        ValueError: as `auc`, and as `bootstrap`.
    """
    ranking = _Ranking(members, controls)
    curve = ranking.curve()
    values = {"auc": _area(curve)} | {f"tpr_at_{rate:g}": _recall(curve, rate) for rate in rates}
    sides = [numbered(documents) for documents in (member_documents, control_documents)]
    drawn: dict[str, list[np.ndarray]] = {name: [] for name in values}
    if all(count > 1 for _, count in sides):
        streams = [
            resampled_documents(count, resamples, seed=(seed, number), width=len(members) + len(controls))
            for number, (_, count) in enumerate(sides)
        ]
        for weights in zip(*streams, strict=True):
            curve = ranking.curve(*(side[:, index] for side, (index, _) in zip(weights, sides, strict=True)))
            drawn["auc"].append(_area(curve))
            for rate in rates:
                drawn[f"tpr_at_{rate:g}"].append(_recall(curve, rate))
    entry: dict[str, Any] = {"members": len(members), "controls": len(controls)}
    fewest = min(count for _, count in sides)
    for name, (measured,) in values.items():
        draws = np.concatenate(drawn[name]) if drawn[name] else None
        low, high = _ends(measured, draws, confidence, fewest) if draws is not None else (None, None)
        entry[name] = {"value": float(measured), "low": low, "high": high}
    return entry


def _ends(measured: float, draws: np.ndarray, confidence: float, fewest: int) -> Interval:
    """The interval of a share; one of 0 or 1 that no draw moves gets Wilson's, with documents as trials."""
    if measured in (0, 1) and (draws == measured).all():
        return wilson(int(measured) * fewest, fewest, confidence=confidence)
    return interval_of(draws, confidence, fewest)


class _Curve(NamedTuple):
    """Members and controls at or above each threshold, from above all scores to below all; a row for each draw."""

    members: np.ndarray
    controls: np.ndarray


class _Ranking:
    """All scores from the highest to the lowest, sorted once for all draws of a bootstrap."""

    def __init__(self, members: Sequence[float] | np.ndarray, controls: Sequence[float] | np.ndarray) -> None:
        if not len(members) or not len(controls):
            raise ValueError(f"{len(members)} members and {len(controls)} controls: one or more of both are needed.")
        both = np.concatenate([np.asarray(members, dtype=np.float64), np.asarray(controls, dtype=np.float64)])
        if np.isnan(both).any():
            raise ValueError("a membership score is NaN.")
        self._order = np.argsort(-both, kind="stable")
        self._is_member = self._order < len(members)
        ranked = both[self._order]
        # a threshold lies between two different scores, never inside a tie
        self._thresholds = np.append(np.flatnonzero(ranked[1:] != ranked[:-1]), len(ranked) - 1)
        self._sizes = len(members), len(controls)

    def curve(self, members: np.ndarray | None = None, controls: np.ndarray | None = None) -> _Curve:
        """The ROC curve in counts.

        Args:
            members: how often each member is drawn, [draws, members]; by default once.
            controls: likewise [draws, controls].
        """
        sides = [
            np.ones((1, size)) if side is None else side
            for side, size in zip((members, controls), self._sizes, strict=True)
        ]
        weights = np.concatenate(sides, axis=1)[:, self._order]
        counts = []
        for which in (self._is_member, ~self._is_member):
            above = (weights * which).cumsum(axis=1)[:, self._thresholds]
            counts.append(np.concatenate([np.zeros((len(above), 1)), above], axis=1))
        return _Curve(*counts)


def _area(curve: _Curve) -> np.ndarray:
    members, controls = curve
    area = (np.diff(controls, axis=1) * (members[:, 1:] + members[:, :-1]) / 2).sum(axis=1)
    return np.asarray(area / (members[:, -1] * controls[:, -1]))


def _recall(curve: _Curve, rate: float) -> np.ndarray:
    allowed = rate * curve.controls[:, -1:] * (1 + 1e-12)  # 0.01 * 300 is not quite 3
    return np.asarray(np.where(curve.controls <= allowed, curve.members, 0).max(axis=1) / curve.members[:, -1])
