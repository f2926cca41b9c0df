"""The commands `bundle` and `verify`: files, messages, exit codes."""

import json
import shutil
import subprocess

import pytest

from hf_axonn_eval import extract, write_samples
from hf_axonn_eval.__main__ import main
from hf_axonn_eval.cli.bundle import _name_runs
from tests.helpers.eval_support import samples, tiny_llama, topics_tokenizer


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with samples and a run of them."""
    place = tmp_path_factory.mktemp("place")
    write_samples(samples()[:9], place / "samples.jsonl")
    record = {"fingerprint": "ab" * 32, "path": str(place / "model"), "dtype": "float32", "attn_implementation": None}
    extract(tiny_llama(), topics_tokenizer(), samples()[:9], output=place / "run", model_record=record, progress=False)
    return place


def call(*words) -> int:
    return main([str(word) for word in words])


def test_a_run_is_packed_without_a_signature_and_verified(place, tmp_path, capsys):
    asked = [
        place / "run",
        "--samples",
        place / "samples.jsonl",
        "--output",
        tmp_path / "b.tar",
        "--key",
        tmp_path / "key",
    ]
    assert call("bundle", *asked) == 0
    told = capsys.readouterr().out
    assert "NOT SIGNED" in told and f"new key: {tmp_path / 'key'}. Keep it" in told
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    first = (tmp_path / "b.tar").read_bytes()
    (tmp_path / "b.tar.sig").write_text("of the bundle that was here before")
    assert call("bundle", *asked) == 0 and (tmp_path / "b.tar").read_bytes() == first
    assert "\nkey: " in capsys.readouterr().out and not (tmp_path / "b.tar.sig").exists()

    samples_and_key = ["--samples", place / "samples.jsonl", "--key", tmp_path / "key"]
    assert call("verify", tmp_path / "b.tar", *samples_and_key, "--output", tmp_path / "checks.json") == 0
    told = capsys.readouterr().out
    assert "CONTRADICTS: 0" in told and "NOT SIGNED" in told
    written = json.loads((tmp_path / "checks.json").read_text())
    assert written["exit_code"] == 0
    assert {check["what"]: check["state"] for check in written["checks"]}["samples"] == "agrees"


def test_a_contradiction_is_exit_code_1(place, tmp_path, capsys):
    asked = ["--samples", place / "samples.jsonl", "--output", tmp_path / "b.tar", "--key", tmp_path / "key"]
    assert (
        call("bundle", f"mine={place / 'run'}", *asked, "--lengths", 3, 5, "--confidence", 0.9, "--document_ids") == 0
    )
    content = (tmp_path / "b.tar").read_bytes()
    assert content.count(b'"confidence": 0.9') > 1 and samples()[0].document_id.encode() in content
    (tmp_path / "b.tar").write_bytes(content.replace(b'"confidence": 0.9', b'"confidence": 0.8'))
    capsys.readouterr()
    assert call("verify", tmp_path / "b.tar", "--output", tmp_path / "checks.json") == 1
    assert "other bytes than the manifest says" in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "checks.json").read_text())["exit_code"] == 1


def test_a_bundle_is_signed_and_its_signer_checked(place, tmp_path, capsys):
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen (Debian: openssh-client)")
    make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "ssh")]
    subprocess.run(make, check=True)
    (tmp_path / "signers").write_text(f"me@example.org {(tmp_path / 'ssh.pub').read_text()}")
    asked = ["--samples", place / "samples.jsonl", "--output", tmp_path / "b.tar", "--key", tmp_path / "key"]
    assert call("bundle", place / "run", *asked, "--sign", tmp_path / "ssh") == 0
    assert str(tmp_path / "b.tar.sig") in capsys.readouterr().out
    assert call("verify", tmp_path / "b.tar", "--signers", tmp_path / "signers") == 0
    assert "by me@example.org, ED25519 key" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "b.tar.sig").unlink()
    assert call("verify", tmp_path / "b.tar", "--signers", tmp_path / "signers") == 1


def test_what_cannot_be_read_is_exit_code_2_and_leaves_no_key(place, tmp_path, capsys):
    output = ["--output", tmp_path / "b.tar", "--key", tmp_path / "key"]
    assert call("bundle", tmp_path, "--samples", place / "samples.jsonl", *output) == 2
    assert "holds no run.json" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert call("verify", tmp_path / "absent.tar") == 2
    assert "absent.tar is not a file" in capsys.readouterr().err
    assert call("verify", place / "samples.jsonl") == 2
    assert "looks like samples, but bundle takes an audit bundle" in capsys.readouterr().err
    assert call("verify", place / "samples.jsonl", "--key", tmp_path / "absent") == 2


def test_runs_have_names():
    assert _name_runs(["a=x/y", "runs/b/", "./c=d"]) == {"a": "x/y", "b": "runs/b/", "c=d": "./c=d"}
    for words in (["=x"], ["a="], ["a=x", "y/a"]):
        with pytest.raises(ValueError, match="each name once"):
            _name_runs(words)
