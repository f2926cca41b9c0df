"""Activations between their layouts: who holds which tokens and which features.

Legend: T = tokens of this (data, z) position, padded to a multiple of x * y; H = hidden size; N = out_features;
C = copies of the residual stream, where a model has several.
The layouts of the residual stream:

    token        [1, T/(x*y), H]   every rank owns its tokens; norms, dropout, residuals touch nothing else
    feature      [1, T/x, H/y]     what blocks take and give; norms reduce their statistics over y (layers/norms.py)
    replicated   [B, S, H]         every rank of (x, y) holds all; used for decoding one token at a time

The first two are one where y = 1. Both are called sharded. Copies stand behind a token, [B, S, C, H], or before the
batch, [C, B, S, H] (`Tokens.copies_first`); or they are one wide token of C * H features, of which no layout knows.

Tokens are numbered batch-major and sharded over x, then y, as ranks are. Features are padded with zeros so that every
rank holds the same number; zeros meet zero weights, so results stay exact.

Source: the reduce-scatter and all-gather halves of each all-reduce of AxoNN (arXiv 2502.08145).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from hf_axonn.distributed.collectives import (
    all_gather,
    all_to_all,
    gather_replicated,
    reduce_scatter,
    take_replicated,
)
from hf_axonn.distributed.mesh import GridMesh
from hf_axonn.topology.grid import bounds as bounds  # how a dim is sharded, for those who import layouts
from hf_axonn.topology.grid import ceil_div


def pad_dim(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Return `tensor` with zeros after the end of `dim`, up to `size`; itself if it is that long already."""
    missing = size - tensor.shape[dim]
    if missing == 0:
        return tensor
    dim = dim % tensor.dim()
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1 - dim) + (0, missing))


def first(tensor: Tensor, size: int) -> Tensor:
    """Return `tensor` without what lies behind `size` in its last dim; itself if that is nothing."""
    return tensor if tensor.shape[-1] == size else tensor[..., :size]


@dataclass(frozen=True)
class Tokens:
    """The batch that is passing through the model.

    Args:
        batch: B, rows of this (data, z) position.
        seq: S, tokens a row.
        sharded: whether the residual stream is sharded or replicated.
        features: H where the layers have it in the feature layout, else 0.
        copies_first: whether copies of the residual stream stand before the batch.
    """

    batch: int
    seq: int
    sharded: bool
    features: int = 0
    copies_first: bool = False

    @property
    def count(self) -> int:
        """Tokens before padding, B * S."""
        return self.batch * self.seq

    def padded_count(self, mesh: GridMesh) -> int:
        """Tokens after padding to a multiple of x * y."""
        parts = mesh.size("x", "y")
        return ceil_div(self.count, parts) * parts


def take_tokens(hidden: Tensor, tokens: Tokens, mesh: GridMesh, *, partial: bool = False) -> Tensor:
    """[B, S, H], the same on all (x, y) -> this rank's tokens [1, T/(x*y), H], or [1, T/x, H/y] of them.

    `partial`: what ranks of (x, y) have is to be summed. A reduce-scatter over (x, y).
    Of copies: [C, B, S, H] -> [C, 1, T/(x*y), H], or [B, S, C, H] -> [1, T/(x*y), C, H].
    Backward: all-gather over (x, y), so every rank has the gradient of the full tensor.
    """
    take = reduce_scatter if partial else take_replicated
    if hidden.dim() == 4:
        return _move_copies(hidden, tokens, lambda folded: take_tokens(folded, tokens, mesh, partial=partial))
    flat = pad_dim(hidden.reshape(tokens.count, -1), 0, tokens.padded_count(mesh))
    if tokens.features:
        x, y = mesh.size("x"), mesh.size("y")
        features = ceil_div(tokens.features, y)
        blocks = pad_dim(flat, 1, y * features).view(x, -1, y, features).transpose(1, 2).flatten(0, 1)
        return take(blocks, mesh.group("x", "y")).unsqueeze(0)
    blocks = flat.view(mesh.size("x", "y"), -1, flat.shape[-1])
    return take(blocks, mesh.group("x", "y")).unsqueeze(0)


