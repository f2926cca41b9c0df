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
    bar_chart,
    line_chart,
)


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
    # a chart is written with one decimal
    assert [float(bar.get("height")) for bar in bars] == pytest.approx([height / 4, height / 2, height], abs=0.051)
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
