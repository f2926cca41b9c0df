"""The site: its menu has every page, its reference every public name, its pictures are those that the code draws.

`make docs` builds it, with warnings as errors; nothing here needs Sphinx.
"""

import re

import pytest

import hf_axonn
import hf_axonn_eval
from hf_axonn.planner.machine import load_machine
from hf_axonn.planner.time.exposed import Overlaps, exposed_seconds
from tests.helpers import ROOT
from tests.repository.test_docs import DOTTED, inline_code
from tests.tools.documents import DOCUMENTS, FENCE, blocks
from tests.tools.pictures import (
    CONTEXT,
    FOLDER,
    MACHINE,
    PASSAGE,
    PICTURES,
    TEXTS,
    masked_texts,
    overlap_seconds,
    timeline,
)
from tests.tools.site_docstrings import options_of, shown_signature, to_rst


MENU = ROOT / "docs" / "index.md"
REFERENCE = ROOT / "docs" / "reference"
# Pages that are read on GitHub alone; results are not among DOCUMENTS.
NOT_IN_MENU = {"index.md"}


def in_reference() -> list[str]:
    """The full name of everything that the reference documents."""
    found = []
    for page in sorted(REFERENCE.glob("*.md")):
        for block in FENCE.finditer(page.read_text(encoding="utf-8")):
            if block[2].startswith("{api} "):
                package = block[2].partition(" ")[2]
                found += [f"{package}.{line.partition(':')[0]}" for line in block[3].splitlines()]
    return found


@pytest.mark.parametrize("package", [hf_axonn, hf_axonn_eval], ids=lambda package: package.__name__)
def test_every_public_name_is_in_the_reference_once(package):
    found = in_reference()
    wanted = {f"{package.__name__}.{name}" for name in package.__all__}
    assert not sorted(wanted - set(found))
    assert len(found) == len(set(found))


def test_every_name_that_code_of_the_documents_imports_is_in_the_reference():
    imported = set()
    for block in blocks("python"):
        for module, names in re.findall(r"^ *from (hf_axonn\S*) import (.+)$", block.text, re.MULTILINE):
            imported |= {f"{module}.{name.strip()}" for name in names.split(",")}
    found = in_reference()
    short = {name.rpartition(".")[2] for name in found}
    assert len(imported) > 20
    assert not sorted(name for name in imported if name not in found and name.rpartition(".")[2] not in short)


def test_the_menu_has_every_page_once():
    targets = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", MENU.read_text(encoding="utf-8"), re.MULTILINE)
    pages = [(MENU.parent / target).resolve() for target in targets]
    results = [*(ROOT / "docs" / "results").glob("*.md"), ROOT / "tests" / "benchmarks" / "README.md"]
    wanted = {
        path for path in [*DOCUMENTS, *results, *(ROOT / "docs").glob("*.ipynb")] if path.name not in NOT_IN_MENU
    }
    assert not sorted(map(str, wanted - set(pages)))
    assert len(pages) == len(set(pages)) == len(wanted)


def test_the_reference_of_commands_has_every_command():
    listed = (REFERENCE / "commands.md").read_text(encoding="utf-8").partition("```{help}\n")[2].split("\n")
    tests_of = (ROOT / "tests" / "repository" / "test_docs.py").read_text(encoding="utf-8")
    cli = re.search(r"commands = \((.+)\)", tests_of)
    assert cli and {f"hf-axonn {name}" for name in re.findall(r'"([\w-]+)"', cli[1])} <= set(listed)


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_what_the_code_draws(name):
    assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == PICTURES[name]().svg(), "run `make picture`"


def test_the_timeline_of_overlaps_is_as_long_as_the_planner_says():
    layer, groups = overlap_seconds()
    computed = sum(sum(group[:5]) for group in groups)
    share = load_machine(MACHINE).overlap
    for on in (False, True):
        overlaps = Overlaps(
            all_gather=on,
            reduce_scatter=on,
            all_reduce=on,
            checkpointing=False,
            share=share,
            apart=True,
            layer_ahead=True,
        )
        left = exposed_seconds(overlaps, layer, (), groups)
        end = max(bar.end for bar in timeline(on, layer, groups) if bar.lane != "reduce" or not on)
        assert end == pytest.approx(computed + left.forward_z + left.backward_z + left.xy)


