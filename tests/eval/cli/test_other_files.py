"""Every file option given another of our files: one sentence, exit code 2, and nothing is written or loaded."""

from __future__ import annotations

import json
import shutil

import pytest

from hf_axonn_eval.__main__ import main
from hf_axonn_eval.canaries.generate import make_canaries, write_canaries
from hf_axonn_eval.data.kinds import kind_of
from hf_axonn_eval.extraction import load_model as loading
from tests.helpers.eval_support import documents, tiny_llama, topics_tokenizer, trained_llama


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with one of every file that the commands read or write, made by them."""
    place = tmp_path_factory.mktemp("place")
    known = [document for document in documents() if document["bucket"]]
    (place / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in known))
    (place / "ids.jsonl").write_text('\n{"id": "a", "bucket": 1, "input_ids": [1, 2]}\n')
    for name, model in (("model", trained_llama()), ("other", tiny_llama())):
        model.save_pretrained(place / name)
        topics_tokenizer().save_pretrained(place / name)
    topics_tokenizer().save_pretrained(place / "tokenizer")
    write_canaries(make_canaries("{digits:2}", insertions=[1], each=1, candidates=10, seed=0), place / "canaries")
    for words in (
        "samples --documents documents.jsonl --tokenizer model --output samples.jsonl",
        "extract --model model --samples samples.jsonl --output run --no_generation",
        "report --runs a=run --output report",
        "bundle a=run --samples samples.jsonl --output bundle.tar --key key",
        "export --samples samples.jsonl --tokenizer model --format lm-eval --output export",
        "overlaps --documents documents.jsonl --output overlaps.json",
    ):
        assert main(at(place, words)) == 0, words
    return place


FILES = "documents.jsonl ids.jsonl samples.jsonl samples.jsonl.about.json bundle.tar key overlaps.json new".split()
FOLDERS = "model other tokenizer canaries run report export".split()


def at(place, words: str) -> list[str]:
    """A command line with a path for each of these names."""

    def whole(word: str) -> str:
        name, equals, path = word.rpartition("=")
        return f"{name}{equals}{place / path}" if path.partition("/")[0] in (*FILES, *FOLDERS) else word

    command, *rest = words.split()
    return [command, *map(whole, rest)]


KINDS = {
    "documents.jsonl": ("documents", ", line 1"),
    "ids.jsonl": ("documents", ", line 2"),
    "samples.jsonl": ("samples", ", line 1"),
    "samples.jsonl.about.json": ("about", ""),
    "run": ("run", ""),
    "run/results.jsonl": ("results", ", line 1"),
    "run/run.json": ("record", ""),
    "run/summary.json": ("summary", ""),
    "report": ("report", ""),
    "bundle.tar": ("bundle", ""),
    "key": ("key", ""),
    "export": ("export", ""),
    "overlaps.json": ("overlaps", ""),
    "canaries": ("canaries", ""),
    "canaries/canaries.json": ("canaries file", ""),
    "model": ("model", ""),
    "tokenizer": ("tokenizer", ""),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_the_commands_write_is_known(place, name):
    assert kind_of(place / name) == KINDS[name]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "extract --model model --samples documents.jsonl --output new",
            "documents.jsonl, line 1 looks like documents, but --samples takes samples: `hf-axonn-eval samples "
            "--documents {place}/documents.jsonl --tokenizer MODEL --output samples.jsonl` makes samples of it.",
        ),
        ("extract --model model --samples ids.jsonl --output new", "line 2 looks like documents"),
        ("extract --model model --samples run --output new", "name the samples that the run was asked."),
        ("extract --model model --samples run/results.jsonl --output new", "looks like results of an `extract` run"),
        ("extract --model model --samples samples.jsonl.about.json --output new", "{place}/samples.jsonl."),
        ("extract --model model --samples bundle.tar --output new", "looks like an audit bundle, but --samples takes "
         "samples: name the file that `hf-axonn-eval samples` wrote."),
        ("extract --model model --samples model --output new", "looks like a model, but --samples takes samples"),
        ("extract --model tokenizer --samples samples.jsonl --output new", "a tokenizer without a model"),
        ("extract --model run --samples samples.jsonl --output new", "but --model takes a model"),
        ("extract --model model --tokenizer samples.jsonl --samples samples.jsonl --output new", "--tokenizer takes"),
        ("extract --model model --samples samples.jsonl --output model", "--output would write the output of an"),
        ("samples --documents samples.jsonl --tokenizer model --output new", "looks like samples, but --documents"),
        ("samples --documents run --tokenizer model --output new", "the output of an `extract` run"),
        ("samples --documents bundle.tar --tokenizer model --output new", "looks like an audit bundle"),
        ("samples --documents documents.jsonl --control run --tokenizer model --output new", "but --control"),
        ("samples --documents documents.jsonl --tokenizer run --output new", "but --tokenizer takes a tokenizer"),
        ("samples --documents documents.jsonl --drop overlaps.json --tokenizer model --output new", "--drop takes"),
        ("samples --documents documents.jsonl --tokenizer model --output documents.jsonl", "name another place."),
        ("overlaps --documents samples.jsonl --output new", "looks like samples, but --documents takes documents"),
        ("overlaps --documents documents.jsonl --held_out run --output new", "but --held_out takes documents"),
        ("overlaps --documents documents.jsonl --output samples.jsonl", "write the output of `overlaps` there"),
        ("report --runs b=samples.jsonl --output new", "`hf-axonn-eval extract --model MODEL --samples"),
        ("report --runs b=model --output new", "`hf-axonn-eval extract --model {place}/model --samples samples.jsonl"),
        ("report --runs b=run/results.jsonl --output new", "name the directory that it is in, {place}/run."),
        ("report --runs a=run --samples documents.jsonl --output new", "looks like documents, but --samples takes"),
        ("report --runs a=run --output run", "--output would write a report there: name another place."),
        ("compare --runs a=run b=bundle.tar", "looks like an audit bundle, but --runs takes the output of an"),
        ("tokens --run samples.jsonl --output new", "looks like samples, but --run takes"),
        ("tokens --run run --samples documents.jsonl --output new", "looks like documents, but --samples takes"),
        ("canaries make --documents samples.jsonl --output new", "looks like samples, but --documents takes"),
        ("canaries rank --canaries documents.jsonl --model model --output new", "but --canaries takes a directory of"),
        ("canaries rank --canaries canaries/canaries.json --model model --output new", "is in, {place}/canaries."),
        ("bundle b=samples.jsonl --samples samples.jsonl --output new --key key", "but runs takes the output of an"),
        ("bundle a=run --samples documents.jsonl --output new --key key", "but --samples takes samples"),
        ("bundle a=run --samples samples.jsonl --output new --key samples.jsonl", "but --key takes the key of audit"),
        ("verify run", "but bundle takes an audit bundle"),
        ("verify bundle.tar --samples documents.jsonl --key key", "looks like documents, but --samples takes samples"),
        ("export --samples documents.jsonl --tokenizer model --format lm-eval --output new", "makes samples of it."),
    ],
)  # fmt: skip
def test_another_of_our_files_is_one_sentence(place, capsys, monkeypatch, command, message):
    def refuse(*_, **__):
        raise AssertionError("weights are read")

    monkeypatch.setattr(loading, "_on_one_process", refuse)
    before = sorted(path.relative_to(place) for path in place.rglob("*"))
    capsys.readouterr()
    assert main(at(place, command)) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and "__init__" not in told
    assert message.format(place=place) in told
    assert before == sorted(path.relative_to(place) for path in place.rglob("*"))


def test_a_line_in_the_midst_is_named_by_its_fields(place, tmp_path, capsys):
    lines = (place / "samples.jsonl").read_text().splitlines()
    mixed = tmp_path / "mixed.jsonl"
    for line, message in (
        ('{"id": "a", "text": "b", "bucket": 1}', "line 2 is not a sample: it has no field sample_id, document_id, "),
        (lines[1].replace('"offset"', '"place"'), "it has no field offset; Sample has no field place."),
        ("[1]", "line 2 is not a sample: it is not a JSON object."),
    ):
        mixed.write_text("\n".join([lines[0], line]))
        words = ["--samples", str(mixed), "--output", str(tmp_path / "out")]
        assert main(["extract", "--model", str(place / "model"), *words]) == 2
        told = capsys.readouterr().err
        assert message in told and "__init__" not in told and "hf-axonn-eval samples" in told


def test_a_used_output_and_another_tokenizer_are_found_before_weights_are_read(place, tmp_path, capsys, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("weights are read")

    monkeypatch.setattr(loading, "_on_one_process", refuse)
    asked = "extract --model model --samples samples.jsonl --output run"
    for more, message in (
        ("", "generate was False and is True"),
        ("--no_generation --membership", "membership was None and is True"),
        (
            "--no_generation --server http://127.0.0.1:9/v1 --tokenizer model --membership",
            "membership was None and is True",
        ),
    ):
        assert main(at(place, f"{asked} {more}")) == 2
        told = capsys.readouterr()
        assert f"{place / 'run'} holds another run (" in told.err and message in told.err
    other = topics_tokenizer()
    tokenizer = type(other).from_pretrained(place / "model")
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    asked = [*at(place, "extract --model model --samples samples.jsonl --output new"), "--tokenizer"]
    for more in ([], ["--server", "http://127.0.0.1:9/v1"]):
        assert main([*asked, str(tmp_path / "tokenizer"), *more]) == 2
        assert "the samples were made with another tokenizer than the model's" in capsys.readouterr().err
    shutil.copy(place / "samples.jsonl", tmp_path / "unknown.jsonl")  # nothing says which tokenizer made them
    small = type(other).from_pretrained(place / "model")
    (tmp_path / "samples.jsonl").write_text(
        '{"sample_id": "a", "document_id": "a", "bucket": 0, "offset": 0, "prefix": [1], "suffix": [900]}\n'
    )
    small.save_pretrained(tmp_path / "small")
    words = ["--model", place / "model", "--samples", tmp_path / "samples.jsonl", "--output", tmp_path / "new"]
    assert main(["extract", *map(str, words)]) == 2
    assert "there is a token id 900, but the ids of the tokenizer" in capsys.readouterr().err
    report = [*at(place, "report --runs a=run --samples samples.jsonl --output new"), "--tokenizer"]
    assert main([*report, str(tmp_path / "tokenizer")]) == 2
    assert "the page would show other words" in capsys.readouterr().err
    assert not (place / "new").exists()


def test_samples_and_extract_say_what_they_do_and_what_they_wrote(place, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = {"id": "short", "text": "one", "bucket": 0}
    lines = (place / "documents.jsonl").read_text() + json.dumps(short) + "\n"
    (tmp_path / "documents.jsonl").write_text(lines)
    model = str(place / "model")
    assert main(["samples", "--documents", "documents.jsonl", "--tokenizer", model, "--output", "samples.jsonl"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("documents  documents.jsonl\ntokenizer  ") and "document/s" not in told.err
    for line in (
        "cuts       kind offsets, prefix_length 32, suffix_length 32, offset 0, combine product, bos tokenizer",
        "output     samples.jsonl",
        "6 samples from 7 documents: samples.jsonl",
        "  left out: 1 too short",
        f"    hf-axonn-eval extract --model {model} --samples samples.jsonl --output runs/model",
    ):
        assert line in told.out.splitlines(), told.out
    assert main(["extract", "--model", model, "--samples", "samples.jsonl", "--output", "runs/base"]) == 0
    told = capsys.readouterr()
    for line in (
        f"model      {model}, on one process",
        "samples    6 of samples.jsonl: 6 of bucket 40; the first has 32 + 32 tokens",
        "measures   exact match, probability of the suffix, ROUGE and edit distance (by decoding)",
        "output     runs/base",
        "    hf-axonn-eval report --runs base=runs/base --samples samples.jsonl --output runs/base-report",
    ):
        assert line in told.out.splitlines(), told.out
    assert "sample/s" not in told.err
    assert main(["extract", "--model", model, "--samples", "samples.jsonl", "--output", "runs/base"]) == 0
    assert "output     runs/base, where 6 of 6 samples are done" in capsys.readouterr().out
