"""Every block of code in the tutorials and how-to guides runs, one after the other, with a tiny model as MODEL.

Blocks of YAML are the launch file axonn.yaml. A page that writes no documents or launch file of its own gets those of
the first tutorial, to which it refers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.eval_support import tiny_llama, topics_tokenizer
from tests.repository.test_docs import Block, blocks


PAGES = sorted(
    {
        block.place.partition(":")[0]
        for block in blocks()
        if block.place.startswith(("docs/tutorials/", "docs/how_to/"))
    }
)
FIRST = "docs/tutorials/fine_tune.md"
# What a page leaves behind that it promises.
LEAVES = {
    "docs/tutorials/fine_tune.md": ["trained/axonn_checkpoint.json", "runs/report/report.html"],
    "docs/tutorials/cluster.md": ["grid/checkpoint-6/axonn_checkpoint.json", "plain/model.safetensors"],
    "docs/tutorials/audit.md": ["overlaps.json", "runs/report/report.html", "audit.tar"],
    "docs/how_to/lightning.md": ["exported/model.safetensors", "loop/lightning.pt"],
    "docs/how_to/lora.md": ["adapters/adapter_model.safetensors", "runs/adapters/summary.json"],
    "docs/how_to/qlora.md": ["qlora/adapter_model.safetensors"],
    "docs/how_to/evaluate.md": ["my-model/model.safetensors", "results"],
    "docs/how_to/resume.md": ["out/checkpoint-6/trainer_state.json"],
}


def of_page(page: str) -> list[Block]:
    return [block for block in blocks() if block.place.startswith(f"{page}:")]


def run(block: Block, folder: Path) -> None:
    text = block.text.replace("MODEL", "model")
    if block.language == "yaml":
        (folder / "axonn.yaml").write_text(text)
        return
    command = [sys.executable, "-c", text] if block.language == "python" else ["bash", "-euo", "pipefail", "-c", text]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{block.place}: {done.stdout[-2000:]}{done.stderr[-4000:]}"


def test_every_page_is_here_and_its_blocks_are_of_a_kind_that_runs():
    assert set(PAGES) == set(LEAVES)
    assert {block.language for page in PAGES for block in of_page(page)} <= {"bash", "python", "yaml"}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page, tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 256} if "qlora" in page else {}  # rows of whole blocks
    tiny_llama(**sizes).save_pretrained(tmp_path / "model")
    topics_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "training_scripts").symlink_to(ROOT / "training_scripts")
    for block in [block for block in of_page(FIRST) if block.language != "bash"]:
        run(block, tmp_path)
    for block in of_page(page):
        if "lm_eval " in block.text:
            pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (the extra study has it)")
        run(block, tmp_path)
    assert not [name for name in LEAVES[page] if not (tmp_path / name).exists()]
