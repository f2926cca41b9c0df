"""Fenced blocks of README, the tutorials and the how-to guides are run byte for byte (helpers/fenced_blocks.py)."""

from __future__ import annotations

import pytest

from tests.helpers.fenced_blocks import LEAVES, LEFT_OUT, of_page, run_page
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
