"""The HTML page: everything is on it, it needs nothing from elsewhere, and no text can act in it."""

import json
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from math import log
from urllib.parse import unquote

import pytest

from hf_axonn_eval import Sample, compare, html_page, write_report
from hf_axonn_eval.data.visible import visible
from hf_axonn_eval.report import html, tables
from hf_axonn_eval.report.charts import Point
from hf_axonn_eval.report.html import chosen_maps
from hf_axonn_eval.report.maps import document_maps
from tests.helpers.eval_support import result, samples, topics_tokenizer


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SECTIONS = (
    "models buckets differences prefix offset survival probability draws near_copies cost goldfish membership".split()
)
SECTIONS += "undecided degenerate left_out coverage maps documents texts provenance".split()
HOSTILE = (
    "</dd></article><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "<svg onload=document.title='owned'> '\" &amp; \u202e"
)
NOT_HERE = ("near_copies", "cost", "goldfish", "coverage", "documents")  # on the page of `everything`
VOID = {"meta", "br", "img", "link"}


class Page(HTMLParser):
    """Tags, attributes and text of each section; every tag is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.tags: set[str] = set()
        self.sections: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    @property
    def hrefs(self) -> list[str | None]:
        return [value for _, name, value in self.attributes if name == "href"]

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(tag, *attribute) for attribute in attrs]
        if tag == "section":
            self.sections[dict(attrs)["id"]] = ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "section" in self.open:
            self.sections[list(self.sections)[-1]] += data


def measured(name: str, place: int, *, known: bool):
    return result(
        f"{name}@{place}",
        document_id=name,
        offset=10 * place,
        bucket=6 if name.startswith("b") else 0,
        prefix_length=10 if place % 2 else 20,
        exact_match=known,
        divergence_point=2 if known else 1,
        token_accuracy=1.0 if known else 0.5,
        near_verbatim=known,
        rougeL=1.0 if known else 0.2,
        suffix_text=f"true {HOSTILE}",
        generated_text=f"said {HOSTILE}",
        generated=[5, 6] if known else [5, 7],
        sampled_logprob=log(0.5) if known else float("-inf"),
        membership={"loss": -0.1 * place if known else -2.0 - place, "min_k": -1.0},
        margin=0.5,
        near_tie=place == 0,
        type_token_ratio=0.3,
        zlib_ratio=0.9,
    )


RECORD = {
    "identity": {
        "samples": 16,
        "samples_sha256": "ab" * 32,
        "model_fingerprint": "cd" * 32,
        "dtype": "float32",
        "sampler": "temperature 1, top-k 40",
    },
    "model": {"path": f"runs/{HOSTILE}"},
    "grid": None,
    "device": {"type": "cpu"},
    "settings": {"batch_size": 8, "left_out": {"documents": 9, "too_short": 5}},
    "versions": {"torch": "2.13.0"},
    "command": ["extract", "--model", "x"],
}


@pytest.fixture(scope="module")
def everything():
    """Two runs in which all is measured, several windows a document, and names and texts that are attacks."""
    names = ["a1", f"a2{HOSTILE}", "b1", f"b2{HOSTILE}"]
    runs = {
        "base": [measured(name, place, known=False) for name in names for place in range(4)],
        f"trained {HOSTILE}": [measured(name, place, known=name[0] == "b") for name in names for place in range(4)],
    }
    records = {name: RECORD for name in runs}
    return compare(runs, records=records, lengths=[1]), runs


@pytest.fixture(scope="module")
def page(everything):
    comparison, runs = everything
    return html_page(comparison, runs=runs, title=HOSTILE)


def test_every_section_says_what_was_measured(page):
    found = Page(page).sections
    assert list(found) == [*(name for name in SECTIONS if name not in NOT_HERE), "not_measured"]
    assert all(Page(page).hrefs.count(f"#{section}") == 1 for section in found)
    for section, told in {
        "models": "weights",
        "buckets": "8 of 8 [",
        "differences": "McNemar's test",
        "prefix": "prefix tokens",
        "offset": "most from 20 tokens at offset 0, 1.000",
        "survival": "L, tokens",
        "probability": "log10",
        "draws": "Sampler: temperature 1, top-k 40.",
        "membership": "Min-K%",
        "undecided": "2 of 8",
        "degenerate": "Degenerate suffixes",
        "left_out": "documents that are too short",
        "maps": "4 of 4 windows verbatim",
        "texts": "all 2 tokens right",
        "provenance": "cd" * 32,
    }.items():
        assert told in found[section], section
    charts = re.findall(r'<section id="(\w+)">(.*?)</section>', page, re.DOTALL)
    counts = {name: body.count('<figure class="chart">') for name, body in charts}
    assert {name: count for name, count in counts.items() if count} == {
        "buckets": 4,  # PLOTTED; the first of these opens the page
        "prefix": 2,  # the others: one for each bucket
        "offset": 4,  # and run
        "survival": 2,
        "probability": 2,
        "draws": 4,
    }


def test_every_table_of_the_comparison_is_on_the_page(everything, page):
    """Those that Markdown has too, so that none is forgotten; each has a caption, and its headings a scope."""
    comparison, _ = everything
    captions = [unescape(caption) for caption in re.findall(r"<table>\s*<caption>(.*?)</caption>", page)]
    titles = [one.title for one in tables.all_details(comparison)]
    assert len(titles) >= 9 and set(titles) <= set(captions)
    assert page.count("<table>") == len(captions) == len(set(captions)) == len(titles) + 6 and all(captions)
    assert page.count("<th") == page.count('<th scope="col">') + page.count('<th scope="row"') + page.count("<thead")
    assert '<tr><th scope="row">0x</th>' in page and '<th scope="row">loss</th>' in page
    # Sentences in a cell break, so that the columns after them are on the page.
    assert '<td class="wraps">the distribution at every token' not in page
    assert '<th scope="row" class="wraps">the log-probability of a guessed text' in page


def test_tables_that_only_say_p_is_1_are_folded(everything, page):
    comparison, _ = everything
    folded = re.findall(r"<details><summary>(.*?)</summary>(.*?)</details>", page, re.DOTALL)
    titles = [one.title for one in tables.changes(comparison) if one.folded]
    *folded, (last, _) = [one for one in folded if not one[0].startswith("The numbers of the grids")]
    assert last == "5 sections have nothing to show, and why"
    assert [unescape(heading) for heading, _ in folded] == [f"{title}: p = 1 in every row" for title in titles]
    assert len(titles) == 2 and all("controls" in title for title in titles)
    assert all(body.count("<table>") == 1 for _, body in folded)


def test_the_page_loads_nothing_and_runs_nothing(page):
    found = Page(page)
    assert not found.tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "video", "audio"}
    for tag, name, value in found.attributes:
        assert not name.startswith("on"), (tag, name)
        assert name not in ("src", "srcset", "data", "action", "background", "style", "xlink:href")
        assert name != "href" or value.startswith("#")
    assert "url(" not in page and "@import" not in page
    assert ("meta", "http-equiv", "Content-Security-Policy") in found.attributes
    assert any(value and value.startswith("default-src 'none'") for _, name, value in found.attributes)


def test_hostile_text_is_shown_as_it_is(page):
    texts = Page(page).sections
    assert HOSTILE in texts["texts"]
    # The direction of a name would turn round what follows it.
    assert all(visible(HOSTILE) in texts[section] for section in ("buckets", "provenance", "maps"))
    assert "<script" not in page and "<img" not in page


def test_what_was_not_measured_is_said():
    comparison = compare({"only": [result("a"), result("b", bucket=2)]})
    for runs in ({"only": [result("a"), result("b", bucket=2)]}, None):
        found = Page(html_page(comparison, runs=runs)).sections
        assert list(found)[-1] == "not_measured" and all(text for text in found.values())
        missing = [name for name in SECTIONS if name not in found]
        assert len(missing) == (16 if runs else 19) and f"{len(missing)} sections" in found["not_measured"]
        for told in ("there is one run", "no sampler", "do not say", "run.json", "at several offsets", "no texts"):
            assert told in found["not_measured"], told
    assert "write_report" in found["not_measured"]


def test_prefixes_and_marks_need_samples_and_a_tokenizer():
    asked = samples()[0]
    answer = result(
        asked.sample_id,
        document_id=asked.document_id,
        bucket=asked.bucket,
        generated=[*asked.suffix[:4], 5],
        suffix_text="x",
        generated_text="y",
    )
    options = {"runs": {"only": [answer]}, "samples": [asked], "tokenizer": topics_tokenizer()}
    text = html_page(compare(options["runs"]), **options)
    assert topics_tokenizer().decode(asked.prefix) in Page(text).sections["texts"]
    assert '<mark class="start">' in text.split('id="texts"')[1].split("</article>")[0].split("<article")[1]
    long = Sample(
        sample_id="long", document_id="d", bucket=0, offset=0, prefix=(60,) * 300 + (61,) * 200, suffix=(5, 6)
    )
    answer = result("long", prefix_length=500, suffix_text="x", generated_text="y", generated=[5, 5])
    shown = html_page(
        compare({"only": [answer]}), runs={"only": [answer]}, samples=[long], tokenizer=topics_tokenizer()
    )
    texts = Page(shown).sections["texts"]
    assert "Prefix, the last 200 of 500 tokens" in texts and topics_tokenizer().decode([61] * 200) in texts
    assert topics_tokenizer().decode([60, 61]) not in texts
    hostile = Sample(sample_id=asked.sample_id, document_id="d", bucket=0, offset=0, prefix=(5,), suffix=asked.suffix)

    class Hostile:
        def decode(self, ids):
            return HOSTILE * len(ids)

    options |= {"samples": [hostile], "tokenizer": Hostile()}
    assert "<script" not in html_page(compare(options["runs"]), **options)


def test_maps_are_files_too(everything, tmp_path):
    comparison, runs = everything
    paths = write_report(comparison, tmp_path, runs=runs)
    assert {"maps.svg", "maps.png", "report.html"} <= set(paths) and all(path.is_file() for path in paths.values())
    assert "<script" not in paths["maps.svg"].read_text(encoding="utf-8")


@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium: apt-get install chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_it(page, tmp_path, width):
    """Nothing is wider than the window, nothing was loaded, no text ran: read off by a script that is added here."""
    probe = """<script>addEventListener("load", () => { const wide = [...document.querySelectorAll("section *")]
      .filter(e => !e.closest(".wide, .maps-box") && e.getBoundingClientRect().right > innerWidth + 1);
      document.documentElement.setAttribute("data-probe", JSON.stringify({title: document.title, width: innerWidth,
      scroll: document.documentElement.scrollWidth, wide: wide.map(e => e.outerHTML.slice(0, 80)),
      loaded: performance.getEntriesByType("resource").length,
      ground: getComputedStyle(document.body).backgroundColor,
      bars: [...document.querySelectorAll(".bar")].filter(e => e.getBoundingClientRect().width > 0).length})); });
      </script>"""
    (tmp_path / "page.html").write_text(
        page.replace("default-src 'none'", "script-src 'unsafe-inline'") + probe, "utf-8"
    )
    quiet = "--disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update"
    browser = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        *quiet.split(),
        "--disable-sync",
        f"--user-data-dir={tmp_path}/u",
    ]
    # a headless window is at least 500 wide; an emulated telephone is not
    frame = f'<iframe id="f" src="page.html" width="{width}" height="900" style="border:0"></iframe>'
    read = """<script>addEventListener("load", () => { document.body.setAttribute("data-out",
      encodeURIComponent(f.contentDocument.documentElement.getAttribute("data-probe"))); });</script>"""
    (tmp_path / "frame.html").write_text(f"<body>{frame}{read}", "utf-8")
    command = [*browser, "--allow-file-access-from-files", "--dump-dom", (tmp_path / "frame.html").as_uri()]
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout
    seen = json.loads(unquote(re.search('data-out="([^"]*)"', dumped)[1]))
    assert seen["title"].startswith("</dd>") and "owned" in seen["title"] and seen["title"] != "owned"
    assert seen["width"] == width and seen["scroll"] <= width and seen["wide"] == []
    assert seen["loaded"] == 0 and seen["bars"] == 20 and seen["ground"] != "rgba(0, 0, 0, 0)"


def windows(count: int, *, run: str = "a"):
    """Documents of two windows each; of the last ones more comes back."""
    return [
        result(
            f"d{place}@{offset}",
            document_id=f"d{place}",
            offset=offset,
            exact_match=offset < (place if run == "a" else count - place),
            suffix_length=2 + 3 * (place % 2),
        )
        for place in range(count)
        for offset in (0, 20)
    ]


@pytest.mark.parametrize("count", [1, 29, 30, 31, 40])
def test_of_many_documents_the_thirty_are_drawn_of_which_most_comes_back(count):
    found = chosen_maps({"a": windows(count)})["a"]
    assert len(found) == min(count, 30)
    shares = [one.share for one in found]
    assert shares == sorted(shares, reverse=True)
    left_out = {one.document_id: one.share for one in document_maps(windows(count))}
    assert all(left_out.pop(one.document_id) <= 1 for one in found)
    assert max(left_out.values(), default=0) <= shares[-1]


def test_the_best_of_any_run_decides():
    runs = {"a": windows(40), "b": windows(40, run="b")}
    found = chosen_maps(runs)
    assert [one.document_id for one in found["a"]] == [one.document_id for one in found["b"]]
    best = [max(one.share, other.share) for one, other in zip(found["a"], found["b"], strict=True)]
    assert best == sorted(best, reverse=True) and len(best) == 30
    assert chosen_maps({}) == chosen_maps({"a": [result("x")]}) == {}


def test_lines_have_the_confidence_of_the_comparison(monkeypatch):
    asked = []
    monkeypatch.setattr(
        html.curves, "survival", lambda results, **options: asked.append(options) or [Point(1, 0.5, 0.25, 0.75)]
    )
    results = [result("a"), result("b", bucket=2)]
    html_page(compare({"only": results}, confidence=0.9), runs={"only": results})
    assert asked == [{"confidence": 0.9}] * 2, "once a bucket"


def test_prefix_lengths_are_a_chart_where_there_are_several():
    def drawn(*lengths):
        results = [result(f"{place}", prefix_length=length) for place, length in enumerate(lengths)]
        return html._prefix(compare({"only": results}), {"only": results})

    assert len(drawn(3, 5)["charts"]) == 1 and drawn(3, 3)["charts"] == []
    assert [row[:3] for row in drawn(5, 3, 5)["rows"]] == [["0x", "only", "3"], ["0x", "only", "5"]]
    assert drawn(3, 5)["rows"][0][3].startswith("0.000 [0.00, 0.")
    assert html._prefix(compare({"only": [result("a")]}), {}) == {}


def offsets(*pairs, known=(), **changes):
    return [
        result(
            f"{offset}+{length}", offset=offset, prefix_length=length, exact_match=(offset, length) in known, **changes
        )
        for offset, length in pairs
    ]


def test_grids_of_prefix_length_and_offset():
    cells = [(offset, length) for offset in (0, 4, 16) for length in (8, 32)]
    runs = {"only": offsets(*cells[:-1], known=[(0, 8)], bucket=3)}
    found = html._offsets(compare(runs), runs)
    assert [row[:4] for row in found["rows"]] == [["3x", "only", str(length), str(offset)] for length, offset in (
        (8, 0), (8, 4), (8, 16), (32, 0), (32, 4),
    )]  # fmt: skip
    assert found["most"].startswith("only, 3x: most from 8 tokens at offset 0, 1.000") and not found["left_out"]
    [chart] = found["charts"]
    assert chart.count('class="cell s0"') == 5, "what was not asked is empty"
    assert chart.count('fill-opacity="0.450"') == 1 and chart.count('fill-opacity="0.000"') == 4
    for one_of_both in (cells[:2], cells[::2]):
        runs = {"only": offsets(*one_of_both)}
        assert html._offsets(compare(runs), runs) == {}
    assert html._offsets(compare(runs), {}) == {}
    shown = html_page(compare(runs), runs=runs, offset_runs={"only": offsets(*cells)})
    assert 'id="offset"' in shown and 'id="offset"' not in html_page(compare(runs), runs=runs)


def test_of_many_offsets_some_are_drawn():
    runs = {"only": offsets(*((offset, length) for offset in range(100) for length in (8, 32)), bucket=1)}
    found = html._offsets(compare(runs), runs)
    drawn = sorted({int(row[3]) for row in found["rows"]})
    assert found["left_out"] and len(drawn) == html.MOST_CELLS and (drawn[0], drawn[-1]) == (0, 99)
    assert "Of many offsets" in html_page(compare(runs), runs=runs)


def test_the_first_bin_of_probabilities_is_told_and_not_drawn():
    results = [result("a", logprob=float("-inf")), result("b", logprob=-1.0), result("c", logprob=-1.0, bucket=2)]
    found = html._probability({"only": results})
    assert found["least"] == "1e-48"
    assert found["rows"] == [["0x", "only", "0.500", "0.37"], ["2x", "only", "0.000", "0.37"]]
    for chart, share in zip(found["charts"], ("0.500", "1.000"), strict=True):
        assert chart.count("<title>only, ") == 24 and f"<title>only, -1: {share}" in chart
    assert html._probability({"only": [result("a", logprob=None)]}) == {}


def test_shares_have_an_axis_up_to_one_and_probabilities_up_to_the_most_there_is():
    results = [
        result(
            f"{place}", prefix_length=place + 1, exact_match=place < 1, divergence_point=2 * (place < 1),
            near_verbatim=False, rougeL=0.25, sampled_logprob=log(0.1) if place < 1 else -200.0,
        )
        for place in range(4)
    ]  # fmt: skip
    runs = {"only": results}
    comparison = compare(runs)
    drawn = [*html._bucket_charts(comparison), *html._prefix(comparison, runs)["charts"]]
    drawn += [
        *html._survival(comparison, runs),
        *(one for some in html._draws(comparison, runs)["charts"].values() for one in some),
    ]
    assert len(drawn) == 5 + 1 + 1 + 2
    assert all(f">{number}</text>" in chart for chart in drawn[-2:] for number in (1, 10, 1000, "1e6")), "factors"
    for chart in drawn:  # the number at the height of the top
        assert 'y="16.0" text-anchor="end">1</text>' in chart
    [chart] = html._probability(runs)["charts"]
    assert 'text-anchor="end">0.25</text>' in chart and 'text-anchor="end">1</text>' not in chart
    assert html._estimate(Point(0, 0.5)) == "0.500" and html._estimate(Point(0, 0.5, 0.0, 1.0)) == "0.500 [0.00, 1.00]"
