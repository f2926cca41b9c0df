"""Samples: what one is, their file, and what is written beside it."""

import hashlib
import json
import tracemalloc

import pytest

from hf_axonn_eval import build_samples
from hf_axonn_eval.data.samples import (
    Sample,
    SampleFile,
    about_file,
    counts,
    read_about,
    read_samples,
    samples_digest,
    write_about,
    write_samples,
)


def document(name="a", *, length=20, bucket=0, start=100):
    return {"id": name, "bucket": bucket, "input_ids": list(range(start, start + length))}


def test_round_trip_and_digest(tmp_path):
    samples = build_samples([document("\u00e9"), document("b", bucket=6)], prefix_length=3, suffix_length=2)
    file = tmp_path / "new" / "samples.jsonl"
    digest = write_samples(samples, file)
    assert read_samples(file) == samples
    assert samples_digest(samples) == digest == hashlib.sha256(file.read_bytes()).hexdigest()
    assert [path.name for path in file.parent.iterdir()] == ["samples.jsonl"]


def test_samples_of_a_file_are_read_when_asked_for(tmp_path):
    documents = [document(str(number), start=number) for number in range(9)]
    samples = build_samples(documents, prefix_length=3, suffix_length=2)
    file = tmp_path / "samples.jsonl"
    write_samples(samples, file)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\n\n", 3))  # a mark, and empty lines
    lazy = SampleFile(file)
    assert len(lazy) == 9 and list(lazy) == samples
    assert lazy[4] == samples[4] and lazy[-1] == samples[-1] and lazy[2:8:3] == samples[2:8:3]
    assert samples[5] in lazy and samples_digest(lazy) == samples_digest(samples)
    with pytest.raises(IndexError):
        lazy[9]


def test_memory_does_not_grow_with_the_samples(tmp_path):
    """Cutting, writing, checking and reading 5,000 samples of 100 tokens, which in a list take 20 MB."""
    from hf_axonn_eval import Sampling, iter_samples

    size = 5_000
    ids = list(range(300, 400))
    sampling = Sampling(prefix_length=50, suffix_length=50)
    documents = ({"id": str(number), "bucket": 0, "input_ids": [number, *ids]} for number in range(size))
    tracemalloc.start()
    try:
        write_samples(iter_samples(documents, sampling=sampling), tmp_path / "samples.jsonl")
        samples = SampleFile(tmp_path / "samples.jsonl")
        assert sum(sample.prefix[0] for sample in samples) == sum(range(size))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(samples) == size and peak < 4e6  # the ids of documents and samples, to see that none occurs twice


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
@pytest.mark.parametrize("read", [read_samples, SampleFile])
def test_wrong_sample_files_are_named(tmp_path, read, lines, message):
    file = tmp_path / "samples.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=message):
        read(file)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"absent.jsonl is not a file"):
        read_samples(tmp_path / "absent.jsonl")


def test_a_stopped_write_leaves_the_old_file_and_nothing_else(tmp_path):
    samples = build_samples([document("a"), document("b")], prefix_length=3, suffix_length=2)
    file = tmp_path / "samples.jsonl"
    write_samples(samples, file)

    def broken():
        yield samples[0]
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_samples(broken(), file)
    assert read_samples(file) == samples and [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]


def test_what_is_written_beside_the_samples_is_of_these_samples(tmp_path):
    file = tmp_path / "samples.jsonl"
    samples = build_samples([document()], prefix_length=3, suffix_length=2)
    digest = write_samples(samples, file)
    assert read_about(file) is None
    write_about(file, {"sha256": digest, "samples": 1})
    assert read_about(file) == {"sha256": digest, "samples": 1}
    file.write_bytes(file.read_bytes() + b"\n")
    with pytest.raises(ValueError, match="tells of other samples"):
        read_about(file)
    about_file(file).write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        read_about(file)
    digest = write_samples(samples, file)
    good = {"documents": 3, "left_out": {"too_short": 2}, "not_round_trip": 0}
    for wrong in ({"documents": "3"}, {"left_out": [1]}, {"left_out": {"too_short": -1}}, {"not_round_trip": None}):
        write_about(file, {"sha256": digest, **good, **wrong})
        with pytest.raises(ValueError, match="damaged"):
            read_about(file)
    write_about(file, {"sha256": digest, **good})
    assert counts(read_about(file)) == {"documents": 3, "too_short": 2, "not_round_trip": 0}
    write_samples(samples, file)
    assert read_about(file) is None  # the other samples' description went with them


def test_the_least_that_a_sample_holds():
    least = GOOD | {"bucket": 0, "offset": 0, "prefix": [0], "suffix": (0,)}
    assert (Sample(**least).prefix, Sample(**least).suffix) == ((0,), (0,))
    for wrong in ({"offset": -1}, {"bucket": True}, {"prefix": [-1]}, {"suffix": "1"}, {"sample_id": ""}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Sample(**{**least, **wrong})
    with pytest.raises(AttributeError):
        Sample(**least).bucket = 1
    with pytest.raises(TypeError):
        Sample("a@0", "a", 0, 0, (1,), (2,))


def test_a_file_is_written_without_blanks(tmp_path):
    write_samples([Sample(**GOOD)], tmp_path / "samples.jsonl")
    assert (tmp_path / "samples.jsonl").read_text() == (
        '{"sample_id":"a@0","document_id":"a","bucket":1,"offset":0,"prefix":[1,2],"suffix":[3]}\n'
    )
    write_about(tmp_path / "samples.jsonl", {"sha256": "x"})
    assert about_file(tmp_path / "samples.jsonl").read_text() == '{\n  "sha256": "x"\n}\n'
