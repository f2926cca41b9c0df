"""Further tables of a comparison: each tells one thing, and is left out where that was not measured."""

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any, NamedTuple

from hf_axonn_eval.report.tables import bucket_name, buckets, estimate_text, group, title


class Details(NamedTuple):
    """A table with a heading, and a line below it."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    note: str = ""


ATTACKS = {
    "loss": "loss",
    "zlib": "zlib",
    "min_k": "Min-K%",
    "min_k_plus_plus": "Min-K%++",
    "reference": "reference",
}


def all_details(comparison: Mapping[str, Any]) -> list[Details]:
    """All of them, in the order of a report."""
    makers = (changes, shorter, discoverability, membership, undecided, degenerate)
    return [details for make in makers for details in make(comparison)]


def changes(comparison: Mapping[str, Any]) -> list[Details]:
    """McNemar's tests between each run and the base run, for every yes-or-no metric."""
    base = comparison["base"]
    metrics = dict.fromkeys(
        metric for run in comparison["mcnemar"].values() for group in run.values() for metric in group
    )
    found = []
    for metric in metrics:
        body = [
            [bucket_name(bucket), name, *_change(run[bucket][metric])]
            for bucket in [*buckets(comparison), "all"]
            for name, run in comparison["mcnemar"].items()
            if metric in run.get(bucket, {})
        ]
        note = (
            f"Samples that are {title(metric)} in the run and not in {base}, the other way round, and in both. p is "
            "of McNemar's exact test with a document as one trial; no correction for the number of tests."
        )
        headings = ["trained on", "model", "gained", "lost", "both", "documents gained", "documents lost", "p"]
        found.append(Details(f"{title(metric).capitalize()} against {base}: McNemar's test", headings, body, note))
    return found


def shorter(comparison: Mapping[str, Any]) -> list[Details]:
    """Exact match of suffixes cut to some lengths, where these were asked for."""
    lengths = dict.fromkeys(length for _, _, numbers in _groups(comparison) for length in numbers["exact_match_at"])
    body = [
        [bucket, name, *(estimate_text(numbers["exact_match_at"].get(length)) for length in lengths)]
        for bucket, name, numbers in _groups(comparison)
    ]
    headings = ["trained on", "model", *(f"first {length}" for length in lengths)]
    return [Details("Verbatim, suffixes cut to their first tokens", headings, body)] if lengths else []


def discoverability(comparison: Mapping[str, Any]) -> list[Details]:
    """For each p the median number of draws, and the share that each number of draws discovers."""
    told = [(bucket, name, numbers.get("discoverability")) for bucket, name, numbers in _groups(comparison)]
    told = [(bucket, name, numbers) for bucket, name, numbers in told if numbers]
    found = []
    for p in dict.fromkeys(p for _, _, numbers in told for p in numbers):
        tries = dict.fromkeys(n for _, _, numbers in told for n in numbers[p]["tries"])
        body = [
            [bucket, name, _draws(numbers[p]["median_n"]), *(estimate_text(numbers[p]["tries"].get(n)) for n in tries)]
            for bucket, name, numbers in told
        ]
        headings = ["trained on", "model", "median n", *(f"n = {int(n):,}" for n in tries)]
        found.append(Details(f"(n, {p})-discoverable", headings, body, samplers(comparison)))
    return found


def membership(comparison: Mapping[str, Any]) -> list[Details]:
    """How well each score parts what was trained on from bucket 0."""
    body, rates = [], []
    for bucket, name, numbers in _groups(comparison):
        for score, told in numbers.get("membership", {}).items():
            rates = [key for key in told if key.startswith("tpr_at_")]
            cells = [_value(told[key]) for key in ("auc", *rates)]
            body.append([bucket, name, ATTACKS.get(score, score), f"{told['members']}, {told['controls']}", *cells])
    headings = ["trained on", "model", "score", "members, controls", "AUC"]
    headings += [f"TPR at {float(rate.removeprefix('tpr_at_')):.1%} FPR" for rate in rates]
    note = (
        "AUC 0.5 is chance. With fewer controls than 1 / FPR the true positive rate is the share of members above "
        "every control. The reference score, mean log-probability of a token minus the base's, is over the "
        f"{comparison.get('reference_over', 'sample')}."
    )
    return [Details("Membership inference against bucket 0", headings, body, note)] if body else []


def undecided(comparison: Mapping[str, Any]) -> list[Details]:
    """How many samples rounding decides, and between what the number of verbatim ones lies for it."""
    body = [
        [
            bucket,
            name,
            f"{told['count']} of {told['n']}",
            f"{told['exact_match_at_least']} to {told['exact_match_at_most']}",
        ]
        for bucket, name, numbers in _groups(comparison)
        if (told := numbers.get("undecided"))
    ]
    headings = ["trained on", "model", "undecided", "verbatim, whichever way they fall"]
    return [Details("Undecided samples", headings, body)] if body else []


def degenerate(comparison: Mapping[str, Any]) -> list[Details]:
    """How many suffixes are predictable without having been seen, and the exact match of the others."""
    body = [
        [bucket, name, f"{told['count']} of {told['n']}", estimate_text(told["exact_match_of_others"])]
        for bucket, name, numbers in _groups(comparison)
        if (told := numbers.get("degenerate"))
    ]
    headings = ["trained on", "model", "degenerate", "verbatim among the others"]
    note = "A suffix that repeats itself is easily right without having been learnt."
    return [Details("Degenerate suffixes", headings, body, note)] if body else []


def samplers(comparison: Mapping[str, Any]) -> str:
    """With which samplers the runs were measured, in a sentence; empty if the records do not say."""
    stated = {}
    for name, summary in comparison["runs"].items():
        run = summary["run"] or {}
        sampler = run.get("identity", {}).get("sampler") or run.get("settings", {}).get("sampler")
        if sampler:
            stated[name] = str(sampler)
    if len(set(stated.values())) == 1:
        return f"Sampler: {next(iter(stated.values()))}."
    return "Samplers: " + "; ".join(f"{name}: {sampler}" for name, sampler in stated.items()) + "." if stated else ""


def _groups(comparison: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for bucket in [*buckets(comparison), "all"]:
        for name, summary in comparison["runs"].items():
            numbers = group(summary, bucket)
            yield bucket_name(bucket), name, {"exact_match_at": {}, **numbers}


def _change(told: Mapping[str, Any]) -> list[str]:
    counts = [str(told[key]) for key in ("gained", "lost", "both", "documents_gained", "documents_lost")]
    return [*counts, f"{told['p']:.2g}"]


def _draws(number: float | None) -> str:
    if number is None or not isfinite(number):
        return "none suffices"
    return f"{number:,.0f}" if number < 1e7 else f"{number:.1e}"


def _value(told: Mapping[str, Any]) -> str:
    return f"{told['value']:.3f}" + ("" if told["low"] is None else f" [{told['low']:.2f}, {told['high']:.2f}]")
