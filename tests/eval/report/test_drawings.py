"""Charts and maps as they were when somebody last looked at them, text for text, and what can be read off any of them.

The drawings are in drawings/*.svg; a browser shows them. After a change that is meant, look at them and keep them:

    python -m tests.eval.report.test_drawings

writes them anew.
"""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_axonn_eval.report.charts import COLOURS, Point, bar_chart, line_chart
from hf_axonn_eval.report.maps import DocumentMap, Stretch, maps_svg
from tests.helpers.eval_support import TENTH


DRAWINGS = Path(__file__).parent / "drawings"
SVG = "{http://www.w3.org/2000/svg}"
LABELS = {"title": "a & b", "x_label": "what is below", "y_label": "what is <above>"}
# The page gives charts their colours; here these are for whoever opens the file.
STYLE = (
    "svg{background:#fff;font:11px sans-serif}.rule{stroke:#ddd}.axis,.whisker{stroke:#000;fill:none}"
    ".line{fill:none;stroke:var(--c)}.bar,.dot{fill:var(--c)}.band{fill:var(--c);fill-opacity:.2}.tip{fill-opacity:0}"
    + "".join(f".s{number}{{--c:{colour}}}" for number, colour in enumerate(COLOURS))
)
TWO_DOCUMENTS = [
    DocumentMap(
        document_id="short & <plain>",
        bucket=3,
        tokens=40,
        windows=7,
        extracted=2,
        stretches=(Stretch(0, 5, 1), Stretch(15, 25, 8), Stretch(35, 40, 3)),
        verbatim=((15, 20), (38, 40)),
    ),
    DocumentMap(
        document_id="long",
        bucket=12,
        tokens=96_000,
        windows=900,
        extracted=31,
        stretches=(
            Stretch(0, 100, 2),
            Stretch(100, 199, 5),
            Stretch(200, 201, 4),
            Stretch(9_999, 10_001, 7),
            Stretch(95_900, 96_000, 8),
        ),
        verbatim=((0, 4), (48_000, 60_000)),
    ),
]


