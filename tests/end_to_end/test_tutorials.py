"""Fenced blocks of README, the tutorials and the how-to guides are run byte for byte (helpers/fenced_blocks.py)."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from tests.helpers.fenced_blocks import LEAVES, LEFT_OUT, make_model, of_page, run_block, run_page
from tests.tools.documents import blocks


def test_every_page_is_here_and_what_is_left_out_has_a_reason():
    folders = ("README.md:", "docs/tutorials/", "docs/how_to/")
    found = [block for block in blocks() if block.place.startswith(folders)]
    assert {block.place.partition(":")[0] for block in found} == set(LEAVES)
    assert len(LEFT_OUT) <= 2
    for beginning in LEFT_OUT:
        assert len([block for block in found if block.text.startswith(beginning)]) == 1
    assert sum(len(of_page(page)) for page in LEAVES) >= 31


@pytest.mark.slow  # .ci/run runs README, from the wheel; importing libraries takes most of the time of each command
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", LEAVES)
def test_the_blocks_of_a_page_run(page, tmp_path):
    run_page(page, tmp_path / "reader")


MIXTURE = "docs/how_to/experts.md"
ON_EIGHT = {"num_processes: 4": "num_processes: 8", "{z: 4, context: 2}": "{z: 4, x: 2, context: 2}"}
ON_ONE = {"num_processes: 4": "num_processes: 1", "{z: 4, context: 2}": "{z: 1}", "experts: move": "experts: auto"}
ON_ONE |= {"--per_device_train_batch_size 1": "--per_device_train_batch_size 2", "--batch 1": "--batch 2"}


def losses_of(folder: Path, changes: dict[str, str]) -> list[float]:
    """The losses of all steps that the blocks of a page print, with other words in them."""
    folder.mkdir()
    make_model(folder)
    printed, found = [], set()
    for block in of_page(MIXTURE):
        text = block.text
        for old, new in changes.items():
            found |= {old} if old in text else set()
            text = text.replace(old, new)
        printed.append(run_block(dataclasses.replace(block, text=text), folder, Path(sys.executable).parent))
    assert found == changes.keys()
    return [float(number) for number in re.findall(r"'loss': '?([0-9.]+)", "\n".join(printed))]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_mixture_trains_on_eight_ranks_as_on_one(tmp_path):
    """TRL's script, 16 experts that move, context, packing: all weights and then LoRA, to what Trainer prints."""
    eight, one = losses_of(tmp_path / "eight", ON_EIGHT), losses_of(tmp_path / "one", ON_ONE)
    assert len(eight) == len(one) == 4 + 4 and len(set(one[:4])) == 4
    assert eight == pytest.approx(one, rel=1e-3)
