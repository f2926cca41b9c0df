"""The report of a synthetic pair of runs."""

import io
import json

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from hf_axonn_eval import compare, write_report
from hf_axonn_eval.report import tables
from hf_axonn_eval.report.answer import answer
from hf_axonn_eval.report.charts import COLOURS
from hf_axonn_eval.report.html import chosen_maps
from hf_axonn_eval.report.maps import maps_svg
from hf_axonn_eval.report.tables import report_columns, rows
from hf_axonn_eval.report.verdict import cannot_show, page_title, verdicts
from hf_axonn_eval.report.write import markdown, terminal_differences, terminal_table
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
    assert headings[:5] == ["seen", "model", "verbatim", "near-verbatim", "ROUGE-L"]
    assert [cells[:3] for cells in body] == [
        ["0x", "base", "0 of 4 [0.00, 0.60]"],
        ["0x", "trained|k=4", "0 of 4 [0.00, 0.60]"],
        ["6x", "base", "0 of 8 [0.00, 0.37]"],
        ["6x", "trained|k=4", "6 of 8 [0.35, 0.97]"],
        ["all", "base", "0 of 12 [0.00, 0.26]"],
        ["all", "trained|k=4", "6 of 12 [0.21, 0.79]"],
    ]
    rouge = headings.index("ROUGE-L")
    assert body[2][rouge] == "0.250" and body[3][rouge] == "0.812", "eight documents are too few for a mean"
    assert body[-1][rouge].startswith("0.625 [")
    assert tables.caption(comparison).endswith(
        "Without brackets there is no interval: 4 documents are too few, 8 documents are too few or all documents "
        "have the same."
    )


def test_what_was_not_measured_has_no_column():
    headings, body = rows(compare({"base": run(0, rouge=False)}))
    assert "ROUGE-L" not in headings and "verbatim" in headings and "nats per token" in headings
    headings, body = rows(compare({"base": run(0, rouge=False), "other": run(0)}))
    assert body[0][headings.index("ROUGE-L")] == "-"


def test_files(comparison, tmp_path):
    paths = write_report(comparison, tmp_path / "report")
    assert json.loads(paths["summary.json"].read_text()) == comparison
    text = paths["report.md"].read_text()
    assert "| 6x | trained\\|k=4 | 6 of 8 [0.35, 0.97] |" in text
    # the difference from the base model, paired: 6 of 8 more
    assert "| 6x | trained\\|k=4 | +0.750 [" in text
    tables = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables[:8]} == {3 + len(set(report_columns()) - {"nv_recall"})}, (
        "of long texts"
    )
    assert "## Verbatim against base: McNemar's test" in text
    # twice the chance of six heads, and by Holm twice that, as near-verbatim is tested too
    assert "| 6x | trained\\|k=4 | 6 | 0 | 0 | 6, 0 | 0.031 | 0.062 |" in text
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
    for cell in ("6 of 8 [0.35, 0.97]", "goldfish", "0.812", "95% intervals"):
        assert cell in text
    assert "\u2026" not in text, "a cell was cut"


def test_differences_on_the_terminal():
    console = Console(width=80, record=True, file=io.StringIO())
    for table in terminal_differences(compare({"base": run(0), "goldfish": run(6)})):
        console.print(table)
    text = console.export_text()
    for cell in ("Difference from base", "+0.750", "McNemar's test", "0.031", "0.062"):
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


def test_the_markdown_has_a_line_between_its_parts_and_ends_with_one(comparison):
    record = {
        "identity": {"samples": 12, "samples_sha256": "ab", "model_fingerprint": "cd", "dtype": "float32"},
        "model": {}, "grid": None, "device": {"type": "cpu", "name": None}, "versions": {"torch": "2.13.0"},
    }  # fmt: skip
    with_facts = compare({"base": run(0)}, records={"base": record}, lengths=[1])
    for one in (comparison, with_facts, compare({"base": run(0)})):
        text = markdown(one)
        assert text.endswith("\n") and not text.endswith("\n\n") and "\n\n\n" not in text
        blocks = text.rstrip("\n").split("\n\n")
        opening = [
            f"# {page_title(one)}",
            "\n".join(f"- {verdict}" for verdict in verdicts(one)),
            f"What this design cannot show: {' '.join(cannot_show(one))}",
            " ".join(answer(one)),
        ]
        assert blocks[:4] == [block.replace("|", "\\|") for block in opening] and blocks[5] == tables.caption(one)
        assert all(len({line.startswith("|") for line in block.splitlines()}) == 1 for block in blocks)
        for found in tables.all_details(one):
            at = blocks.index(f"## {found.title}")
            assert len(blocks[at + 1].splitlines()) == 2 + len(found.rows)
            assert not found.note or blocks[at + 2] == found.note
    assert "## Difference" in markdown(comparison) and "## Difference" not in markdown(with_facts)
    assert "## Runs" not in markdown(comparison)
    assert markdown(with_facts).endswith(
        "## Runs\n\n- `base`: model a model in memory; weights cd; dtype float32; samples 12, sha256 ab; grid none; "
        "device cpu; level of access weights; versions torch 2.13.0.\n"
    )
    assert "Difference from `base`, sample by sample" in markdown(comparison)
    only = markdown(comparison, columns=["rougeL"]).splitlines()
    assert "| seen | model | ROUGE-L |" in only and "| --- | --- | --- |" in only


def test_a_line_is_drawn_on_the_terminal_after_each_bucket(comparison):
    table = terminal_table(comparison)
    assert [row.end_section for row in table.rows] == [False, True] * 3
    assert [column.justify for column in table.columns[:4]] == ["left", "left", "right", "right"]
    assert all(column.no_wrap for column in table.columns) and str(table.columns[0].header) == "seen"
    assert [str(cell) for cell in table.columns[0].cells] == ["0x", "0x", "6x", "6x", "all", "all"]
    assert (str(table.title), str(table.caption)) == ("Extraction", tables.caption(comparison, means=False))
    assert "Without brackets" not in str(table.caption), "of a mean the terminal shows no interval"
    differences, tests, *_ = terminal_differences(comparison)
    assert [row.end_section for row in differences.rows] == [True] * 3
    assert (str(differences.title), str(tests.title)) == (
        "Difference from base",
        "Verbatim against base: McNemar's test",
    )
    assert str(tests.caption).startswith("Samples that are verbatim in the run and not in base")
    for shown in (
        terminal_table(comparison, columns=["rougeL"]),
        terminal_differences(comparison, columns=["rougeL"])[0],
    ):
        assert [str(column.header) for column in shown.columns] == ["seen", "model", "ROUGE-L"]
    [cell] = list(terminal_table(compare({"a": run(0)[:1]}), columns=["rougeL"]).columns[2].cells)[:1]
    assert str(cell) == "0.250", "of a mean the terminal shows no interval"


def test_only_what_was_drawn_is_a_file(comparison, tmp_path):
    names = ["summary.json", "report.md", "report.html", "plot.png"]
    assert list(write_report(comparison, tmp_path / "a")) == names
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(names)
    assert (tmp_path / "a" / "summary.json").read_text() == json.dumps(comparison, indent=2) + "\n"
    runs = {
        name: [result(f"{offset}", document_id="d", offset=offset) for offset in (0, 5)] for name in ("base", "other")
    }
    paths = write_report(compare(runs), tmp_path / "b", runs=runs)
    assert list(paths) == [*names, "maps.svg", "maps.png"]
    assert paths["maps.svg"].read_text(encoding="utf-8") == maps_svg(chosen_maps(runs), alone=True)
