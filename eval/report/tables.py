"""What a comparison says, as tables of text: the same for the terminal, for Markdown and for HTML."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

from hf_axonn_eval.metrics.registry import METRICS


ATTACKS = {
    "loss": "loss",
    "zlib": "zlib",
    "min_k": "Min-K%",
    "min_k_plus_plus": "Min-K%++",
    "reference": "reference",
}


def rows(
    comparison: Mapping[str, Any], *, columns: Sequence[str] | None = None, intervals: Collection[str] = METRICS
) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the table: a line for every bucket and run, runs of one bucket under each other.

    By default those of `report_columns`. Columns that no run has are left out: without generation there is no ROUGE.
    Those in `intervals` show theirs.
    """
    runs, columns = comparison["runs"], report_columns() if columns is None else columns
    columns = [metric for metric in columns if any(metric in group(runs[name], "all")["metrics"] for name in runs)]
    body = []
    for bucket in [*buckets(comparison), "all"]:
        for name in runs:
            metrics = group(runs[name], bucket)["metrics"]
            cells = [estimate_text(metrics.get(metric), interval=metric in intervals) for metric in columns]
            body.append([bucket_name(bucket), name, *cells])
    return ["trained on", "model", *(title(metric) for metric in columns)], body


def difference_rows(
    comparison: Mapping[str, Any], *, columns: Sequence[str] | None = None, intervals: Collection[str] = METRICS
) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the differences from the base run, sample by sample; arguments as of `rows`."""
    differences, columns = comparison["minus_base"], report_columns() if columns is None else columns
    columns = [metric for metric in columns if any(metric in run["all"] for run in differences.values())]
    body = []
    for bucket in [*buckets(comparison), "all"]:
        for name, run in differences.items():
            cells = [_difference(run[bucket].get(metric), interval=metric in intervals) for metric in columns]
            body.append([bucket_name(bucket), name, *cells])
    return ["trained on", "model", *(title(metric) for metric in columns)], body


def overview(comparison: Mapping[str, Any]) -> str:
    """What was measured, in a sentence."""
    runs = comparison["runs"]
    everything, models = runs[comparison["base"]]["all"], "model" if len(runs) == 1 else "models"
    return (
        f"{len(runs)} {models} ({', '.join(runs)}), {everything['samples']:,} samples of "
        f"{everything['documents']:,} documents, {len(buckets(comparison))} buckets."
    )


def caption(comparison: Mapping[str, Any]) -> str:
    """What the brackets mean."""
    share = comparison["intervals"]["confidence"]
    return (
        f"In brackets: {share:.0%} intervals; Wilson's for shares with one sample a document, otherwise a bootstrap "
        f"over documents ({comparison['intervals']['resamples']} draws, seed {comparison['intervals']['seed']}), for "
        "shares no narrower than Wilson's."
    )


def provenance(comparison: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """For each run with a record (run.json) where its numbers come from, by what they are."""
    facts = {}
    for name, summary in comparison["runs"].items():
        run = summary["run"]
        if run is None:
            continue
        identity = run["identity"]
        facts[name] = {
            "model": str(run["model"].get("path", "a model in memory")),
            "weights": str(identity["model_fingerprint"]),
            "dtype": str(identity["dtype"]),
            "samples": f"{identity['samples']}, sha256 {identity['samples_sha256']}",
            "grid": str(run["grid"] or "none"),
            "device": ", ".join(str(value) for value in run["device"].values() if value),
            "settings": ", ".join(f"{key} {value}" for key, value in run.get("settings", {}).items()),
            "versions": ", ".join(f"{package} {number}" for package, number in run["versions"].items()),
            "command": " ".join(map(str, run.get("command", ()))),
            "started": str(run.get("started", "")),
        }
        facts[name] = {key: value for key, value in facts[name].items() if value}
    return facts


def report_columns() -> list[str]:
    """The metrics in the tables of the Markdown and HTML report."""
    return [name for name, metric in METRICS.items() if metric.shown_in in ("terminal", "report")]


def terminal_columns() -> list[str]:
    """The metrics in the table on the terminal; those that come with the package fit into 80 characters."""
    return [name for name, metric in METRICS.items() if metric.shown_in == "terminal"]


def title(metric: str) -> str:
    """The heading of a metric; one that is not registered here, such as that of another's summary, is its name."""
    return METRICS[metric].title if metric in METRICS else metric


def group(summary: Mapping[str, Any], bucket: str) -> Mapping[str, Any]:
    """The numbers of one bucket, or of "all"."""
    return summary["all"] if bucket == "all" else summary["buckets"][bucket]


def buckets(comparison: Mapping[str, Any]) -> list[str]:
    """The buckets, as text."""
    return list(comparison["runs"][comparison["base"]]["buckets"])


