"""Small charts as SVG, written into the page itself: lines with intervals, bars with whiskers.

They have no colours of their own: shapes carry classes (s0, s1, ... for the series), and the page's style gives them
colours for light and dark. Every chart has a title for screen readers and a tooltip on every point.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from typing import NamedTuple

from hf_axonn_eval.report.words import round_end, round_mean


# Of the series on paper; templates/page.css has them, and those for dark, as --s0, --s1, ...
COLOURS = ("#7a7f87", "#0072b2", "#d55e00", "#009e73", "#aa4499", "#b58900")
SERIES = len(COLOURS)  # further series begin again
WIDTH, HEIGHT = 360, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 12, 40
_FEW = 12  # points that are drawn as points
_DARKEST = 0.45  # of a cell, whose number is still read
_WIDE, _HIGH = 22, 12  # pixels of a cell with a number in it


class Point(NamedTuple):
    """A number at a place, with both ends of its interval where it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Axis:
    """An axis: maps numbers to places on the paper.

    Args:
        low: the number at the beginning.
        high: the number at the end; larger than `low`.
        start: place of the beginning, in pixels.
        end: place of the end.
        log: whether equal distances are equal factors; both ends are positive then.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, number: float) -> float:
        """Return pixels; numbers outside are put at the nearer end."""
        from math import log

        low, high, number = (log(value) if self.log else value for value in (self.low, self.high, number))
        return self.start + (self.end - self.start) * (min(max(number, low), high) - low) / (high - low)

    def ticks(self) -> list[float]:
        """List round numbers to write beside the axis."""
        from matplotlib.ticker import LogLocator, MaxNLocator

        locator = LogLocator(numticks=7) if self.log else MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10])
        rounding = 1e-9 * (self.high - self.low)
        return [
            float(number)
            for number in locator.tick_values(self.low, self.high)
            if self.low - rounding <= number <= self.high + rounding
        ]


def line_chart(
    series: Mapping[str, Sequence[Point]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log: bool = False,
    y_high: float | None = None,
    limits: Mapping[str, Sequence[Point]] | None = None,
) -> str:
    """Draw lines through points, with a band between the ends of the intervals.

    Args:
        series: by name, in the order of the colours; points in the order of x. A series may be empty.
        title: what is drawn, for screen readers.
        x_label: under the chart.
        y_label: above the chart.
        log: a logarithmic x axis.
        y_high: end of the y axis; by default the largest number in the chart.
        limits: upper bounds of the series, by their names: dotted lines in their colours, without bands.
    """
    limits = limits or {}
    drawn = [point for points in [*series.values(), *limits.values()] for point in points]
    if not drawn:
        return ""
    places = [point.x for point in drawn]
    low, high = min(places), max(places)
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - 1, high + 1)
    top = y_high or max(max(point.y, point.high or 0) for point in drawn) or 1.0
    x = Axis(low, high, LEFT, WIDTH - RIGHT, log)
    y = Axis(0.0, top, HEIGHT - BOTTOM, TOP)
    lines = [_line(points, x, y, number) for number, points in enumerate(series.values()) if points]
    tips = [
        _tip(x.place(point.x), y.place(point.y), number, f"{name}, {_number(point.x)}: {point_text(point)}")
        for number, (name, points) in enumerate(series.items())
        for point in points
    ]
    for number, name in enumerate(series):
        if points := limits.get(name):
            along = " ".join(f"{x.place(point.x):.1f},{y.place(point.y):.1f}" for point in points)
            lines.append([f'<polyline class="limit s{number % SERIES}" points="{along}"/>'])
            tips += [
                _tip(
                    x.place(point.x), y.place(point.y), number, f"{name}, {_number(point.x)}, at most: {point.y:z.3f}"
                )
                for point in points
            ]
    return _svg([*_frame(x, y), *chain(*lines), *tips], title=title, x_label=x_label, y_label=y_label)


def bar_chart(
    groups: Sequence[str],
    series: Mapping[str, Sequence[Point | None]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    y_high: float | None = None,
) -> str:
    """Draw bars with whiskers, those of one group beside each other; a number that is 0 is a point.

    Args:
        groups: names under the chart.
        series: by name, a point for every group (its x is not used), or None where nothing was measured.
        title: as of `line_chart`, like the labels and `y_high`.
    """
    drawn = [point for points in series.values() for point in points if point is not None]
    if not drawn:
        return ""
    top = y_high or max(max(point.y, point.high or 0) for point in drawn) or 1.0
    y = Axis(0.0, top, HEIGHT - BOTTOM, TOP)
    x = Axis(0.0, len(groups), LEFT, WIDTH - RIGHT)
    room = (WIDTH - RIGHT - LEFT) / len(groups)
    width = min(0.8 * room / len(series), 36)
    shapes = _frame(None, y)
    for place, group in enumerate(groups):
        shapes.append(_text(x.place(place + 0.5), HEIGHT - BOTTOM + 16, group, "middle"))
    for number, (name, points) in enumerate(series.items()):
        for place, point in enumerate(points):
            if point is None:
                continue
            left = x.place(place + 0.5) + (number - len(series) / 2) * width
            upper, middle = y.place(point.y), left + width / 2
            label = escape(f"{name}, {groups[place]}: {point_text(point)}")
            shapes.append(
                f'<rect class="bar s{number % SERIES}" x="{left:.1f}" y="{upper:.1f}" width="{max(width - 2, 1):.1f}" '
                f'height="{y.start - upper:.1f}"><title>{label}</title></rect>'
            )
            if point.y == 0:  # a bar without height has no colour
                shapes.append(_dot(middle - 1, upper, number))
            if point.low is not None and point.high is not None:
                shapes += _whisker(middle - 1, y.place(point.low), y.place(point.high))
    return _svg(shapes, title=title, x_label=x_label, y_label=y_label)


def grid_chart(
    columns: Sequence[str],
    rows: Sequence[str],
    cells: Mapping[tuple[str, str], Point],
    *,
    number: int,
    name: str,
    title: str,
    x_label: str,
    y_label: str,
) -> str:
    """Draw a grid of cells, each as dark as its share, with the share in it; where nothing was asked it is empty.

    Args:
        columns: names under the grid.
        rows: names beside it, the first at the bottom.
        cells: by column and row a share from 0 to 1 with its interval.
        number: of the colour.
        name: of the series.
        title: what is drawn, for screen readers.
        x_label: under the chart.
        y_label: above the chart.
    """
    width, height = (WIDTH - RIGHT - LEFT) / len(columns), (HEIGHT - BOTTOM - TOP) / len(rows)
    shapes = [_text(LEFT + (at + 0.5) * width, HEIGHT - BOTTOM + 16, one, "middle") for at, one in enumerate(columns)]
    for up, row in enumerate(rows):
        top = HEIGHT - BOTTOM - (up + 1) * height
        shapes.append(_text(LEFT - 6, top + height / 2 + 4, row, "end"))
        for at, column in enumerate(columns):
            point = cells.get((column, row))
            if point is None:
                continue
            box = f'x="{LEFT + at * width:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
            label = escape(f"{name}, {x_label} {column}, {y_label} {row}: {point_text(point)}")
            shapes.append(f'<rect class="ground" {box}/>')
            shapes.append(
                f'<rect class="cell s{number % SERIES}" fill-opacity="{_DARKEST * point.y:.3f}" {box}>'
                f"<title>{label}</title></rect>"
            )
            if width >= _WIDE and height >= _HIGH:
                left = LEFT + (at + 0.5) * width
                shapes.append(_text(left, top + height / 2 + 4, f"{point.y:.2f}".removeprefix("0"), "middle"))
    return _svg(shapes, title=title, x_label=x_label, y_label=f"{name}: {y_label}")


def point_text(point: Point) -> str:
    """Write the number, and its interval in brackets."""
    digits, low, high = "z.3f", point.low, point.high
    if low is None or high is None:
        return round_mean(point.y, digits)
    return f"{round_mean(point.y, digits)} [{round_end(low, high, digits)}, {round_end(high, low, digits)}]"


def _line(points: Sequence[Point], x: Axis, y: Axis, number: int) -> list[str]:
    kind = f"s{number % SERIES}"
    along = [f"{x.place(point.x):.1f},{y.place(point.y):.1f}" for point in points]
    shapes = []
    if len(points) > 1 and all(point.low is not None and point.high is not None for point in points):
        lower = [f"{x.place(point.x):.1f},{y.place(point.low):.1f}" for point in points]
        upper = [f"{x.place(point.x):.1f},{y.place(point.high):.1f}" for point in reversed(points)]
        shapes.append(f'<polygon class="band {kind}" points="{" ".join(lower + upper)}"/>')
    elif len(points) == 1 and points[0].low is not None and points[0].high is not None:
        shapes += _whisker(x.place(points[0].x), y.place(points[0].low), y.place(points[0].high))
    shapes.append(f'<polyline class="line {kind}" points="{" ".join(along)}"/>')
    if len(points) <= _FEW:
        shapes += [_dot(x.place(point.x), y.place(point.y), number) for point in points]
    return shapes


def _dot(x: float, y: float, number: int) -> str:
    return f'<circle class="dot s{number % SERIES}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'


def _tip(x: float, y: float, number: int, text: str) -> str:
    kind = f"tip s{number % SERIES}"
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{escape(text)}</title></circle>'


def _whisker(x: float, low: float, high: float) -> list[str]:
    ends = "".join(f"M{x - 3:.1f} {end:.1f}h6" for end in (low, high))
    return [f'<path class="whisker" d="M{x:.1f} {low:.1f}V{high:.1f}{ends}"/>']


def _frame(x: Axis | None, y: Axis) -> list[str]:
    shapes = []
    for number in y.ticks():
        height = y.place(number)
        shapes.append(f'<path class="rule" d="M{LEFT} {height:.1f}H{WIDTH - RIGHT}"/>')
        shapes.append(_text(LEFT - 6, height + 4, _number(number), "end"))
    for number in x.ticks() if x is not None else ():
        shapes.append(_text(x.place(number), HEIGHT - BOTTOM + 16, _number(number), "middle"))
    return [*shapes, f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>']


def _svg(shapes: Sequence[str], *, title: str, x_label: str, y_label: str) -> str:
    middle = (LEFT + WIDTH - RIGHT) / 2
    return (
        f'<figure class="chart"><figcaption>{escape(y_label)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(shapes)}{_text(middle, HEIGHT - 6, x_label, 'middle')}</svg></figure>"
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _number(number: float) -> str:
    if number and abs(number) >= 10_000:
        return f"{number:.3g}".replace("e+0", "e").replace("e+", "e")
    return f"{number:zg}"
