"""The intervals of a bundle, and how often intervals of their kinds hold the truth in studies.

The figures are those of docs/results/coverage.md and docs/results/coverage_attack.md, which are made by a command; a
test compares them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from hf_axonn_eval.analysis.intervals import (
    BY_DOCUMENT,
    EXACT,
    FEWEST_DOCUMENTS,
    FEWEST_OF_MEAN,
    GAINED_AND_LOST,
    MEAN,
)


STUDIED = 0.95  # the confidence of the study
_PAGE, _ATTACKS = "docs/results/coverage.md", "docs/results/coverage_attack.md"
_SHARE = {"lowest": 0.953, "cases": 156, "page": _PAGE, "range": "any share, any number of documents from 2 on"}
_MEANS = (
    f"{FEWEST_OF_MEAN} documents and more, and at least five times as many as the square of the skewness of the "
    "values, which data do not prove: not means of what is rare"
)
_AUC = "AUC 0.5 to 0.999; 2 to 200 documents of members, 2 to 1,000 of controls"
STUDIES: dict[str, dict[str, Any]] = {
    EXACT: _SHARE,
    BY_DOCUMENT: _SHARE,
    GAINED_AND_LOST: {"lowest": 0.929, "cases": 144, "page": _PAGE, "range": f"{FEWEST_DOCUMENTS} documents and more"},
    MEAN: {"lowest": 0.933, "cases": 53, "page": _PAGE, "range": _MEANS},
    "auc": {"range": _AUC, "lowest": 0.959, "cases": 540, "page": _ATTACKS},
    "tpr": {"lowest": 0.935, "page": _ATTACKS, "range": "from 10 / rate independent controls on"},
}


def statement(*trees: Mapping[str, Any], confidence: float) -> dict[str, Any]:
    """State what is known of the intervals in some summaries or comparisons.

    Args:
        trees: what `summarize` and `compare` return.
        confidence: of the intervals.
    Returns:
        `confidence`; `studied`, that of the study, which says nothing of other ones; `intervals`, by kind how many
        there are (`number`), and the `range` in which they were studied, the `lowest` share that held the truth among
        how many `cases`, and the `page`; `withheld`, by reason how many numbers have none.
    """
    kinds = Counter(kind for tree in trees for kind in _kinds(tree))
    given = {kind: number for kind, number in kinds.items() if not kind.startswith("none")}
    return {
        "confidence": confidence,
        "studied": STUDIED,
        "intervals": {kind: {"number": given[kind], **STUDIES.get(kind, {"page": None})} for kind in sorted(given)},
        "withheld": {kind: kinds[kind] for kind in sorted(kinds) if kind not in given},
    }


def _kinds(tree: Any, name: str = "") -> Iterator[str]:
    if not isinstance(tree, Mapping):
        return
    if isinstance(tree.get("interval"), str):
        yield tree["interval"]
    elif {"value", "low", "high"} <= tree.keys() and (name == "auc" or name.startswith("tpr_at_")):
        none = "none: " + str(tree.get("why") or "a single document")
        yield none if tree["low"] is None else name.partition("_at_")[0]
    for key, below in tree.items():
        yield from _kinds(below, str(key))