def gather_tokens(hidden: Tensor, tokens: Tokens, mesh: GridMesh) -> Tensor:
    """[1, T/(x*y), H] or [1, T/x, H/y] -> [B, S, H] on all (x, y), which then repeat the same work.

    Of copies: [C, 1, T/(x*y), H] -> [C, B, S, H], or [1, T/(x*y), C, H] -> [B, S, C, H].
    All-gather over (x, y). Backward: this rank's part of a gradient that every rank has in full.
    """
    if hidden.dim() == 4:
        return _move_copies(hidden, tokens, lambda folded: gather_tokens(folded, tokens, mesh))
    blocks = gather_replicated(hidden.squeeze(0), mesh.group("x", "y"))
    if in_features(hidden, tokens, mesh):
        flat = blocks.unflatten(0, (mesh.size("x"), -1)).transpose(1, 2).flatten(2).flatten(0, 1)
        flat = flat[:, : tokens.features]
    else:
        flat = blocks.flatten(0, 1)
    return flat[: tokens.count].view(tokens.batch, tokens.seq, -1)


def _move_copies(hidden: Tensor, tokens: Tokens, move: Callable[[Tensor], Tensor]) -> Tensor:
    """Move copies of tokens as wide tokens, [.., .., C * H], and return them as copies."""
    copies = hidden.movedim(0, -2) if tokens.copies_first else hidden
    moved = move(copies.flatten(-2)).unflatten(-1, copies.shape[-2:])
    return moved.movedim(-2, 0) if tokens.copies_first else moved


def in_features(hidden: Tensor, tokens: Tokens, mesh: GridMesh) -> bool:
    """Return whether a part of the residual stream is [1, T/x, H/y] and not [1, T/(x*y), H]: the layers' is, but what
    comes after the last of them is not."""
    return bool(tokens.features) and hidden.shape[1] * mesh.size("x") == tokens.padded_count(mesh)


def tokens_to_features(hidden: Tensor, mesh: GridMesh) -> Tensor:
    """[1, T/(x*y), H] -> [T/x, H/y]: the first step into a block. All-to-all over y, both ways."""
    y = mesh.size("y")
    if y == 1:
        return hidden.squeeze(0)
    features = ceil_div(hidden.shape[-1], y)
    blocks = pad_dim(hidden.squeeze(0), 1, y * features).view(-1, y, features).transpose(0, 1)
    return all_to_all(blocks, mesh.group("y")).flatten(0, 1)


def features_to_tokens(hidden: Tensor, hidden_size: int, mesh: GridMesh) -> Tensor:
    """[T/x, H/y] -> [1, T/(x*y), H]: the way out of a block. All-to-all over y, both ways."""
    y = mesh.size("y")
    blocks = hidden.reshape(y, -1, hidden.shape[-1])
    own = all_to_all(blocks, mesh.group("y")).transpose(0, 1).flatten(1, 2)
    return first(own, hidden_size).unsqueeze(0)


def take_features(hidden: Tensor, mesh: GridMesh, axis: str) -> Tensor:
    """[..., K], the same on all ranks of `axis` -> [..., K/axis]. Backward: all-gather over `axis`."""
    parts = mesh.size(axis)
    if parts == 1:
        return hidden
    features = ceil_div(hidden.shape[-1], parts)
    blocks = pad_dim(hidden, -1, parts * features).unflatten(-1, (parts, features)).movedim(-2, 0)
    return take_replicated(blocks, mesh.group(axis))


def gather_features(hidden: Tensor, size: int, mesh: GridMesh, axis: str, *, replicated: bool = True) -> Tensor:
    """[..., N/axis] -> [..., N], `size` being N. All-gather over `axis`.

    Backward: this rank's block if the ranks then repeat the same work (`replicated`), else the reduce-scatter of
    gradients that are each rank's own share.
    """
    if mesh.size(axis) == 1:
        return first(hidden, size)
    gather = gather_replicated if replicated else all_gather
    return first(gather(hidden, mesh.group(axis)).movedim(0, -2).flatten(-2), size)
