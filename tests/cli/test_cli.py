"""`hf-axonn`: what each command prints and returns; more in test_manifest.py and test_export.py."""

from __future__ import annotations

from hf_axonn import Grid, __version__
from hf_axonn.checkpoint.commit import write_manifest
from hf_axonn.checkpoint.manifest import MANIFEST, Manifest
from hf_axonn.cli.main import main


def test_env_names_versions(capsys):
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    assert f"hf_axonn {__version__}" in printed and "transformers 5." in printed and "gloo" in printed


def test_what_cannot_be_converted_ends_with_2_and_a_message(tmp_path, capsys):
    source, output = tmp_path / "checkpoint", str(tmp_path / "out")
    source.mkdir()
    assert main(["convert", str(source), output]) == 2
    assert f"has no {MANIFEST}" in capsys.readouterr().err
    write_manifest(source, Manifest("id", Grid(x=2), {}))
    assert main(["convert", str(source), output]) == 2
    assert "holds adapters" in capsys.readouterr().err
    assert main(["convert", str(source), output, "--max-shard-gb", "0"]) == 2
    assert "--max-shard-gb" in capsys.readouterr().err
