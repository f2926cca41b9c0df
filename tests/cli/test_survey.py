"""`hf-axonn survey`: the plan that it prints, its certificates, and what it refuses."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from hf_axonn.certificate import certify as certificates
from hf_axonn.cli.main import main


def test_it_prints_the_plan_and_what_each_grid_gave(tmp_path, capsys, monkeypatch):
    calls = []

    def certify(config, model, *, output, **_):
        calls.append((config.read_text(encoding="utf-8"), model, output))
        if "y2" in str(output):
            raise RuntimeError("the run on one process failed")
        return int("x2y2" in str(output)), ["lines", "  loop sgd: from step 1: off. cause: a bias times 0.5"]

    monkeypatch.setattr(certificates, "certify", certify)
    config = AutoConfig.for_model("xmod", num_hidden_layers=2, hidden_size=48, num_attention_heads=4, is_decoder=True)
    config.save_pretrained(tmp_path / "model")
    command = ["survey", str(tmp_path / "model"), "--output", str(tmp_path / "out"), "--grids", "x2,y2"]
    assert main(command) == 2
    printed = capsys.readouterr().out
    assert printed.startswith("xmod: 2 decoder layers sharded as 4 blocks by rules that are untested")
    assert "  intermediate.dense -> output.dense\n" in printed
    assert "-> attention.output.dense (4 query and 4 kv heads)" in printed
    assert "  output.adapter_modules gets full sequences: not known as a block" in printed
    assert "  x2      equal" in printed and "  y2      not compared  the run on one process failed" in printed
    assert "allow_untested: true" in calls[0][0] and "num_processes: 2" in calls[0][0]
    assert main(command) == 2 and "is not empty" in capsys.readouterr().err


def test_a_type_without_blocks_has_no_certificate(capsys):
    assert main(["survey", "xlnet"]) == 1
    assert "xlnet: no list of decoder layers with a block was found" in capsys.readouterr().out
    assert main(["survey", "xlnet", "--grids", "x4"]) == 2
    assert "--grids: x4 is none of x2, y2" in capsys.readouterr().err


@pytest.mark.slow
def test_a_certificate_of_a_grid(tmp_path, capsys):
    assert main(["survey", "olmo2", "--grids", "x2", "--output", str(tmp_path / "out")]) == 0
    assert "  x2      equal" in capsys.readouterr().out
    found = json.loads((tmp_path / "out/x2/report/certificate.json").read_text(encoding="utf-8"))
    assert found
