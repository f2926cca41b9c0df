"""`hf-axonn`: what each command prints and returns; more in test_manifest.py and test_export.py.

And what all commands share: `--version`, dashes or underscores, usage errors.
"""

from __future__ import annotations

import argparse
import sys

import pytest

from hf_axonn import Grid, __version__
from hf_axonn.checkpoint.commit import write_manifest
from hf_axonn.checkpoint.manifest import MANIFEST, Manifest
from hf_axonn.cli.main import main
from hf_axonn.cli.scripts import SCRIPTS
from hf_axonn.compat.arguments import Parser
from hf_axonn.launch import command as launch_command
from hf_axonn_eval.__main__ import main as eval_main
from tests.helpers import ROOT


MAINS = {"hf-axonn": main, "hf-axonn-eval": eval_main}
PAGE = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
COMMANDS = [*MAINS, *PAGE.partition("```{help}\n")[2].partition("\n```")[0].splitlines()]


def ended(line: str) -> int:
    """The exit code of a command line that ends where it is parsed."""
    program, *words = line.split()
    with pytest.raises(SystemExit) as end:
        MAINS[program](words)
    return end.value.code


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_its_version_and_what_is_wrong_in_two_lines(command, capsys):
    assert not ended(f"{command} --version")
    assert capsys.readouterr().out == f"hf_axonn {__version__}\n"
    assert ended(f"{command} --no_such_option") == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{command.partition(' ')[0]}")
    assert "--no_such_option" in first or "required" in first or "env: " in first
    assert second.endswith(" --help shows the options.")


@pytest.mark.parametrize("command", [*MAINS, "hf-axonn-eval canaries"])
def test_a_command_alone_lists_its_subcommands(command, capsys):
    assert ended(command) == 2
    alone = capsys.readouterr()
    assert not ended(f"{command} --help")
    assert (alone.out, alone.err) == ("", capsys.readouterr().out)


@pytest.mark.parametrize("command", SCRIPTS)
def test_scripts_say_the_version_without_being_imported(command, capsys, monkeypatch):
    monkeypatch.setattr("importlib.import_module", None)
    assert main([command, "--config", "axonn.yaml", "--version"]) == 0
    assert capsys.readouterr().out == f"hf_axonn {__version__}\n"


def test_the_launcher_says_its_version(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["axonn-launch", "--version"])
    with pytest.raises(SystemExit):
        launch_command.main()
    assert capsys.readouterr().out == f"hf_axonn {__version__}\n"


def test_dashes_and_underscores_are_the_same_in_names_alone():
    parser = Parser(prog="x")
    parser.add_argument("--two_words")
    command = parser.add_subparsers(dest="command").add_parser("go")
    command.add_argument("--more-words", action=argparse.BooleanOptionalAction)
    command.add_argument("--texts", nargs="*")
    command.add_argument("rest", nargs="*")
    for two, more in (("--two-words", "--no-more_words"), ("--two_words", "--no_more-words")):
        found = parser.parse_args([f"{two}=a_b-c", "go", more, "--texts", "a_b", "a-b", "--", "--more_words"])
        assert (found.two_words, found.more_words, found.texts) == ("a_b-c", False, ["a_b", "a-b"])
        assert found.rest == ["--more_words"]
    with pytest.raises(SystemExit):  # no abbreviations
        parser.parse_args(["--two", "a"])


def test_env_names_versions(capsys):
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    assert f"hf_axonn {__version__}" in printed and "transformers 5." in printed and "gloo" in printed


def test_what_cannot_be_converted_ends_with_2_and_a_message(tmp_path, capsys):
    source, output = tmp_path / "checkpoint", str(tmp_path / "out")
    assert main(["convert", str(source), output]) == 2
    assert f"{source} is not a directory" in capsys.readouterr().err
    source.mkdir()
    assert main(["convert", str(source), output]) == 2
    assert f"has no {MANIFEST}" in capsys.readouterr().err
    write_manifest(source, Manifest("id", Grid(x=2), {}))
    assert main(["convert", str(source), output]) == 2
    assert "holds adapters" in capsys.readouterr().err
    for size in ("0", "inf", "nan"):
        assert main(["convert", str(source), output, "--max-shard-gb", size]) == 2
        assert f"--max-shard-gb is {float(size)}: give a number above 0" in capsys.readouterr().err
