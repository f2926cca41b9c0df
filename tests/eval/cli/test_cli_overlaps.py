"""The command `overlaps`, and its drop list in `samples`."""

import json
from pydoc_data.topics import topics

import pytest

from hf_axonn_eval import read_about, read_samples
from hf_axonn_eval.__main__ import main
from tests.helpers.eval_support import topics_tokenizer


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Members, controls of which one is a page of a member, held-out texts of which one is a member, a tokenizer."""
    place = tmp_path_factory.mktemp("place")
    pages = [topics[name] for name in sorted(topics) if 3000 < len(topics[name]) < 9000][:6]
    kinds = {
        "members": {"a": pages[0], "b": pages[1]},
        "controls": {"c": pages[2], "page of a": pages[0][500:2500]},
        "outside": {"d": pages[3], "b again": pages[1]},
    }
    for kind, documents in kinds.items():
        lines = [json.dumps({"id": name, "text": content, "bucket": 4}) for name, content in documents.items()]
        (place / f"{kind}.jsonl").write_text("\n".join(lines))
    topics_tokenizer().save_pretrained(place / "tokenizer")
    return place


def run(*words) -> int:
    return main([str(word) for word in words])


@pytest.mark.parametrize("tokenizer", [False, True])
def test_what_overlaps_is_written_and_dropped(place, tmp_path, capsys, tokenizer):
    inputs = ["--documents", place / "members.jsonl", "--control", place / "controls.jsonl"]
    more = ["--tokenizer", place / "tokenizer"] if tokenizer else []
    output, drop = tmp_path / "out" / "overlaps.json", tmp_path / "drop.txt"
    files = ["--held_out", place / "outside.jsonl", "--output", output, "--drop", drop]
    assert run("overlaps", *inputs, *files, *more) == 0
    told = capsys.readouterr().out
    assert "compared 2 of bucket 0, 2 of bucket 4, 2 of bucket held_out" in told
    assert "0 and 4: 1 pairs, largest containment 1.00" in told
    assert "0 and held_out: 0 pairs, largest containment 0.00" in told
    assert "2 controls and held-out documents overlap with members" in told and str(drop) in told
    found = json.loads(output.read_text())
    assert found["drop"] == ["page of a", "b again"] == drop.read_text().splitlines()
    assert found["settings"] == {"n": 8, "least": 0.2, "one_in": 1, "runs_of": "ids" if tokenizer else "words"}
    assert found["inputs"]["held_out"] == [str(place / "outside.jsonl")]
    assert found["tokenizer"] == (str(place / "tokenizer") if tokenizer else None)
    first = {tuple(pair["ids"]): pair for pair in found["pairs"]}
    assert first["b", "b again"]["jaccard"] == 1 and first["page of a", "a"]["buckets"] == ["0", "4"]
    # the list in `samples`; a held-out id in it is nobody there
    samples = tmp_path / "samples.jsonl"
    asked = ["samples", *inputs, "--tokenizer", place / "tokenizer", "--output", samples]
    assert run(*asked, "--drop", drop) == 0
    assert {sample.document_id for sample in read_samples(samples)} == {"a", "b", "c"}
    about = read_about(samples)
    assert about["left_out"] == {"dropped": 1} and about["documents"] == 4


def test_without_a_drop_list_and_with_every_option(place, tmp_path, capsys):
    inputs = ["--documents", place / "members.jsonl", "--control", place / "controls.jsonl"]
    output = tmp_path / "overlaps.json"
    assert run("overlaps", *inputs, "--output", output, "--ngram", 5, "--least", 0.99, "--one_in", 2) == 0
    assert json.loads(output.read_text())["settings"] == {"n": 5, "least": 0.99, "one_in": 2, "runs_of": "words"}
    assert "their ids" not in capsys.readouterr().out and list(tmp_path.iterdir()) == [output]
    assert run("overlaps", *inputs, "--held_out", place / "members.jsonl", "--output", output) == 2
    assert "'a' occurs twice" in capsys.readouterr().err


def test_everything_dropped_leaves_no_samples(place, tmp_path, capsys):
    (tmp_path / "drop.txt").write_text("a\nb\n")
    asked = ["samples", "--documents", place / "members.jsonl", "--tokenizer", place / "tokenizer"]
    assert run(*asked, "--output", tmp_path / "samples.jsonl", "--drop", tmp_path / "drop.txt") == 2
    assert "no samples" in (told := capsys.readouterr().err) and "2 are to be dropped" in told
    assert run(*asked, "--output", tmp_path / "samples.jsonl", "--drop", tmp_path / "absent") == 2
    assert "absent is not a file" in capsys.readouterr().err
