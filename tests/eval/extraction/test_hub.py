"""Models and data sets on the Hub, which a server on this machine plays: revisions, and the commits that they were.

What asks it is a program of its own, since the libraries read the Hub's address when they are imported.
"""

import json
import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from hf_axonn_eval.data.hub import HubDataset, pin
from hf_axonn_eval.extraction.load_model import load_model
from tests.helpers import ROOT
from tests.helpers.eval_support import tiny_llama, topics_tokenizer
from tests.helpers.hub_server import Hub, Repository, hub_server


OLD, NEW = "0a" * 20, "1b" * 20
PROGRAM = """
import json, sys
from hf_axonn_eval import load_model, read_documents
from hf_axonn_eval.data.hub import pin

def tried(function, *words, **options):
    try:
        return function(*words, **options)
    except ValueError as error:
        return f"error: {error}"

def model(name="org/model", **options):
    loaded = load_model(name, **options)
    return {"record": loaded.record, "first": loaded.model.model.embed_tokens.weight[0, :3].tolist(),
            "vocabulary": len(loaded.tokenizer)}

print(json.dumps({
    "moves": model("org/moves"),
    "main": model(), "old": model(revision="v1"), "commit": model(revision="%(OLD)s"),
    "no_revision": tried(model, revision="v2"), "no_model": tried(load_model, "org/nothing"),
    "pinned": [pin("hub:org/data@v1"), pin("hub:org/data")],
    "rows": read_documents("hub:org/data"), "old_rows": read_documents("hub:org/data@v1", id_key=None, split="train"),
    "errors": [tried(read_documents, *words) for words in (
        ["hub:org/data@v3"], ["hub:org/nothing"], ["hub:org/data/other"])],
    "two": [tried(read_documents, "hub:org/split"), read_documents("hub:org/split", split="b"),
            tried(read_documents, "hub:org/split", split="c")],
}))
"""


class Moves(dict):
    """A branch that gets a commit after it was first looked up."""

    def get(self, name: str, default: str) -> str:
        commit = super().get(name, default)
        if name == "main":
            self["main"] = NEW
        return commit


