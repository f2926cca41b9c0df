"""training_scripts/study/report/figures.py: what is drawn, and that it can be read."""

import json

import pytest
from matplotlib.colors import to_hex, to_rgba
from matplotlib.container import ErrorbarContainer
from matplotlib.image import imread
from matplotlib.text import Text

from hf_axonn_eval.data.jsonl import json_text
from hf_axonn_scripts.study.findings.findings import measure
from hf_axonn_scripts.study.findings.results import read_study
from hf_axonn_scripts.study.report import figures
from tests.study.planted import Plan, plant


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    output = tmp_path_factory.mktemp("planted")
    plan = Plan(models=("XS", "M", "XL"), apart=True, losses=("ordinary", "k2", "k4", "random"), articles=10)
    recipe = plant(plan, output)
    return measure(read_study(recipe, output))


@pytest.fixture(scope="module")
def nothing(tmp_path_factory):
    """Of a study that has not begun."""
    output = tmp_path_factory.mktemp("nothing")
    recipe = plant(Plan(models=("XS",), losses=("ordinary",), seeds=(0,)), output / "there")
    return measure(read_study(recipe, output))


NAMES = ("heat.png", "repetitions.png", "sizes.png", "slopes.png", "goldfish.png", "costs.png")


def test_every_figure_is_drawn_and_said(content, tmp_path):
    """Draw with a name that is no formula, which raises where it is taken for one."""
    said = figures.draw(json.loads(json_text(content).replace('"XS"', '"$x^$"')), tmp_path)
    assert tuple(said) == NAMES and all(text.endswith(".") and len(text) > 50 for text in said.values())
    for name in NAMES:
        picture = imread(tmp_path / name)
        assert picture.shape[0] > 400 and picture[..., :3].std() > 0.05


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_inside_the_figure_and_do_not_cover_each_other(content, name):
    figure = figures.FIGURES[name](content)
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    figure.canvas.draw()
    boxes = [(text.get_text(), text.get_window_extent()) for text in written(figure) if text.get_text().strip()]
    assert len(boxes) > 20
    edge = figure.bbox
    for said, box in boxes:
        assert edge.x0 - 1 <= box.x0 and box.x1 <= edge.x1 + 1 and edge.y0 - 1 <= box.y0 and box.y1 <= edge.y1 + 1, (
            said
        )
    covered = [
        (one, two)
        for place, (one, mine) in enumerate(boxes)
        for two, other in boxes[place + 1 :]
        if mine.overlaps(other)
    ]
    assert not covered, covered


def written(figure):
    """Every text that is drawn; an axis has more ticks than it shows."""
    legends = [*figure.legends]
    for axes in figure.axes:
        yield from (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts)
        legends += [axes.get_legend()] if axes.get_legend() else []
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            yield from (tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high)
    for legend in legends:
        yield from (legend.get_title(), *legend.get_texts())


@pytest.mark.parametrize("name", NAMES)
def test_axes_say_what_they_show_and_in_which_unit(content, name):
    figure = figures.FIGURES[name](content)
    for axes in figure.axes:
        assert "(" in axes.get_title() and ")" in axes.get_title(), axes.get_title()
        assert axes.get_xlabel() or [label.get_text() for label in axes.get_xticklabels()]


def test_maps_have_the_numbers_and_a_gap_before_what_is_apart(content):
    figure = figures.heat(content)
    axes = next(axes for axes in figure.axes if axes.get_title().startswith("given back verbatim\nordinary"))
    rows = {row["bucket"]: row for row in content["cells"] if (row["model"], row["loss"]) == ("XL", "ordinary")}
    written = [text.get_text() for text in axes.texts]
    assert len(written) == 4 * len(content["buckets"])
    assert written[8:12] == [f"{rows[bucket]['verbatim']['mean']:.2f}" for bucket in content["buckets"]]
    heights = sorted({patch.get_y() for patch in axes.patches})
    gaps = [after - before for before, after in zip(heights, heights[1:], strict=False)]
    assert gaps == pytest.approx([1, 1, 1.35])
    titles = [axes.get_title() for axes in figure.axes]
    assert sum("random" in title for title in titles) == 0  # the two with the most runs; ties by the recipe's order
    assert sum("k2 (" in title for title in titles) == sum("k4 (" in title for title in titles) == 4


