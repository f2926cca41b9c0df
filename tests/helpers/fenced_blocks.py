"""Run the fenced blocks of a page as a reader would: byte for byte, in order, in one folder, on two cores.

    python -m tests.helpers.fenced_blocks README.md [--bin VENV/bin] [--folder FOLDER]

`--bin`: where the commands are, if not beside this Python. Shell blocks run in bash, blocks of Python in Python; but
one that begins with the name of a file (`# train.py`) is saved under it. A page that links to PREPARED goes
on from there. The folder has a tiny model called MODEL.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.helpers import ROOT
from tests.tools.documents import SHELL, Block, blocks


PREPARED = "docs/tutorials/fine_tune.md"  # up to its heading "Train"
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
    "docs/how_to/experts.md": ["full/axonn_checkpoint.json", "lora/adapter_model.safetensors"],
    "docs/how_to/long_rows.md": ["certificate/certificate.json", "long/axonn_checkpoint.json"],
    "docs/how_to/vision.md": [
        "exported/model.safetensors",
        "vision/axonn_checkpoint.json",
        "captioned/axonn_checkpoint.json",
    ],
    "docs/how_to/own_loss.md": ["own/training_record.json", "own/model.safetensors"],
    "docs/how_to/torch_checkpoints.md": ["state/.metadata", "later/.metadata"],
    "docs/how_to/resume.md": ["out/checkpoint-6/trainer_state.json"],
}
# The beginnings of blocks that are not run, and why. This list may only become shorter.
LEFT_OUT = {
    "make demo": "downloads a model and trains for minutes; pip asks an index of packages",
    "mkdir -p tasks": "needs lm_eval, which only the extra study installs; it is run where that is",
}


def of_page(page: str) -> list[Block]:
    """The blocks of a page but for plain text, after those of PREPARED that it goes on from."""
    own = [block for block in blocks() if block.place.startswith(f"{page}:") and block.language != "text"]
    if page == PREPARED or f"{Path(PREPARED).name}#prepare" not in (ROOT / page).read_text(encoding="utf-8"):
        return own
    end = (ROOT / PREPARED).read_text(encoding="utf-8").partition("## Train\n")[0].count("\n")
    return [block for block in of_page(PREPARED) if int(block.place.partition(":")[2]) < end] + own


def why_left_out(block: Block) -> str | None:
    """The reason of LEFT_OUT for a block, None of one that is run."""
    (reason,) = [why for beginning, why in LEFT_OUT.items() if block.text.startswith(beginning)] or [None]
    return None if "lm_eval" in block.text and importlib.util.find_spec("lm_eval") else reason


def make_model(folder: Path) -> None:
    """A tiny model and its tokenizer, in the folder that pages call MODEL."""
    from tests.helpers.eval_support import tiny_llama, topics_tokenizer

    model = tiny_llama(hidden_size=128, intermediate_size=256)  # rows of whole blocks of 4 bits
    model.config.max_position_embeddings = 512
    model.save_pretrained(folder / "MODEL")
    tokenizer = topics_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder / "MODEL")


def run_block(block: Block, folder: Path, commands: Path) -> str:
    """Run a block, or save it, and return what it printed.

    Raises:
        AssertionError: it ended with another exit code than 0, or printed a traceback.
    """
    name = re.match(r"# (\w+\.py)\n", block.text)
    if block.language == "python" and name:
        (folder / name[1]).write_text(block.text + "\n")
        return ""
    assert block.language in ("python", *SHELL), f"{block.place}: nobody knows how to run {block.language}"
    python = block.language == "python"
    command = [commands / "python", "-c"] if python else ["bash", "-euo", "pipefail", "-c"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AXONN_", "PYTHONPATH"))}
    kept |= {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    kept |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder.with_name("cache"))}
    done = subprocess.run(
        [*command, block.text],
        env=kept,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=_on_two_cores,
    )
    assert done.returncode == 0 and "Traceback" not in done.stdout, f"{block.place}: {done.stdout[-6000:]}"
    return done.stdout


def _on_two_cores() -> None:
    """Let `hf-axonn init` find as many as it needs for two processes, wherever this runs."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])


def run_page(page: str, folder: Path, commands: Path = Path(sys.executable).parent, *, show: bool = False) -> str:
    """Run all blocks of a page in a new folder, and return what they printed.

    Raises:
        AssertionError: as `run_block`; or a file that the page promises is not there; or README printed a warning.
    """
    folder.mkdir()
    make_model(folder)
    printed = []
    for block in of_page(page):
        begun = time.monotonic()
        reason = why_left_out(block)
        printed.append("" if reason else run_block(block, folder, commands))
        if show:
            what = f"left out: {reason}" if reason else f"{time.monotonic() - begun:.1f} s"
            print(f"== {block.place}: {what}\n{printed[-1]}", flush=True)
    missing = [name for name in LEAVES[page] if not (folder / name).exists()]
    assert not missing, f"{page} promises {', '.join(missing)} in {folder}"
    if page == "README.md":
        _check_readme("\n".join(printed), folder)
    return "\n".join(printed)


def _check_readme(printed: str, folder: Path) -> None:
    assert not re.search("Warning|Error", printed), printed[-6000:]
    assert "{'loss': " in printed.partition("\nnext:\n")[2], "train.py, which follows finetune, shows its losses"
    assert "grid: {data: 1, z: 2, y: 1, x: 1}" in (folder / "axonn.yaml").read_text()


def main() -> None:
    """Run one page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", help="README.md, or a page of docs/tutorials or docs/how_to")
    parser.add_argument("--bin", type=Path, default=Path(sys.executable).parent)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run_page(arguments.page, arguments.folder or Path(scratch) / "reader", arguments.bin.absolute(), show=True)


if __name__ == "__main__":
    main()
