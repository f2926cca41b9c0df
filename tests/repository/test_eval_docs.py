"""docs/evaluation.md, with protocols.md, defines every metric and score; with attacks.md they name every option."""

import argparse
import re

import pytest

from hf_axonn_eval.__main__ import _parser
from hf_axonn_eval.canaries.generate import ALPHABETS
from hf_axonn_eval.data.windows import COMBINE, KINDS
from hf_axonn_eval.extraction.callback import LOGGED, PREFIX
from hf_axonn_eval.extraction.scoring import BOUNDS
from hf_axonn_eval.metrics.registry import METRICS
from hf_axonn_eval.metrics.text import NEAR_VERBATIM
from hf_axonn_eval.report.tables import ATTACKS
from tests.helpers import ROOT


TEXT = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
PROTOCOLS = (ROOT / "docs" / "protocols.md").read_text(encoding="utf-8").partition("<!-- begin")[0]
PAGES = TEXT + (ROOT / "docs" / "attacks.md").read_text(encoding="utf-8") + PROTOCOLS
LINES = (TEXT + PROTOCOLS).splitlines()
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in LINES if line.startswith("| ")]
NAMED = {name: cells for cells in ROWS for name in re.findall(r"`(\w+)`", cells[0])}


def options(parser, names=()):
    """Every option of every command, with the names of the command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from options(below, (*names, name))
        else:
            yield from ((" ".join(names), option) for option in action.option_strings)


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_is_defined_in_a_row(metric):
    kind, definition = NAMED[metric][1:3]
    assert kind in ("TF", "FR", "text") and len(definition) > 10


@pytest.mark.parametrize("score", ATTACKS)
def test_every_membership_score_has_a_formula_and_a_source(score):
    _, definition, source = NAMED[score]
    assert "`" in definition and re.search(r"\d{4}", source)


def test_every_option_is_named():
    found = dict.fromkeys(options(_parser()))
    assert ("extract", "--sampler") in found and ("canaries make", "--candidates") in found
    words = set(re.findall(r"--\w[\w-]*", PAGES))
    unnamed = [pair for pair in found if pair[1] not in words | {"-h", "--help"} and not pair[1].startswith("--no-")]
    assert unnamed == []


def test_no_option_is_named_that_there_is_not():
    known = {option for _, option in options(_parser())}
    launcher = {"--config"}
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", PAGES)) <= known | launcher


def test_choices_and_bounds():
    for name in (*KINDS, *COMBINE, *ALPHABETS):
        assert re.search(rf"[`{{ ]{name}[`:]", PAGES), name
    for dtype, bound in BOUNDS.items():
        row = next(cells for cells in ROWS if cells[0] == str(dtype).removeprefix("torch."))
        assert float(row[1]) == bound
    assert f"edit_distance <= {NEAR_VERBATIM:.2f}" in TEXT
    for metric in LOGGED:
        assert f"{PREFIX}{metric}" in TEXT or f"`{metric}`" in TEXT.split("## While a model trains")[1]
