"""Coverage, dropped tokens and costs in the report: the tables by hand, the map from 0 to 1, hostile names."""

import csv
import io
import re
import xml.etree.ElementTree as ElementTree
from math import inf, log, nan

import numpy as np
import pytest

from hf_axonn_eval import compare, html_page, write_report
from hf_axonn_eval.analysis.attack_cost import attack_cost
from hf_axonn_eval.analysis.coverage import FULL, SAMPLED, Book, book_coverage
from hf_axonn_eval.analysis.goldfish_tokens import TokenMasks, goldfish_tokens
from hf_axonn_eval.data.visible import visible
from hf_axonn_eval.report import attacks
from hf_axonn_eval.report.maps import PERCENT, Stretch, character_map, maps_svg
from tests.eval.report.test_html_report import HOSTILE, Page
from tests.helpers.eval_support import result


def book(name="book", *, best=(nan, 0.9, 0.004, nan), probability=SAMPLED, greedy=(False, True, False, False)):
    return Book(
        document_id=name,
        bucket=3,
        characters=1000,
        windows=7,
        greedy_windows=2,
        probability=probability,
        edges=np.array([0, 100, 350, 600, 1000]),
        best=np.array(best),
        released=np.array([0.9, 0.9, 0.9, nan]),
        greedy=np.array(greedy),
    )


BOOKS = {"base": [book(best=(nan, 0.0, 0.0, nan), greedy=(False,) * 4)], "trained": [book()]}


def run(known):
    """Ten documents of a sample with two tokens, of which the second was dropped, and q = 1/2 or 0."""
    return [
        result(
            f"s{place}",
            document_id=f"d{place}",
            bucket=4,
            hits=[True, known and place == 0],
            logprobs=[-0.1 * (place + 1), -2.0 - 0.1 * place],
            sampled_logprob=log(0.5) if known else -inf,
        )
        for place in range(12)
    ]


@pytest.fixture(scope="module")
def comparison():
    runs = {"base": run(False), "trained": run(True)}
    mask = TokenMasks({f"s{place}": 2 * place for place in range(12)}, np.array([0, 1] * 12, dtype=np.int8), {"k": 2})
    found = compare(runs)
    found["attack_cost"] = {name: attack_cost(some, tries=(1, 2), queries=(10**9,)) for name, some in runs.items()}
    found["goldfish_tokens"] = goldfish_tokens(runs, mask)
    found["coverage"] = book_coverage(BOOKS, thresholds=(0.001, 0.5))
    return found


def test_coverage_by_hand(comparison):
    table, released = attacks.coverage(comparison)
    assert table.headings[4:] == ["in a suffix", "p_z >= 0.001", "p_z >= 0.5", "greedy", "longest passage"]
    assert table.rows == [
        ["book", "base", "3x", "1,000", "50.00%", "0.00%", "0.00%", "0.00%", "0"],
        ["book", "trained", "3x", "1,000", "50.00%", "50.00%", "25.00%", "25.00%", "500"],
    ]
    assert released.rows[1] == ["book", "trained", "3x", "60.00%", "60.00%"]
    assert "by the stated sampler" in table.note and "census" in table.note


def test_coverage_without_probabilities():
    early = {"m": [book(best=(nan, -1.0, -1.0, nan), probability=None)]}
    (table,) = attacks.coverage({"coverage": book_coverage(early)})
    assert table.rows[0][4:] == ["50.00%", *["-"] * 5, "25.00%", "250"] and "not measured" in table.note
    full = {"m": [book(probability=FULL)]}
    assert "full distribution" in attacks.coverage({"coverage": book_coverage(full)})[0].note


def test_of_many_books_the_table_has_those_that_are_covered_most():
    some = [book(f"b{place}", best=(nan, 0.9 if place % 2 else 0.1, nan, nan)) for place in range(50)]
    table, released = attacks.coverage({"coverage": book_coverage({"m": some}, thresholds=(0.5,))})
    names = [cells[0] for cells in table.rows]
    assert len(names) == len(released.rows) == attacks.MOST_BOOKS and set(names) >= {f"b{n}" for n in range(1, 50, 2)}
    assert names == sorted(names, key=lambda name: int(name[1:])) and "20 documents of which less" in table.note


def test_passages_by_hand():
    (table,) = attacks.passages(BOOKS, 0.5)
    assert table.rows == [["book", "trained", "100 to 350", "250", "0.9"]]
    assert attacks.passages(BOOKS, 0.95) == []
    listed = list(csv.reader(io.StringIO(attacks.passages_csv({"a, b": BOOKS["trained"]}, (0.001, 0.5)))))
    assert listed[1:] == [
        ["a, b", "book", "3", "greedy", "100", "350", "250", "0.9"],
        ["a, b", "book", "3", "0.001", "100", "600", "500", "0.9"],
        ["a, b", "book", "3", "0.5", "100", "350", "250", "0.9"],
    ]
    early = attacks.passages_csv({"m": [book(probability=None)]}, (0.001,))
    assert early.splitlines()[1:] == ["m,book,3,greedy,100,350,250,"]


