"""The command line, from documents to a report, and its exit codes."""

import json
import os
import shutil
import subprocess
import sys
from html import unescape

import pytest
from transformers import dynamic_module_utils

from hf_axonn_eval.__main__ import main
from hf_axonn_eval.data.results import RunDirectory
from hf_axonn_eval.data.samples import read_samples, samples_digest, write_samples
from tests.helpers.eval_support import LEARNT, documents, result, samples, tiny_llama, topics_tokenizer, trained_llama


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with documents, a base model and a trained one."""
    place = tmp_path_factory.mktemp("place")
    lines = [json.dumps({"title": d["id"], "body": d["text"], "seen": d["bucket"]}) for d in documents()]
    (place / "documents.jsonl").write_text("\n".join(lines) + "\n")
    for name, model in (("base", tiny_llama()), ("trained", trained_llama())):
        model.save_pretrained(place / name)
        topics_tokenizer().save_pretrained(place / name)
    return place


REPORT = ["plot.png", "report.html", "report.md", "summary.json"]


def build(place, output):
    fields = ["--id_key", "title", "--text_key", "body", "--bucket_key", "seen"]
    lengths = ["--prefix_length", "12", "--suffix_length", "12"]
    files = ["--documents", place / "documents.jsonl", "--tokenizer", place / "base", "--output", output]
    return main(["samples", *map(str, files), *fields, *lengths])


def test_from_documents_to_a_report(place, tmp_path, capsys):
    assert build(place, tmp_path / "samples.jsonl") == 0
    told = capsys.readouterr().out
    assert f"bucket 40: {LEARNT}" in told and samples_digest(samples()) in told
    for name in ("base", "trained"):
        asked = ["--model", place / name, "--samples", tmp_path / "samples.jsonl", "--output", tmp_path / name]
        assert main(["extract", *map(str, asked)]) == 0
    assert f"{LEARNT} of {LEARNT}" in capsys.readouterr().out
    runs = [f"{name}={tmp_path / name}" for name in ("base", "trained")]
    asked = ["--samples", str(tmp_path / "samples.jsonl"), "--output", str(tmp_path / "report"), "--lengths", "4"]
    assert main(["report", "--runs", *runs, *asked]) == 0
    assert "plot.png" in capsys.readouterr().out
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert topics_tokenizer().decode(samples()[0].prefix) in unescape(page), "the tokenizer of the base run is found"
    assert main(["compare", "--runs", *runs, "--output", str(tmp_path / "compared.md")]) == 0
    told = f"| 40x | trained | {LEARNT} | 0 | 0 | {LEARNT}, 0 | 0.031 | 0.062 |"
    assert told in (tmp_path / "compared.md").read_text()
    assert main(["compare", "--runs", *runs, "--output", str(tmp_path / "compared.json")]) == 0
    assert json.loads((tmp_path / "compared.json").read_text())["base"] == "base"
    assert "McNemar" in capsys.readouterr().out
    assert main(["compare", "--runs", runs[0]]) == 2 and "two runs or more" in capsys.readouterr().err
    write_samples(samples()[:3], tmp_path / "others.jsonl")
    asked[1] = str(tmp_path / "others.jsonl")
    assert main(["report", "--runs", *runs, *asked]) == 2
    assert "is not what the runs were asked" in capsys.readouterr().err
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    counts = {
        (name, bucket): summary["runs"][name]["buckets"][bucket]["metrics"]["exact_match"]["count"]
        for name in ("base", "trained")
        for bucket in ("0", "40")
    }
    assert counts == {("base", "0"): 0, ("base", "40"): 0, ("trained", "0"): 0, ("trained", "40"): LEARNT}
    assert summary["runs"]["trained"]["run"]["model"]["path"] == str(place / "trained")
    left_out = {"documents": 2 * LEARNT, "not_round_trip": 2}
    assert summary["runs"]["trained"]["run"]["settings"]["left_out"] == left_out
    told = f"of {2 * LEARNT} documents, nothing was left out; the tokenizer does not give back 2 documents unchanged."
    assert told in page and told in (tmp_path / "report" / "report.md").read_text()
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == REPORT


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("samples --documents {place}/absent --tokenizer {place}/base --output {out}/s", "absent is not a file"),
        ("samples --documents {place}/documents.jsonl --tokenizer {place}/base --output {out}/s", "no field 'id'"),
        ("extract --model {place}/absent --samples {samples} --output {out}/run", "absent is not a directory"),
        (
            "extract --model {place}/base --samples {place}/documents.jsonl --output {out}/run",
            "line 1 is not a sample",
        ),
        ("extract --model {place}/base --samples {samples} --output {out}/run --grid z=2", "= 2, but 1 process"),
        ("extract --model {place}/base --samples {samples} --output {out}/run --grid two", "--grid two is not like"),
        ("report --runs base={place}/base --output {out}", "looks like a model, but --runs takes the output of an"),
        ("report --runs {place}/absent --output {out}", "NAME=DIRECTORY"),
    ],
)
def test_bad_input_is_exit_code_2_with_a_message(place, tmp_path, capsys, command, message):
    build(place, tmp_path / "samples.jsonl")
    capsys.readouterr()
    words = command.format(place=place, samples=tmp_path / "samples.jsonl", out=tmp_path / "out").split()
    assert main(words) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and message in told and "Traceback" not in told
    assert not (tmp_path / "out").exists()


def test_code_of_a_model_or_tokenizer_runs_only_where_it_may(place, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    build(place, tmp_path / "samples.jsonl")
    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    own_config = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    names = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    for folder, file, changes in ((model, "config.json", own_config), (tokenizer, "tokenizer_config.json", names)):
        shutil.copytree(place / "base", folder)
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changes))
        (folder / "own.py").write_text(
            "from transformers import LlamaConfig, PreTrainedTokenizerFast\n"
            "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
            "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"  # a class that is loaded so stays marked
        )
    documents = ["--documents", str(place / "documents.jsonl"), "--number_documents", "--bucket", "1"]
    documents += ["--text_key", "body"]
    own = ["--tokenizer", str(tokenizer), "--output", str(tmp_path / "out")]
    samples = ["--samples", str(tmp_path / "samples.jsonl")]
    may = "--trust_remote_code"
    commands = (
        ["samples", *documents, *own],
        ["overlaps", *documents, *own],
        ["export", *samples, "--format", "lm-eval", *own],
        ["extract", *samples, "--model", str(place / "base"), *own],
        ["extract", *samples, "--model", str(model), "--output", str(tmp_path / "out")],
    )
    for command in commands:
        assert main(command) == 2 and not (tmp_path / "out").exists()
        assert "comes with code of its own: read it, and give --trust-remote-code" in capsys.readouterr().err
    for command in commands[:2]:
        assert main([*command[:-1], str(tmp_path / command[0]), may]) == 0
    assert may in next(line for line in capsys.readouterr().out.splitlines() if "hf-axonn-eval extract" in line)


def test_an_output_that_is_a_file_in_place_of_a_directory_is_refused_before_anything_is_read(place, tmp_path, capsys):
    build(place, tmp_path / "samples.jsonl")
    (tmp_path / "run").write_text("text")
    command = ["extract", "--model", str(place / "absent"), "--samples", str(tmp_path / "samples.jsonl"), "--output"]
    assert main([*command, str(tmp_path / "run")]) == 2
    assert "run is a file, and --output would write the output of an `extract` run there, a" in capsys.readouterr().err
    words = f"samples --documents {place}/documents.jsonl --tokenizer {place}/base --output {tmp_path}"
    assert main(words.split()) == 2
    assert f"{tmp_path} is a directory, and --output would write samples there, a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model/tokenizer.json", "[]", "no tokenizer at"),
        ("model/tokenizer_config.json", "[]", "no tokenizer at"),
        ("model/model.safetensors", "x" * 100, "cannot be loaded: Error while deserializing header"),
        (
            "samples.jsonl.about.json",
            {"extract": {"sampler": [1]}},
            "about.json is damaged: extract is {'sampler': [1]}",
        ),
        (
            "samples.jsonl.about.json",
            {"extract": {"generate": "no"}},
            "about.json is damaged: extract is {'generate': 'no'}",
        ),
        ("samples.jsonl.about.json", {"extract": 7}, "about.json is damaged: extract is 7"),
    ],
)
def test_damaged_files_are_exit_code_2_with_a_message(place, tmp_path, capsys, file, content, message):
    build(place, tmp_path / "samples.jsonl")
    shutil.copytree(place / "base", tmp_path / "model")
    if isinstance(content, dict):
        content = json.dumps(content | {"sha256": samples_digest(read_samples(tmp_path / "samples.jsonl"))})
    (tmp_path / file).write_text(content)
    files = {"--model": "model", "--samples": "samples.jsonl", "--output": "out"}
    assert main(["extract", *(word for key, name in files.items() for word in (key, str(tmp_path / name)))]) == 2
    told = capsys.readouterr().err
    assert f"error: {tmp_path}" in told or "error: no tokenizer" in told
    assert message in told and "Traceback" not in told


def test_a_message_cannot_act_on_the_terminal(tmp_path, capsys):
    assert main(["report", "--runs", f"a={tmp_path}/\x1b[2J\ud83d", "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/\\x1b[2J\\ud83d is not the output directory")


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("utf-8", marks=pytest.mark.slow)])
def test_what_a_terminal_cannot_show_is_escaped(tmp_path, encoding):
    """A name of bytes that are not UTF-8, and a terminal without it."""
    run = RunDirectory(tmp_path / "run")
    identity = {"samples": 1, "samples_sha256": "b", "model_fingerprint": "a", "dtype": "float32"}
    others = {"model": {}, "settings": {}, "grid": None, "device": {}, "versions": {}, "command": []}
    run.begin({"identity": identity, **others})
    run.append([result("a")])
    words = ["report", "--runs", b"\xff[/]\xc3\xa9=" + bytes(tmp_path / "run"), "--output", tmp_path / "out"]
    told = subprocess.run(
        [sys.executable, "-m", "hf_axonn_eval", *words],
        capture_output=True,
        timeout=120,
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )
    shown = {"ascii": "\\udcff[/]\\xe9", "utf-8": "\\udcff[/]\u00e9"}[encoding]
    assert told.returncode == 0, told.stderr
    assert told.stderr == b"" and f" {shown} ".encode() in told.stdout
    assert "1 model (\\\\udcff[/]\u00e9) was asked" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("wrong", [["--batch_size", "0"], ["--confidence", "95"], ["--confidence", "0"]])
def test_numbers_are_checked_before_anything_is_loaded(wrong, capsys):
    with pytest.raises(SystemExit) as end:
        main(["extract", "--model", "absent", "--samples", "absent", "--output", "absent", *wrong])
    assert end.value.code == 2
    assert f"argument {wrong[0]}: {wrong[1]} is not" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("report --runs a=absent --output absent --tokenizer absent", "--tokenizer does nothing without --samples:"),
        ("report --runs a=absent --output absent --text_key body", "--text_key does nothing without --documents or "),
        ("report --runs a=absent --output absent --control x --bucket 2", "--bucket does nothing without --documents"),
        ("verify absent --samples absent", "--samples does nothing without --key: give --key, too"),
        ("verify absent --key absent", "--key does nothing without --samples: give --samples, too"),
        ("verify absent --model absent", "--model does nothing without --samples: give --samples, too"),
        ("verify absent --again 3", "--again does nothing without --model: give --model, too, or leave --again out."),
        ("canaries make --output absent --text_key body", "--text_key does nothing without --documents"),
        ("overlaps --documents absent --output x --drop ./x", "--output and --drop are both ./x: name two files."),
        ("overlaps --documents absent --output x --bucket 1 --bucket_key seen", "--bucket stands in place of --buck"),
        ("overlaps --documents absent --output x --bucket 0 --bucket_key seen", "--bucket stands in place of --buck"),
        ("overlaps --documents absent --output x --number_documents --id_key title", "--number_documents stands in p"),
    ],
)
def test_options_that_do_nothing_or_contradict_each_other_are_refused(command, message, capsys, monkeypatch):
    monkeypatch.setattr("hf_axonn_eval.__main__.check_files", lambda arguments: None)
    assert main(command.split()) == 2
    assert f"error: {message}" in capsys.readouterr().err


def test_the_grid_of_the_launcher_is_used(place, tmp_path, capsys, monkeypatch):
    build(place, tmp_path / "samples.jsonl")
    monkeypatch.setenv("AXONN_CONFIG", json.dumps({"grid": {"data": 1, "z": 2, "y": 1, "x": 2}}))
    asked = ["--model", place / "base", "--samples", tmp_path / "samples.jsonl", "--output", tmp_path / "out"]
    assert main(["extract", *map(str, asked)]) == 2
    assert "= 4, but 1 process" in capsys.readouterr().err


def test_help_needs_no_torch_and_tells_the_commands():
    code = (
        "import runpy, sys; sys.argv = ['x', '--help']\n"
        "try:\n    runpy.run_module('hf_axonn_eval', run_name='__main__')\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert told.returncode == 0, told.stderr
    for command in ("samples", "extract", "report"):
        assert command in told.stdout


@pytest.mark.parametrize("command", ["samples", "extract", "report"])
def test_every_option_has_help(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert "--output" in capsys.readouterr().out
