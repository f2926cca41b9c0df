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
    """Return the member of a bundle that holds the summary of a run."""
    return f"runs/{run}/{SUMMARY}"


def compute_trees(
    runs: Mapping[str, Sequence[SampleResult]],
    *,
    base: str,
    confidence: float,
    lengths: Sequence[int],
    tries: Sequence[int],
) -> dict[str, dict[str, Any]]:
    """Compute every aggregate, interval and test of some runs, as JSON has them, by the member of the bundle.

    Args and errors are those of `compare`; of one run there is no comparison.
    """
    options: dict[str, Any] = {"confidence": confidence, "lengths": lengths, "tries": tries}
    trees = {summary_file(name): summarize(results, **options) for name, results in runs.items()}
    if len(runs) > 1:
        trees[COMPARISON] = compare(runs, base=base, **options)
    for tree in [*trees.values(), *trees.get(COMPARISON, {}).get("runs", {}).values()]:
        tree.pop("run", None)
    trees[COVERAGE] = state_coverage(trees, confidence)
    return {member: as_json(tree) for member, tree in trees.items()}


def state_coverage(trees: Mapping[str, Mapping[str, Any]], confidence: float) -> dict[str, Any]:
    """State what is known of the intervals of a bundle: those of its comparison, or without one of its summary."""
    whole = [trees[COMPARISON]] if COMPARISON in trees else [trees[member] for member in trees if member != COVERAGE]
    return statement(*whole, confidence=confidence)


def as_json(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree as it is read from a file."""
    return dict(json.loads(json_text(tree)))


def against_chance(summary: Mapping[str, Any], chance: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry `chance` of a summary: that of the run, with what follows from the numbers of the samples."""
    loss = summary["all"]["metrics"].get("nll", {}).get("mean")
    level = chance.get("chance_nll")
    if not isinstance(loss, int | float) or not isinstance(level, int | float):
        return dict(chance)
    return {**chance, "nll": loss, "no_better": loss >= level}


@contextmanager
def use_metrics(described: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Replace the registered metrics by those that a bundle names; of one that is not known here the samples carry the
    numbers.
    """
    before = dict(METRICS)
    METRICS.clear()
    METRICS.update({name: before.get(name) or _make_metric(name, entry) for name, entry in described.items()})
    try:
        yield
    finally:
        METRICS.clear()
        METRICS.update(before)


def describe_metrics(summaries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Describe the metrics that are registered, and those that summaries of the runs have besides."""
    entries = {
        name: {"mean": metric.mean, "least": str(metric.least), "most": str(metric.most)}
        for name, metric in METRICS.items()
    }
    for summary in summaries:
        for name, estimate in summary.get("all", {}).get("metrics", {}).items():
            mean = "share" if "count" in estimate else "number"
            entries.setdefault(name, {"mean": mean, "least": "-inf", "most": "inf"})
    return entries


def _make_metric(name: str, entry: Mapping[str, Any]) -> Metric:
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
    """Entries that two trees of JSON share, and those in which they differ, by path.

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


def compare_trees(claimed: Any, found: Any) -> Difference:
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
