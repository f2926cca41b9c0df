"""Samples: where they are cut, and what a wrong file is told."""

import hashlib
import json
import logging

import pytest
from eval_support import topics_tokenizer

from hf_axonn_eval.samples import Sample, build_samples, read_documents, read_samples, samples_digest, write_samples


def document(name="a", *, length=20, bucket=0, start=100):
    return {"id": name, "bucket": bucket, "input_ids": list(range(start, start + length))}


def test_prefix_and_suffix_are_neighbours_at_the_offset():
    samples = build_samples([document(bucket=4)], prefix_length=3, suffix_length=2, offsets=(0, 5))
    assert samples == [
        Sample(sample_id="a@0", document_id="a", bucket=4, offset=0, prefix=(100, 101, 102), suffix=(103, 104)),
        Sample(sample_id="a@5", document_id="a", bucket=4, offset=5, prefix=(105, 106, 107), suffix=(108, 109)),
    ]


def test_a_document_that_just_fits_is_used_and_a_shorter_one_is_reported(caplog):
    documents = [document("fits", length=10), document("short", length=9)]
    with caplog.at_level(logging.WARNING):
        samples = build_samples(documents, prefix_length=4, suffix_length=4, offsets=(0, 2))
    assert [sample.document_id for sample in samples] == ["fits", "fits"]
    assert "1 of 2 documents have fewer than 10 tokens" in caplog.text


def test_length_filter():
    documents = [document(str(length), length=length) for length in (5, 10, 15, 20)]
    samples = build_samples(
        documents, prefix_length=2, suffix_length=2, min_document_tokens=10, max_document_tokens=15
    )
    assert [sample.document_id for sample in samples] == ["10", "15"]


def test_text_is_tokenized_as_a_whole_and_then_cut():
    tokenizer = topics_tokenizer()
    text = "for statement, while statement and generator expressions"
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    documents = [{"id": "d", "bucket": 1, "text": text}]
    [sample] = build_samples(documents, tokenizer=tokenizer, prefix_length=5, suffix_length=4)
    assert [*sample.prefix, *sample.suffix] == whole[:9]
    [special] = build_samples(
        documents, tokenizer=tokenizer, prefix_length=5, suffix_length=4, add_special_tokens=True
    )
    assert special.prefix == (tokenizer.bos_token_id, *whole[:4])


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ([document()], {"prefix_length": 0}, "prefix_length is 0"),
        ([document()], {"suffix_length": 1.5}, "suffix_length is 1.5"),
        ([document()], {"offsets": (1, 1)}, "different numbers"),
        ([document()], {"offsets": (-1,)}, "different numbers"),
        ([document()], {"max_document_tokens": 5}, "max_document_tokens is 5, but a document needs 8 tokens"),
        ([document(length=7)], {}, "1 of 1 documents have fewer than 8 tokens"),
        ([document(), document()], {}, "'a' occurs twice"),
        ([document(bucket="many")], {}, "bucket 'many'"),
        ([{"id": "a", "bucket": 1}], {}, "document 1 has no 'text'"),
        ([{"id": "a", "bucket": 1, "text": "words"}], {}, "needs tokenizer"),
        ([{"id": "a", "bucket": 1, "input_ids": [1, 2, -100, 4, 5, 6, 7, 8]}], {}, "prefix must be a list"),
    ],
)
def test_wrong_input_is_named(documents, options, message):
    with pytest.raises(ValueError, match=message):
        build_samples(documents, **{"prefix_length": 4, "suffix_length": 4, **options})


def test_round_trip_and_digest(tmp_path):
    samples = build_samples([document("\u00e9"), document("b", bucket=6)], prefix_length=3, suffix_length=2)
    file = tmp_path / "new" / "samples.jsonl"
    write_samples(samples, file)
    assert read_samples(file) == samples
    assert samples_digest(samples) == hashlib.sha256(file.read_bytes()).hexdigest()
    assert [path.name for path in file.parent.iterdir()] == ["samples.jsonl"]


GOOD = {"sample_id": "a@0", "document_id": "a", "bucket": 1, "offset": 0, "prefix": [1, 2], "suffix": [3]}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no samples"),
        ([json.dumps(GOOD), "{"], "line 2 is not JSON"),
        ([json.dumps(GOOD), json.dumps(GOOD)], "line 2: sample id 'a@0' is already on line 1"),
        ([json.dumps(GOOD | {"suffix": []})], "line 1 is not a sample: suffix must be a list of one or more"),
        ([json.dumps(GOOD | {"prefix": [1, True]})], "prefix must be a list"),
        ([json.dumps(GOOD | {"bucket": -1})], "bucket is -1"),
        ([json.dumps(GOOD | {"document_id": 7})], "document_id is 7"),
        ([json.dumps({"prompt": "text"})], "line 1 is not a sample: .*prompt"),
        (["[1, 2]"], "line 1 is not a sample"),
    ],
)
def test_wrong_sample_files_are_named(tmp_path, lines, message):
    file = tmp_path / "samples.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=message):
        read_samples(file)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="absent.jsonl is not a file"):
        read_samples(tmp_path / "absent.jsonl")


def test_documents_file(tmp_path):
    file = tmp_path / "documents.jsonl"
    file.write_text('{"id": "a", "text": "words", "bucket": 4}\n\n{"id": "b", "input_ids": [1, 2], "bucket": 0}\n')
    assert read_documents(file) == [
        {"id": "a", "text": "words", "bucket": 4},
        {"id": "b", "input_ids": [1, 2], "bucket": 0},
    ]
    file.write_text('{"title": "a", "body": "words"}\n')
    assert read_documents(file, id_key="title", text_key="body", bucket=6) == [
        {"bucket": 6, "id": "a", "text": "words"}
    ]
    with pytest.raises(ValueError, match="line 1 has no field 'id', 'bucket', 'text'"):
        read_documents(file)
