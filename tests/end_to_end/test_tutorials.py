"""Fenced blocks of README, the tutorials and the how-to guides are run byte for byte (helpers/fenced_blocks.py)."""

from __future__ import annotations

import re

import pytest

from tests.helpers.fenced_blocks import LEFT_OUT, of_page, run_page
from tests.tools.documents import blocks


# What a page leaves behind that it promises.
LEAVES = {
    "README.md": ["out/axonn_checkpoint.json", "out-script/axonn_checkpoint.json", "runs/report/report.html"],
    "docs/tutorials/fine_tune.md": ["trained/axonn_checkpoint.json", "runs/report/report.html"],
    "docs/tutorials/cluster.md": ["grid/checkpoint-6/axonn_checkpoint.json", "plain/model.safetensors"],
    "docs/tutorials/audit.md": ["overlaps.json", "runs/report/report.html", "audit.tar"],
    "docs/how_to/lightning.md": ["exported/model.safetensors", "loop/lightning.pt"],
    "docs/how_to/lora.md": ["adapters/adapter_model.safetensors", "runs/adapters/summary.json"],
    "docs/how_to/qlora.md": ["qlora/adapter_model.safetensors"],
    "docs/how_to/evaluate.md": ["my-model/model.safetensors"],
    "docs/how_to/long_rows.md": ["certificate/certificate.json", "long/axonn_checkpoint.json"],
    "docs/how_to/resume.md": ["out/checkpoint-6/trainer_state.json"],
}


def test_every_page_is_here_and_what_is_left_out_has_a_reason():
    folders = ("README.md:", "docs/tutorials/", "docs/how_to/")
    found = [block for block in blocks() if block.place.startswith(folders)]
    assert {block.place.partition(":")[0] for block in found} == set(LEAVES)
    assert len(LEFT_OUT) <= 2
    for beginning in LEFT_OUT:
        assert len([block for block in found if block.text.startswith(beginning)]) == 1
    assert sum(len(of_page(page)) for page in LEAVES) >= 31


@pytest.mark.timeout(1800)  # a minute on two idle cores
def test_the_blocks_of_readme_run(tmp_path):
    printed = run_page("README.md", tmp_path / "reader")
    assert not re.search("Warning|Error", printed), printed[-6000:]
    assert "{'loss': " in printed.partition("\nnext:\n")[2], "train.py, which follows finetune, shows its losses"
    assert not [name for name in LEAVES["README.md"] if not (tmp_path / "reader" / name).exists()]
    assert "grid: {data: 1, z: 2, y: 1, x: 1}" in (tmp_path / "reader" / "axonn.yaml").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", sorted(set(LEAVES) - {"README.md"}))
def test_the_blocks_of_a_page_run(page, tmp_path):
    run_page(page, tmp_path / "reader")
    assert not [name for name in LEAVES[page] if not (tmp_path / "reader" / name).exists()]
