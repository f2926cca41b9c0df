"""A package of an extra that is not installed is named in one sentence, with the extra, before anything begins."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from hf_axonn.cli.main import main
from hf_axonn.compat import extras
from hf_axonn.compat.extras import lacking, missing
from hf_axonn_eval.__main__ import main as eval_main
from hf_axonn_eval.cli import samples


WANTED = [
    "torch",
    'datasets>=4.0; extra == "data"',
    'pyarrow>=15; extra == "data"',
    'scipy>=1.13; extra == "eval"',
    'hf-axonn[data,eval]; extra == "demo"',
    'gguf<0.20,>=0.19; extra == "demo"',
    'hf_axonn[demo]; extra == "study"',
    'trl<1.17,>=1.15; extra == "trl"',
]


@pytest.fixture
def absent(monkeypatch):
    """Take packages away."""

    def take(*names):
        monkeypatch.setattr(extras, "requires", lambda _: WANTED)
        monkeypatch.setattr(extras, "_is_installed", lambda name: name not in names)

    return take


def test_an_extra_has_the_packages_of_those_that_it_names(absent):
    absent("datasets", "gguf", "scipy", "torch")
    assert missing("data") == ["datasets"] and missing("eval") == ["scipy"] and missing("trl") == []
    assert missing("study") == missing("demo") == ["datasets", "gguf", "scipy"]
    assert lacking("trl") == ""
    assert lacking("data") == "datasets is not installed: pip install 'hf_axonn[data]'"
    assert lacking("demo", "data", "eval") == "datasets, scipy are not installed: pip install 'hf_axonn[demo]'"


def test_what_setup_cfg_says_is_installed_here(monkeypatch):
    assert missing("data", "eval", "trl", "completion") == []

    def no_metadata(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "version", no_metadata)
    assert {"datasets", "rapidfuzz", "jinja2", "scipy"} <= set(missing("demo"))
    monkeypatch.setattr(extras, "requires", no_metadata)
    assert missing("demo") == []  # a folder on the path: nothing is known


@pytest.mark.parametrize(
    ("command", "lacks", "extra"),
    [
        (["finetune", "--config", "axonn.yaml", "--model", "m"], "datasets is", "data"),
        (["demo"], "datasets, scipy are", "demo"),
    ],
)
def test_a_script_is_not_started_where_it_would_fail_late(command, lacks, extra, absent, monkeypatch, capsys):
    absent("datasets", "scipy", "gguf")
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it was launched"))
    assert main(command) == 2
    said = f"hf-axonn {command[0]}: {lacks} not installed: pip install 'hf_axonn[{extra}]'\n"
    assert capsys.readouterr().err == said


def test_evaluation_names_the_extra_and_other_modules_keep_their_traceback(absent, monkeypatch, capsys):
    def fail(arguments):
        raise ModuleNotFoundError("No module named 'scipy'", name="scipy")

    monkeypatch.setattr(samples, "run", fail)
    command = ["samples", "--documents", "d", "--tokenizer", "t", "--output", "o"]
    absent("scipy")
    assert eval_main(command) == 2
    assert capsys.readouterr().err == "error: scipy is not installed: pip install 'hf_axonn[eval]'\n"
    with pytest.raises(ModuleNotFoundError):
        eval_main(["--debug", *command])
    absent()
    with pytest.raises(ModuleNotFoundError):
        eval_main(command)


def test_trainers_of_trl_name_the_extra(absent, monkeypatch):
    monkeypatch.delitem(sys.modules, "hf_axonn.goldfish.sft", raising=False)
    for name in ("trl", "trl.trainer.sft_config"):
        monkeypatch.setitem(sys.modules, name, None)
    absent("trl")
    with pytest.raises(ImportError, match=r"trl is not installed: pip install 'hf_axonn\[trl\]'"):
        importlib.import_module("hf_axonn.goldfish.sft")
    absent()  # something else is wrong with it, which its own error says
    with pytest.raises(ModuleNotFoundError, match="trl"):
        importlib.import_module("hf_axonn.goldfish.sft")
