"""The report of a synthetic pair of runs."""

import io
import json

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from hf_axonn_eval import compare, write_report
from hf_axonn_eval.report.charts import COLOURS
from hf_axonn_eval.report.tables import report_columns, rows
from hf_axonn_eval.report.write import terminal_differences, terminal_table
from tests.helpers.eval_support import result


def run(learnt: int, *, rouge: bool = True):
    """Four documents never seen, eight seen six times; `learnt` of these come back."""
    results = []
    for place in range(12):
        bucket, known = (0, False) if place < 4 else (6, place - 4 < learnt)
        extra = {"rougeL": 1.0 if known else 0.25, "near_verbatim": known, "longest_run": 2} if rouge else {}
        results.append(
            result(f"d{place}", bucket=bucket, exact_match=known, token_accuracy=0.25 + 0.5 * known, **extra)
        )
    return results


@pytest.fixture
def comparison():
    return compare({"base": run(0), "trained|k=4": run(6)})


def test_a_line_for_each_bucket_and_run(comparison):
    headings, body = rows(comparison)
    assert headings[:5] == ["trained on", "model", "verbatim", "near-verbatim", "ROUGE-L"]
    assert [cells[:3] for cells in body] == [
        ["0x", "base", "0 of 4 [0.00, 0.49]"],
        ["0x", "trained|k=4", "0 of 4 [0.00, 0.49]"],
        ["6x", "base", "0 of 8 [0.00, 0.32]"],
        ["6x", "trained|k=4", "6 of 8 [0.41, 0.93]"],
        ["all", "base", "0 of 12 [0.00, 0.24]"],
        ["all", "trained|k=4", "6 of 12 [0.25, 0.75]"],
    ]
    rouge = headings.index("ROUGE-L")
    assert body[2][rouge].startswith("0.250 [") and body[3][rouge].startswith("0.812 [")


def test_what_was_not_measured_has_no_column():
    headings, body = rows(compare({"base": run(0, rouge=False)}))
    assert "ROUGE-L" not in headings and "verbatim" in headings and "nats per token" in headings
    headings, body = rows(compare({"base": run(0, rouge=False), "other": run(0)}))
    assert body[0][headings.index("ROUGE-L")] == "-"


def test_files(comparison, tmp_path):
    paths = write_report(comparison, tmp_path / "report")
    assert json.loads(paths["summary.json"].read_text()) == comparison
    text = paths["report.md"].read_text()
    assert "| 6x | trained\\|k=4 | 6 of 8 [0.41, 0.93] |" in text
    # the difference from the base model, paired: 6 of 8 more
    assert "| 6x | trained\\|k=4 | +0.750 [" in text
    tables = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables[:8]} == {3 + len(report_columns())}
    assert "## Verbatim against base: McNemar's test" in text
    assert "| 6x | trained\\|k=4 | 6 | 0 | 0 | 6 | 0 | 0.031 |" in text
    assert paths["report.html"].read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_plot_draws_the_numbers(comparison, tmp_path):
    image = imread(write_report(comparison, tmp_path)["plot.png"])
    assert image.shape[1] > image.shape[0] > 300
    plain = imread(write_report(compare({"base": run(0), "trained|k=4": run(0)}), tmp_path)["plot.png"])
    assert image.shape == plain.shape and not np.array_equal(image, plain)
    one_sample = compare({"base": run(0)[:1]})  # no interval to draw
    assert imread(write_report(one_sample, tmp_path)["plot.png"]).size > 0


def test_the_plot_has_the_colours_of_the_page(comparison, tmp_path):
    page = write_report(comparison, tmp_path)["report.html"].read_text(encoding="utf-8")
    assert all(f"--s{number}: {colour};" in page for number, colour in enumerate(COLOURS))
    image = (255 * imread(write_report(comparison, tmp_path)["plot.png"])[..., :3]).round().astype(int)
    for colour in COLOURS[:2]:
        asked = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
        assert (image == asked).all(axis=-1).sum() > 1000


def test_the_terminal_table_fits_into_80_characters():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal_table(compare({"base": run(0), "goldfish": run(6)})))
    text = console.export_text()
    for cell in ("6 of 8 [0.41, 0.93]", "goldfish", "0.812", "95% intervals"):
        assert cell in text
    assert "\u2026" not in text, "a cell was cut"


def test_differences_on_the_terminal():
    console = Console(width=80, record=True, file=io.StringIO())
    for table in terminal_differences(compare({"base": run(0), "goldfish": run(6)})):
        console.print(table)
    text = console.export_text()
    for cell in ("Difference from base", "+0.750", "McNemar's test", "0.031"):
        assert cell in text
    assert "\u2026" not in text, "a cell was cut"


def test_the_report_says_what_was_measured(tmp_path):
    record = {
        "identity": {"samples": 12, "samples_sha256": "ab" * 32, "model_fingerprint": "cd" * 32, "dtype": "float32"},
        "model": {"path": "runs/model"},
        "grid": "data=1,z=2,y=1,x=2",
        "device": {"type": "cpu"},
        "versions": {"torch": "2.13.0"},
    }
    comparison = compare({"base": run(0)}, records={"base": record})
    text = write_report(comparison, tmp_path)["report.md"].read_text()
    for part in ("runs/model", "grid data=1,z=2,y=1,x=2", "abababab", "cdcdcdcd", "torch 2.13.0", "12 samples"):
        assert part in text
