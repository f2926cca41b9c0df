"""The layout of one weight on a rank, and its way into the shape of the product and back (matmul3d.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from hf_axonn.distributed.mesh import GridMesh
from hf_axonn.engine.activation_layouts import bounds, ceil_div, pad_dim
from hf_axonn.topology.experts import own_experts
from hf_axonn.topology.local_slices import slices_at
from hf_axonn.topology.weight_kind import SHARDED_DIMS, WeightKind


@dataclass(frozen=True)
class WeightLayout:
    """The layout of one weight [N, K] on this rank.

    Args:
        rows, cols: this rank's block of [N, K] before it is sharded over z; 0 beyond the end of a dim.
        out_blocks, out_size: Q and n of the product.
        in_blocks, in_size: P and k of the product.
        z, z_index: ranks that divide the rows of the block, and which of them this is.
    """

    rows: int
    cols: int
    out_blocks: int
    out_size: int
    in_blocks: int
    in_size: int
    z: int
    z_index: int

    @cached_property
    def z_rows(self) -> int:
        """Rows that travel for each z rank; the last ones may be padding."""
        return ceil_div(self.rows, self.z)

    @cached_property
    def own_rows(self) -> int:
        start, stop = bounds(self.rows, self.z, self.z_index)
        return stop - start

    @property
    def summed_over(self) -> int:
        """Number of ranks of z over whose samples a gradient is the sum when its reduction is finished."""
        return self.z

    @cached_property
    def is_matrix(self) -> bool:
        """True if the block of the product is a matrix, [n, k]: P and Q are 1."""
        return self.in_blocks == self.out_blocks == 1

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """[Q, n, P, k] of the product, or [n, k]."""
        if self.is_matrix:
            return self.out_size, self.in_size
        return self.out_blocks, self.out_size, self.in_blocks, self.in_size

    @cached_property
    def pads(self) -> bool:
        """True if this rank's block of the product has padding."""
        return self.rows * self.cols < math.prod(self.shape)

    @cached_property
    def divides(self) -> bool:
        """True if nothing is padded, neither the block nor what travels: then all that is done here is a view."""
        return not self.pads and self.rows == self.z * self.z_rows

    @cached_property
    def travels(self) -> int:
        """Elements of one rank's padded shard."""
        return self.z_rows * self.cols

    def pad(self, shard: Tensor) -> Tensor:
        """This rank's shard [own_rows, cols] -> what travels, [z_rows, cols]."""
        return pad_dim(shard, 0, self.z_rows)

    def block(self, gathered: Tensor) -> Tensor:
        """[z * z_rows * cols] or the shard itself -> the zero-padded block of the product, in its `shape`."""
        if self.divides:
            return gathered.reshape(self.shape)
        # Not view(-1, cols): a rank whose dim has run out has no columns.
        weight = gathered.reshape(gathered.numel() // self.cols if self.cols else self.rows, self.cols)
        weight = weight[: self.rows]
        weight = pad_dim(pad_dim(weight, 1, self.in_blocks * self.in_size), 0, self.out_blocks * self.out_size)
        return weight.view(self.shape)

    def unblock(self, grad: Tensor) -> Tensor:
        """A gradient in the `shape` of the product -> [z, z_rows * cols], what each z rank is to receive."""
        if self.divides:
            return grad.reshape(self.z, self.travels)
        flat = grad.reshape(self.out_blocks * self.out_size, -1)[: self.rows, : self.cols]
        return pad_dim(flat, 0, self.z * self.z_rows).reshape(self.z, self.travels)

    def own(self, reduced: Tensor) -> Tensor:
        """[z_rows * cols] -> this rank's shard [own_rows, cols]."""
        return reduced.view(-1, self.cols)[: self.own_rows] if self.cols else reduced.new_empty(self.own_rows, 0)


def weight_layout(kind: WeightKind, rows: int, cols: int, mesh: GridMesh, *, full_input: bool = False) -> WeightLayout:
    """Return the layout of a weight [N, K] = [rows, cols] on this rank. No communication.

    Args:
        kind: any but those of experts (see `ExpertLayout`) and those that every rank holds in full.
        full_input: the features of a row layer's input are sharded over x alone.
    Raises:
        ValueError: another kind.
    """
    if kind in (WeightKind.EXPERTS, WeightKind.WHOLE_EXPERTS, WeightKind.REPLICATED, WeightKind.ADAPTER):
        raise ValueError(f"a weight of kind {kind} has no layout of rows and columns.")
    y, x, z = (mesh.size(axis) for axis in ("y", "x", "z"))
    here = (mesh.index("y"), mesh.index("x"))
    own_rows, own_cols = slices_at((rows, cols), SHARDED_DIMS[kind][:2], (y, x), here)
    out_blocks = in_blocks = 1
    if kind == WeightKind.ROW:
        in_blocks = 1 if full_input else y
        out_size, in_size = ceil_div(rows, y), ceil_div(ceil_div(cols, x), in_blocks)
    elif kind in (WeightKind.COLUMN, WeightKind.LINEAR):
        out_blocks = y if kind == WeightKind.COLUMN else 1
        out_size, in_size = ceil_div(ceil_div(rows, x), out_blocks), ceil_div(cols, y)
    else:
        out_size, in_size = ceil_div(ceil_div(rows, y), x), cols
    return WeightLayout(
        rows=own_rows.stop - own_rows.start,
        cols=own_cols.stop - own_cols.start,
        out_blocks=out_blocks,
        out_size=out_size,
        in_blocks=in_blocks,
        in_size=in_size,
        z=z,
        z_index=mesh.index("z"),
    )


def vocabulary_range(size: int, mesh: GridMesh, *, y: int | None = None, x: int | None = None) -> range:
    """Ids whose rows lie at coordinates (y, x), by default this rank's own."""
    y = mesh.index("y") if y is None else y
    x = mesh.index("x") if x is None else x
    (own,) = slices_at((size,), (0, 0), (mesh.size("y"), mesh.size("x")), (y, x))
    return range(own.start, own.stop)


@dataclass(frozen=True)
class ExpertLayout:
    """The layout of a weight [E, A, B] on this rank, as `WeightLayout` is that of a matrix.

    z shards B: Transformers' loader joins gate and up along A while it reads, so a shard of A would mix the two. Where
    z shards E, too (WHOLE_EXPERTS), nothing is gathered, and the rank that has an expert sees the tokens of all z.

    Args:
        experts: of this rank, e.
        rows, cols: A and B.
        z, z_index: ranks that divide B, and which of them this is.
        summed_over: ranks of z over whose samples a gradient is the sum when its reduction, if any, is finished.
    """

    experts: int
    rows: int
    cols: int
    z: int
    z_index: int
    summed_over: int

    is_matrix = False

    @property
    def pads(self) -> bool:
        """False: the block of experts is never padded."""
        return False

    @property
    def divides(self) -> bool:
        """True if all that is done here is a view."""
        return self.z == 1

    @property
    def z_cols(self) -> int:
        """Columns that travel for each z rank; the last ones may be padding."""
        return ceil_div(self.cols, self.z)

    @property
    def travels(self) -> int:
        """Elements of one rank's padded shard."""
        return self.experts * self.rows * self.z_cols

    def pad(self, shard: Tensor) -> Tensor:
        """This rank's shard -> what travels, [e, A, z_cols]."""
        return pad_dim(shard, 2, self.z_cols)

    def block(self, gathered: Tensor) -> Tensor:
        """[z * travels] or, where z is 1, the shard itself -> [e, A, B]."""
        if self.z == 1:
            return gathered.view(self.experts, self.rows, self.cols)
        parts = gathered.view(self.z, self.experts, self.rows, self.z_cols).movedim(0, 2)
        full = parts.reshape(self.experts, self.rows, self.z * self.z_cols)
        # Without padding between the rows: grouped matmuls want them to begin where they would on one process.
        return full[..., : self.cols].contiguous()

    def unblock(self, grad: Tensor) -> Tensor:
        """[e, A, B] -> [z, travels], what each z rank is to receive."""
        parts = pad_dim(grad, 2, self.z * self.z_cols).unflatten(2, (self.z, self.z_cols))
        return parts.movedim(2, 0).reshape(self.z, self.travels)

    def own(self, reduced: Tensor) -> Tensor:
        """[travels] -> the gradient of this rank's shard."""
        start, stop = bounds(self.cols, self.z, self.z_index)
        return reduced.view(self.experts, self.rows, self.z_cols)[..., : stop - start]


def expert_layout(shape: Sequence[int], mesh: GridMesh, *, over_z: bool) -> ExpertLayout:
    """Return the layout of a weight [E, A, B] on this rank; with `over_z` z shards E, else B. No communication."""
    experts, rows, cols = shape
    z, index = (1, 0) if over_z else (mesh.size("z"), mesh.index("z"))
    return ExpertLayout(len(own_experts(experts, mesh, over_z=over_z)), rows, cols, z, index, mesh.size("z"))
