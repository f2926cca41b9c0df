"""Charts put numbers where they belong, and escape what they are given."""

import xml.etree.ElementTree as ElementTree

import pytest

from hf_axonn_eval.report.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Point,
    _number,
    bar_chart,
    grid_chart,
    line_chart,
    point_text,
)
from tests.helpers.eval_support import TENTH


LABELS = {"title": "t", "x_label": "x", "y_label": "y"}


def parse(chart: str) -> ElementTree.Element:
    return ElementTree.fromstring(chart)


def shapes(chart: str, kind: str) -> list[ElementTree.Element]:
    return [shape for shape in parse(chart).iter() if kind in shape.get("class", "").split()]


def test_an_axis_places_numbers():
    linear = Axis(10, 20, 0, 100)
    assert [linear.place(number) for number in (10, 15, 20)] == [0, 50, 100]
    assert [linear.place(number) for number in (0, 99)] == [0, 100], "what is outside is at the end"
    assert Axis(1, 100, 0, 200, log=True).place(10) == pytest.approx(100)
    assert linear.ticks() == [10, 12, 14, 16, 18, 20]
    assert Axis(1, 1000, 0, 1, log=True).ticks() == [1, 10, 100, 1000]


def test_a_line_goes_through_its_points():
    chart = line_chart({"a": [Point(0, 0.0, 0.0, 0.5), Point(10, 1.0, 0.5, 1.0)], "b": []}, y_high=1.0, **LABELS)
    (line,) = shapes(chart, "line")
    floor, ceiling, right = HEIGHT - BOTTOM, TOP, WIDTH - RIGHT
    assert line.get("points") == f"{LEFT}.0,{floor}.0 {right}.0,{ceiling}.0"
    (band,) = shapes(chart, "band")
    middle = (floor + ceiling) / 2
    assert band.get("points") == f"{LEFT}.0,{floor}.0 {right}.0,{middle} {right}.0,{ceiling}.0 {LEFT}.0,{middle}"
    assert len(shapes(chart, "dot")) == 2
    assert [tip[0].text for tip in shapes(chart, "tip")] == [
        "a, 0: 0.000 [0.000, 0.500]",
        "a, 10: 1.000 [0.500, 1.000]",
    ]


def test_a_single_point_has_a_whisker_and_no_interval_no_band():
    chart = line_chart({"a": [Point(32, 0.5, 0.25, 0.75)]}, y_high=1.0, **LABELS)
    assert len(shapes(chart, "whisker")) == 1 and not shapes(chart, "band")
    chart = line_chart({"a": [Point(1, 0.5), Point(100, 0.25)]}, log=True, **LABELS)
    assert not shapes(chart, "band") and not shapes(chart, "whisker")
    assert line_chart({"a": []}, **LABELS) == ""


def test_bars_stand_beside_each_other():
    chart = bar_chart(["0x", "4x"], {"a": [Point(0, 0.25), None], "b": [Point(0, 0.5), Point(0, 1, 0.5, 1)]}, **LABELS)
    bars = shapes(chart, "bar")
    height = HEIGHT - BOTTOM - TOP
    assert [float(bar.get("height")) for bar in bars] == pytest.approx([height / 4, height / 2, height], abs=TENTH)
    assert [bar.get("class") for bar in bars] == ["bar s0", "bar s1", "bar s1"]
    ends = [(float(bar.get("x")), float(bar.get("x")) + float(bar.get("width"))) for bar in bars]
    assert all(before[1] <= after[0] for before, after in zip(ends, ends[1:], strict=False))
    assert len(shapes(chart, "whisker")) == 1
    assert bar_chart(["0x"], {"a": [None]}, **LABELS) == ""


def test_names_are_escaped():
    hostile = "<script>\"&'"
    labels = {name: hostile for name in LABELS}
    charts = line_chart({hostile: [Point(0, 1)]}, **labels), bar_chart([hostile], {hostile: [Point(0, 1)]}, **labels)
    for chart in charts:
        assert "<script>" not in chart and hostile in "".join(parse(chart).itertext())


def test_what_lies_at_the_ends_of_an_axis_has_a_tick_and_what_lies_beyond_has_none():
    assert Axis(11, 19, 0, 1).ticks() == [12, 14, 16, 18]
    assert Axis(0, 0.3, 0, 1).ticks()[-1] == pytest.approx(0.3), "which comes as a rounding error more"
    assert Axis(0.1 + 0.2, 0.6, 0, 1).ticks()[0] == pytest.approx(0.3), "and here as one less"
    assert Axis(2, 500, 0, 1, log=True).ticks() == [10, 100]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"), (0.25, "0.25"), (-3, "-3"), (9999, "9999"), (10_000, "1e4"), (-10_000, "-1e4"), (12_500, "1.25e4"),
        (1e6, "1e6"), (1e12, "1e12"),
    ],
)  # fmt: skip
def test_numbers_beside_an_axis_are_short(number, text):
    assert _number(number) == text


def test_an_interval_is_told_where_both_ends_are_known():
    assert point_text(Point(0, 0.5, 0.25, 0.75)) == "0.500 [0.250, 0.750]"
    assert point_text(Point(0, 0.5, 0.0, 1.0)) == "0.500 [0.000, 1.000]"
    assert (
        point_text(Point(0, 0.5)) == point_text(Point(0, 0.5, 0.25)) == point_text(Point(0, 0.5, None, 1.0)) == "0.500"
    )