def test_the_common_passage_of_the_goldfish_picture_loses_the_same_tokens():
    """From the CONTEXT-th token on, as the page says, and some are lost there."""
    one, two = (
        [drop for _, drop in text][len(before.split()) :][CONTEXT - 1 : len(PASSAGE.split())]
        for text, (before, _) in zip(masked_texts(), TEXTS, strict=True)
    )
    assert one == two and any(one) and not all(one)


DOCSTRING = """Load it from `path`, 2 * x or y_.

    with grid(*names):
        pass

Lists:
- `first`: one
- second

Args:
    path: where; see `Grid`.
    x, y: sizes,
        on two lines.
Raises:
    ValueError: there is none.
    As `Grid`.
Collectives: those of `Grid`,
    and one more.

After."""


def test_docstrings_become_restructuredtext():
    lines = to_rst(DOCSTRING, {"Grid": "hf_axonn.Grid"})
    text = "\n".join(lines)
    assert "Load it from ``path``, 2 \\* x or y\\_." in lines
    assert ".. code-block:: python\n\n    with grid(*names):\n        pass\n" in text
    assert "Lists:\n\n- ``first``: one\n- second" in text
    assert (
        ":Parameters:\n    - **path**: where; see :py:obj:`Grid <hf_axonn.Grid>`.\n    - **x**, **y**: sizes,\n"
        in text
    )
    assert "      on two lines." in text
    assert ":Raises:\n    - **ValueError**: there is none.\n      As :py:obj:`Grid <hf_axonn.Grid>`.\n" in text
    assert ":Collectives:\n    those of :py:obj:`Grid <hf_axonn.Grid>`,\n    and one more.\n" in text
    assert lines[-2:] == ["After.", ""]


def test_text_in_pictures_is_legible_on_a_telephone():
    """The page stays as wide as the window: a picture that would be too small scrolls in its own box."""
    style = re.sub(r"/\*.*?\*/", "", (ROOT / "docs" / "site.css").read_text(encoding="utf-8"), flags=re.DOTALL)
    rules = {names.strip(): settings for names, settings in re.findall(r"([^{}]+)\{([^}]*)\}", style)}
    assert "overflow-x: auto;" in rules[".picture"]
    wide = [names for names, settings in rules.items() if "min-width" in settings]
    assert all(name.strip().startswith(".picture ") for names in wide for name in names.split(",")), (
        "it widens the page"
    )
    (narrowest,) = re.findall(r"min-width: (\d+)rem", rules[".picture svg, .picture img"])
    for name in PICTURES:
        picture = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
        ((width, _),) = re.findall(r'^<svg [^>]*viewBox="0 0 (\d+) (\d+)"', picture)
        smallest = min(map(int, re.findall(r"font-size:(\d+)px", picture)))
        assert smallest * int(narrowest) * 16 / int(width) >= 9, name


def test_options_of_training_arguments_are_their_own():
    lines = options_of(hf_axonn.GoldfishConfig)
    assert any(line.startswith("    goldfish_k: ") and line.endswith("By default 4.") for line in lines)
    assert not any("learning_rate" in line for line in lines)
    signature = shown_signature(hf_axonn.GoldfishConfig)
    assert signature is not None and "goldfish_k=4" in signature and signature.endswith(", **others)")
    assert options_of(hf_axonn.Grid) == [] and shown_signature(hf_axonn.Grid) is None


def test_names_in_backticks_are_full_names_of_the_reference_or_modules():
    """What the text calls by its full name in code, in a document that is a guide, can be looked up."""
    found = in_reference()
    named = {name for place, code in inline_code() if place.startswith("docs/how_to") for name in DOTTED.findall(code)}
    assert named and not sorted(named - set(found))
