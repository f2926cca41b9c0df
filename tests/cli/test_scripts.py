"""`hf-axonn finetune`, `demo` and `study`: scripts get their arguments, a launch its file, missing packages a name."""

from __future__ import annotations

import importlib
import json
import os
import sys
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM

from hf_axonn import Grid
from hf_axonn.checkpoint.manifest import read_manifest
from hf_axonn.cli import scripts
from hf_axonn.cli.main import main
from hf_axonn.cli.scripts import EXTRAS, SCRIPTS, run_script
from tests.helpers.eval_support import tiny_llama, topics_tokenizer
from tests.helpers.launching import launch_file, run


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_is_the_scripts_own(name, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["hf-axonn"])
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code in (0, None)
    assert capsys.readouterr().out.startswith(f"usage: hf-axonn {name} ")


def test_study_plans(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["hf-axonn"])
    assert main(["study", "cpu", "--dry-run", "--output", str(tmp_path / "out")]) == 0
    assert "report" in capsys.readouterr().out and not (tmp_path / "out").exists()
    assert main(["study", "no such recipe"]) == 2


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_package_that_is_missing_is_named_with_its_extra(name, monkeypatch, capsys):
    def refuse(module):
        raise ModuleNotFoundError("no such package", name="datasets")

    monkeypatch.setattr(importlib, "import_module", refuse)
    monkeypatch.setattr(scripts, "lacking", lambda *_: "")
    assert run_script(name, []) == 2
    assert f"datasets is not installed: pip install 'hf_axonn[{EXTRAS[name]}]'" in capsys.readouterr().err


def test_what_a_script_raises_keeps_its_traceback(monkeypatch):
    def fail():
        raise ValueError("of the training")

    monkeypatch.setattr("sys.argv", ["hf-axonn"])
    monkeypatch.setattr(scripts, "importlib", SimpleNamespace(import_module=lambda module: SimpleNamespace(main=fail)))
    with pytest.raises(ValueError, match="of the training"):
        main(["finetune"])


@pytest.mark.parametrize(
    ("words", "launcher", "rest"),
    [
        (["--config", "a.yaml", "--model", "m"], ["--config", "a.yaml"], ["--model", "m"]),
        (["--config=a.yaml", "--model", "m"], ["--config", "a.yaml"], ["--model", "m"]),
        (["--num_processes", "4", "--config", "a.yaml"], ["--num_processes", "4", "--config", "a.yaml"], []),
    ],
)
def test_finetune_with_a_launch_file_becomes_a_launch(words, launcher, rest, monkeypatch):
    """The slow test below shows that this command trains, and test_end_to_end.py that such a launch does."""

    def become(program, command):
        raise SystemExit([program, *command])

    monkeypatch.setattr(os, "execv", become)
    with pytest.raises(SystemExit) as end:
        main(["finetune", *words])
    own = [sys.executable, "-m", "hf_axonn.launch"]
    assert end.value.code == [sys.executable, *own, *launcher, "-m", "hf_axonn", "finetune", *rest]


def test_a_second_launch_file_is_refused_before_the_launch(capsys):
    assert main(["finetune", "--config", "a.yaml", "--model", "m", "--config=b.yaml"]) == 2
    assert capsys.readouterr().err == "hf-axonn finetune: --config is given twice: leave one of the files out\n"


@pytest.mark.slow
def test_a_sentence_of_finetune_stands_alone_after_a_launch(tmp_path):
    """The sentence begins with the name of the command, whose exit code is that of the launch."""
    (tmp_path / "d.jsonl").write_text('{"text": "a row"}\n')
    file = launch_file(tmp_path, Grid(z=2))
    ended = run(tmp_path, "-m", "hf_axonn", "finetune", "--config", file, "--model", "nowhere", "--data", "d.jsonl")
    assert ended.code == 2 and ended.output.count("hf-axonn finetune: nowhere is neither a folder") == 1, ended.output
    assert "Traceback" not in ended.output and "hf_axonn: the reason is above" in ended.output


@pytest.mark.slow
def test_finetune_on_the_grid_of_a_launch_file(tmp_path):
    """The command runs from a folder without a clone, through `axonn-launch`, to a sharded checkpoint."""
    tiny_llama().save_pretrained(tmp_path / "model")
    topics_tokenizer().save_pretrained(tmp_path / "model")
    texts = ["one two three " * (number + 4) for number in range(8)]
    lines = [{"id": str(number), "text": text, "bucket": number % 3} for number, text in enumerate(texts)]
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    grid = Grid(x=2)
    options = ["--model", "model", "--data", "documents.jsonl", "--sequence_length", "16", "--output_dir", "out"]
    options += ["--max_steps", "2", "--per_device_train_batch_size", "2", "--report_to", "none"]
    command = ["-m", "hf_axonn", "finetune", "--config", launch_file(tmp_path, grid), *options]
    ended = run(tmp_path, *command)
    assert ended.code == 0, ended.output
    counts = (
        "3 of bucket 0 (controls, left out), 3 of bucket 1, 2 of bucket 2; each is seen as often as its bucket says "
        "in an epoch"
    )
    for line in (  # by one process each, and no bars where the output is a file
        f"documents  8 of documents.jsonl: {counts}",
        "model      LlamaForCausalLM, 80,112 parameters, float32 weights",
        "grid       data=1,z=1,y=1,x=2 on 2 processes",
        "saved      out: a sharded checkpoint of the grid data=1,z=1,y=1,x=2, which AutoModelForCausalLM",
        "    hf-axonn convert out out-hf\n",
        "{'loss': ",
        "The tokenizer has new PAD/BOS/EOS tokens",
    ):
        assert ended.output.count(line) == (2 if "loss" in line else 1), (line, ended.output)
    assert "%|" not in ended.output and "warning: " not in ended.output
    assert read_manifest(tmp_path / "out").grid == grid
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "llama"