def known_less(drawn: DocumentMap) -> DocumentMap:
    """The same document by a run that gives back less of it, and whose last window ends earlier."""
    return DocumentMap(
        document_id=drawn.document_id,
        bucket=drawn.bucket,
        tokens=drawn.tokens // 2,
        windows=3,
        extracted=1,
        stretches=(Stretch(4, drawn.tokens // 4, 6),),
        verbatim=((4, drawn.tokens // 8),),
    )


def bars() -> str:
    """Two runs, three buckets, one bar that was not measured and one without an interval."""
    series = {
        "base": [Point(0, 0.0, 0.0, 0.24), Point(0, 0.25), Point(0, 0.1, 0.05, 0.3)],
        "trained": [Point(0, 0.5, 0.25, 0.75), None, Point(0, 1.0, 0.8, 1.0)],
    }
    return bar_chart(["0x", "4x", "<12x>"], series, y_high=1.0, **LABELS)


def many_bars() -> str:
    """More runs than colours, and an axis as high as the highest interval."""
    series = {f"run {number}": [Point(0, number / 20, number / 40, number / 16)] for number in range(1, 9)}
    return bar_chart(["0x"], series, **LABELS)


def one_bar() -> str:
    return bar_chart(["0x", "1x"], {"base": [Point(0, 3000.0), Point(0, 9000.0)]}, **LABELS)


def lines() -> str:
    """A band, a line without one that has too many points for dots, a run without points, and a single point."""
    series = {
        "band": [Point(x, x / 60, x / 90, min(1, x / 50)) for x in range(10, 60, 10)],
        "plain": [Point(x, 0.9 - x / 100) for x in range(2, 54, 4)],
        "nothing": [],
        "alone": [Point(32, 0.5, 0.4, 0.75)],
        "half known": [Point(5, 0.2, 0.1, 0.3), Point(15, 0.3)],
    }
    return line_chart(series, y_high=1.0, **LABELS)


def one_point() -> str:
    return line_chart({"a": [Point(32, 0.5, 0.25, 0.625)]}, **LABELS)


def one_point_of_factors() -> str:
    return line_chart({"a": [Point(100, 0.5, 0.25, 0.625)]}, log=True, **LABELS)


def factors() -> str:
    """A logarithmic axis, and more runs than colours."""
    series = {
        f"run {run}": [
            Point(10**place, (place + run) / 14, (place + run) / 16, (place + run) / 12) for place in range(7)
        ]
        for run in range(7)
    }
    return line_chart(series, log=True, **LABELS)


def strips() -> str:
    """A document with a place for each token, and one so long that several tokens share a place, by two runs."""
    return maps_svg(
        {"a name of 16 long": TWO_DOCUMENTS, "sixteen letters!": [known_less(one) for one in TWO_DOCUMENTS]},
        alone=True,
    )


CHARTS: dict[str, Callable[[], str]] = {
    made.__name__: made for made in (bars, many_bars, one_bar, lines, one_point, one_point_of_factors, factors)
}


def chart(name: str) -> str:
    """A chart as a file of its own; what the page has around it is checked and left out."""
    before, drawing = CHARTS[name]().removesuffix("</figure>").split("<svg ")
    assert before == '<figure class="chart"><figcaption>what is &lt;above&gt;</figcaption>'
    head, shapes = drawing.split(">", 1)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {head}><style>{STYLE}</style>{shapes}'


def text_of(name: str) -> str:
    """What the file of a drawing says, a line for each shape."""
    drawing = strips() if name == "strips" else chart(name)
    return re.sub(r"(</(?!title)\w+>|/>|<svg [^>]*>)(?!$)", r"\1\n", drawing) + "\n"


@pytest.mark.parametrize("name", [*CHARTS, "strips"])
def test_a_drawing_is_as_it_was_looked_at(name):
    assert text_of(name) == (DRAWINGS / f"{name}.svg").read_text(encoding="utf-8")


def test_no_drawing_is_left_over():
    assert sorted(path.stem for path in DRAWINGS.iterdir()) == sorted([*CHARTS, "strips"])


def boxes(name: str) -> list[tuple[str, float, float, float, float]]:
    """Of every shape its class, or "text", and left, right, top and bottom; text is as wide as letters of 6 by 11."""
    found = []
    for shape in ElementTree.fromstring(text_of(name)):
        kind = shape.get("class", "text").split()[0]
        across, down = [], []
        if shape.tag == f"{SVG}rect":
            left, top = float(shape.get("x")), float(shape.get("y"))
            across, down = [left, left + float(shape.get("width"))], [top, top + float(shape.get("height"))]
        elif shape.tag == f"{SVG}circle":
            x, y = float(shape.get("cx")), float(shape.get("cy"))
            across, down = [x], [y]
        elif shape.tag == f"{SVG}text":
            x, y, wide = float(shape.get("x")), float(shape.get("y")), 6 * len(shape.text)
            left = x - wide * {"middle": 0.5, "end": 1}.get(shape.get("text-anchor"), 0)
            across, down = [left, left + wide], [y - 11, y]
        elif shape.tag in (f"{SVG}polyline", f"{SVG}polygon"):
            pairs = [place.split(",") for place in shape.get("points").split()]
            across, down = ([float(pair[axis]) for pair in pairs] for axis in (0, 1))
        elif shape.tag == f"{SVG}path":
            for step, numbers in re.findall(r"([MHVh])([^MHVh]*)", shape.get("d")):
                values = [float(number) for number in numbers.split()]
                across += {"M": values[:1], "H": values, "h": [across[-1] + values[0]] if across else []}.get(step, [])
                down += {"M": values[1:], "V": values}.get(step, [])
        else:
            assert shape.tag == f"{SVG}style"
            continue
        found.append((kind, min(across), max(across), min(down), max(down)))
    return found


@pytest.mark.parametrize("name", [*CHARTS, "strips"])
def test_nothing_lies_outside_the_picture(name):
    _, _, width, height = map(float, ElementTree.fromstring(text_of(name)).get("viewBox").split())
    for kind, left, right, top, bottom in boxes(name):
        assert 0 <= left <= right <= width and 0 <= top <= bottom <= height, kind


@pytest.mark.parametrize(
    ("name", "runs", "groups"),
    [("bars", 2, [[0, 3], [1], [2, 4]]), ("many_bars", 8, [range(8)]), ("one_bar", 1, [[0], [1]])],
)
def test_names_stand_under_their_bars_and_bars_on_the_axis(name, runs, groups):
    drawn = boxes(name)
    (axis,) = [shape for shape in drawn if shape[0] == "axis"]
    bars_of = [[[shape for shape in drawn if shape[0] == "bar"][place] for place in group] for group in groups]
    labels = [shape for shape in drawn if shape[0] == "text" and shape[3] >= axis[4]][: len(groups)]
    room = (axis[2] - axis[1]) / len(groups)
    for place, (label, group) in enumerate(zip(labels, bars_of, strict=True)):
        middle = axis[1] + room * (place + 0.5)
        assert (label[1] + label[2]) / 2 == pytest.approx(middle, abs=TENTH)
        assert all(bar[4] == pytest.approx(axis[3], abs=2 * TENTH) for bar in group)
        assert middle - room / 2 <= min(bar[1] for bar in group) and max(bar[2] for bar in group) <= middle + room / 2
        assert all(before[2] <= after[1] for before, after in zip(group, group[1:], strict=False))
        if len(group) == runs:  # a bar is two pixels narrower than its place
            assert sum(bar[1] + bar[2] for bar in group) / (2 * runs) == pytest.approx(middle - 1, abs=2 * TENTH)


def test_whiskers_end_where_the_intervals_end():
    """The axis of this chart goes from 0 at 190 to 1 at 12; the ends of the first run are 0 and 0.24, 0.05 and 0.3."""
    ends = [(shape[3], shape[4]) for shape in boxes("bars") if shape[0] == "whisker"]
    wanted = [(0.24, 0.0), (0.3, 0.05), (0.75, 0.25), (1.0, 0.8)]
    assert ends == [tuple(pytest.approx(190 - 178 * end, abs=TENTH) for end in pair) for pair in wanted]


if __name__ == "__main__":
    DRAWINGS.mkdir(exist_ok=True)
    for drawing_name in [*CHARTS, "strips"]:
        (DRAWINGS / f"{drawing_name}.svg").write_text(text_of(drawing_name), encoding="utf-8")
