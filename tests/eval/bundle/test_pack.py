"""Bundles: the same bytes for the same input, nothing in them that tells a text, an id, a path or a person."""

import hashlib
import io
import json
import re
import shutil
import tarfile
from pathlib import Path

import pytest

from hf_axonn_eval import read_run, read_samples, write_bundle, write_samples
from hf_axonn_eval.bundle.keys import Key
from hf_axonn_eval.data.results import RunDirectory
from tests.helpers.eval_support import documents, samples


def members(bundle: Path) -> dict[str, bytes]:
    with tarfile.open(bundle) as archive:
        return {entry.name: archive.extractfile(entry).read() for entry in archive}


def edit(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def bundled(made, run, output, key, **options) -> dict[str, bytes]:
    write_bundle({"trained": run}, made / "samples.jsonl", output, key=key, **options)
    return members(output)


def test_the_same_input_and_key_make_the_same_bytes_and_another_key_other_hashes(made, key, bundle, tmp_path):
    runs = {name: made / "runs" / name for name in ("base", "trained")}
    write_bundle(runs, made / "samples.jsonl", tmp_path / "again.tar", key=key)
    assert (tmp_path / "again.tar").read_bytes() == bundle.read_bytes()
    write_bundle(runs, made / "samples.jsonl", tmp_path / "other.tar", key=Key(bytes(32)))
    mine, other = (
        set(re.findall(rb"hmac-sha256:(\w+)", path.read_bytes())) for path in (bundle, tmp_path / "other.tar")
    )
    assert len(mine) == len(other) > 2 * len(samples()) and not mine & other


def test_it_has_what_an_auditor_needs(made, key, bundle):
    told = members(bundle)
    assert list(told) == ["manifest.json", *sorted(set(told) - {"manifest.json"})]
    manifest = json.loads(told["manifest.json"])["members"]
    assert {name: entry["sha256"] for name, entry in manifest.items()} == {
        name: hashlib.sha256(content).hexdigest() for name, content in told.items() if name != "manifest.json"
    }
    about = json.loads(told["about.json"])
    assert about["runs"] == ["base", "trained"] and about["base"] == "base" and about["samples"] == len(samples())
    assert about["options"]["confidence"] == 0.95 and about["key"] == key.name
    assert about["made_by"]["commit"] == "ab" * 20 and about["made_by"]["hf_axonn"] == "0.2.0"
    for name in ("base", "trained"):
        original = json.loads((made / "runs" / name / "run.json").read_text())
        record = json.loads(told[f"runs/{name}/run.json"])
        for entry in ("versions", "settings", "precision", "started", "grid"):
            assert record[entry] == original[entry], entry
        for entry in ("model_fingerprint", "tokenizer_sha256", "dtype", "samples"):
            assert record["identity"][entry] == original["identity"][entry], entry
        summary, written = (
            json.loads(text)
            for text in (told[f"runs/{name}/summary.json"], (made / "runs" / name / "summary.json").read_text())
        )
        assert summary["all"]["metrics"]["exact_match"] == written["all"]["metrics"]["exact_match"]
        assert summary["chance"] == pytest.approx(written["chance"]) and "run" not in summary
    assert json.loads(told["comparison.json"])["mcnemar"]["trained"]["40"]["exact_match"]["p"] < 0.05
    assert json.loads(told["coverage.json"])["intervals"]["clopper-pearson"]["lowest"] == 0.953


def test_results_have_the_numbers_of_the_run(made, key, bundle, tmp_path):
    with tarfile.open(bundle) as archive:
        archive.extractall(tmp_path, filter="data")
    _, told = read_run(tmp_path / "runs" / "trained")
    _, originals = read_run(made / "runs" / "trained")
    by_id = {key.hash("sample", result.sample_id): result for result in originals}
    assert [result.sample_id for result in told] == sorted(by_id)
    for result in told:
        original = by_id[result.sample_id]
        assert result.document_id == key.hash("document", original.document_id)
        for name in ("hits", "logprobs", "margin", "divergence_point", "rougeL", "edit_distance", "membership"):
            assert getattr(result, name) == getattr(original, name), name


def test_no_text_token_id_document_path_person_or_unkeyed_hash_is_in_it(made, key, run, tmp_path, someone):
    """Of what is written, and of what another version or an owner might have written into run.json."""
    secret = "the number of the vault is 4711"

    def add(record):
        record["command"] = ["/home/arthur/bin/extract.py", "--model=/srv/vault/model", "--samples", "~/vault/s.jsonl"]
        record["parts"][0]["command"] = ["/Users/arthur/x", "goldheart42:/srv/vault/arthur"]
        record["model"] |= {"path": "/srv/vault/model", "url": "http://goldheart42.magrathea.example/v1"}
        record["settings"]["protocol"] = {
            "name": "sc24",
            "deviations": [f"texts of {made}/vault, zaphodb"],
            "file": "/srv/vault/p",
        }
        record |= {
            "prompt": secret,
            "excerpts": [secret],
            "/srv/vault": {"4711": secret},
            "documents_sha256": "ab" * 32,
        }

    edit(run / "run.json", add)
    told = bundled(made, run, tmp_path / "b.tar", key)
    everything = "\0".join([*told, *(content.decode() for content in told.values())])
    asked = read_samples(made / "samples.jsonl")
    _, results = read_run(run)
    private = {str(Path.home()) + "/", str(made), str(tmp_path), "/srv", "vault/", "arthur", "zaphodb", "goldheart42"}
    private |= {"magrathea", secret, secret[:12], "ab" * 32, (made / "owner.key").read_text().strip()}
    record = json.loads((made / "runs" / "trained" / "run.json").read_text())
    private |= {record["identity"]["samples_sha256"], record["identity"]["samples_sha256"][:16]}
    for sample in asked:
        private |= {sample.sample_id, f'"{sample.document_id}"'}
        for ids in (sample.prefix, sample.suffix, sample.prefix + sample.suffix):
            for separator in (",", ", ", " "):
                private |= {separator.join(map(str, ids[place : place + 4])) for place in range(len(ids) - 3)}
            for kind in (str(ids), str(list(ids)), json.dumps(ids), json.dumps(ids, separators=(",", ":"))):
                private.add(hashlib.sha256(kind.encode()).hexdigest())
    for result in results:
        for text in (result.suffix_text, result.generated_text):
            private |= {text[place : place + 12] for place in range(0, max(1, len(text) - 11))}
            private.add(hashlib.sha256(text.encode()).hexdigest())
        private.add(",".join(map(str, result.generated[:4])))
    for document in documents():
        private |= {hashlib.sha256(document[name].encode()).hexdigest() for name in ("id", "text")}
    found = sorted(text for text in private if text in everything)
    # what repeats one token, as "0.0,0.0,0.0" or "==========", is in every file of numbers
    assert [text for text in found if len(set(text)) > 3] == []
    assert len(private) > 1000
    assert "4711" in everything  # the name of an entry that is a number says nothing
    assert b"hits" in told["runs/trained/results.jsonl"]


def test_ids_of_documents_are_in_it_where_the_owner_asks(made, key, run, tmp_path):
    told = bundled(made, run, tmp_path / "b.tar", key, document_ids=True)
    assert json.loads(told["about.json"])["document_ids"] == "clear"
    ids = {json.loads(line)["document_id"] for line in io.BytesIO(told["runs/trained/results.jsonl"])}
    assert ids == {document["id"] for document in documents()}


def test_the_part_of_a_run_that_a_sample_is_of_stays_known(made, key, run, tmp_path):
    edit(run / "run.json", lambda record: record["parts"].append({**record["parts"][0], "index": 5}))
    told = bundled(made, run, tmp_path / "b.tar", key)
    parts = {line["sample"]: line["parts"]["trained"] for line in map(json.loads, told["samples.jsonl"].splitlines())}
    _, results = read_run(run)
    assert [parts[key.hash("sample", result.sample_id)] for result in results] == [0] * 5 + [1] * (len(results) - 5)


def test_a_summary_that_contradicts_the_results_is_told_and_not_used(made, key, run, tmp_path, caplog):
    edit(run / "summary.json", lambda summary: summary["all"]["metrics"]["exact_match"].update(count=3))
    told = bundled(made, run, tmp_path / "b.tar", key)
    assert "summary.json of run 'trained' contradicts its results in 1 entries" in caplog.text
    assert "all.metrics.exact_match.count is 3, but the samples give 6" in caplog.text
    assert json.loads(told["runs/trained/summary.json"])["all"]["metrics"]["exact_match"]["count"] == 6
    caplog.clear()
    shutil.copy(made / "runs" / "trained" / "summary.json", run)
    edit(run / "summary.json", lambda summary: summary["all"].update(of_tomorrow=1))
    bundled(made, run, tmp_path / "b.tar", key)
    assert (
        "has 1 entries that do not follow from what a bundle carries, so they are left out: all.of_tomorrow"
        in caplog.text
    )
    assert "contradicts" not in caplog.text
    caplog.clear()
    (run / "summary.json").unlink()
    bundled(made, run, tmp_path / "b.tar", key)
    assert "run 'trained' has no summary.json" in caplog.text
    caplog.clear()
    bundled(made, made / "runs" / "trained", tmp_path / "b.tar", key, confidence=0.9)
    assert caplog.text == ""


def test_numbers_of_a_registered_metric_are_in_it(made, key, run, tmp_path):
    lines = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]
    for place, line in enumerate(lines):
        line["metrics"] = {**(line["metrics"] or {}), "mine": place / 4}
    (run / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    estimate = {"mean": 1.375, "low": 0, "high": 1, "n": 12}
    edit(run / "summary.json", lambda summary: summary["all"]["metrics"].update(mine=estimate))
    told = bundled(made, run, tmp_path / "b.tar", key)
    assert json.loads(told["about.json"])["metrics"]["mine"]["mean"] == "number"
    assert json.loads(told["runs/trained/summary.json"])["all"]["metrics"]["mine"]["mean"] == pytest.approx(1.375)


def test_options_go_in(made, key, run, tmp_path):
    told = bundled(made, run, tmp_path / "b.tar", key, lengths=[4, 2, 4], confidence=0.9)
    assert json.loads(told["about.json"])["options"]["lengths"] == [2, 4]
    summary = json.loads(told["runs/trained/summary.json"])
    assert summary["intervals"]["confidence"] == 0.9 and set(summary["all"]["exact_match_at"]) == {"2", "4"}


def test_what_does_not_belong_together_is_refused(made, key, run, tmp_path, someone):
    trained, file, output = made / "runs" / "trained", made / "samples.jsonl", tmp_path / "b.tar"
    write_samples(samples()[:4], tmp_path / "four.jsonl")
    for runs, asked, options, words in (
        ({}, file, {}, "no runs to bundle"),
        ({"a": trained}, tmp_path / "four.jsonl", {}, "run 'a' was asked other samples"),
        ({"a": trained}, file, {"base": "b"}, "base run 'b' is not among the runs a"),
        ({"a b": trained}, file, {}, "'a b' is no plain word"),
        ({"../a": trained}, file, {}, "'../a' is no plain word"),
        ({"of-zaphodb": trained}, file, {}, "'of-zaphodb' is no plain word, or that of this user"),
        ({"a": tmp_path}, file, {}, "holds no run.json"),
    ):
        with pytest.raises(ValueError, match=words):
            write_bundle(runs, asked, output, key=key, **options)
    edit(run / "run.json", lambda record: record["identity"].update(samples=13))
    RunDirectory(run).append([type(read_run(trained)[1][0])(**{**vars(read_run(trained)[1][0]), "sample_id": "more"})])
    with pytest.raises(ValueError, match="trained has a result of a sample that was not asked: 'more'"):
        write_bundle({"trained": run}, file, output, key=key)
    assert not output.exists()