def documents(*texts: str) -> bytes:
    rows = [{"id": f"d{number}", "text": text, "bucket": number, "else": "x"} for number, text in enumerate(texts)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def files_of(model, directory) -> dict[str, bytes]:
    model.save_pretrained(directory)
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the program printed, and what the Hub was asked."""
    place = tmp_path_factory.mktemp("hub")
    topics_tokenizer().save_pretrained(place / "tokenizer")
    tokenizer = {file.name: file.read_bytes() for file in (place / "tokenizer").iterdir()}
    old, new = (files_of(tiny_llama(seed=seed), place / str(seed)) for seed in (1, 2))
    refs = {"main": NEW, "v1": OLD}
    card = b"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: %s\n    path: a.jsonl\n"
    card += b"  - split: b\n    path: b.jsonl\n---\n"
    hub = Hub(
        {
            ("models", "org/model"): Repository({OLD: tokenizer | old, NEW: tokenizer | new}, refs),
            ("models", "org/moves"): Repository({OLD: tokenizer | old, NEW: tokenizer | new}, Moves(main=OLD)),
            ("datasets", "org/data"): Repository(
                {OLD: {"data.jsonl": documents("before")}, NEW: {"data.jsonl": documents("one", "two")}}, refs
            ),
            ("datasets", "org/split"): Repository(
                {NEW: {"README.md": card % b"a", "a.jsonl": documents("a"), "b.jsonl": documents("b")}}, {"main": NEW}
            ),
        }
    )
    with hub_server(hub):
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(place / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM % {"OLD": OLD}],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    first = {name: load_file(place / str(seed) / "model.safetensors") for name, seed in (("old", 1), ("main", 2))}
    return json.loads(done.stdout.splitlines()[-1]), first, hub.log, place


def test_a_revision_of_a_model_is_loaded_and_its_commit_recorded(told):
    answer, weights, log, place = told
    for name, revision, commit in (("main", None, NEW), ("old", "v1", OLD), ("commit", OLD, OLD)):
        record = answer[name]["record"]
        assert record["revision"] == revision and record["commit"] == commit and record["path"] == "org/model"
        expected = weights["main" if commit == NEW else "old"]["model.embed_tokens.weight"][0, :3]
        assert answer[name]["first"] == expected.tolist()
        assert answer[name]["vocabulary"] == len(topics_tokenizer())
    assert answer["old"]["record"]["fingerprint"] == answer["commit"]["record"]["fingerprint"]
    assert answer["old"]["record"]["fingerprint"] != answer["main"]["record"]["fingerprint"]
    weights_asked = {line for line in log if line.endswith("model.safetensors")}
    assert {line.split("/")[-2] for line in weights_asked} == {OLD, NEW}  # of commits, never of a branch
    for line in log:
        if "/org/model/resolve/" in line and "main" in line:
            assert line.endswith("/config.json")  # the one that says which commit it is
    topics_tokenizer().save_pretrained(place / "1")
    assert load_model(place / "1").record["fingerprint"] == answer["old"]["record"]["fingerprint"]


def test_a_branch_that_moves_meanwhile_does_not_mix_commits(told):
    answer, weights, log, _ = told
    assert answer["moves"]["record"]["commit"] == OLD
    assert answer["moves"]["first"] == weights["old"]["model.embed_tokens.weight"][0, :3].tolist()
    assert answer["moves"]["record"]["fingerprint"] == answer["old"]["record"]["fingerprint"]


def test_no_such_revision_or_model(told, tmp_path):
    answer = told[0]
    assert answer["no_revision"].startswith("error: org/model at revision 'v2' cannot be had:")
    assert answer["no_model"].startswith("error: org/nothing cannot be had:")
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is a directory, which has no revisions"):
        load_model(tmp_path, revision="main")


def test_a_data_set_is_read_at_the_commit_that_its_branch_is(told):
    answer, _, log, _ = told
    assert answer["pinned"] == [f"hub:org/data@{OLD}", f"hub:org/data@{NEW}"]
    assert answer["rows"] == [
        {"id": "d0", "bucket": 0, "text": "one"},
        {"id": "d1", "bucket": 1, "text": "two"},
    ]
    assert answer["old_rows"] == [{"id": "org/data/train:1", "bucket": 0, "text": "before"}]
    read = {line.split("/")[-2] for line in log if line.endswith("data.jsonl")}
    assert read == {OLD, NEW}
    assert answer["two"][1] == [{"id": "d0", "bucket": 0, "text": "b"}]
    assert "name one of its splits with split=... (--split): a, b." in answer["two"][0]
    assert "there is no split 'c' with split=... (--split): a, b." in answer["two"][2]


def test_what_the_hub_does_not_have_is_named(told):
    revision, name, config = told[0]["errors"]
    assert revision == "error: the data set org/data on the Hub has no revision 'v3'."
    assert name.startswith("error: there is no data set org/nothing on the Hub, or it is private")
    assert config.startswith(f"error: hub:org/data/other@{NEW}: ") and "'other'" in config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hub:a/b", HubDataset("a/b")),
        ("hub:a/b@main", HubDataset("a/b", None, "main")),
        ("hub:a-1/b.c/en@refs/convert/parquet", HubDataset("a-1/b.c", "en", "refs/convert/parquet")),
    ],
)
def test_names(text, expected):
    assert HubDataset.parse(text) == expected and str(expected) == text


@pytest.mark.parametrize("text", ["hub:", "hub:a", "hub:a/", "hub:a/b/c/d", "hub:a/b@", "hub://a/b", "hub:a b/c"])
def test_what_is_no_name(text):
    with pytest.raises(ValueError, match="is not like hub:OWNER/NAME"):
        pin(text)


def test_a_commit_needs_no_answer_of_the_hub():
    assert pin(f"hub:a/b@{NEW}") == f"hub:a/b@{NEW}" and pin("docs.jsonl") == "docs.jsonl"
