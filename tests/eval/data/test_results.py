"""The directory of a run: what survives a crash, and what is refused."""

import json
import math

import pytest

from hf_axonn_eval.data.results import RunDirectory, read_results, read_run
from tests.helpers.eval_support import result


RECORD = {
    "identity": {"samples": 2, "samples_sha256": "b", "model_fingerprint": "a", "dtype": "float32"},
    "model": {"path": "m"},
    "settings": {},
    "grid": None,
    "device": {"type": "cpu"},
    "versions": {},
    "command": [],
}


def test_what_is_appended_is_read_back(tmp_path):
    run = RunDirectory(tmp_path / "run")
    assert run.begin(RECORD) == []
    whole = result("b", generated=[1, 2], generated_text="\u00e9", rougeL=0.25, near_verbatim=True)
    run.append([result("a")])
    run.append([whole])
    assert RunDirectory(tmp_path / "run").begin(RECORD) == [result("a"), whole]
    record, results = read_run(tmp_path / "run")
    assert results == [result("a"), whole]
    assert [part.pop("index") for part in record.pop("parts")] == [0, 2] and record == RECORD


def test_every_start_is_a_part_of_the_run(tmp_path):
    first = {**RECORD, "started": "monday", "processes": 1, "grid": None, "settings": {"batch_size": 2}}
    second = {**first, "started": "tuesday", "processes": 2, "grid": "z=2", "settings": {"batch_size": 4}}
    second |= {"versions": {"torch": "3"}, "command": ["again"]}
    run = RunDirectory(tmp_path)
    run.begin(first)
    run.append([result("a")])
    run.begin(second)
    run.append([result("b")])
    run.begin(first)
    record = read_run(tmp_path)[0]
    parts = record.pop("parts")
    assert record == first, "the rest is of the first start"
    assert [part["index"] for part in parts] == [0, 1, 2]
    assert [part["started"] for part in parts] == ["monday", "tuesday", "monday"]
    assert parts[1] == {
        "index": 1,
        "started": "tuesday",
        "command": ["again"],
        "settings": {"batch_size": 4},
        "processes": 2,
        "grid": "z=2",
        "device": {"type": "cpu"},
        "versions": {"torch": "3"},
    }


def test_a_run_of_before_there_were_parts_goes_on(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({**RECORD, "started": "last year"}))
    RunDirectory(tmp_path).append([result("a")])
    assert RunDirectory(tmp_path).begin({**RECORD, "started": "now"}) == [result("a")]
    parts = json.loads((tmp_path / "run.json").read_text())["parts"]
    assert [(part["index"], part["started"]) for part in parts] == [(0, "last year"), (1, "now")]


def test_what_json_cannot_say_is_said_in_quotes(tmp_path):
    run = RunDirectory(tmp_path)
    run.begin(RECORD)
    never = result(
        "a", sampled_logprob=-math.inf, logprob=-math.inf, logprobs=[-math.inf, -1.0], membership={"loss": -2.0}
    )
    run.append([never])

    def refuse(constant):
        raise AssertionError(constant)

    json.loads((tmp_path / "results.jsonl").read_text(), parse_constant=refuse)
    assert run.results()[0] == never


def test_lines_of_before_the_newer_fields_are_read(tmp_path):
    fields = {name: value for name, value in vars(result("a")).items() if value is not None}
    assert "margin" not in fields
    (tmp_path / "results.jsonl").write_text(json.dumps(fields) + "\n")
    assert read_results(tmp_path / "results.jsonl") == [result("a")]


def test_results_are_read_from_the_file_in_any_order(tmp_path):
    run = RunDirectory(tmp_path)
    run.begin(RECORD)
    assert run.results() == []
    run.append([result("c"), result("a"), result("b")])
    assert run.results() == [result("c"), result("a"), result("b")]
    sorted_ = run.results({"a": 0, "b": 1, "c": 2})
    assert sorted_[2] == result("c") and sorted_[-1:] == [result("c")] and len(sorted_) == 3
    assert [one.sample_id for one in sorted_] == ["a", "b", "c"]
    assert sorted_ != [result("a"), result("b")] and sorted_ != "abc"


def test_a_line_that_a_crash_cut_short_is_measured_again(tmp_path):
    run = RunDirectory(tmp_path)
    run.begin(RECORD)
    run.append([result("a"), result("b")])
    file = tmp_path / "results.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    assert run.begin(RECORD) == [result("a")]
    run.append([result("b")])
    assert read_run(tmp_path)[1] == [result("a"), result("b")]


def test_an_unfinished_run_is_not_reported(tmp_path):
    run = RunDirectory(tmp_path)
    run.begin(RECORD)
    with pytest.raises(ValueError, match="0 of 2 samples: run the same extract command again"):
        read_run(tmp_path)
    run.append([result("a")])
    with pytest.raises(ValueError, match="1 of 2 samples"):
        read_run(tmp_path)