def test_a_map_hatches_what_is_missing(content):
    less = {**content, "cells": [row for row in content["cells"] if (row["model"], row["bucket"]) != ("M", 4)]}
    axes = figures.heat(less).axes[1]
    assert [patch.get_hatch() for patch in axes.patches].count("//") == 1


ENDS = ("low", "high")


def test_curves_have_intervals_seeds_and_hollow_markers_for_what_is_apart(content):
    axes = figures.by_repetitions(content).axes[0]
    bars = {one.get_label(): one for one in axes.containers if isinstance(one, ErrorbarContainer)}
    assert list(bars) == ["XS", "M", "XL", "Known"]
    line, _, whiskers = bars["XL"]
    rows = [row for row in content["cells"] if (row["model"], row["loss"]) == ("XL", "ordinary") and row["bucket"]]
    assert list(line.get_xdata()) == pytest.approx([1, 4, 16], rel=0.1) and axes.get_xscale() == "log"
    assert list(line.get_ydata()) == pytest.approx([row["gain"]["mean"] for row in rows])
    drawn = [tuple(segment[:, 1]) for segment in whiskers[0].get_segments()]
    ends = [
        [row["gain"][end] if row["gain"][end] is not None else row["gain"]["mean"] for end in ENDS] for row in rows
    ]
    assert drawn == [pytest.approx(tuple(pair)) for pair in ends]  # without an interval, a point
    assert line.get_linestyle() != "None" and bars["Known"][0].get_linestyle() == "None"
    assert to_hex(bars["Known"][0].get_markerfacecolor()) == "#ffffff" != to_hex(line.get_markerfacecolor())
    seeds = [one for one in axes.lines if one.get_marker() == "." and len(one.get_xdata()) == 3]
    assert len(seeds) == 4 * 3
    looks = {(one[0].get_marker(), to_rgba(one[0].get_color())) for one in bars.values()}
    assert len(looks) == 4 == len({marker for marker, _ in looks})  # told apart without colours


def test_lines_by_size_go_through_the_mean_with_the_slope(content):
    from math import log10

    axes = figures.by_size(content).axes[0]
    row = next(
        row for row in content["slopes"] if (row["outcome"], row["loss"], row["bucket"]) == ("gain", "ordinary", 16)
    )
    fits = [one for one in axes.lines if len(one.get_xdata()) == 2 and min(one.get_xdata()) > 1]
    (left, right), (low, high) = (fits[-1].get_data()[0], fits[-1].get_data()[1])
    assert (high - low) / (log10(right) - log10(left)) == pytest.approx(row["slope"]["mean"])
    sizes = [model["parameters"] for model in content["models"] if not model["apart"]]
    assert (left, right) == (min(sizes), max(sizes))


def test_shares_below_the_axis_are_at_its_edge(content):
    axes = figures.costs(content).axes[2]
    lowest = min(min(line.get_ydata()) for line in axes.lines)
    assert lowest == figures.LEAST_SHARE and axes.get_yscale() == "log"


def test_names_are_drawn_as_they_are(content):
    strange = {**content, "models": [{**model, "model": "$x^2$\x1b"} for model in content["models"]]}
    for row in (rows := [dict(row) for row in content["cells"]]):
        row["model"] = "$x^2$\x1b"
    figure = figures.by_repetitions({**strange, "cells": rows})
    labels = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert labels[0] == "$x^2$\\x1b"


def test_nothing_to_draw(nothing, tmp_path):
    assert figures.draw(nothing, tmp_path / "report") == {}
    assert list((tmp_path / "report").iterdir()) == []
