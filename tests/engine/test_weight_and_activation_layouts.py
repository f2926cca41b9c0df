"""How weights and activations are cut: without processes for every grid of up to 8 ranks, then the moves between."""

import dataclasses
import itertools
import json

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hf_axonn.distributed.mesh import grid_mesh
from hf_axonn.engine.activation_layouts import (
    Tokens,
    bounds,
    ceil_div,
    features_to_tokens,
    gather_features,
    gather_tokens,
    pad_dim,
    take_features,
    take_tokens,
    tokens_to_features,
)
from hf_axonn.engine.dtensors import shard_of, shard_placements
from hf_axonn.engine.matmul3d import as_matrix
from hf_axonn.engine.weight_layout import vocabulary_range, weight_layout
from hf_axonn.layers.base import feature_slice, take_slice
from hf_axonn.topology.grid import Grid
from hf_axonn.topology.weight_kind import WeightKind
from tests.helpers.devices import rank_device, seeded
from tests.helpers.ranks import all_grids, fake_mesh, run_ranks


pytestmark = pytest.mark.usefixtures("device")


GRIDS = [grid for size in range(1, 9) for grid in all_grids(size)]
SHAPES = [(5, 3), (1, 1), (211, 48), (7, 2), (8, 8)]
KINDS = [WeightKind.COLUMN, WeightKind.ROW, WeightKind.VOCABULARY, WeightKind.LINEAR]


def meshes(grid):
    return [fake_mesh(grid, rank) for rank in range(grid.size)]


def test_bounds_are_those_of_chunk():
    for size, parts in itertools.product(range(1, 12), range(1, 9)):
        pieces = [slice(*bounds(size, parts, index)) for index in range(parts)]
        ours = [torch.arange(size)[piece] for piece in pieces]
        theirs = torch.arange(size).chunk(parts)
        assert torch.equal(torch.cat(ours), torch.arange(size)), (size, parts)
        assert [len(piece) for piece in ours if len(piece)] == [len(piece) for piece in theirs], (size, parts)
        assert max(map(len, ours)) == ceil_div(size, parts), (size, parts)


def test_pad_dim():
    tensor = torch.ones(2, 3, 4)
    assert pad_dim(tensor, 1, 3) is tensor
    for dim in (0, 1, 2, -1):
        padded = pad_dim(tensor, dim, 7)
        assert padded.shape[dim] == 7 and padded.sum() == 24
        assert torch.equal(padded.narrow(dim, 0, tensor.shape[dim]), tensor)


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_shards_reassemble_to_the_weight(rows, cols):
    """Gathered over z as the engine does it, then summed over (y, x) at the places the matmuls take them to be."""
    for grid in GRIDS:
        weight = torch.arange(1.0, rows * cols + 1).view(rows, cols)
        for kind in KINDS:
            placements = shard_placements(kind, grid)
            times_seen = torch.zeros_like(weight)
            for mesh in meshes(grid):
                cut = weight_layout(kind, rows, cols, mesh)
                shard = shard_of(weight, placements, mesh)
                assert shard.shape == (cut.own_rows, cut.cols)
                mates = grid.ranks_along(("z",), mesh.rank)
                shards = [shard_of(weight, placements, fake_mesh(grid, mate)) for mate in mates]
                gathered = torch.cat([pad_dim(each, 0, cut.z_rows).reshape(-1) for each in shards])
                block = cut.block(gathered)
                assert block.shape == cut.shape and block.dim() == (2 if cut.is_matrix else 4)
                if mesh.index("data", "z") == 0:  # the others hold the same block
                    times_seen += placed(block, kind, rows, cols, mesh)
                # What each z rank gets back of a gradient is the place of its own shard.
                own = cut.own(cut.unblock(block)[mesh.index("z")])
                assert torch.equal(own, shard), (kind, grid)
            assert torch.equal(times_seen, weight), (kind, grid)


