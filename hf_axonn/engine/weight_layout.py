"""How one weight lies on a rank, and how it is brought into the shape of the product and back (matmul3d.py)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hf_axonn.engine.activation_layouts import bounds, ceil_div, pad_dim


@dataclass(frozen=True)
class Cut:
    """How one weight [N, K] lies on this rank.

    Args:
        rows, cols: this rank's block of [N, K] before the cut over z; 0 where the dim has run out.
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

    @property
    def z_rows(self) -> int:
        """Rows that travel for each z rank; the last ones may be padding."""
        return ceil_div(self.rows, self.z)

    @property
    def own_rows(self) -> int:
        start, stop = bounds(self.rows, self.z, self.z_index)
        return stop - start

    @property
    def pads(self) -> bool:
        """Whether this rank's block of the product has padding."""
        return self.rows * self.cols < self.out_blocks * self.out_size * self.in_blocks * self.in_size

    @property
    def travels(self) -> int:
        """Elements of one rank's padded shard."""
        return self.z_rows * self.cols

    def padded(self, shard: Tensor) -> Tensor:
        """This rank's shard [own_rows, cols] -> what travels, [z_rows, cols]."""
        return pad_dim(shard, 0, self.z_rows)

    def block(self, gathered: Tensor) -> Tensor:
        """[z * z_rows * cols] or the shard itself -> the zero-padded [Q, n, P, k] of the product."""
        # Not view(-1, cols): a rank whose dim has run out has no columns.
        weight = gathered.reshape(gathered.numel() // self.cols if self.cols else self.rows, self.cols)
        weight = weight[: self.rows]
        weight = pad_dim(pad_dim(weight, 1, self.in_blocks * self.in_size), 0, self.out_blocks * self.out_size)
        return weight.view(self.out_blocks, self.out_size, self.in_blocks, self.in_size)

    def unblock(self, grad: Tensor) -> Tensor:
        """[Q, n, P, k] -> [z, z_rows * cols], what each z rank is to receive."""
        flat = grad.reshape(self.out_blocks * self.out_size, -1)[: self.rows, : self.cols]
        return pad_dim(flat, 0, self.z * self.z_rows).reshape(self.z, self.travels)

    def own(self, reduced: Tensor) -> Tensor:
        """[z_rows * cols] -> this rank's shard [own_rows, cols]."""
        return reduced.view(-1, self.cols)[: self.own_rows] if self.cols else reduced.new_empty(self.own_rows, 0)
