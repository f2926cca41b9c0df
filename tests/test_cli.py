"""`hf-axonn`: what each command prints and returns; conversion itself is tested in test_training.py."""

from __future__ import annotations

import json

import pytest

from hf_axonn import __version__
from hf_axonn.checkpoint import MANIFEST
from hf_axonn.cli import main


def test_env_names_versions(capsys):
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    assert f"hf_axonn {__version__}" in printed and "transformers 5." in printed and "gloo" in printed


def test_bad_checkpoints_end_with_2_and_a_message(tmp_path, capsys):
    for arguments in (["verify", str(tmp_path)], ["convert", str(tmp_path), str(tmp_path / "out")]):
        assert main(arguments) == 2
        assert f"has no {MANIFEST}" in capsys.readouterr().err
    (tmp_path / MANIFEST).write_text(json.dumps({"version": 1, "grid": {"x": 2}, "tied": [], "files": {"a": 3}}))
    assert main(["verify", str(tmp_path)]) == 2
    assert "a is missing" in capsys.readouterr().err
    (tmp_path / "a").write_text("abc")
    assert main(["verify", str(tmp_path)]) == 0
    assert "1 files, 3 bytes, written on data=1,z=1,y=1,x=2" in capsys.readouterr().out
    assert main(["convert", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "holds adapters" in capsys.readouterr().err
    assert main(["convert", str(tmp_path), str(tmp_path / "out"), "--max-shard-gb", "0"]) == 2


def test_a_manifest_cannot_point_outside(tmp_path, capsys):
    (tmp_path / MANIFEST).write_text(json.dumps({"version": 1, "grid": {"x": 2}, "tied": [], "files": {"../a": 3}}))
    assert main(["verify", str(tmp_path)]) == 2
    assert "../a" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"files": {}, "grid": {"q": 2}}'])
def test_a_foreign_manifest_is_refused(tmp_path, capsys, text):
    (tmp_path / MANIFEST).write_text(text)
    assert main(["verify", str(tmp_path)]) == 2
    assert "not a manifest" in capsys.readouterr().err