def placed(block, kind, rows, cols, mesh):
    """The block of this rank at its place in [rows, cols]; padding must be zero."""
    flat = as_matrix(block)
    if kind == WeightKind.VOCABULARY:
        own = vocabulary_range(rows, mesh)
        row_at, col_at = own.start, 0
    else:
        row_axis, col_axis = ("y", "x") if kind == WeightKind.ROW else ("x", "y")
        row_at = mesh.index(row_axis) * ceil_div(rows, mesh.size(row_axis))
        col_at = mesh.index(col_axis) * ceil_div(cols, mesh.size(col_axis))
    whole = torch.zeros(rows + flat.shape[0] + row_at, cols + flat.shape[1] + col_at)
    whole[row_at : row_at + flat.shape[0], col_at : col_at + flat.shape[1]] = flat
    assert whole[rows:].count_nonzero() == whole[:, cols:].count_nonzero() == 0
    return whole[:rows, :cols]


@pytest.mark.parametrize("axes", [(), ("y",), ("x",), ("x", "y")], ids=["none", "y", "x", "x and y"])
def test_feature_slices_are_those_of_padded_activations(axes):
    for grid, size in itertools.product(GRIDS, (1, 5, 8, 13)):
        full = torch.arange(1.0, size + 1)
        for mesh in meshes(grid):
            mine = full
            for axis in axes:  # as activations are cut: padded, one axis after the other
                parts = mesh.size(axis)
                mine = pad_dim(mine, 0, parts * ceil_div(len(mine), parts)).view(parts, -1)[mesh.index(axis)]
            own, padded = feature_slice(size, mesh, *axes)
            assert len(mine) == padded, (grid, size)
            assert torch.equal(full[own], mine[mine > 0]), (grid, size)
            assert torch.equal(take_slice(full, size, mesh, *axes), mine), (grid, size)


def test_the_vocabulary_is_cut_once():
    for grid in GRIDS:
        for size in (1, 3, 131):
            ids = [token for mesh in meshes(Grid(y=grid.y, x=grid.x)) for token in vocabulary_range(size, mesh)]
            assert sorted(ids) == list(range(size)), grid
        mesh = fake_mesh(grid, grid.size - 1)
        assert vocabulary_range(131, mesh, y=mesh.index("y"), x=mesh.index("x")) == vocabulary_range(131, mesh), grid


def cut_as_dtensor_cuts():
    for grid in (*all_grids(4), Grid(z=2, x=2)):
        mesh = grid_mesh(grid, rank_device().type)
        for shape in SHAPES:
            weight = torch.arange(float(shape[0] * shape[1])).view(shape)
            for kind in (*KINDS, WeightKind.REPLICATED):
                placements = shard_placements(kind, grid)
                ours = shard_of(weight, placements, mesh)
                theirs = distribute_tensor(weight, mesh.storage_mesh, placements, src_data_rank=None)
                assert torch.equal(ours, theirs.to_local()), (grid, shape, kind)
                whole = DTensor.from_local(
                    ours.contiguous(), mesh.storage_mesh, placements, shape=weight.shape, stride=weight.stride()
                )
                assert torch.equal(whole.full_tensor(), weight), (grid, shape, kind)
    for grid in all_grids(4):  # DTensor remembers results, and several of these meshes have the same ranks
        storage = grid_mesh(grid, rank_device().type).storage_mesh
        shards = DTensor.from_local(torch.ones(2), storage, [Shard(0)] * storage.ndim)
        assert shards.detach().device_mesh is storage, grid


