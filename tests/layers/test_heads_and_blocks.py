"""Heads: how they are divided on every grid; and blocks that are used in a way they are not made for."""

import pytest
import torch
import torch.distributed as dist

from hf_axonn import parallelize
from hf_axonn.layers.block import Heads
from hf_axonn.topology.grid import Grid
from tests.helpers.float64 import Float64
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import all_grids, fake_mesh, run_ranks


GRIDS = [grid for size in range(1, 9) for grid in all_grids(size)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(("query", "kv"), [(12, 6), (9, 3), (8, 1), (32, 8), (7, 7)])
def test_every_query_head_reads_its_kv_head_once(grid, query, kv):
    read = []
    for rank in range(grid.size):
        mesh = fake_mesh(grid, rank)
        heads = Heads.divide(query, kv, mesh)
        parts = mesh.size(*heads.axes)
        assert query % parts == 0
        longer = {("x", "y"): None, ("x",): ("x", "y"), (): ("x",)}[heads.axes]
        assert longer is None or query % mesh.size(*longer)
        if (
            not heads.replicate_kv and kv % parts == 0
        ):  # then the first kv head of the rank belongs to its first query head
            assert heads.kv_of_own_queries(mesh)[0] == mesh.index(*heads.axes) * (kv // parts)
        repeats = mesh.size(*(axis for axis in ("x", "y") if axis not in heads.axes))
        others = {axis: 0 for axis in ("data", "z", "x", "y") if axis not in heads.axes}
        assert repeats * parts == grid.x * grid.y
        if all(mesh.coordinates[axis] == 0 for axis in others):
            first = mesh.index(*heads.axes) * (query // parts)
            read += list(enumerate(heads.kv_of_own_queries(mesh), first))
        assert heads.replicate_kv == (bool(heads.axes) and kv % parts != 0)
    assert sorted(read) == [(head, head // (query // kv)) for head in range(query)]


@pytest.mark.parametrize(
    ("grid", "axes", "expand"),
    [
        (Grid(y=2, x=3), ("x", "y"), False),
        (Grid(y=2, x=2), ("x", "y"), True),
        (Grid(y=8, x=3), ("x",), False),
        (Grid(y=2, x=5), (), False),
    ],
    ids=str,
)
def test_which_axes_divide_twelve_heads(grid, axes, expand):
    heads = Heads.divide(12, 6, fake_mesh(grid, 0))
    assert (heads.axes, heads.replicate_kv) == (axes, expand)


def heads_modes():
    """Every way of dividing heads, named in the report, with the logits of one process."""
    batch = tiny_batch(2, 6)
    modes = {  # (query heads, kv heads): words of the report, grids
        (12, 6): {"": [Grid(x=2, z=2)], "kv heads are not divisible by x*y = 4": [Grid(y=2, x=2), Grid(x=4)]},
        (6, 2): {"divisible by x = 2 but not by x*y = 4: repeated over y": [Grid(y=2, x=2)]},
        (6, 1): {"divisible by x = 2 but not by x*y = 4: repeated over y": [Grid(y=2, x=2)]},
        (3, 1): {"not divisible by x = 2: attention on all heads": [Grid(y=2, x=2), Grid(z=2, x=2)]},
    }
    for (query, kv), grids_of in modes.items():
        changes = dict(num_attention_heads=query, num_key_value_heads=kv)
        with Float64(), torch.no_grad():
            expected = tiny_model("llama", **changes)(input_ids=batch["input_ids"]).logits
            for reason, grids in grids_of.items():
                for grid in grids:
                    model, report = parallelize(tiny_model("llama", **changes), grid)
                    line = next(line for line in report.lines() if "layers.0.self_attn.q_proj" in line)
                    assert (reason in line) if reason else line.endswith("q_proj column"), line
                    torch.testing.assert_close(model(input_ids=batch["input_ids"]).logits, expected)


def test_every_mode_gives_the_logits_of_one_process():
    run_ranks(heads_modes, 4)


def a_block_on_its_own():
    model, _ = parallelize(tiny_model("llama"), Grid(x=2))
    for block in (model.model.layers[0].mlp, model.model.layers[1].self_attn):
        try:
            block(torch.zeros(1, 4, 48, dtype=torch.float64))
        except RuntimeError as error:
            assert "outside of its decoder" in str(error)
        else:
            raise AssertionError("a block ran on an input that nobody has laid out")
    with Float64():
        logits = model.train()(input_ids=torch.ones(1, 3, dtype=torch.long)).logits
    assert logits.shape == (1, 3, 131)
    assert model.axonn.context.tokens is None and dist.get_world_size() == 2  # nothing of a pass outlives it


def test_a_block_cannot_be_called_on_its_own():
    run_ranks(a_block_on_its_own, 2)
