"""What a comparison says, as tables of text: the same for the terminal, for Markdown and for HTML."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hf_axonn_eval.analysis.summary import METRICS


COLUMNS = ("exact_match", "near_verbatim", "rougeL", "token_accuracy", "longest_run", "nll")
TITLES = {
    "exact_match": "verbatim",
    "near_verbatim": "near-verbatim",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "token_accuracy": "token accuracy",
    "free_running_accuracy": "free-running accuracy",
    "divergence_point": "divergence point (tokens)",
    "longest_run": "longest run (tokens)",
    "edit_distance": "edit distance",
    "extraction_strength": "extraction strength",
    "nll": "nats per token",
    "probability": "probability",
}


def rows(
    comparison: Mapping[str, Any], *, columns: Sequence[str] = COLUMNS, intervals: Collection[str] = METRICS
) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the table: a line for every bucket and run, runs of one bucket under each other.

    Columns that no run has are left out: without generation there is no ROUGE. Those in `intervals` show theirs.
    """
    runs = comparison["runs"]
    columns = [metric for metric in columns if any(metric in group(runs[name], "all")["metrics"] for name in runs)]
    body = []
    for bucket in [*buckets(comparison), "all"]:
        for name in runs:
            metrics = group(runs[name], bucket)["metrics"]
            cells = [estimate_text(metrics.get(metric), interval=metric in intervals) for metric in columns]
            body.append([bucket_name(bucket), name, *cells])
    return ["trained on", "model", *(title(metric) for metric in columns)], body


def difference_rows(
    comparison: Mapping[str, Any], *, columns: Sequence[str] = COLUMNS, intervals: Collection[str] = METRICS
) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the differences from the base run, sample by sample. Those in `intervals` show theirs."""
    differences = comparison["minus_base"]
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
            "weights": identity["model_fingerprint"],
            "dtype": identity["dtype"],
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


def title(metric: str) -> str:
    """The heading of a metric; one that has none is its name."""
    return TITLES.get(metric, metric)


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
