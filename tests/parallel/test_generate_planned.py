"""Every architecture with a plan writes the tokens that it writes on one process: greedily, with left padding."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hf_axonn import Grid, parallelize
from hf_axonn.architectures.table import CHECKED
from tests.benchmarks.architectures.tiny_configs import DECODER_OF, MODEL_TYPES, tiny_model
from tests.helpers import images
from tests.helpers.equality import exact, rows_of
from tests.helpers.ranks import run_ranks


GRIDS = [Grid(y=2, x=2), Grid(z=2, x=2)]
TOGETHER = 15  # models that are held at once
# Attention bias for padding has no float64; several codebooks.
UNABLE = {"xglm", "musicgen", "musicgen_melody"}
OF_IMAGES = set(images.TYPES) - set(MODEL_TYPES)  # test_images.py
PLANNED = sorted({DECODER_OF.get(kind, kind) for kind in CHECKED} - UNABLE - OF_IMAGES)
FEW = ["gpt2", "mixtral", "deepseek_v3", "bloom"]


def write(model, prompts):
    options = {"do_sample": False, "max_new_tokens": 5, "pad_token_id": 0, "eos_token_id": None}
    with exact():
        return model.eval().generate(**prompts, **options)


def left_padded(rows: int = 4, seq: int = 6) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 110, (rows, seq), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    ids[1, :2] = mask[1, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _unequal(types, truths):
    """The (type, grid) whose tokens differ on this rank."""
    found = []
    for grid in GRIDS:
        for kind in types:
            model, _ = parallelize(tiny_model(kind), grid)
            ours = write(model, rows_of(left_padded(), grid, dist.get_rank()))
            expected = rows_of({"tokens": truths[kind]}, grid, dist.get_rank())["tokens"]
            if not torch.equal(ours, expected):
                found.append((kind, str(grid)))
    return found


def check(types):
    truths = {kind: write(tiny_model(kind), left_padded()) for kind in types}
    for rank, found in enumerate(run_ranks(_unequal, 4, types, truths, timeout=60 + 40 * len(types))):
        assert not found, rank


def test_one_of_each_kind():
    check(FEW)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(-(-len(PLANNED) // TOGETHER)))
def test_all_of_them(part):
    check(PLANNED[part * TOGETHER : (part + 1) * TOGETHER])
