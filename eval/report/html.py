"""The report as one HTML page that needs nothing else: no script, no font, no picture from elsewhere.

Everything that comes from a file or a model is escaped, and the page's own policy forbids the browser to load or
execute anything, so that an extracted text cannot act, whatever it says.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.data.samples import Sample
from hf_axonn_eval.report import curves, maps, tables
from hf_axonn_eval.report.charts import Point, bar_chart, legend, line_chart
from hf_axonn_eval.report.style import STYLE
from hf_axonn_eval.report.texts import texts_section


PLOTTED = ("exact_match", "near_verbatim", "rougeL", "token_accuracy")
DRAWS = 400  # of the bootstrap of a line: it has many places
MOST_MAPS = 30
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

Runs = Mapping[str, Sequence[SampleResult]]


def html_page(
    comparison: Mapping[str, Any],
    *,
    runs: Runs | None = None,
    samples: Sequence[Sample] | None = None,
    tokenizer=None,
    examples: int = 4,
    title: str = "Extraction",
) -> str:
    """The page.

    Args:
        comparison: what `compare` returned.
        runs: the results it was made of, by name: for the curves, the maps and the texts.
        samples: what was asked: for the prefixes.
        tokenizer: to show the prefixes, and to mark what agrees token by token.
        examples: samples of each bucket whose texts are shown.
        title: heading of the page.
    """
    runs = runs or {}
    texts = runs
    runs = {name: [_without_tokens(result) for result in results] for name, results in runs.items()}
    sections: dict[str, tuple[str, Callable[[], str]]] = {
        "buckets": ("By how often it was trained on", lambda: _buckets(comparison)),
        "differences": (f"Difference from {comparison['base']}", lambda: _differences(comparison)),
        "prefix": ("By prefix length", lambda: _prefix(comparison, runs)),
        "survival": ("How long a match lasts", lambda: _survival(comparison, runs)),
        "probability": ("Probability of the suffix", lambda: _probability(runs)),
        "draws": ("Many draws", lambda: _draws(comparison, runs)),
        "membership": ("Membership", lambda: _tables(tables.membership(comparison), NOT_MEASURED["membership"])),
        "undecided": ("Undecided", lambda: _undecided(comparison)),
        "maps": ("Maps of documents", lambda: _maps(runs)),
        "texts": ("Texts", lambda: texts_section(texts, samples=samples, tokenizer=tokenizer, count=examples)),
        "provenance": ("Where the numbers come from", lambda: _provenance(comparison)),
    }
    links = "".join(f'<li><a href="#{name}">{escape(heading)}</a></li>' for name, (heading, _) in sections.items())
    body = "".join(
        f'<section id="{name}"><h2>{escape(heading)}</h2>{make()}</section>'
        for name, (heading, make) in sections.items()
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>{_note(tables.overview(comparison))}<nav><ul>{links}</ul></nav>"
        f"<main>{body}</main></body></html>\n"
    )


NOT_MEASURED = {
    "draws": "No sampler was stated, so nothing is said about drawing: extract with --sampler.",
    "membership": "No membership scores are in these results, or there is no control bucket (0) to compare with.",
    "results": "Only a summary was given. write_report(..., runs=...) draws this from the results.",
    "probability": "Probabilities were not measured: extract without --stop_early.",
    "maps": "No document was asked at several offsets. A sliding window (protocol cooper100) makes maps.",
}


def _without_tokens(result: SampleResult) -> SampleResult:
    """What the curves need of a result: 100,000 of them fit into memory, with their tokens and texts they may not."""
    return replace(result, logprobs=None, hits=None, generated=None, generated_text=None, suffix_text=None)


def _buckets(comparison: Mapping[str, Any]) -> str:
    names, buckets = list(comparison["runs"]), tables.buckets(comparison)
    charts = []
    for metric in PLOTTED:
        series = {name: [_point(comparison, name, bucket, metric) for bucket in buckets] for name in names}
        charts.append(
            bar_chart(
                [f"{bucket}x" for bucket in buckets],
                series,
                title=f"{tables.title(metric)} by bucket",
                x_label="times trained on",
                y_label=tables.title(metric),
                y_high=1.0,
            )
        )
    table = _table(*tables.rows(comparison), first=len(names))
    return f"{legend(names)}{_charts(charts)}{table}{_note(tables.caption(comparison))}"


def _differences(comparison: Mapping[str, Any]) -> str:
    if not comparison["minus_base"]:
        return _note("There is one run only. Beside an untrained model one sees what the training did.")
    body = _table(*tables.difference_rows(comparison), first=len(comparison["minus_base"]))
    return body + _tables(tables.changes(comparison), "")


def _prefix(comparison: Mapping[str, Any], runs: Runs) -> str:
    if not runs:
        return _note(NOT_MEASURED["results"])
    found = _curves(comparison, runs, curves.by_prefix_length)
    body = [
        [tables.bucket_name(bucket), name, f"{point.x:g}", _interval(point)]
        for bucket, series in found.items()
        for name, points in series.items()
        for point in points
    ]
    lengths = {cells[2] for cells in body}
    charts = _lines(found, x_label="prefix tokens", y_label="verbatim", y_high=1.0) if len(lengths) > 1 else ""
    note = "" if charts else _note("All prefixes have one length.")
    return charts + note + _table(["trained on", "model", "prefix tokens", "verbatim"], body, first=len(runs))


def _survival(comparison: Mapping[str, Any], runs: Runs) -> str:
    if not runs:
        return _note(NOT_MEASURED["results"])
    found = _curves(comparison, runs, curves.survival)
    return _note(
        "Share of suffixes whose first L tokens come back word for word, by L. At the right end stands what is "
        "verbatim as a whole."
    ) + _lines(found, x_label="L, tokens", y_label="divergence point of L or more", y_high=1.0)


def _probability(runs: Runs) -> str:
    if not runs:
        return _note(NOT_MEASURED["results"])
    found = _by_bucket(runs, curves.probabilities)
    if not any(points for series in found.values() for points in series.values()):
        return _note(NOT_MEASURED["probability"])
    # nearly all samples may lie in the first bin, and beside it nothing else would be seen
    charts = {bucket: {name: points[1:] for name, points in series.items()} for bucket, series in found.items()}
    medians = _by_bucket(runs, curves.median_probability)
    body = [
        [tables.bucket_name(bucket), name, f"{points[0].y:.3f}", medians[bucket][name]]
        for bucket, series in found.items()
        for name, points in series.items()
        if points
    ]
    least = f"1e{curves.LEAST + curves.WIDTH:.0f}"
    return (
        _note(
            "Share of samples by the decimal logarithm of the probability that one draw gives the whole suffix: with "
            "the stated sampler, or else from the whole distribution at temperature 1. At 0 it is certain. What is "
            f"below {least} is in the table alone."
        )
        + _lines(charts, x_label="log10 of the probability", y_label="share of samples")
        + _table(["trained on", "model", f"below {least}, or never", "median"], body, first=len(runs))
    )


def _draws(comparison: Mapping[str, Any], runs: Runs) -> str:
    sampled = {name: [result for result in runs[name] if result.sampled_logprob is not None] for name in runs}
    sampled = {name: results for name, results in sampled.items() if results}
    if not sampled:
        return _note(NOT_MEASURED["draws"])
    parts = [
        _note(
            tables.samplers(comparison) + " A sample is (n, p)-discoverable if n draws give its suffix with "
            "probability p or more."
        )
    ]
    for p in curves.CHANCES:
        found = _curves(comparison, sampled, lambda results, p=p, **options: curves.draws(results, **options)[p])
        parts.append(f"<h3>p = {p:g}</h3>")
        parts.append(_lines(found, x_label="n, draws", y_label=f"discoverable with p = {p:g}", y_high=1.0, log=True))
    return "".join(parts) + _tables(tables.discoverability(comparison), "")


def _undecided(comparison: Mapping[str, Any]) -> str:
    return _note(
        "Samples whose two best tokens were, at some place up to the first miss, closer than rounding: another grid, "
        "batch or machine may decide them otherwise."
    ) + _tables(tables.undecided(comparison), "These results do not say how close the two best tokens were.")


def _maps(runs: Runs) -> str:
    drawn = chosen_maps(runs)
    if not drawn:
        return _note(NOT_MEASURED["maps"])
    shown = len(next(iter(drawn.values())))
    return (
        _note(
            f"{shown} documents, those first of which most comes back. The stronger the colour, the likelier a "
            "suffix: none below 1e-8, all of it at 1, in logarithms. Marks above a strip: suffixes that come back "
            "word for word."
        )
        + f'<div class="maps-box">{maps.maps_svg(drawn)}</div>'
    )


def chosen_maps(runs: Runs) -> dict[str, list[maps.DocumentMap]]:
    """Maps of at most MOST_MAPS documents by run, those of which most comes back first; {} if there are none."""
    found = {name: {one.document_id: one for one in maps.document_maps(results)} for name, results in runs.items()}
    documents = list(next(iter(found.values()), {}))
    best = {document: max(some[document].share for some in found.values()) for document in documents}
    documents = sorted(documents, key=lambda document: -best[document])[:MOST_MAPS]
    return {name: [some[document] for document in documents] for name, some in found.items()} if documents else {}


def _provenance(comparison: Mapping[str, Any]) -> str:
    parts = []
    for name, facts in tables.provenance(comparison).items():
        entries = "".join(f"<dt>{escape(key)}</dt><dd><code>{escape(fact)}</code></dd>" for key, fact in facts.items())
        parts.append(f"<div><h3>{escape(name)}</h3><dl>{entries}</dl></div>")
    if not parts:
        return _note("The records of the runs (run.json) were not given.")
    return f'<div class="provenance">{"".join(parts)}</div>'


def _curves(comparison: Mapping[str, Any], runs: Runs, function: Callable) -> dict[str, dict[str, list[Point]]]:
    options = dict(comparison["intervals"])
    options["resamples"] = min(options["resamples"], DRAWS)
    return _by_bucket(runs, lambda results: function(results, **options))


def _by_bucket(runs: Runs, function: Callable) -> dict[str, dict[str, Any]]:
    """By bucket and run, what the function makes of its results; an empty list where there are none."""
    found: dict[str, dict[str, Any]] = {}
    for bucket in sorted({result.bucket for results in runs.values() for result in results}):
        for name, results in runs.items():
            mine = [result for result in results if result.bucket == bucket]
            found.setdefault(str(bucket), {})[name] = function(mine) if mine else []
    return found


def _lines(found: Mapping[str, Mapping[str, list[Point]]], **options: Any) -> str:
    charts = [
        line_chart(
            series,
            title=f"{options['y_label']}, trained on {bucket}x",
            **options | {"y_label": f"{tables.bucket_name(bucket)}: {options['y_label']}"},
        )
        for bucket, series in found.items()
    ]
    return legend(list(next(iter(found.values())))) + _charts(charts)


def _charts(charts: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(charts)}</div>'


def _point(comparison: Mapping[str, Any], name: str, bucket: str, metric: str) -> Point | None:
    entry = tables.group(comparison["runs"][name], bucket)["metrics"].get(metric)
    return None if entry is None else Point(0, entry["mean"], entry["low"], entry["high"])


def _interval(point: Point) -> str:
    return f"{point.y:.3f}" + ("" if point.low is None else f" [{point.low:.2f}, {point.high:.2f}]")


def _tables(found: Sequence[tables.Details], otherwise: str) -> str:
    parts = [f"<h3>{escape(one.title)}</h3>{_table(one.headings, one.rows)}{_note(one.note)}" for one in found]
    return "".join(parts) or _note(otherwise)


def _table(headings: Sequence[str], body: Sequence[Sequence[str]], *, first: int = 0) -> str:
    """A table; `first`: a line above every so many rows."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    lines = []
    for place, cells in enumerate(body):
        kind = ' class="first"' if first and place and cells[0] != body[place - 1][0] else ""
        lines.append(f"<tr{kind}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>' if text else ""
