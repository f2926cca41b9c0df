"""docs/protocols.md says what the files of the protocols say, and what they say exists."""

import re

import pytest

from hf_axonn_eval import PROTOCOLS
from hf_axonn_eval.__main__ import _parser
from hf_axonn_eval.data.contract import BY_RESULTS, CHECKS
from hf_axonn_eval.data.protocols import read_protocol
from hf_axonn_eval.metrics.registry import METRICS
from tests.helpers import ROOT
from tests.repository.test_eval_docs import options
from tests.tools.protocol_page import DOCUMENT, written


TEXT = DOCUMENT.read_text(encoding="utf-8")
FOLDER = ROOT / "eval" / "data" / "published"


def test_the_page_is_as_the_files():
    assert TEXT == written(TEXT), "a protocol has changed: run  python -m tests.tools.protocol_page"


def test_a_page_without_a_place_for_them_is_named():
    with pytest.raises(ValueError, match="protocols.md has no lines"):
        written("# Protocols\n")


def test_every_file_is_a_protocol_by_its_name():
    assert sorted(file.stem for file in FOLDER.iterdir()) == sorted(PROTOCOLS)
    for file in FOLDER.iterdir():
        assert read_protocol(file.read_text(encoding="utf-8")) == PROTOCOLS[file.stem]


@pytest.mark.parametrize("name", PROTOCOLS)
def test_lines_name_their_source_and_what_there_is(name):
    some = PROTOCOLS[name]
    assert re.search(r"arXiv \d{4}\.\d{5}", some.source) and some.cite and some.commands
    assert some.code == "" or re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", some.code)
    for line in some.lines:
        assert line.published and line.source, line.what
        assert set(line.ours) <= set(METRICS), line.what
    assert len({line.what for line in some.lines}) == len(some.lines)
    # what the issue of a contract is: these subjects are spoken of, if only to say that nothing was published
    spoken = " ".join(f"{line.what} {line.published}" for line in some.lines)
    for subject in ("prefix" if some.sampling.kind != "sliding" else "50 shown", "BOS", "EOS", "dtype", "decoding"):
        assert subject in spoken, subject


@pytest.mark.parametrize("name", PROTOCOLS)
def test_commands_can_be_typed(name):
    parser = _parser()
    for command in PROTOCOLS[name].commands:
        words = command.split()
        assert words[0] == "hf-axonn-eval"
        parser.parse_args(words[1:])
    assert f"--protocol {name} " in PROTOCOLS[name].commands[0]


def test_options_and_metrics_of_the_head_exist():
    known = {option for _, option in options(_parser())}
    assert set(re.findall(r"(?<![\w-])--[a-z]\w+", TEXT.partition("<!-- begin")[0])) <= known
    for name in ("rougeL_to_eos", "rougeL_tokens", "lccs", "holds_eos", "sampled_probability", "type_token_ratio"):
        assert f"`{name}`" in TEXT and name in METRICS


def test_every_check_is_used():
    required = {name for some in PROTOCOLS.values() for line in some.lines for name in line.require}
    assert required == set(CHECKS) and BY_RESULTS == ("eos_generated",)