@pytest.mark.parametrize(("count", "dots"), [(11, 11), (12, 12), (13, 0)])
def test_few_points_are_drawn_as_points(count, dots):
    chart = line_chart({"a": [Point(x, x / count) for x in range(count)]}, **LABELS)
    assert len(shapes(chart, "dot")) == dots and len(shapes(chart, "tip")) == count


def test_the_axis_ends_with_the_largest_number():
    """The highest of what is drawn, intervals with it, is at the top; of nothing but zeros the axis goes to 1."""

    def tops(chart):
        return [float(bar.get("y")) for bar in shapes(chart, "bar")]

    floor = HEIGHT - BOTTOM
    assert tops(bar_chart(["0x"], {"a": [Point(0, 0.5)], "b": [Point(0, 2.0)]}, **LABELS)) == [
        pytest.approx(floor - (floor - TOP) / 4, abs=TENTH), TOP,
    ]  # fmt: skip
    assert tops(bar_chart(["0x"], {"a": [Point(0, 0.5, 0.2, 1.0)]}, **LABELS)) == [(floor + TOP) / 2]
    assert tops(bar_chart(["0x"], {"a": [Point(0, 0.0)]}, **LABELS)) == [floor]
    assert "<text" in bar_chart(["0x"], {"a": [Point(0, 0.0)]}, **LABELS) and ">1<" in bar_chart(
        ["0x"], {"a": [Point(0, 0.0)]}, **LABELS
    )
    for points, places in (
        ([Point(0, 0.5), Point(1, 2.0)], [floor - (floor - TOP) / 4, TOP]),
        ([Point(0, 0.0), Point(1, 0.5, 0.0, 1.0)], [floor, (floor + TOP) / 2]),
        ([Point(0, 0.0), Point(1, 0.0)], [floor, floor]),
    ):
        (line,) = shapes(line_chart({"a": points}, **LABELS), "line")
        assert [float(place.split(",")[1]) for place in line.get("points").split()] == pytest.approx(places, abs=TENTH)


def test_a_place_alone_is_in_the_middle():
    for options, ends in (({}, ("31", "33")), ({"log": True}, None)):
        chart = line_chart({"a": [Point(32, 0.5)]}, **options, **LABELS)
        (dot,) = shapes(chart, "dot")
        assert float(dot.get("cx")) == (LEFT + WIDTH - RIGHT) / 2
        if ends:
            assert all(f">{end}<" in chart for end in ends)


@pytest.mark.parametrize(("groups", "runs", "width"), [(1, 1, 34), (2, 2, 34), (9, 2, 11.4), (3, 9, 6.9), (30, 10, 1)])
def test_bars_are_no_wider_than_there_is_room_for(groups, runs, width):
    series = {f"run {run}": [Point(0, 1.0)] * groups for run in range(runs)}
    drawn = shapes(bar_chart(["g"] * groups, series, **LABELS), "bar")
    assert {float(bar.get("width")) for bar in drawn} == {width}
    places = sorted(float(bar.get("x")) for bar in drawn)
    assert LEFT <= places[0] and places[-1] + width <= WIDTH - RIGHT
    room = (WIDTH - RIGHT - LEFT) / groups
    of_first = places[:runs]
    middle = (of_first[0] + of_first[-1] + min(0.8 * room / runs, 36)) / 2
    assert middle == pytest.approx(LEFT + room / 2, abs=TENTH), "a group stands in the middle of its room"


def test_without_intervals_the_axis_ends_with_the_largest_number():
    """Also if all are below 1."""
    bars = shapes(bar_chart(["0x"], {"a": [Point(0, 0.5)], "b": [Point(0, 0.25, None, 0.0)]}, **LABELS), "bar")
    assert [float(bar.get("height")) for bar in bars] == [HEIGHT - BOTTOM - TOP, (HEIGHT - BOTTOM - TOP) / 2]
    (line,) = shapes(line_chart({"a": [Point(0, 0.5), Point(1, 0.25, None, 0.0)]}, **LABELS), "line")
    assert line.get("points") == f"{LEFT}.0,{TOP}.0 {WIDTH - RIGHT}.0,{(HEIGHT - BOTTOM + TOP) / 2}"


def test_names_of_a_grid_are_beside_their_cells():
    columns, rows = ["8", "16", "32"], ["0", "50"]
    cells = {(column, row): Point(0, 0.5) for column in columns for row in rows}
    chart = grid_chart(columns, rows, cells, number=0, name="exact match", **LABELS)
    texts = {text.text: text for text in parse(chart).iter() if text.tag.endswith("text")}
    boxes = shapes(chart, "cell")  # row by row, from the bottom
    for box, name in zip(boxes, columns, strict=False):  # pixels are written with one decimal
        assert float(texts[name].get("x")) == pytest.approx(float(box.get("x")) + float(box.get("width")) / 2, abs=0.1)
    for box, name in zip(boxes[:: len(columns)], rows, strict=True):
        middle = float(box.get("y")) + float(box.get("height")) / 2
        assert float(texts[name].get("y")) == pytest.approx(middle + 4, abs=0.1)  # one decimal, as above
