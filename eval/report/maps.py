"""Maps of long documents: which passages come out, drawn as strips over the tokens or characters of the document.

For documents with samples at several offsets, as a sliding window gives them. A place is as dark as the likeliest of
the suffixes that cover it, in logarithms over tokens and from 0 to 1 over characters; above the strip lie marks where
a suffix is reproduced verbatim.

The idea of a map over a full book is that of Cooper et al. 2025, arXiv 2505.12546.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hf_axonn_eval.analysis.coverage import Book
from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.data.visible import PAGE, visible
from hf_axonn_eval.report.curves import decimal_logarithm
from hf_axonn_eval.report.words import write_share


SHADES = 8
FAINTEST = -8.0  # decimal logarithm of the probability that is still white
PERCENT = 100  # shades of a map from 0 to 1
_STYLE = Path(__file__).parent / "templates" / "map.css"  # of a map that stands alone
_BINS = 480  # places of a strip
_WIDTH, _STRIP, _MARK, _GAP, _HEADING = 720, 14, 5, 5, 20


class Stretch(NamedTuple):
    """Places of a document from `start` to before `end`, and how dark they are: from 1 on."""

    start: int
    end: int
    shade: int


@dataclass(frozen=True, kw_only=True)
class DocumentMap:
    """The passages of one document that one model gives back.

    Args:
        document_id: the document.
        bucket: how often it was seen, by the samples file.
        tokens: how many places the strip has; where the last suffix ends, or the characters of the document.
        windows: number of samples.
        extracted: how many of them are reproduced verbatim.
        stretches: the places that are not white.
        verbatim: (start, end) of the places within suffixes that are reproduced verbatim, joined where they touch.
        unit: what the places are: "token" or "character".
        shades: what a fully dark place has.
    """

    document_id: str
    bucket: int
    tokens: int
    windows: int
    extracted: int
    stretches: tuple[Stretch, ...]
    verbatim: tuple[tuple[int, int], ...]
    unit: str = "token"
    shades: int = SHADES

    @property
    def share(self) -> float:
        """Share of the document's places that are within suffixes that are reproduced."""
        return sum(end - start for start, end in self.verbatim) / self.tokens


def document_maps(results: Sequence[SampleResult]) -> list[DocumentMap]:
    """Make a map of every document with samples at two offsets or more, in the order in which they come."""
    by_document: dict[str, list[SampleResult]] = {}
    for result in results:
        by_document.setdefault(result.document_id, []).append(result)
    return [_map(some) for some in by_document.values() if len({result.offset for result in some}) > 1]


def character_map(book: Book) -> DocumentMap:
    """Make the map of a book over its characters: a place has the largest p_z of the suffixes that cover it, 0 to 1.

    Source: Cooper et al. 2025, arXiv 2505.12546, and its code, which draws it with colours from 0 to 1.
    """
    shades = np.rint(np.nan_to_num(book.best, nan=0.0).clip(0, 1) * PERCENT).astype(int)
    edges = book.edges.tolist()
    return DocumentMap(
        document_id=book.document_id,
        bucket=book.bucket,
        tokens=book.characters,
        windows=book.windows,
        extracted=book.greedy_windows,
        stretches=_stretches(shades, edges),
        verbatim=tuple((start, end) for start, end, _ in _stretches(book.greedy, edges)),
        unit="character",
        shades=PERCENT,
    )


def maps_svg(maps: Mapping[str, Sequence[DocumentMap]], *, alone: bool = False) -> str:
    """Draw strips of the documents, those of all runs under each other, as SVG.

    Args:
        maps: by the name of the run, of the same documents in the same order.
        alone: for a file of its own, with colours; else it takes those of the page around it.
    """
    shapes, top = [], 0.0
    for of_document in zip(*maps.values(), strict=True):
        tokens = max(drawn.tokens for drawn in of_document)
        title = f"{of_document[0].document_id} ({_seen_text(of_document[0])}, {tokens:,} {of_document[0].unit}s)"
        shapes.append(f'<text class="document" x="0" y="{top + 12:.1f}">{escape(title)}</text>')
        top += _HEADING
        for name, drawn in zip(maps, of_document, strict=True):
            shapes += _strip(name, drawn, tokens, top)
            top += _MARK + _STRIP + _GAP
        top += 8
    box = f'viewBox="0 0 {_WIDTH} {max(top, 1):.0f}"'
    if alone:
        box += ' xmlns="http://www.w3.org/2000/svg"'
        shapes.insert(0, f"<style>{_STYLE.read_text(encoding='utf-8')}</style>")
    drawing = f'<svg class="maps" {box} role="img" aria-label="maps of documents">{"".join(shapes)}</svg>'
    return visible(drawing, keep=PAGE)


