"""Verifying: an honest bundle agrees, and whatever a forger changes is named."""

import json
import shutil
import tarfile
from pathlib import Path

import pytest

from hf_axonn_eval import read_samples, verify_bundle, write_bundle, write_samples
from hf_axonn_eval.bundle import verify
from hf_axonn_eval.bundle.archive import pack
from hf_axonn_eval.bundle.checks import exit_code, terminal_checks
from hf_axonn_eval.bundle.keys import Key
from hf_axonn_eval.bundle.signature import sign, signature_file
from hf_axonn_eval.bundle.verify import is_rank_zero


SUMMARY = "runs/trained/summary.json"


def by_what(checks):
    return {check.what: check for check in checks}


def contradictions(checks) -> dict[str, str]:
    return {check.what: check.said for check in checks if check.state == "contradicts"}


@pytest.fixture
def forged(bundle, tmp_path):
    """Change members of the bundle; the manifest is made anew, unless the forger forgets it."""

    def forge(changes, *, manifest: bool = True) -> Path:
        directory, output = tmp_path / "members", tmp_path / "forged.tar"
        with tarfile.open(bundle) as archive:
            archive.extractall(directory, filter="data")
        for name, change in changes.items():
            path = directory / name
            if change is None:
                path.unlink()
            elif name.endswith(".jsonl"):
                lines = [json.loads(line) for line in path.read_text().splitlines()]
                path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in change(lines)))
            else:
                content = json.loads(path.read_text())
                change(content)
                path.write_text(json.dumps(content))
        if manifest:
            (directory / "manifest.json").unlink()
            pack(directory, output)
        else:
            with tarfile.open(output, "w") as archive:
                for path in sorted(directory.rglob("*.json*")):
                    archive.add(path, path.relative_to(directory).as_posix())
        return output

    return forge


def one(change):
    """A change of the first line that `change` says something of."""

    def of_lines(lines):
        for line in lines:
            told = change(line)
            if told:
                return [{**each, **told} if each is line else each for each in lines]
        raise AssertionError("no line to change")

    return of_lines


def test_an_honest_bundle_agrees(bundle, made, key):
    checks = by_what(verify_bundle(bundle))
    assert exit_code(checks.values()) == 0
    states = {what: check.state for what, check in checks.items()}
    assert states == {
        "signature": "unchecked",
        "manifest": "agrees",
        "samples of base": "agrees",
        "samples of trained": "agrees",
        "runs/base/summary.json": "agrees",
        SUMMARY: "agrees",
        "comparison.json": "agrees",
        "coverage.json": "agrees",
        "samples": "unchecked",
        "model": "unchecked",
        "what ran": "unchecked",
    }
    assert checks["comparison.json"].said.endswith("entries computed again from the samples, all equal")
    assert "NOT SIGNED" in checks["signature"].said and "--key" in checks["samples"].needs
    checks = by_what(verify_bundle(bundle, samples=made / "samples.jsonl", key=key))
    assert checks["samples"].state == "agrees" and checks["samples"].said.startswith("12 are those of the bundle")
    assert is_rank_zero()


def test_a_signed_one_agrees_until_a_byte_of_it_changes(bundle, forged, ssh, tmp_path):
    copy = shutil.copy(bundle, tmp_path / "copy.tar")
    sign(copy, ssh / "owner")
    assert by_what(verify_bundle(copy, signers=ssh / "signers"))["signature"].state == "agrees"
    change = one(lambda line: {"rougeL": 0.5} if line["rougeL"] == 0 else None)
    forgery = forged({"runs/trained/results.jsonl": change, SUMMARY: lambda summary: None})
    shutil.copy(signature_file(copy), signature_file(forgery))
    assert "is not of this bundle" in contradictions(verify_bundle(forgery, signers=ssh / "signers"))["signature"]


