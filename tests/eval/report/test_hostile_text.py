"""Text from outside is shown in every output and acts in none: rich, Markdown, HTML, SVG, matplotlib, JSON."""

import io
import json
import re
import warnings
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from matplotlib.figure import Figure
from rich.console import Console

from hf_axonn_eval import compare, write_report
from hf_axonn_eval.data.visible import DIRECTIONS, PAGE, visible
from hf_axonn_eval.report.html import chosen_maps
from hf_axonn_eval.report.maps import maps_png, maps_svg
from hf_axonn_eval.report.write import markdown, plot, terminal_differences, terminal_table
from tests.helpers.eval_support import result
from tests.helpers.fuzzing import fuzz


NASTY = {  # what stands in the outputs
    "[/]": "[/]",
    "[bold]x[/bold]": "[bold]x[/bold]",
    ":smile:": ":smile:",
    "\\[x]\\": "\\[x]\\",
    "$\\frac{$": "$\\frac{$",
    "$x^2$": "$x^2$",
    "_hidden": "_hidden",
    "\ud83d a \udcff": "\\ud83d a \\udcff",
    "a\x00b": "a\\x00b",
    "\x1b[31mred\x1b]8;;http://e\x1b\\": "\\x1b[31mred\\x1b]8;;http://e\\x1b\\",
    "\x9b31m": "\\x9b31m",
    "a\nb\r\tc\u2028d": "a\\nb\\r\\tc\\u2028d",
    "\u202eab": "\\u202eab",
    "\ufffe": "\\ufffe",
    "<script>x</script>": "<script>x</script>",
    "<!--": "<!--",
    "&lt;&#60;": "&lt;&#60;",
    "![i](http://e/x.png)": "![i](http://e/x.png)",
    "[x][y] [z]: q": "[x][y] [z]: q",
    "`a``b": "`a``b",
    "a|b\\|c": "a|b\\|c",
    "*b* __c__ ~~d~~": "*b* __c__ ~~d~~",
}
# Of these the quick tests write whole reports; the tables are of all.
REPORTED = ("[/]", "$\\frac{$", "\ud83d a \udcff", "\x1b[31mred\x1b]8;;http://e\x1b\\", "a\nb\r\tc\u2028d")
REPORTED += ("\u202eab", "<script>x</script>")
TEXT = st.text(st.characters(), min_size=1, max_size=30) | st.text("[]()<>!&|`\\$*_~:#/ab ;\x1b\n\ud83d", min_size=1)


def compared(text):
    """Two runs of two windows of a document: everything that a user or a file can name is this text."""
    record = {
        "identity": {"samples": 2, "samples_sha256": text, "model_fingerprint": text, "dtype": text, "sampler": text},
        "model": {"path": text},
        "grid": text,
        "device": {"type": text},
        "versions": {text: text},
        "settings": {text: text},
        "command": [text],
        "started": text,
    }
    texts = {"suffix_text": text, "generated_text": text, "generated": [1, 2], "membership": {text: -1.0}}
    runs = {
        name: [
            result(f"{text}{offset}", document_id=text, offset=offset, bucket=offset, sampled_logprob=-1.0, **texts)
            for offset in (0, 5)
        ]
        for name in ("base", text)
    }
    return compare(runs, records=dict.fromkeys(runs, record)), runs


def on_terminal(comparison) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    console = Console(file=file, width=2000, force_terminal=True, color_system=None)
    for table in (terminal_table(comparison), *terminal_differences(comparison)):
        console.print(table)
    file.flush()
    return file.buffer.getvalue().decode()


def in_markdown(text: str) -> list[str]:
    """The contents of all inline elements; fails if one is more than text, code and a heading or a table."""
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
    allowed = {"heading", "paragraph", "table", "thead", "tbody", "tr", "th", "td", "bullet_list", "list_item"}
    blocks = {token.type.removesuffix("_open").removesuffix("_close") for token in tokens}
    assert blocks <= {*allowed, "inline"}
    children = [token.children for token in tokens if token.type == "inline"]
    assert {child.type for some in children for child in some} <= {"text", "text_special", "code_inline"}
    assert text.count("$") == text.count("\\$") + sum(
        child.content.count("$") for some in children for child in some if child.type == "code_inline"
    )
    return ["".join(child.content for child in some) for some in children]


def shapes_of(svg: str) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.fromstring(svg).iter()]


def on_maps(text: str) -> str:
    """What a reader of XML makes of it, which gives all line ends one form."""
    return visible(text, keep=PAGE).replace("\r\n", "\n").replace("\r", "\n") + " (seen"


@pytest.fixture(scope="module", autouse=True)
def drawn():
    """Figures that are saved; with few pixels, which are no part of what is drawn."""
    found, savefig = [], Figure.savefig
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Figure, "savefig", lambda self, to, **how: (found.append(self), savefig(self, to, **how | {"dpi": 20}))
        )
        yield found


@pytest.mark.parametrize(
    "text", [pytest.param(text, marks=[] if text in REPORTED else pytest.mark.slow) for text in NASTY]
)
def test_every_output_shows_a_nasty_text(tmp_path, text, drawn):
    drawn.clear()
    comparison, runs = compared(text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of glyphs that are missing, or a layout without room
        paths = write_report(comparison, tmp_path / "report", runs=runs, title=text)
    shown = NASTY[text]
    assert f" {shown} " in on_terminal(comparison)
    cells = in_markdown(paths["report.md"].read_text(encoding="utf-8"))
    assert cells.count(shown) >= 10
    assert any(cell.startswith(f"{shown}: model {shown}; weights {shown}") for cell in cells)
    assert shown in [one.get_text() for one in drawn[0].legends[0].get_texts()]
    assert on_maps(text) in "".join(shapes_of(paths["maps.svg"].read_text(encoding="utf-8")))
    page = paths["report.html"].read_text(encoding="utf-8")
    assert "\x00" not in page and "\x1b" not in page and "<script" not in page
    assert not re.search(f"[{DIRECTIONS}]", page)  # which would turn round the numbers behind a name
    assert ("&#8238;" in page) == ("\u202e" in text)  # but in the texts, as they were written
    assert json.loads(paths["summary.json"].read_text()) == comparison
    # nothing but lines and printable text reaches a terminal that shows the file
    assert (tmp_path / "report" / "report.md").read_text(encoding="utf-8").replace("\n", "").isprintable()


def test_names_that_are_markup_are_the_base_too(tmp_path):
    base, trained = "`a`", "trained"
    runs = {base: [result("a"), result("b")], trained: [result("a"), result("b")]}
    comparison = compare(runs, base=base)
    assert "Difference from `a`, sample by sample" in in_markdown(markdown(comparison))


def test_nasty_texts_are_shown_in_tables():
    assert set(REPORTED) < NASTY.keys()
    for text in NASTY:
        check_tables(text)


@fuzz(30)
@given(text=TEXT)
@example(text="` `")
@example(text=" ")
def test_any_text_is_shown_in_tables(text):
    check_tables(text)


def check_tables(text):
    comparison, _ = compared(text)
    shown, cells = visible(text), in_markdown(markdown(comparison))
    assert shown.strip() in [cell.strip() for cell in cells]
    assert shown.rstrip() in on_terminal(comparison)


@fuzz(3)
@given(text=TEXT)
def test_any_text_is_drawn(text):
    comparison, runs = compared(text)
    maps = chosen_maps(runs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph|Matplotlib currently does not support|constrained_layout")
        plot(comparison, io.BytesIO())
        maps_png(maps, io.BytesIO())
    assert on_maps(text) in "".join(shapes_of(maps_svg(maps, alone=True)))
