"""plot.png draws the numbers: bars as high as the means, and error bars that end where the intervals end."""

import pytest
from matplotlib.figure import Figure

from hf_axonn_eval import compare, plot
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
            result(f"d{place}", bucket=4 * (place % 2), exact_match=place in right, token_accuracy=0.1 + 0.05 * place)
            for place in range(12)
        ]

    runs = {"base": run({1}), "trained": run({1, 3, 5, 7, 2})}
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
    assert skewed >= 4, "symmetric intervals would look the same upside down"


def test_a_number_without_an_interval_has_an_error_bar_of_no_length(figure, tmp_path):
    one = [result("a", document_id="d"), result("b", document_id="d", token_accuracy=0.75)]
    plot(compare({"base": one}), tmp_path / "plot.png")
    accuracy = figure[0].axes[1]
    assert error_bars(accuracy.containers[1]) == [(0.625, 0.625)]