RESULTS = "runs/trained/results.jsonl"
FORGERIES = [
    # one number of a sample: others of it deny it, and the summary does
    (
        RESULTS,
        one(lambda line: {"exact_match": False} if line["exact_match"] else None),
        "samples of trained",
        "exact_match is False",
    ),
    (
        RESULTS,
        one(lambda line: {"exact_match": False} if line["exact_match"] else None),
        SUMMARY,
        "buckets.40.metrics.exact_match.mean is 1.0",
    ),
    # all of a sample's numbers alike: only the summary denies it
    (
        RESULTS,
        one(lambda line: {"rougeL": 0.75} if line["bucket"] == 0 else None),
        SUMMARY,
        "buckets.0.metrics.rougeL.mean is",
    ),
    (
        RESULTS,
        one(lambda line: {"bucket": 40} if line["bucket"] == 0 else None),
        SUMMARY,
        "buckets.0.samples is 6, but the samples give 5",
    ),
    (RESULTS, one(lambda line: {"document_id": "another"}), "samples of trained", "its document is another one"),
    (RESULTS, one(lambda line: {"sample_id": "another"}), "samples of trained", "not in samples.jsonl"),
    (RESULTS, one(lambda line: {"near_tie": True}), "samples of trained", "near_tie is True, but the margin is"),
    (RESULTS, lambda lines: lines[1:], "members", "holds 11 of 12 samples"),
    (RESULTS, lambda lines: [*lines, lines[0]], "members", "line 13: sample"),
    (RESULTS, one(lambda line: {"hits": "all"}), "members", "line 1 is damaged (hits is 'all'"),
    # a figure, an interval or a test
    (
        SUMMARY,
        lambda summary: summary["buckets"]["40"]["metrics"]["exact_match"].update(count=1),
        SUMMARY,
        "count is 1, but the samples give 6",
    ),
    (
        SUMMARY,
        lambda summary: summary["all"]["metrics"]["exact_match"].update(high=0.6),
        SUMMARY,
        "all.metrics.exact_match.high is 0.6",
    ),
    (SUMMARY, lambda summary: summary["all"].pop("undecided"), SUMMARY, "all.undecided is left out"),
    (
        SUMMARY,
        lambda summary: summary["all"].update(verdict="clean"),
        SUMMARY,
        "all.verdict does not follow from the samples",
    ),
    (SUMMARY, lambda summary: summary["chance"].update(no_better=True), SUMMARY, "chance.no_better is True"),
    (
        "comparison.json",
        lambda tree: tree["mcnemar"]["trained"]["40"]["exact_match"].update(p=0.5),
        "comparison.json",
        "mcnemar.trained.40.exact_match.p is 0.5",
    ),
    ("comparison.json", None, "members", "comparison.json cannot be read"),
    (
        "coverage.json",
        lambda tree: tree["intervals"]["clopper-pearson"].update(lowest=0.999),
        "coverage.json",
        "lowest is 0.999, but the samples give 0.953",
    ),
    ("coverage.json", lambda tree: tree["withheld"].clear(), "coverage.json", "is left out"),
    # what it is of
    (
        "runs/base/run.json",
        lambda record: record["identity"].update(samples_sha256="x"),
        "samples of base",
        "run.json is of the samples x",
    ),
    ("runs/base/run.json", lambda record: record.pop("identity"), "members", "run.json is damaged"),
    ("samples.jsonl", lambda lines: lines[1:], "samples of base", "not in samples.jsonl"),
    ("samples.jsonl", lambda lines: [lines[0], *lines], "members", "samples.jsonl cannot be read"),
    (
        "about.json",
        lambda about: about["options"].update(confidence=0.8),
        SUMMARY,
        "intervals.confidence is 0.95, but the samples give 0.8",
    ),
    (
        "runs/base/run.json",
        lambda record: record["settings"].update(near_tie_below=100.0),
        "samples of base",
        "near_tie_below is 100.0, and that of float32 at most 0.0002",
    ),
    ("about.json", lambda about: about.update(runs=["base", "../runs/base"]), "members", "about.json cannot be read"),
    ("about.json", lambda about: about.update(runs=["base", "base"]), "members", "about.json cannot be read"),
    ("about.json", lambda about: about.pop("metrics"), "members", "about.json cannot be read"),
    ("about.json", lambda about: about["metrics"].pop("nll"), SUMMARY, "nll does not follow"),
]


@pytest.mark.parametrize(("member", "change", "what", "said"), FORGERIES)
def test_a_forgery_with_a_manifest_of_its_own_is_named(forged, member, change, what, said):
    checks = verify_bundle(forged({member: change}))
    assert exit_code(checks) == 1 and by_what(checks)["manifest"].state == "agrees"
    assert said in contradictions(checks)[what]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({SUMMARY: lambda summary: None}, f"{SUMMARY} has other bytes than the manifest says"),
        ({"comparison.json": None}, "comparison.json is missing"),
        (
            {"manifest.json": lambda manifest: manifest["members"].pop("about.json")},
            "about.json is not in the manifest",
        ),
        (
            {"manifest.json": lambda manifest: manifest["members"][SUMMARY].update(bytes=1)},
            f"{SUMMARY} has other bytes",
        ),
    ],
)
def test_a_forgery_without_a_manifest_is_named(forged, changes, said):
    assert said in contradictions(verify_bundle(forged(changes, manifest=False)))["manifest"]


def test_what_is_missing_leaves_the_rest_to_be_checked(forged):
    checks = by_what(verify_bundle(forged({"runs/base/summary.json": None})))
    assert checks["members"].said == "runs/base/summary.json cannot be read"
    assert checks["samples of trained"].state == "agrees" and checks["summaries"].state == "unchecked"


