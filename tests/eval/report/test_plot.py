"""plot.png draws the numbers: bars as high as the means, and error bars that end where the intervals end."""

import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from hf_axonn_eval import compare, plot
from hf_axonn_eval.report.charts import COLOURS
from tests.helpers.eval_support import result


@pytest.fixture
def figure(monkeypatch):
    """The figure that `plot` saves, kept from the disk."""
    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: kept.append(figure))
    return kept


def error_bars(container):
    [lines] = container.errorbar.lines[2]
    return [(low[1], high[1]) for low, high in lines.get_segments()]


def test_error_bars_end_where_the_intervals_end(figure, tmp_path):
    def run(right):
        return [
            result(f"d{place}", bucket=4 * (place % 2), exact_match=place in right, token_accuracy=0.1 + 0.03 * place)
            for place in range(24)
        ]

    runs = {"base": run({1}), "trained": run({1, 3, 5, 7, 9, 2})}
    comparison = compare(runs)
    plot(comparison, tmp_path / "plot.png")
    verbatim, accuracy = figure[0].axes
    assert (verbatim.get_title(), accuracy.get_title()) == ("verbatim", "token accuracy")
    skewed = 0
    for axes, metric in ((verbatim, "exact_match"), (accuracy, "token_accuracy")):
        assert [container.get_label() for container in axes.containers[1::2]] == list(runs)
        for container in axes.containers[1::2]:
            summary = comparison["runs"][container.get_label()]["buckets"]
            entries = [summary[bucket]["metrics"][metric] for bucket in ("0", "4")]
            assert [bar.get_height() for bar in container] == [entry["mean"] for entry in entries]
            for drawn, entry in zip(error_bars(container), entries, strict=True):
                assert drawn == pytest.approx((entry["low"], entry["high"]))
                skewed += abs(entry["high"] + entry["low"] - 2 * entry["mean"]) > 0.05
            centres = [bar.get_x() + bar.get_width() / 2 for bar in container]
            assert [round(centre) for centre in centres] == [0, 1], "each bar stands over its bucket"
    assert skewed >= 3, "symmetric intervals would look the same upside down"


def test_0_of_n_is_a_point_with_its_whisker(figure, tmp_path):
    runs = {"base": [result("a"), result("b")], "trained": [result("a", exact_match=True), result("b")]}
    plot(compare(runs), tmp_path / "plot.png")
    verbatim = figure[0].axes[0]
    [points] = [line for line in verbatim.lines if line.get_marker() == "o"]
    [bar] = verbatim.containers[1]
    assert points.get_xydata().tolist() == [[bar.get_x() + bar.get_width() / 2, 0]] and bar.get_height() == 0
    assert points.get_color() == COLOURS[0] and error_bars(verbatim.containers[1])[0][1] > 0.8


def test_a_number_without_an_interval_has_an_error_bar_of_no_length(figure, tmp_path):
    one = [result("a", document_id="d"), result("b", document_id="d", token_accuracy=0.75)]
    plot(compare({"base": one}), tmp_path / "plot.png")
    accuracy = figure[0].axes[1]
    assert error_bars(accuracy.containers[1]) == [(0.625, 0.625)]


def test_bars_of_a_bucket_stand_beside_each_other_and_the_picture_is_labelled(monkeypatch, tmp_path):
    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: kept.append((figure, options)))
    runs = {
        name: [result(f"{place}", bucket=place % 2, rougeL=0.5 if name != "b" else None) for place in range(4)]
        for name in ("a", "b", "c")
    }
    plot(compare(runs), tmp_path / "plot.png")
    [(figure, options)] = kept
    assert options == {"dpi": 150} and figure.get_size_inches() == pytest.approx([3 * 4.2, 3.6])
    assert [axes.get_title() for axes in figure.axes] == ["verbatim", "ROUGE-L", "token accuracy"]
    for axes in figure.axes:
        assert axes.get_ylim() == (0, 1.05) and axes.get_xlabel() == "times seen, by the samples file"
        assert axes.get_xticks().tolist() == [0, 1]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["0x", "1x"]
    accuracy = [[bar.get_x() for bar in container] for container in figure.axes[2].containers[1::2]]
    wanted = [[-0.4, 0.6], [-0.4 + 0.8 / 3, 0.6 + 0.8 / 3], [-0.4 + 1.6 / 3, 0.6 + 1.6 / 3]]
    assert [x for bars in accuracy for x in bars] == pytest.approx([x for bars in wanted for x in bars])
    assert {round(bar.get_width(), 9) for container in figure.axes[2].containers[1::2] for bar in container} == {
        round(0.8 / 3, 9)
    }
    rouge = [[bar.get_x() for bar in container] for container in figure.axes[1].containers[1::2]]
    assert [len(bars) for bars in rouge] == [2, 0, 2] and rouge[2] == pytest.approx(wanted[2]), "a gap stays for b"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b", "c"]
    colours = [container[0].get_facecolor() for container in figure.axes[2].containers[1::2]]
    assert colours == [to_rgba(colour) for colour in COLOURS[:3]]


def test_more_runs_than_colours_begin_again(figure, tmp_path):
    plot(compare({f"run {number}": [result("a")] for number in range(8)}), tmp_path / "plot.png")
    colours = [container[0].get_facecolor() for container in figure[0].axes[0].containers[1::2]]
    assert len(colours) == 8 and len(set(colours)) == 6 and colours[6:] == colours[:2]
