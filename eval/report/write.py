"""Show a comparison: a table on the terminal, Markdown, JSON, a plot, and one HTML page with everything."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_axonn_eval.analysis.coverage import Book
from hf_axonn_eval.analysis.table import share_names
from hf_axonn_eval.data.jsonl import json_text
from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.data.samples import Sample
from hf_axonn_eval.data.visible import visible
from hf_axonn_eval.report import access, maps, tables
from hf_axonn_eval.report.answer import answer
from hf_axonn_eval.report.attacks import all_attacks, passages_csv
from hf_axonn_eval.report.charts import COLOURS
from hf_axonn_eval.report.html import character_maps, chosen_maps, html_page
from hf_axonn_eval.report.markdown import code, plain
from hf_axonn_eval.report.markdown import table as markdown_table
from hf_axonn_eval.report.protocols import standing
from hf_axonn_eval.report.tables import all_details, changes
from hf_axonn_eval.report.verdict import cannot_show, page_title, verdicts, warnings


PLOTTED = ("exact_match", "rougeL", "token_accuracy")


def write_report(
    comparison: Mapping[str, Any],
    output: str | os.PathLike,
    *,
    runs: Mapping[str, Sequence[SampleResult]] | None = None,
    samples: Sequence[Sample] | None = None,
    tokenizer=None,
    examples: int = 4,
    title: str | None = None,
    books: Mapping[str, Sequence[Book]] | None = None,
    offset_runs: Mapping[str, Sequence[SampleResult]] | None = None,
) -> dict[str, Path]:
    """Write summary.json, report.md, report.html and plot.png, and maps.svg and maps.png where there are maps.

    With books also passages.csv, books.svg and books.png.

    Args:
        comparison: what `compare` returned; with `books` it has its `coverage`.
        output: directory; made if it is not there.
        runs: as of `html_page`, like the others. `title` is also the heading of report.md.
    Returns:
        The paths, by file name.
    """
    directory = Path(output)
    directory.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"samples": samples, "tokenizer": tokenizer, "examples": examples, "books": books}
    options["offset_runs"] = offset_runs
    texts = {"summary.json": json_text(comparison), "report.md": markdown(comparison, title=title)}
    texts["report.html"] = html_page(comparison, runs=runs, title=title, **options)
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
    plot(comparison, directory / "plot.png")
    names = [*texts, "plot.png"]
    for kind, drawn in (("maps", chosen_maps(runs or {})), ("books", character_maps(books or {}))):
        if drawn:
            (directory / f"{kind}.svg").write_text(maps.maps_svg(drawn, alone=True), encoding="utf-8")
            maps.maps_png(drawn, directory / f"{kind}.png")
            names += [f"{kind}.svg", f"{kind}.png"]
    if books:
        table = passages_csv(books, comparison["coverage"]["thresholds"])
        (directory / "passages.csv").write_text(table, encoding="utf-8", newline="")
        names.append("passages.csv")
    return {name: directory / name for name in names}


def terminal_table(comparison: Mapping[str, Any], *, columns: Sequence[str] | None = None, show_warnings: bool = True):
    """Make the table for `rich.print`; narrow, so of the intervals it shows only those of shares."""
    columns = tables.terminal_columns() if columns is None else columns
    headings, body = tables.rows(comparison, columns=columns, intervals=share_names())
    notes = [tables.caption(comparison, means=False), standing(comparison)]
    notes += warnings(comparison) if show_warnings else []
    return _rich("Extraction", headings, body, *filter(None, notes))


def terminal_differences(comparison: Mapping[str, Any], *, columns: Sequence[str] | None = None) -> list:
    """Make tables of differences from the base run and tests of them for `rich.print`, narrow as `terminal_table`."""
    columns = tables.terminal_columns() if columns is None else columns
    headings, body = tables.difference_rows(comparison, columns=columns, intervals=share_names())
    found = [_rich(f"Difference from {comparison['base']}", headings, body, tables.caption(comparison, means=False))]
    return found + [_rich(one.title, one.headings, one.rows, one.note) for one in changes(comparison)]


def markdown(comparison: Mapping[str, Any], *, columns: Sequence[str] | None = None, title: str | None = None) -> str:
    """Write verdicts, answer, tables, differences from the base model and the origin of the numbers as Markdown."""
    lines = [f"# {plain(title or page_title(comparison))}", ""]
    for warning in warnings(comparison):
        lines += [f"**Warning:** {plain(warning)}", ""]
    lines += [*(f"- {plain(verdict)}" for verdict in verdicts(comparison)), ""]
    limits = [*cannot_show(comparison), *access.limits(comparison)]
    lines += [f"What this design cannot show: {plain(' '.join(limits))}", ""]
    lines += [plain(" ".join(answer(comparison))), ""]
    lines += [*markdown_table(*tables.rows(comparison, columns=columns)), "", tables.caption(comparison), ""]
    if comparison["minus_base"]:
        lines += [f"## Difference from {code(comparison['base'])}, sample by sample", ""]
        lines += [*markdown_table(*tables.difference_rows(comparison, columns=columns)), ""]
    for found in [*all_details(comparison), *access.levels(comparison), *all_attacks(comparison)]:
        lines += [f"## {plain(found.title)}", "", *markdown_table(found.headings, found.rows), ""]
        lines += [plain(found.note), ""] if found.note else []
    facts = tables.provenance(comparison)
    lines += ["## Runs", ""] if facts else []
    for name, of_run in facts.items():
        lines += [f"- {code(name)}: {plain('; '.join(f'{key} {value}' for key, value in of_run.items()))}."]
    return "\n".join([*lines, ""] if facts else lines)


def plot(comparison: Mapping[str, Any], path: str | os.PathLike) -> None:
    """Draw bars per bucket and run with intervals, points where a number is 0, a panel for each of PLOTTED."""
    # the object interface, not pyplot: no global state and no display
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    runs = comparison["runs"]
    buckets = tables.buckets(comparison)
    panels = [metric for metric in PLOTTED if any(metric in runs[name]["all"]["metrics"] for name in runs)]
    figure = Figure(figsize=(4.2 * len(panels), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    width = 0.8 / len(runs)
    bars: dict[str, Any] = {}
    for axes, metric in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for number, name in enumerate(runs):
            entries = [runs[name]["buckets"][bucket]["metrics"].get(metric) for bucket in buckets]
            drawn = [(place, entry) for place, entry in enumerate(entries) if entry is not None]
            places = [place + (number - (len(runs) - 1) / 2) * width for place, _ in drawn]
            means = [entry["mean"] for _, entry in drawn]
            whiskers = [[_whisker(entry, end) for _, entry in drawn] for end in ("low", "high")]
            colour = COLOURS[number % len(COLOURS)]
            bars[name] = axes.bar(places, means, width, yerr=whiskers, capsize=3, label=name, color=colour)
            zeros = [place for place, mean in zip(places, means, strict=True) if mean == 0]
            if zeros:  # a bar without height has no colour
                axes.plot(zeros, [0] * len(zeros), "o", color=colour, clip_on=False)
        axes.set_title(visible(tables.title(metric)))
        axes.set_xticks(range(len(buckets)), [f"{bucket}x" for bucket in buckets])
        axes.set_xlabel("times seen, by the samples file")
        axes.set_ylim(0, 1.05)
    # named one by one, as otherwise a legend leaves out what begins with "_"
    figure.legend(list(bars.values()), list(map(visible, bars)), loc="outside lower center", ncols=len(runs))
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    figure.savefig(path, dpi=150)


def _whisker(entry: Mapping[str, Any], end: str) -> float:
    return 0.0 if entry[end] is None else abs(entry[end] - entry["mean"])


def _rich(title: str, headings: Sequence[str], body: Sequence[Sequence[str]], *notes: str):
    from rich.table import Table
    from rich.text import Text

    # a plain string would be markup, and the names of emoji in it pictures
    table = Table(
        title=Text(visible(title), "table.title"),
        caption=Text("\n".join(map(visible, notes)), "table.caption"),
        caption_justify="left",
    )
    for place, heading in enumerate(headings):
        # a cell in two lines is hard to read, a heading is not
        name = Text(visible(heading).replace(" ", "\n"))
        table.add_column(name, justify="left" if place < 2 else "right", no_wrap=True)
    for place, cells in enumerate(body):
        last_of_bucket = place + 1 == len(body) or body[place + 1][0] != cells[0]
        table.add_row(*(Text(visible(cell)) for cell in cells), end_section=last_of_bucket)
    return table