def bucket_name(bucket: str) -> str:
    """How often it was trained on: "12x", or "all"."""
    return bucket if bucket == "all" else f"{bucket}x"


def estimate_text(entry: Mapping[str, Any] | None, *, interval: bool = True) -> str:
    """A number of a summary: "3 of 12 [0.09, 0.53]" for a share, "0.512 [0.40, 0.61]" for a mean, "-" for None."""
    if entry is None:
        return "-"
    mean = f"{entry['count']} of {entry['n']}" if "count" in entry else f"{entry['mean']:.3f}"
    return mean if entry["low"] is None or not interval else f"{mean} [{entry['low']:.2f}, {entry['high']:.2f}]"


def _difference(entry: Mapping[str, Any] | None, *, interval: bool) -> str:
    if entry is None:
        return "-"
    ends = "" if entry["low"] is None or not interval else f" [{entry['low']:+.2f}, {entry['high']:+.2f}]"
    return f"{entry['difference']:+.3f}{ends}"


class Details(NamedTuple):
    """A table with a heading, and a line below it."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    note: str = ""


def all_details(comparison: Mapping[str, Any]) -> list[Details]:
    """All of them, in the order of a report."""
    makers = (changes, shorter, discoverability, membership, near_ties, degenerate)
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
    groups = [(bucket, name, numbers.get("discoverability")) for bucket, name, numbers in _groups(comparison)]
    groups = [(bucket, name, numbers) for bucket, name, numbers in groups if numbers]
    found = []
    for p in dict.fromkeys(p for _, _, numbers in groups for p in numbers):
        tries = dict.fromkeys(n for _, _, numbers in groups for n in numbers[p]["tries"])
        body = [
            [bucket, name, _draws(numbers[p]["median_n"]), *(estimate_text(numbers[p]["tries"].get(n)) for n in tries)]
            for bucket, name, numbers in groups
        ]
        headings = ["trained on", "model", "median n", *(f"n = {int(n):,}" for n in tries)]
        found.append(Details(f"(n, {p})-discoverable", headings, body, samplers(comparison)))
    return found


def membership(comparison: Mapping[str, Any]) -> list[Details]:
    """How well each score parts what was trained on from bucket 0."""
    body, rates = [], []
    for bucket, name, numbers in _groups(comparison):
        for score, attack in numbers.get("membership", {}).items():
            rates = [key for key in attack if key.startswith("tpr_at_")]
            cells = [_value(attack[key]) for key in ("auc", *rates)]
            body.append(
                [bucket, name, ATTACKS.get(score, score), f"{attack['members']}, {attack['controls']}", *cells]
            )
    headings = ["trained on", "model", "score", "members, controls", "AUC"]
    headings += [f"TPR at {float(rate.removeprefix('tpr_at_')):.1%} FPR" for rate in rates]
    note = (
        "AUC 0.5 is chance. With fewer controls than 1 / FPR the true positive rate is the share of members above "
        "every control. The reference score, mean log-probability of a token minus the base's, is over the "
        f"{comparison.get('reference_over', 'sample')}."
    )
    return [Details("Membership inference against bucket 0", headings, body, note)] if body else []


def near_ties(comparison: Mapping[str, Any]) -> list[Details]:
    """How many samples rounding decides, and between what the number of verbatim ones lies for it."""
    body = [
        [
            bucket,
            name,
            f"{entry['count']} of {entry['n']}",
            f"{entry['exact_match_at_least']} to {entry['exact_match_at_most']}",
        ]
        for bucket, name, numbers in _groups(comparison)
        if (entry := numbers.get("undecided"))
    ]
    headings = ["trained on", "model", "undecided", "verbatim, whichever way they fall"]
    return [Details("Undecided samples", headings, body)] if body else []


def degenerate(comparison: Mapping[str, Any]) -> list[Details]:
    """How many suffixes are predictable without having been seen, and the exact match of the others."""
    body = [
        [bucket, name, f"{entry['count']} of {entry['n']}", estimate_text(entry["exact_match_of_others"])]
        for bucket, name, numbers in _groups(comparison)
        if (entry := numbers.get("degenerate"))
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


def _change(entry: Mapping[str, Any]) -> list[str]:
    counts = [str(entry[key]) for key in ("gained", "lost", "both", "documents_gained", "documents_lost")]
    return [*counts, f"{entry['p']:.2g}"]


def _draws(number: float | None) -> str:
    if number is None or not isfinite(number):
        return "none suffices"
    return f"{number:,.0f}" if number < 1e7 else f"{number:.1e}"


def _value(entry: Mapping[str, Any]) -> str:
    return f"{entry['value']:.3f}" + ("" if entry["low"] is None else f" [{entry['low']:.2f}, {entry['high']:.2f}]")