def test_another_run_is_not_gone_on_with(tmp_path):
    RunDirectory(tmp_path).begin(RECORD)
    with pytest.raises(ValueError, match="model_fingerprint was 'a' and is 'b'"):
        RunDirectory(tmp_path).begin({"identity": {"samples": 2, "model_fingerprint": "b"}})
    written = json.loads((tmp_path / "run.json").read_text())
    assert len(written.pop("parts")) == 1 and written == RECORD


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no run.json"),
        ({"run.json": "{"}, "run.json is damaged"),
        ({"run.json": "[]"}, "run.json is damaged"),
        ({"run.json": '{"identity": {"samples": 0}}'}, r"run.json is damaged \(not as extract writes it: model, "),
        ({"run.json": json.dumps(RECORD | {"device": []})}, "as extract writes it: device"),
        ({"run.json": json.dumps(RECORD | {"identity": {"samples": "2"}})}, "as extract writes it: samples, "),
        ({"run.json": json.dumps(RECORD | {"parts": {}})}, "as extract writes it: parts"),
        ({"run.json": json.dumps(RECORD | {"parts": [1]})}, "as extract writes it: parts"),
    ],
)
def test_what_is_no_run_is_named(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_run(tmp_path)


def test_results_without_a_record_are_not_written_over(tmp_path):
    (tmp_path / "results.jsonl").write_text("something of the user's\n")
    with pytest.raises(ValueError, match="name another output directory"):
        RunDirectory(tmp_path).begin(RECORD)
    assert (tmp_path / "results.jsonl").read_text() == "something of the user's\n"


def test_damaged_lines_are_named(tmp_path):
    run = RunDirectory(tmp_path)
    run.begin(RECORD)
    run.append([result("a"), result("a")])
    with pytest.raises(ValueError, match="line 2: sample 'a' is there twice"):
        read_results(tmp_path / "results.jsonl")
    (tmp_path / "results.jsonl").write_text('{"sample_id": "a"}\n')
    with pytest.raises(ValueError, match="line 1 is damaged"):
        read_results(tmp_path / "results.jsonl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bucket": "x"}, "bucket is 'x', not int"),
        ({"bucket": 10**30}, "not int"),
        ({"bucket": -1}, "bucket is -1, but it is at least 0"),
        ({"document_id": 3}, "document_id is 3, not str"),
        ({"sample_id": ["x"]}, "not str"),
        ({"exact_match": 3}, "exact_match is 3, not bool"),
        ({"suffix_length": 0}, "suffix_length is 0, but it is at least 1"),
        ({"suffix_length": 10**12}, "suffix_length is 1000000000000, but no sample asks for more"),
        ({"divergence_point": 99}, "divergence_point is 99 of 2 tokens"),
        ({"hits": [True]}, "hits are 1 for 2 tokens"),
        ({"logprobs": [None, 1.0]}, "logprobs is "),
        ({"logprob": math.nan}, "logprob is nan, not float"),
        ({"logprob": "nan"}, "logprob is nan, not float"),
        ({"rougeL": 10**400}, "rougeL is "),
        ({"sampled_logprob": 3.0}, "a probability is at most 1"),
        ({"membership": [1]}, "membership is "),
        ({"near_copies": [-1.0, 3.0]}, "a probability is at most 1"),
        ({"near_copies": [-1.0, -2.0]}, "with more edits there are not fewer"),
        ({"metrics": {"m": "y"}}, "could not convert"),
        ({"suffix_text": 5}, "suffix_text is 5, not str"),
        ({"near_tie": 5}, "near_tie is 5, not bool"),
        ({"unknown": 5}, "SampleResult has no field unknown"),
    ],
)
def test_a_field_that_cannot_be_is_named_with_its_line(tmp_path, changes, message):
    lines = [json.dumps({**vars(result(name)), **changed}) for name, changed in (("a", {}), ("b", changes))]
    (tmp_path / "results.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=f"results.jsonl, line 2 is damaged .*{message}"):
        read_results(tmp_path / "results.jsonl")


def test_a_directory_is_no_file_of_results(tmp_path):
    with pytest.raises(ValueError, match="is not a file"):
        read_results(tmp_path)


def test_a_line_says_everything_without_blanks(tmp_path):
    run = RunDirectory(tmp_path)
    run.begin(RECORD)
    run.append([result("a", metrics={"mine": -math.inf}, rougeL=0.5)])
    text = (tmp_path / "results.jsonl").read_text()
    assert text.startswith('{"sample_id":"a","document_id":"a","bucket":0,') and text.endswith("}\n")
    assert '"metrics":{"mine":"-inf"}' in text and " " not in text
    assert run.results()[0].metric("mine") == -math.inf
    assert (run.results()[0].metric("rougeL"), run.results()[0].metric("rouge1")) == (0.5, None)
    assert run.results()[0].metric("nothing") is None
    run.finish({"a": 1})
    assert (tmp_path / "summary.json").read_text() == '{\n  "a": 1\n}\n'


def test_a_file_that_ends_within_its_first_line_holds_nothing(tmp_path):
    run = RunDirectory(tmp_path)
    run.begin(RECORD)
    (tmp_path / "results.jsonl").write_text('{"sample_id"')
    assert list(run.begin(RECORD)) == [] and (tmp_path / "results.jsonl").read_bytes() == b""


def test_results_are_equal_to_lists_of_the_same_and_to_nothing_else(tmp_path):
    run = RunDirectory(tmp_path)
    run.begin(RECORD)
    run.append([result("a"), result("b")])
    found = run.results()
    assert found == (result("a"), result("b")) and found == run.results()
    for other in ([result("a")], [result("a"), result("c")], [], b"ab", None):
        assert found != other
    assert repr(found) == f"<2 results in {tmp_path / 'results.jsonl'}>"
    with pytest.raises(TypeError):
        hash(found)
    with pytest.raises(AttributeError):
        found[0].bucket = 3
    with pytest.raises(TypeError):
        type(found[0])("a")


def test_more_results_than_were_asked_for_are_no_finished_run(tmp_path):
    run = RunDirectory(tmp_path)
    run.begin(RECORD)
    run.append([result("a"), result("b"), result("c")])
    with pytest.raises(ValueError, match="3 of 2 samples"):
        read_run(tmp_path)