def maps_png(maps: Mapping[str, Sequence[DocumentMap]], path: str | os.PathLike) -> None:
    """Draw the same as a picture; arguments as of `maps_svg`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    documents = list(zip(*maps.values(), strict=True))
    height = len(maps) * 0.28 + 0.55
    figure = Figure(figsize=(10, height * len(documents) + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, of_document in zip(figure.subplots(len(documents), 1, squeeze=False)[:, 0], documents, strict=True):
        for row, drawn in enumerate(of_document):
            for stretch in drawn.stretches:
                axes.broken_barh(
                    [(stretch.start, stretch.end - stretch.start)],
                    (row, 0.6),
                    color="#0b5394",
                    alpha=stretch.shade / drawn.shades,
                    linewidth=0,
                )
            axes.broken_barh(
                [(start, end - start) for start, end in drawn.verbatim], (row - 0.2, 0.16), color="#c00000"
            )
        title = visible(f"{of_document[0].document_id} ({_seen_text(of_document[0])})")
        axes.set_title(title, fontsize=9, loc="left", parse_math=False)
        axes.set_yticks(
            [row + 0.3 for row in range(len(maps))],
            [visible(_short(name)) for name in maps],
            fontsize=8,
            parse_math=False,
        )
        axes.set_xlim(0, max(drawn.tokens for drawn in of_document))
        axes.set_ylim(len(maps), -0.4)
        axes.tick_params(labelsize=8)
    axes.set_xlabel(documents[-1][0].unit, fontsize=8)
    figure.savefig(path, dpi=150)


def _map(results: Sequence[SampleResult]) -> DocumentMap:
    windows = [(result.offset + result.prefix_length, result.suffix_length, result) for result in results]
    # between two edges all tokens are alike: what is kept grows with the windows, not with the document
    edges = sorted({0, *(edge for start, length, _ in windows for edge in (start, start + length))})
    place = {edge: number for number, edge in enumerate(edges)}
    best = np.full(len(edges) - 1, -np.inf)
    verbatim = np.zeros(len(edges) - 1, dtype=bool)
    for start, length, result in windows:
        covered = slice(place[start], place[start + length])
        logarithm = decimal_logarithm(result)  # None after --stop_early: then only what is verbatim is known
        if logarithm is not None:
            np.maximum(best[covered], logarithm, out=best[covered])
        verbatim[covered] |= result.exact_match
    # a shade's upper bound belongs to it, also where it is a rounding error below the number
    shades = np.ceil(np.clip(1 - best / FAINTEST, 0, 1) * SHADES - 1e-9).astype(int)
    return DocumentMap(
        document_id=results[0].document_id,
        bucket=results[0].bucket,
        tokens=edges[-1],
        windows=len(results),
        extracted=sum(result.exact_match for result in results),
        stretches=_stretches(shades, edges),
        verbatim=tuple((start, end) for start, end, _ in _stretches(verbatim, edges)),
    )


def _stretches(values: np.ndarray, edges: Sequence[int]) -> tuple[Stretch, ...]:
    """Join neighbours of equal values, without those of 0; value i is that from edge i to the next."""
    ends = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    runs = [(start, end, int(values[start])) for start, end in zip(ends, ends[1:], strict=False)]
    return tuple(Stretch(edges[start], edges[end], value) for start, end, value in runs if value)


def _strip(name: str, drawn: DocumentMap, tokens: int, top: float) -> list[str]:
    left = 110
    scale = (_WIDTH - left) / tokens
    label = f"{name}: {drawn.extracted} of {drawn.windows} windows verbatim, {write_share(drawn.share, 1)} of the text"
    shapes = [
        f'<text x="{left - 8}" y="{top + _MARK + _STRIP - 3:.1f}" text-anchor="end">{escape(_short(name))}</text>',
        f'<rect class="ground" x="{left}" y="{top + _MARK:.1f}" width="{_WIDTH - left}" height="{_STRIP}">'
        f"<title>{escape(label)}</title></rect>",
    ]
    for start, end, shade in _coarse(drawn.stretches, tokens):
        shapes.append(
            f'<rect class="shade" fill-opacity="{shade / drawn.shades:.3g}" x="{left + start * scale:.2f}" '
            f'y="{top + _MARK:.1f}" width="{(end - start) * scale:.2f}" height="{_STRIP}"/>'
        )
    for start, end in drawn.verbatim:
        width = max((end - start) * scale, 1.0)  # one window of a book is narrower than a pixel, and still counts
        begin = min(left + start * scale, _WIDTH - width)
        shapes.append(
            f'<rect class="verbatim" x="{begin:.2f}" y="{top:.1f}" width="{width:.2f}" '
            f'height="{_MARK - 1}"><title>{drawn.unit}s {start} to {end - 1}</title></rect>'
        )
    return shapes


def _coarse(stretches: Sequence[Stretch], tokens: int) -> Sequence[Stretch]:
    """Reduce stretches to a strip of _BINS places: the darkest of those in one place."""
    if tokens <= _BINS:
        return stretches
    bins = np.zeros(_BINS, dtype=int)
    for start, end, shade in stretches:
        first, last = start * _BINS // tokens, (end - 1) * _BINS // tokens
        np.maximum(bins[first : last + 1], shade, out=bins[first : last + 1])
    edge = tokens / _BINS
    return _stretches(bins, [int(place * edge) for place in range(_BINS + 1)])


def _seen_text(drawn: DocumentMap) -> str:
    return f"seen {drawn.bucket}x"


def _short(name: str) -> str:
    return name if len(name) <= 16 else name[:15] + "\u2026"