def check_moves(grid):
    mesh = grid_mesh(grid, rank_device().type)
    x, y = mesh.index("x"), mesh.index("y")
    for batch, seq, hidden_size in ((2, 4, 8), (3, 5, 7), (1, 1, 1)):
        generator = seeded(batch)
        hidden = torch.randn(batch, seq, hidden_size, generator=generator)
        tokens = Tokens(batch, seq, sharded=True)
        padded = tokens.padded_count(mesh)
        assert padded % mesh.size("x", "y") == 0 and padded - tokens.count < mesh.size("x", "y")
        flat = pad_dim(hidden.view(-1, hidden_size), 0, padded)
        mine = take_tokens(hidden, tokens, mesh)
        share = padded // mesh.size("x", "y")
        start = (x * mesh.size("y") + y) * share
        assert torch.equal(mine, flat[start : start + share].unsqueeze(0))
        assert torch.equal(gather_tokens(mine, tokens, mesh), hidden)
        check_copies(hidden, mine, tokens, mesh)
        features = ceil_div(hidden_size, mesh.size("y"))
        wide = pad_dim(flat, 1, features * mesh.size("y"))
        x_share = padded // mesh.size("x")
        expected = wide[x * x_share : (x + 1) * x_share, y * features : (y + 1) * features]
        moved = tokens_to_features(mine, mesh)
        assert torch.equal(moved, expected)
        assert torch.equal(features_to_tokens(moved, hidden_size, mesh), mine)
        for axis in ("x", "y"):
            for replicated in (True, False):
                cut = take_features(hidden, mesh, axis)
                assert cut.shape[-1] == ceil_div(hidden_size, mesh.size(axis))
                assert torch.equal(gather_features(cut, hidden_size, mesh, axis, replicated=replicated), hidden)
        check_gradients(hidden, tokens, mesh)
        if mesh.size("y") > 1:
            in_layers = dataclasses.replace(tokens, features=hidden_size)  # as in the feature layout
            assert torch.equal(take_tokens(hidden, in_layers, mesh), expected.unsqueeze(0))
            for part in (expected.unsqueeze(0), mine):  # told by its shape
                assert torch.equal(gather_tokens(part, in_layers, mesh), hidden)
            check_gradients(hidden, in_layers, mesh)


def check_copies(hidden, shard, tokens, mesh):
    """Copies of a residual stream, behind its tokens or before the batch, move as the stream does."""
    for dim in (-2, 0):
        where = dataclasses.replace(tokens, copies_first=dim == 0)
        copies, own = (torch.stack([each, 2 * each, each + 1, each - 1], dim=dim) for each in (hidden, shard))
        pads = take_tokens(torch.ones_like(copies), where, mesh)  # zeros behind the tokens
        assert torch.equal(take_tokens(copies, where, mesh), own * pads)
        assert torch.equal(gather_tokens(own, where, mesh), copies)


def check_gradients(hidden, tokens, mesh):
    """Ranks that divide the work and ranks that repeat it must both leave the gradient of one process."""
    weights = torch.randn(hidden.shape, generator=seeded(9))
    leaf = hidden.clone().requires_grad_()
    mine = take_tokens(leaf, tokens, mesh)
    for part in (mine, features_to_tokens(mine, hidden.shape[-1], mesh)) if tokens.features else (mine,):
        (gradient,) = torch.autograd.grad(
            (gather_tokens(part * 2, tokens, mesh) * weights).sum(), leaf, retain_graph=True
        )
        torch.testing.assert_close(gradient, 2 * weights)
    for axis in ("x", "y"):
        leaf = hidden.clone().requires_grad_()
        cut = take_features(leaf, mesh, axis)
        (gather_features(cut * 2, hidden.shape[-1], mesh, axis) * weights).sum().backward()
        torch.testing.assert_close(leaf.grad, 2 * weights)
        leaf = hidden.clone().requires_grad_()
        cut = take_features(leaf, mesh, axis)  # each rank uses a share of what it has gathered
        share = gather_features(cut * 2, hidden.shape[-1], mesh, axis, replicated=False) / mesh.size(axis)
        (share * weights).sum().backward()
        torch.testing.assert_close(leaf.grad, 2 * weights)


def moves():
    for grid in (g for g in all_grids(dist.get_world_size()) if g.dp_size == 1):
        check_moves(grid)


def test_cuts_agree_with_dtensor():
    run_ranks(cut_as_dtensor_cuts, 4)


@pytest.mark.parametrize("world", [4, 6])
def test_moves_between_layouts(world):
    run_ranks(moves, world)


def test_kinds_print_and_serialize_as_plain_words():
    assert f"{WeightKind.LINEAR} {WeightKind.ROW:>6}" == "linear    row" and str(WeightKind.COLUMN) == "column"
    assert json.dumps([WeightKind.EXPERTS]) == '["experts"]' and WeightKind("gathered") is WeightKind.GATHERED


@pytest.mark.parametrize("kind", [WeightKind.EXPERTS, WeightKind.REPLICATED, WeightKind.ADAPTER])
def test_a_kind_without_rows_and_columns_has_no_layout(kind):
    with pytest.raises(ValueError, match=f"a weight of kind {kind.value} has no layout"):
        weight_layout(kind, 4, 4, fake_mesh(Grid(x=2), 0))