def test_only_the_longest_passages_are_in_the_table():
    many = Book(**{**vars(book()), "edges": np.arange(42) ** 2, "best": np.array([0.5, nan] * 20 + [0.5])})
    (table,) = attacks.passages({"m": [many]}, 0.1)
    lengths = [int(cells[3]) for cells in table.rows]
    assert len(lengths) == attacks.MOST_PASSAGES and lengths == sorted(lengths, reverse=True) and lengths[0] == 81


def test_tokens_by_hand(comparison):
    (table,) = attacks.goldfish(comparison)
    assert [cells[:4] for cells in table.rows[3:]] == [
        ["4x", "trained", "dropped", "1 of 12"],
        ["4x", "trained", "supervised", "12 of 12"],
        ["4x", "trained", "supervised minus dropped", ""],
    ]
    assert table.rows[3][4] == "0.083" and table.rows[4][4] == "1.000", "one decides, or all alike: no interval"
    assert table.rows[5][4] == "+0.917" and table.rows[3][5].startswith("2.550 [")
    assert table.note.startswith("Mask: k 2; 12 suffix tokens dropped, 12 supervised. In brackets: 95% intervals")


def test_costs_by_hand(comparison):
    expected, tries, each, budgets = attacks.cost(comparison)
    assert expected.rows == [
        ["4x", "base", "12 of 12", *["never"] * 4],
        ["4x", "trained", "0 of 12", *["2, 8"] * 4],
    ]
    lows = [comparison["attack_cost"]["trained"]["4"]["tries"][number]["low"] for number in ("1", "2")]
    assert tries.headings[3:] == each.headings[2:] == ["n = 1", "n = 2"] and 0.1 < lows[0] < lows[1] < 0.75
    assert tries.rows == [
        ["4x", "base", "48", "0, at least 0.0%", "0, at least 0.0%"],
        ["4x", "trained", "48", f"6, at least {lows[0]:.1%}", f"9, at least {lows[1]:.1%}"],
    ]
    assert each.rows == [["4x", "base", "-", "-"], ["4x", "trained", "8", "11"]]
    assert budgets.rows[1][:4] == ["4x", "trained", "1,000,000,000 queries", "8.3e+07"]
    assert budgets.rows[1][4].startswith("12, at least ") and budgets.rows[1][5] == "3.3e+08"
    assert "mean over documents of the share of their samples, 95% sure for all 3 numbers and budgets" in tries.note
    stricter = {**comparison, "intervals": {"confidence": 0.999}}
    assert "99.9% sure" in attacks.cost(stricter)[1].note


def test_a_map_from_0_to_1():
    drawn = character_map(book())
    assert (drawn.tokens, drawn.unit, drawn.shades, drawn.windows, drawn.extracted) == (
        1000,
        "character",
        PERCENT,
        7,
        2,
    )
    assert drawn.stretches == (Stretch(100, 350, 90),), "0.004 rounds to nothing"
    assert drawn.verbatim == ((100, 350),) and drawn.share == 0.25
    svg = ElementTree.fromstring(maps_svg({"trained": [drawn]}))
    (shade,) = [shape for shape in svg if shape.get("class") == "shade"]
    (ground,) = [shape for shape in svg if shape.get("class") == "ground"]
    assert float(shade.get("fill-opacity")) == 0.9
    scale = float(ground.get("width")) / 480  # a long document is drawn in so many places
    assert float(shade.get("x")) - float(ground.get("x")) == pytest.approx(scale * 48, abs=2 * scale)
    told = "".join(ElementTree.tostring(svg, "unicode"))
    assert "1,000 characters" in told and "characters 100 to 349" in told and "tokens" not in told


def test_a_report_without_them_says_so():
    found = Page(html_page(compare({"only": [result("a")]}))).sections
    assert not {"cost", "goldfish", "coverage"} & found.keys()
    assert all(told in found["not_measured"] for told in ("it needs a sampler", "--goldfish", "--documents"))
    assert attacks.all_attacks(compare({"only": [result("a")]})) == []


def test_names_cannot_act_and_every_table_has_its_caption(comparison, tmp_path):
    books = {f"run {HOSTILE}": [book(HOSTILE)]}
    hostile = {**comparison, "coverage": book_coverage(books, thresholds=(0.001,))}
    hostile["attack_cost"] = {f"run {HOSTILE}": comparison["attack_cost"]["trained"]}
    page = html_page(hostile, books=books)
    assert "<script" not in page and "<img" not in page
    found = Page(page)
    assert all(visible(HOSTILE) in found.sections[section] for section in ("coverage", "cost"))
    captions = re.findall(r"<table>\s*<caption>(.*?)</caption>", page)
    assert len(captions) == page.count("<table>") == len(set(captions))
    write_report(hostile, tmp_path, books=books)
    assert "&lt;script>" in (tmp_path / "report.md").read_text() and (tmp_path / "books.png").stat().st_size > 1000
    assert HOSTILE in (tmp_path / "passages.csv").read_text(encoding="utf-8").replace('""', '"')
