"""The numbers that follow from those of the samples: computed when a bundle is made, and again when it is verified."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hf_axonn_eval.analysis.summary import compare, summarize
from hf_axonn_eval.bundle.coverage import statement
from hf_axonn_eval.data.jsonl import json_text
from hf_axonn_eval.data.results import SUMMARY, SampleResult
from hf_axonn_eval.metrics.registry import METRICS, Metric


COMPARISON, COVERAGE = "comparison.json", "coverage.json"
TOLERANCE = 1e-9  # relative: what another release of numpy or scipy, or another processor, may round otherwise
_NEAR_ZERO = 1e-12


def summary_file(run: str) -> str:
    """The member of a bundle that holds the summary of a run."""
    return f"runs/{run}/{SUMMARY}"


def computed(
    runs: Mapping[str, Sequence[SampleResult]],
    *,
    base: str,
    confidence: float,
    lengths: Sequence[int],
    tries: Sequence[int],
) -> dict[str, dict[str, Any]]:
    """Every aggregate, interval and test of some runs, as JSON has them, by the member of the bundle.

    Args:
        runs: results by the name of the run.
        base: of the runs, the one that the others are compared with.
        confidence: as of `summarize`.
        lengths: as of `summarize`.
        tries: as of `summarize`.
    Raises:
        ValueError: as of `compare`.
    """
    options: dict[str, Any] = {"confidence": confidence, "lengths": lengths, "tries": tries}
    trees = {summary_file(name): summarize(results, **options) for name, results in runs.items()}
    if len(runs) > 1:
        trees[COMPARISON] = compare(runs, base=base, **options)
    for tree in [*trees.values(), *trees.get(COMPARISON, {}).get("runs", {}).values()]:
        tree.pop("run", None)
    whole = [trees[COMPARISON]] if COMPARISON in trees else list(trees.values())
    trees[COVERAGE] = statement(*whole, confidence=confidence)
    return {member: as_json(tree) for member, tree in trees.items()}


def as_json(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A tree as it is read from a file."""
    return dict(json.loads(json_text(tree)))


def against_chance(summary: Mapping[str, Any], chance: Mapping[str, Any]) -> dict[str, Any]:
    """The entry `chance` of a summary: that of the run, with what follows from the numbers of the samples."""
    loss = summary["all"]["metrics"].get("nll", {}).get("mean")
    level = chance.get("chance_nll")
    if not isinstance(loss, int | float) or not isinstance(level, int | float):
        return dict(chance)
    return {**chance, "nll": loss, "no_better": loss >= level}


@contextmanager
def registered(described: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Meanwhile the metrics are those that a bundle names: those of its maker that are not known here, too, of which
    the samples carry the numbers, and none that its maker did not know.
    """
    before = dict(METRICS)
    METRICS.clear()
    METRICS.update({name: before.get(name) or _carried(name, entry) for name, entry in described.items()})
    try:
        yield
    finally:
        METRICS.clear()
        METRICS.update(before)


def described(summaries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The metrics: those that are registered, and those that summaries of the runs have besides."""
    entries = {
        name: {"mean": metric.mean, "least": str(metric.least), "most": str(metric.most)}
        for name, metric in METRICS.items()
    }
    for summary in summaries:
        for name, estimate in summary.get("all", {}).get("metrics", {}).items():
            mean = "share" if "count" in estimate else "number"
            entries.setdefault(name, {"mean": mean, "least": "-inf", "most": "inf"})
    return entries


def _carried(name: str, entry: Mapping[str, Any]) -> Metric:
    return Metric(
        name=name,
        title=name,
        mean="share" if entry.get("mean") == "share" else "number",
        shown_in="summary",
        inputs=(),
        function=lambda: None,  # where a sample does not carry it
        least=float(entry.get("least", "-inf")),
        most=float(entry.get("most", "inf")),
    )


@dataclass
class Difference:
    """What two trees of JSON have in common and in what they differ, by the path of the entry.

    Args:
        compared: how many entries both have.
        largest: the largest relative difference of numbers that count as equal.
        differing: entries that are not equal, with both values.
        only_claimed: entries that only the first has.
        only_computed: entries that only the second has.
    """

    compared: int = 0
    largest: float = 0.0
    differing: list[str] = field(default_factory=list)
    only_claimed: list[str] = field(default_factory=list)
    only_computed: list[str] = field(default_factory=list)


def difference(claimed: Any, found: Any) -> Difference:
    """Compare two trees of JSON. Texts, counts and yes or no must be equal; other numbers within TOLERANCE."""
    seen = Difference()
    _compare(claimed, found, "", seen)
    return seen


def _compare(claimed: Any, found: Any, path: str, seen: Difference) -> None:
    if isinstance(claimed, dict) and isinstance(found, dict):
        for key in [*claimed, *(key for key in found if key not in claimed)]:
            below = f"{path}.{key}" if path else str(key)
            if key not in found:
                seen.only_claimed.append(below)
            elif key not in claimed:
                seen.only_computed.append(below)
            else:
                _compare(claimed[key], found[key], below, seen)
        return
    if isinstance(claimed, list) and isinstance(found, list) and len(claimed) == len(found):
        for place, pair in enumerate(zip(claimed, found, strict=True)):
            _compare(*pair, f"{path}[{place}]", seen)
        return
    seen.compared += 1
    if not _equal(claimed, found, seen):
        seen.differing.append(f"{path} is {_short(claimed)}, but the samples give {_short(found)}")


def _equal(claimed: Any, found: Any, seen: Difference) -> bool:
    numbers = [type(each) in (int, float) for each in (claimed, found)]
    if not all(numbers) or (type(claimed) is int and type(found) is int):
        return type(claimed) is type(found) and bool(claimed == found)
    apart, size = abs(claimed - found), max(abs(claimed), abs(found))
    if apart > max(TOLERANCE * size, _NEAR_ZERO):
        return False
    seen.largest = max(seen.largest, apart / size if apart else 0.0)
    return True


def _short(entry: Any) -> str:
    text = repr(entry)
    return text if len(text) <= 60 else text[:60] + "..."
