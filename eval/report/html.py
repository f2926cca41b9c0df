"""The report as one HTML page that needs nothing else: no script, no font, no picture from elsewhere.

The words of the page are in templates/page.html; the numbers, curves, maps and texts are made here. The templates
escape everything that comes from a file or a model, and the page's own policy forbids the browser to load or execute
anything, so that an extracted text cannot act, whatever it says.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hf_axonn_eval.analysis.coverage import Book
from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.data.samples import Sample
from hf_axonn_eval.data.visible import DIRECTIONS, PAGE, visible
from hf_axonn_eval.report import access, attacks, curves, maps, tables, verdict
from hf_axonn_eval.report.answer import answer
from hf_axonn_eval.report.charts import COLOURS, Point, bar_chart, grid_chart, line_chart
from hf_axonn_eval.report.documents import documents
from hf_axonn_eval.report.texts import text_examples
from hf_axonn_eval.report.words import round_mean


PLOTTED = ("exact_match", "near_verbatim", "rougeL", "token_accuracy", "extraction_strength")
MOST_MAPS = 30
LONGEST_TEXT = 1000  # tokens of a suffix among the texts
MOST_CELLS = 24  # along an axis of a grid

Runs = Mapping[str, Sequence[SampleResult]]


def read_templates(*folders: Path) -> Environment:
    """Return the templates of some folders and of this package, whose base.html pages extend."""
    environment = Environment(
        loader=FileSystemLoader([*folders, Path(__file__).parent / "templates"]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["keep_directions"] = _keep_directions
    return environment


def _keep_directions(text: str) -> str:
    """Write directions as HTML's references, which `visible` leaves alone: for texts in an element that ends them.

    Anywhere else, as in the name of a run, they would turn the numbers of a sentence round.
    """
    return re.sub(f"[{DIRECTIONS}]", lambda found: f"&#{ord(found[0])};", text)


def html_page(
    comparison: Mapping[str, Any],
    *,
    runs: Runs | None = None,
    samples: Sequence[Sample] | None = None,
    tokenizer=None,
    examples: int = 4,
    title: str | None = None,
    books: Mapping[str, Sequence[Book]] | None = None,
    offset_runs: Runs | None = None,
) -> str:
    """Render the page.

    Args:
        comparison: what `compare` returned; with entries `attack_cost`, `goldfish_tokens`, `coverage` and `proxy`
            (what the functions of these names, `book_coverage` and `split_by_proxy` return) the page has sections of
            them.
        runs: the results it was made of, by name: for the curves, the maps and the texts.
        samples: what was asked: for the prefixes.
        tokenizer: to show the prefixes, and to mark what agrees token by token.
        examples: samples of each bucket whose texts are shown.
        title: heading of the page; by default the names of the runs and models.
        books: what `books` returned, for the maps over characters and the passages.
        offset_runs: results of the same models, by the names of the runs, for the grids of prefix length and offset;
            by default `runs`.
    """
    numbers = {name: [_without_tokens(result) for result in results] for name, results in (runs or {}).items()}
    parts = {
        "prefix": _prefix(comparison, numbers),
        "offset": _offsets(comparison, numbers if offset_runs is None else offset_runs),
        "survival": _survival(comparison, numbers),
        "probability": _probability(numbers),
        "draws": _draws(comparison, numbers),
        "maps": _maps(numbers),
        "books": _books(comparison, books or {}),
        "documents": documents(runs or {}),
        "examples": text_examples(_short(runs or {}), samples=samples, tokenizer=tokenizer, count=examples),
    }
    template = read_templates().get_template("page.html")
    page = template.render(
        title=title or verdict.page_title(comparison),
        answer=answer(comparison),
        verdict=verdict,
        comparison=comparison,
        tables=tables,
        names=list(comparison["runs"]),
        colours=len(COLOURS),
        missing=_empty_sections(comparison, parts),
        has_results=bool(numbers),
        bucket_charts=_bucket_charts(comparison),
        attacks=attacks,
        access=access,
        has_prefixes=bool(samples) and tokenizer is not None,
        **parts,
    )
    return visible(page, keep=PAGE)


def _empty_sections(comparison: Mapping[str, Any], parts: Mapping[str, Any]) -> list[str]:
    """List the sections that have nothing to show; templates/page.html says why, or how it is measured."""
    contents = {
        "models": tables.models(comparison),
        "differences": comparison["minus_base"],
        "prefix": parts["prefix"],
        "offset": parts["offset"],
        "survival": parts["survival"] or tables.shorter(comparison),
        "probability": parts["probability"],
        "draws": parts["draws"]
        or tables.discoverability(comparison)
        or tables.inextractability(comparison)
        or tables.guesses(comparison),
        "near_copies": tables.near_copies(comparison),
        "cost": attacks.cost(comparison),
        "goldfish": attacks.goldfish(comparison),
        "membership": tables.membership(comparison),
        "undecided": tables.near_ties(comparison),
        "degenerate": tables.degenerate(comparison) or attacks.proxy(comparison),
        "left_out": tables.left_out(comparison),
        "coverage": parts["books"] or attacks.coverage(comparison),
        "maps": parts["maps"],
        "documents": parts["documents"],
        "texts": parts["examples"],
        "provenance": tables.provenance(comparison),
    }
    return [section for section, content in contents.items() if not content]


def _without_tokens(result: SampleResult) -> SampleResult:
    """Drop the tokens and texts of a result, with which 100,000 of them may not fit into memory."""
    return replace(result, logprobs=None, hits=None, generated=None, generated_text=None, suffix_text=None)


def _short(runs: Runs) -> Runs:
    """Return the results whose texts can be read one after the other; `documents` shows what is longer."""
    return {name: [one for one in results if one.suffix_length <= LONGEST_TEXT] for name, results in runs.items()}


def _bucket_charts(comparison: Mapping[str, Any]) -> list[str]:
    buckets = tables.buckets(comparison)
    return [
        bar_chart(
            [tables.bucket_name(bucket) for bucket in buckets],
            {name: [_point(comparison, name, bucket, metric) for bucket in buckets] for name in comparison["runs"]},
            title=f"{tables.title(metric)} by bucket",
            x_label="times seen, by the samples file",
            y_label=tables.title(metric),
            y_high=1.0,
        )
        for metric in PLOTTED
    ]


def _prefix(comparison: Mapping[str, Any], runs: Runs) -> dict[str, Any]:
    found = _curves(comparison, runs, curves.by_prefix_length)
    rows = [
        [tables.bucket_name(bucket), name, f"{point.x:g}", _estimate(point)]
        for bucket, series in found.items()
        for name, points in series.items()
        for point in points
    ]
    several = len({length for _, _, length, _ in rows}) > 1
    charts = _lines(found, x_label="prefix tokens", y_label="verbatim", y_high=1.0) if several else []
    return {"rows": rows, "charts": charts} if rows else {}


def _offsets(comparison: Mapping[str, Any], runs: Runs) -> dict[str, Any]:
    """Draw extraction by prefix length and offset, a grid for each bucket and run; {} without several of both.

    Offsets and lengths beyond MOST_CELLS are left out, evenly.
    """
    cells = {(result.offset, result.prefix_length) for results in runs.values() for result in results}
    offsets, lengths = (_spread(sorted(set(some))) for some in zip(*cells, strict=True)) if cells else ([], [])
    if len(offsets) < 2 or len(lengths) < 2:
        return {}
    found = _curves(comparison, runs, curves.by_offset)
    charts, rows, most = [], [], []
    for bucket, series in found.items():
        for number, (name, points) in enumerate(series.items()):
            shown = (
                {pair: point for pair, point in points.items() if pair[0] in offsets and pair[1] in lengths}
                if points
                else {}
            )
            charts.append(
                grid_chart(
                    list(map(str, offsets)),
                    list(map(str, lengths)),
                    {(str(offset), str(length)): point for (offset, length), point in shown.items()},
                    number=number,
                    name=f"{name}, {tables.bucket_name(bucket)}",
                    title=f"verbatim by prefix length and offset, {name}, seen {bucket}x by the samples file",
                    x_label="offset, tokens",
                    y_label="prefix tokens",
                )
            )
            rows += [
                [tables.bucket_name(bucket), name, str(length), str(offset), _estimate(point)]
                for (offset, length), point in sorted(shown.items(), key=lambda item: item[0][::-1])
            ]
            if shown and bucket != "0" and (best := max(shown, key=lambda pair: shown[pair].y)) and shown[best].y:
                most.append(
                    f"{name}, {tables.bucket_name(bucket)}: most from {best[1]} tokens at offset {best[0]}, "
                    f"{_estimate(shown[best])}"
                )
    left_out = len({offset for offset, _ in cells}) > len(offsets) or len({length for _, length in cells}) > len(
        lengths
    )
    return {"charts": charts, "rows": rows, "most": "; ".join(most), "left_out": left_out}


def _spread(values: Sequence[int]) -> list[int]:
    """Return at most MOST_CELLS of some numbers, evenly, the first and the last among them."""
    if len(values) <= MOST_CELLS:
        return list(values)
    return [values[round(at * (len(values) - 1) / (MOST_CELLS - 1))] for at in range(MOST_CELLS)]


def _survival(comparison: Mapping[str, Any], runs: Runs) -> list[str]:
    found = _curves(comparison, runs, curves.survival)
    return _lines(found, x_label="L, tokens", y_label="divergence point of L or more", y_high=1.0)


def _probability(runs: Runs) -> dict[str, Any]:
    found = _by_bucket(runs, curves.probabilities)
    medians = _by_bucket(runs, curves.median_probability)
    rows = [
        [tables.bucket_name(bucket), name, round_mean(points[0].y), medians[bucket][name]]
        for bucket, series in found.items()
        for name, points in series.items()
        if points
    ]
    if not rows:
        return {}
    # nearly all samples may lie in the first bin, and beside it nothing else would be seen
    charts = {bucket: {name: points[1:] for name, points in series.items()} for bucket, series in found.items()}
    return {
        "least": f"1e{curves.LEAST + curves.WIDTH:.0f}",
        "rows": rows,
        "charts": _lines(charts, x_label="log10 of the probability", y_label="share of samples"),
    }


def _draws(comparison: Mapping[str, Any], runs: Runs) -> dict[str, Any]:
    lower = _curves(comparison, runs, curves.draws)
    upper = _curves(comparison, runs, curves.draws_at_most)
    names = [name for name in runs if any(of[bucket][name] for of in (lower, upper) for bucket in of)]
    if not names:
        return {}
    charts = {
        f"{p:g}": _lines(
            {
                bucket: {name: by_name[name][p] if by_name[name] else [] for name in names}
                for bucket, by_name in lower.items()
            },
            limits={bucket: {name: of[name][p] for name in names if of[name]} for bucket, of in upper.items()},
            x_label="n, draws",
            y_label=f"discoverable with p = {p:g}",
            y_high=1,
            log=True,
        )
        for p in curves.CHANCES
    }
    return {"names": names, "charts": charts}


def _maps(runs: Runs) -> dict[str, Any]:
    drawn = chosen_maps(runs)
    return {"documents": len(next(iter(drawn.values()))), "drawing": maps.maps_svg(drawn)} if drawn else {}


def _books(comparison: Mapping[str, Any], books: Mapping[str, Sequence[Book]]) -> dict[str, Any]:
    drawn = character_maps(books)
    if not drawn:
        return {}
    count = len(next(iter(drawn.values())))
    least = comparison["coverage"]["thresholds"][0]
    return {"documents": count, "drawing": maps.maps_svg(drawn), "passages": attacks.passages(books, least)}


def character_maps(books: Mapping[str, Sequence[Book]]) -> dict[str, list[maps.DocumentMap]]:
    """Make maps over characters of at most MOST_MAPS books by run, those of which most comes back first."""
    return _choose_maps({name: [maps.character_map(book) for book in some] for name, some in books.items()})


def chosen_maps(runs: Runs) -> dict[str, list[maps.DocumentMap]]:
    """Make maps of at most MOST_MAPS documents by run, those of which most comes back first."""
    return _choose_maps({name: maps.document_maps(results) for name, results in runs.items()})


def _choose_maps(found: Mapping[str, Sequence[maps.DocumentMap]]) -> dict[str, list[maps.DocumentMap]]:
    """Choose those of the documents of which most comes back from any run; {} if there are none."""
    by_document = {name: {one.document_id: one for one in some} for name, some in found.items()}
    best = {one: max(some[one].share for some in by_document.values()) for one in next(iter(by_document.values()), {})}
    documents = sorted(best, key=lambda document: -best[document])[:MOST_MAPS]
    return {name: [some[one] for one in documents] for name, some in by_document.items()} if documents else {}


def _curves(comparison: Mapping[str, Any], runs: Runs, function: Callable) -> dict[str, dict[str, Any]]:
    return _by_bucket(runs, lambda results: function(results, **comparison["intervals"]))


def _by_bucket(runs: Runs, function: Callable) -> dict[str, dict[str, Any]]:
    """Apply the function to the results of each bucket and run; an empty list where there are none."""
    found: dict[str, dict[str, Any]] = {}
    for bucket in sorted({result.bucket for results in runs.values() for result in results}):
        for name, results in runs.items():
            some = [result for result in results if result.bucket == bucket]
            found.setdefault(str(bucket), {})[name] = function(some) if some else []
    return found


def _lines(
    found: Mapping[str, Mapping[str, list[Point]]],
    *,
    limits: Mapping[str, Mapping[str, list[Point]]] | None = None,
    **options: Any,
) -> list[str]:
    return [
        line_chart(
            series,
            limits=(limits or {}).get(bucket),
            title=f"{options['y_label']}, seen {bucket}x by the samples file",
            **options | {"y_label": f"{tables.bucket_name(bucket)}: {options['y_label']}"},
        )
        for bucket, series in found.items()
    ]


def _point(comparison: Mapping[str, Any], name: str, bucket: str, metric: str) -> Point | None:
    entry = tables.group(comparison["runs"][name], bucket)["metrics"].get(metric)
    return None if entry is None else Point(0, entry["mean"], entry["low"], entry["high"])


def _estimate(point: Point) -> str:
    return tables.estimate_text({"mean": point.y, "low": point.low, "high": point.high})
