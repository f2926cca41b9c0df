"""Show a comparison: a table on the terminal, the same in Markdown, and a plot."""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_axonn_eval.summary import METRICS, SHARES


COLUMNS = ("exact_match", "near_verbatim", "rougeL", "token_accuracy", "longest_run", "nll")
TERMINAL = ("exact_match", "rougeL", "token_accuracy", "nll")  # fits into 80 characters
PLOTTED = ("exact_match", "rougeL", "token_accuracy")
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


def write_report(comparison: Mapping[str, Any], output: str | os.PathLike) -> dict[str, Path]:
    """Write summary.json, report.md and plot.png.

    Args:
        comparison: what `compare` returned.
        output: directory; made if it is not there.
    Returns:
        The paths, by file name.
    """
    directory = Path(output)
    directory.mkdir(parents=True, exist_ok=True)
    paths = {name: directory / name for name in ("summary.json", "report.md", "plot.png")}
    paths["summary.json"].write_text(json.dumps(comparison, indent=2) + "\n", encoding="utf-8")
    paths["report.md"].write_text(markdown(comparison), encoding="utf-8")
    plot(comparison, paths["plot.png"])
    return paths


def rows(
    comparison: Mapping[str, Any], *, columns: Sequence[str] = COLUMNS, intervals: Collection[str] = METRICS
) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the table: a line for every bucket and run, runs of one bucket under each other.

    Columns that no run has are left out: without generation there is no ROUGE. Those in `intervals` show theirs.
    """
    runs = comparison["runs"]
    buckets = [*_buckets(comparison), "all"]
    columns = [metric for metric in columns if any(metric in _group(runs[name], "all")["metrics"] for name in runs)]
    body = []
    for bucket in buckets:
        for name in runs:
            group = _group(runs[name], bucket)
            cells = [_cell(group["metrics"].get(metric), interval=metric in intervals) for metric in columns]
            body.append([bucket if bucket == "all" else f"{bucket}x", name, *cells])
    return ["trained on", "model", *(TITLES[metric] for metric in columns)], body


def terminal_table(comparison: Mapping[str, Any], *, columns: Sequence[str] = TERMINAL):
    """The table for `rich.print`; narrow, so of the intervals it shows only those of shares."""
    from rich.table import Table

    headings, body = rows(comparison, columns=columns, intervals=SHARES)
    table = Table(title="Extraction", caption=_caption(comparison))
    for place, heading in enumerate(headings):
        # a cell in two lines is hard to read, a heading is not
        table.add_column(heading.replace(" ", "\n"), justify="left" if place < 2 else "right", no_wrap=True)
    for place, cells in enumerate(body):
        last_of_bucket = place + 1 == len(body) or body[place + 1][0] != cells[0]
        table.add_row(*cells, end_section=last_of_bucket)
    return table


def markdown(comparison: Mapping[str, Any], *, columns: Sequence[str] = COLUMNS) -> str:
    """The table, the differences from the base model and where the numbers come from, as Markdown."""
    headings, body = rows(comparison, columns=columns)
    lines = ["# Extraction", "", *_markdown_table(headings, body), "", _caption(comparison), ""]
    if comparison["minus_base"]:
        lines += [f"## Difference from `{comparison['base']}`, sample by sample", ""]
        lines += [*_markdown_table(*_difference_rows(comparison, columns)), ""]
    lines += _provenance(comparison)
    return "\n".join(lines)


def plot(comparison: Mapping[str, Any], path: str | os.PathLike) -> None:
    """Bars per bucket and run with intervals, one panel for each of PLOTTED that was measured."""
    # the object interface, not pyplot: no global state and no display
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = comparison["runs"]
    buckets = _buckets(comparison)
    panels = [metric for metric in PLOTTED if any(metric in _group(runs[name], "all")["metrics"] for name in runs)]
    figure = Figure(figsize=(4.2 * len(panels), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    width = 0.8 / len(runs)
    for axes, metric in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for number, name in enumerate(runs):
            entries = [_group(runs[name], bucket)["metrics"].get(metric) for bucket in buckets]
            drawn = [(place, entry) for place, entry in enumerate(entries) if entry is not None]
            places = [place + (number - (len(runs) - 1) / 2) * width for place, _ in drawn]
            means = [entry["mean"] for _, entry in drawn]
            whiskers = [[_whisker(entry, end) for _, entry in drawn] for end in ("low", "high")]
            axes.bar(places, means, width, yerr=whiskers, capsize=3, label=name)
        axes.set_title(TITLES[metric])
        axes.set_xticks(range(len(buckets)), [f"{bucket}x" for bucket in buckets])
        axes.set_xlabel("times trained on")
        axes.set_ylim(0, 1.05)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(runs))
    figure.savefig(path, dpi=150)


def _group(summary: Mapping[str, Any], bucket: str) -> Mapping[str, Any]:
    return summary["all"] if bucket == "all" else summary["buckets"][bucket]


def _buckets(comparison: Mapping[str, Any]) -> list[str]:
    return list(comparison["runs"][comparison["base"]]["buckets"])


def _whisker(entry: Mapping[str, Any], end: str) -> float:
    return 0.0 if entry[end] is None else abs(entry[end] - entry["mean"])


def _cell(entry: Mapping[str, Any] | None, *, interval: bool) -> str:
    if entry is None:
        return "-"
    mean = f"{entry['count']} of {entry['n']}" if "count" in entry else f"{entry['mean']:.3f}"
    return mean if entry["low"] is None or not interval else f"{mean} [{entry['low']:.2f}, {entry['high']:.2f}]"


def _difference_rows(comparison: Mapping[str, Any], columns: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    differences = comparison["minus_base"]
    columns = [metric for metric in columns if any(metric in run["all"] for run in differences.values())]
    body = []
    for bucket in [*_buckets(comparison), "all"]:
        for name, run in differences.items():
            cells = []
            for metric in columns:
                entry = run[bucket].get(metric)
                cell = "-" if entry is None else f"{entry['difference']:+.3f}"
                if entry is not None and entry["low"] is not None:
                    cell += f" [{entry['low']:+.2f}, {entry['high']:+.2f}]"
                cells.append(cell)
            body.append([bucket if bucket == "all" else f"{bucket}x", name, *cells])
    return ["trained on", "model", *(TITLES[metric] for metric in columns)], body


def _markdown_table(headings: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    lines = [headings, ["---"] * len(headings), *body]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def _caption(comparison: Mapping[str, Any]) -> str:
    share = comparison["intervals"]["confidence"]
    return (
        f"In brackets: {share:.0%} intervals; Wilson for shares with one sample a document, otherwise a bootstrap "
        f"over documents ({comparison['intervals']['resamples']} draws, seed {comparison['intervals']['seed']})."
    )


def _provenance(comparison: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, summary in comparison["runs"].items():
        run = summary["run"]
        if run is not None:
            identity = run["identity"]
            versions = ", ".join(f"{package} {number}" for package, number in run["versions"].items())
            lines.append(
                f"- `{name}`: {run['model'].get('path', 'a model in memory')}, "
                f"weights {identity['model_fingerprint'][:16]}, {identity['dtype']}, grid {run['grid'] or 'none'}, "
                f"{run['device']['type']}; {identity['samples']} samples, sha256 {identity['samples_sha256'][:16]}; "
                f"{versions}."
            )
    return ["## Runs", "", *lines, ""] if lines else []
