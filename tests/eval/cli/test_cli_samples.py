"""The command `samples`: inputs of several kinds, protocols, and what is written beside the samples."""

import hashlib
import json
from pydoc_data.topics import topics

import pytest
from transformers import AutoTokenizer

from hf_axonn_eval import read_about, read_samples
from hf_axonn_eval.__main__ import main
from hf_axonn_eval.data.tokenizer_identity import tokenizer_identity
from tests.helpers.eval_support import topics_tokenizer


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Three texts that were trained on, two that were not, and a tokenizer."""
    place = tmp_path_factory.mktemp("place")
    names = [name for name in sorted(topics) if 3000 < len(topics[name]) < 9000][:5]
    for number, name in enumerate(names):
        folder = place / ("trained" if number < 3 else "control")
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.txt").write_bytes(topics[name].encode())
    topics_tokenizer().save_pretrained(place / "tokenizer")
    return place


def run(place, output, *more):
    files = ["--documents", place / "trained", "--bucket", "4", "--control", place / "control"]
    command = ["samples", *files, "--tokenizer", place / "tokenizer", "--output", output, *more]
    return main([str(word) for word in command])


def test_a_protocol_with_texts_and_controls(place, tmp_path, capsys):
    output = tmp_path / "samples.jsonl"
    assert run(place, output, "--protocol", "cooper100", "--stride", "500", "--suffix_length", "20") == 0
    told = capsys.readouterr().out
    assert "protocol cooper100 (Cooper et al. 2025" in told and "these samples are not as published in:" in told
    assert "    stride: published 10 characters; the text from there on is tokenized anew, here stride 500\n" in told
    assert "here suffix_length 20; 20 to 20 tokens" in told and told.count(": published ") == 2
    samples = read_samples(output)
    assert {(sample.bucket, len(sample.prefix), len(sample.suffix)) for sample in samples} == {
        (0, 50, 20),
        (4, 50, 20),
    }
    about = read_about(output)
    digest = hashlib.sha256(output.read_bytes()).hexdigest()
    assert about["sha256"] == digest and digest in told
    assert about["samples"] == len(samples) and about["documents"] == 5
    assert about["buckets"] == {str(b): sum(sample.bucket == b for sample in samples) for b in (0, 4)}
    assert about["protocol"]["name"] == "cooper100" and about["protocol"]["changed"] == ["suffix_length", "stride"]
    assert about["protocol"]["settings"]["stride_unit"] == "characters"
    facts = about["protocol"]["samples"]
    assert facts["samples"] == facts["begin_with_bos"] == len(samples) and facts["has_bos"] is True
    assert facts["documents_used"] == {"0": 2, "4": 3} and facts["suffix_tokens"] == {"least": 20, "most": 20}
    assert about["tokenizer"] == tokenizer_identity(AutoTokenizer.from_pretrained(place / "tokenizer"))
    assert about["tokenizer"]["path"] == str(place / "tokenizer") and about["tokenizer"]["size"] == 800
    assert about["extract"]["sampler"]["top_k"] == 40 and about["extract"]["generate"] is False


def test_as_published(tmp_path, capsys):
    """Documents as the protocol wants them, and one that it leaves out by name."""
    rows = [{"id": name, "bucket": 8, "input_ids": list(range(5500))} for name in ("v1/8/87", "v1/8/88")]
    (tmp_path / "docs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    topics_tokenizer().save_pretrained(tmp_path / "tokenizer")
    command = ["samples", "--protocol", "apertus", "--documents", tmp_path / "docs.jsonl"]
    command += ["--tokenizer", tmp_path / "tokenizer", "--output", tmp_path / "s"]
    assert main([str(word) for word in command]) == 0
    told = capsys.readouterr().out
    assert {sample.document_id for sample in read_samples(tmp_path / "s")} == {"v1/8/88"}
    assert read_about(tmp_path / "s")["left_out"] == {"dropped": 1}
    # what can be said before a model is asked: one bucket of 13, 1 of 16 known ones, and a draw that nobody makes
    lines = [
        line.strip().partition(":")[0] for line in told.partition("next:")[0].splitlines() if line.startswith("    ")
    ]
    assert lines == ["buckets", "known contaminations", "nucleus sampling"]


def test_without_a_protocol(place, tmp_path, capsys):
    output = tmp_path / "samples.jsonl"
    more = ["--sampling", "last", "--suffix_length", "10", "--max_tokens", "30", "--max_documents", "1"]
    assert run(place, output, *more, "--add_special_tokens") == 0
    samples = read_samples(output)
    assert [(len(sample.prefix), len(sample.suffix), sample.bucket) for sample in samples] == [
        (20, 10, 4),
        (20, 10, 0),
    ]
    assert read_about(output)["protocol"]["name"] is None and read_about(output)["extract"] == {}
    assert read_about(output)["left_out"] == {"beyond_max_documents": 3}
    assert run(place, output, "--prefix_length", "4", "8", "--offset", "0", "9", "--combine", "axes") == 0
    assert {len(sample.prefix) for sample in read_samples(output)} == {4, 8}
    assert "  protocol " not in capsys.readouterr().out


def test_rows_without_ids(place, tmp_path):
    rows = [json.dumps({"body": topics[name], "seen": 2}) for name in ("for", "while")]
    (tmp_path / "docs.jsonl").write_text("\n".join(rows))
    command = ["samples", "--documents", tmp_path / "docs.jsonl", "--tokenizer", place / "tokenizer"]
    command += ["--output", tmp_path / "s", "--text_key", "body", "--bucket_key", "seen", "--number_documents"]
    assert main([str(word) for word in command]) == 0
    assert [sample.document_id for sample in read_samples(tmp_path / "s")] == ["docs.jsonl:1", "docs.jsonl:2"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--protocol", "sc24", "--stride", "5"], "protocol sc24 cuts by 'first', which has no stride"),
        (["--protocol", "sc24", "--sampling", "last"], "says itself where to cut"),
        (["--stride", "5"], "--sampling offsets cuts by 'offsets', which has no stride"),
        (["--protocol", "apertus"], "fewer than 3048 tokens"),
        (["--split", "train"], "no split 'train'"),
        (["--sampling", "sliding", "--prefix_length", "5", "6"], "prefix_length has 2 numbers"),
        (["--offset", "-3"], "different numbers of at least 0"),
    ],
)
def test_wrong_settings_are_exit_code_2(place, tmp_path, capsys, more, message):
    assert run(place, tmp_path / "samples.jsonl", *more) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