def test_other_samples_contradict_and_are_named(bundle, made, key, tmp_path):
    asked = read_samples(made / "samples.jsonl")

    def told(samples) -> str:
        write_samples(samples, tmp_path / "other.jsonl")
        return contradictions(verify_bundle(bundle, samples=tmp_path / "other.jsonl", key=key))["samples"]

    def with_(**changes):
        return [type(asked[0])(**{**vars(asked[0]), **changes}), *asked[1:]]

    suffix = (asked[0].suffix[0] + 1, *asked[0].suffix[1:])
    assert told(with_(suffix=suffix)) == f"sample 1, {asked[0].sample_id!r}, has other tokens"
    assert "sample 1, 'mine', is not in the bundle; 1 samples of the bundle are not in" in told(
        with_(sample_id="mine")
    )
    assert "is of another document" in told(with_(document_id="mine"))
    assert "has bucket, offset and lengths (7," in told(with_(bucket=7))
    assert told(asked[1:]) == "1 samples of the bundle are not in other.jsonl"
    assert "another order" in told(asked[::-1])


def test_another_key_contradicts_and_one_without_samples_is_refused(bundle, made, key):
    checks = verify_bundle(bundle, samples=made / "samples.jsonl", key=Key(bytes(32)))
    assert contradictions(checks) == {"samples": "the key is another one than that of the bundle"}
    for options in ({"key": key}, {"samples": made / "samples.jsonl"}):
        with pytest.raises(ValueError, match="are needed together"):
            verify_bundle(bundle, **options)


def test_a_metric_that_only_the_owner_registered_is_computed_again(made, key, run, tmp_path):
    lines = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]
    for place, line in enumerate(lines):
        line["metrics"] = {**(line["metrics"] or {}), "mine": place % 2 == 0}
    (run / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = json.loads((run / "summary.json").read_text())
    summary["all"]["metrics"]["mine"] = {"mean": 0.5, "count": 6}
    (run / "summary.json").write_text(json.dumps(summary))
    write_bundle({"mine": run}, made / "samples.jsonl", tmp_path / "mine.tar", key=key)
    assert exit_code(verify_bundle(tmp_path / "mine.tar")) == 0


def test_entries_that_another_version_has_or_lacks_are_not_called_false(forged):
    def older(about):
        about["made_by"] |= {"hf_axonn": "0.0.1", "commit": "cd" * 20}
        about["metrics"].pop("nll")

    checks = verify_bundle(forged({"about.json": older}))
    assert contradictions(checks) == {}
    (told,) = [check for check in checks if check.what == SUMMARY and check.state == "unchecked"]
    assert "metrics.nll does not follow from the samples" in told.said
    assert told.said.endswith(f"(made by version 0.0.1, commit {'cd' * 20})")


def test_a_modified_checkout_is_no_version(bundle, forged, monkeypatch):
    forgery = forged({SUMMARY: lambda summary: summary["all"].pop("undecided")})
    assert "all.undecided is left out" in contradictions(verify_bundle(forgery))[SUMMARY]
    here = {**json.loads(tarfile.open(bundle).extractfile("about.json").read())["made_by"], "modified": True}
    monkeypatch.setattr(verify, "origin", lambda: here)
    changes = {SUMMARY: lambda summary: summary["all"].pop("undecided", None)}
    changes["about.json"] = lambda about: about["made_by"].update(modified=True)
    shutil.rmtree(forgery.with_name("members"))
    assert contradictions(verify_bundle(forged(changes))) == {}


def test_figures_of_another_version_contradict_where_they_differ(forged):
    def older(about):
        about["made_by"]["hf_axonn"] = "0.0.1"

    changes = {"about.json": older, SUMMARY: lambda summary: summary["all"]["metrics"]["exact_match"].update(count=1)}
    said = contradictions(verify_bundle(forged(changes)))[SUMMARY]
    assert said.startswith("all.metrics.exact_match.count is 1, but the samples give 6 (made by version 0.0.1")


def test_the_tables_tell_what_is_needed_and_no_name_acts_on_the_terminal(forged, capsys):
    from rich.console import Console

    checks = verify_bundle(forged({SUMMARY: lambda summary: summary["all"].update({"\x1b[2Jx": 1})}))
    for table in terminal_checks(checks):
        Console(width=200).print(table)
    told = capsys.readouterr().out
    assert "checked, and agrees: 6" in told and "CONTRADICTS: 1" in told and "could not be checked: 4" in told
    assert "needed: --samples FILE --key FILE" in told and "\x1b[2J" not in told and r"\x1b[2Jx" in told


def test_intervals_of_another_confidence_than_the_study_say_so(made, key, tmp_path):
    runs = {"trained": made / "runs" / "trained"}
    write_bundle(runs, made / "samples.jsonl", tmp_path / "b.tar", key=key, confidence=0.5)
    checks = by_what(verify_bundle(tmp_path / "b.tar"))
    assert exit_code(checks.values()) == 0 and checks["coverage"].state == "unchecked"
    assert checks["coverage"].said.startswith(
        "the intervals are of 0.5; how often they hold the truth was studied for 0.95"
    )
