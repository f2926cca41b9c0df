"""What checkpoints of 0.1.0 say and leave unsaid: the manifest's text, and who wrote what, which no file records."""

from __future__ import annotations

import json

from hf_axonn import Grid
from hf_axonn.checkpoint.manifest import MANIFEST, STAGE, Manifest
from hf_axonn.checkpoint.partition import SavedTensor, Writers, box_at
from hf_axonn.checkpoint.shard_files import file_name


# As 0.1.0 wrote it, with its checksum.
WRITTEN = {
    "version": 2,
    "save": "0123abcd",
    "grid": {"data": 1, "z": 1, "y": 2, "x": 2},
    "tied": ["lm_head.weight"],
    "files": {"config.json": [2, "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"]},
    "model": {"model.norm.weight": ["BF16", [6], [None, None, None]]},
    "optimizer": {"state.w.exp_avg": ["F32", [4, 6], [1, 0, 0]]},
    "checksum": "1fdc8071bd212b17df1eb61950bbbbe91512c95b17e3c232cd5e2decc9564ce6",
}


def test_the_manifest_is_read_and_written_as_before():
    text = json.dumps(WRITTEN, indent=1)
    manifest = Manifest.from_json(text)
    assert manifest.grid == Grid(y=2, x=2) and manifest.tied == ["lm_head.weight"]
    assert manifest.model["model.norm.weight"] == SavedTensor((6,), "BF16", (None, None, None))
    assert manifest.optimizer["state.w.exp_avg"] == SavedTensor((4, 6), "F32", (1, 0, 0))
    assert manifest.to_json() == text


def test_files_have_the_same_names():
    assert (MANIFEST, STAGE) == ("axonn_checkpoint.json", ".axonn-saving")
    assert file_name(3) == "shard-00004-model-00001-of-00001.safetensors"


def test_every_rank_has_written_the_same_parts():
    """A reader derives from the shapes and the grid which file holds what. Boxes as 0.1.0 wrote them."""
    shards = {
        "large": SavedTensor((1024, 2048), "F32", (1, 0, None)),
        "larger": SavedTensor((1024, 1024), "F32", (None, 0, 0)),
        "norm": SavedTensor((6,), "F32", (None, None, None)),
        "small": SavedTensor((5, 6), "F32", (1, 0, 0)),
    }
    grid = Grid(data=2, z=2, y=2, x=2)
    writers = Writers(shards, grid, {"large": 2**23, "larger": 2**22, "norm": 24, "small": 120})
    first, second = (0, 1024), (1024, 2048)
    written = [
        {"large": ((0, 512), first), "larger": ((0, 256), first), "norm": ((0, 6),), "small": ((0, 2), (0, 3))},
        {"large": ((0, 512), second), "small": ((0, 2), (3, 6))},
        {"large": ((512, 1024), first), "larger": ((512, 768), first), "small": ((3, 4), (0, 3))},
        {"large": ((512, 1024), second), "small": ((3, 4), (3, 6))},
        {"larger": ((256, 512), first), "small": ((2, 3), (0, 3))},
        {"small": ((2, 3), (3, 6))},
        {"larger": ((768, 1024), first), "small": ((4, 5), (0, 3))},
        {"small": ((4, 5), (3, 6))},
        *[{}] * 8,
    ]
    for rank, boxes in enumerate(written):
        here = grid.coordinates(rank)
        assert {name: box_at(shards[name], grid, here) for name in writers.names_of(here)} == boxes, rank
