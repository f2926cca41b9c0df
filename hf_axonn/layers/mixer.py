"""Mixers, sharded as blocks: Mamba, gated delta nets and short convolutions, by heads or channels.

    MixerBlock    the way in, as of attention, for code that may mask its input before it projects it
    GatedNorm     RMSNorm of groups of heads, multiplied by the activation of a gate; a group may lie on several ranks
    ChannelSum    a projection of all channels to the numbers that every channel reads (x_proj of Mamba 1)

A mixer's own forward runs with the numbers of this rank: those of its heads, and their part of the convolution, of A,
D and the biases (`Replicated`). The state that generation keeps is of these heads alone.

Legend: h = heads of this rank, of P features each; G = groups of the full norm.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_axonn.distributed.collectives import all_reduce, all_reduce_backward
from hf_axonn.distributed.mesh import HEADS, GridMesh
from hf_axonn.engine.dtensors import replicated_local
from hf_axonn.engine.state import ParallelState
from hf_axonn.layers.base import patch_forward, replaced
from hf_axonn.layers.block import Block, BlockPass, ColumnParallel, RowParallel
from hf_axonn.layers.gathered import GatheredParameters
from hf_axonn.layers.head_exchange import HeadExchange
from hf_axonn.layers.norms import FeatureShards, NormKind, normalize
from hf_axonn.topology.heads import Heads


class MixerBlock(Block):
    """The way in to a mixer, whose forward runs as in evaluation: in training Transformers' Mamba would hand full
    weights to a fused kernel that projects, scans and projects again.

    Where context divides rows, positions may be exchanged for heads (`inner`): projections multiply this rank's
    positions, and the code in between runs on whole rows of a part of the heads. It is given an input of their shape
    that has no values, so that what it does to its input, to mask it, is done here.

    Args:
        direct: whether the code projects its input as it is, where no mask is given.
        masks: whether it multiplies it by its mask before, where one is given.
        inner: the division of its heads or channels over (x, y, context); None without an exchange.
    Collectives: those of ColumnParallel.enter.
    """

    def __init__(
        self,
        state: ParallelState,
        entry: nn.Module,
        column: ColumnParallel,
        row: RowParallel,
        *,
        direct: bool,
        masks: bool | None = None,
        inner: Heads | None = None,
    ) -> None:
        self.mixer = entry
        self.direct, self.masks, self.exchanges = direct, masks, inner is not None
        self._names = list(inspect.signature(entry.forward).parameters)
        if inner is not None:
            column.exchange_rows(inner)
            row.exchange_rows()
        super().__init__(state, entry, column, row)

    def _forward(self, original: Callable, *args, **kwargs):
        with replaced(vars(self.mixer), {"training": False}):
            return super()._forward(original, *args, **kwargs)

    def enter(self, hidden: Tensor, args: tuple, kwargs: dict) -> BlockPass:
        """Return a pass for the mixer's input.

        Raises:
            ValueError: positions are exchanged for heads, and the mask that is given has not a number a position.
        """
        mask = (dict(zip(self._names, args, strict=False)) | kwargs).get("attention_mask")
        rows = self.state.context.rows if self.exchanges else None
        if rows is None:
            return self.column.enter(hidden, early=self.direct and mask is None)
        masked = mask is not None and self.masks
        passing = self.column.enter(hidden, early=not masked)
        if mask is not None and masked:
            if mask.shape[1:] != (rows.length,):
                raise ValueError(
                    f"{type(self.mixer).__name__} got an attention mask {list(mask.shape)}, but over context it takes "
                    f"one number for each of the {rows.length} positions of a row, or none."
                )
            given = passing.input
            passing.input = (given * rows.take(mask)[:, :, None]).to(given.dtype)
        passing.shown = passing.input.new_zeros(()).expand(rows.batch, rows.length, passing.input.shape[-1])
        return passing


@dataclass(frozen=True)
class GatedNormKind:
    """RMSNorm of each group of `width` features, times a weight, and times silu(gate) before or after that.

    Args:
        eps: added to the mean square.
        gate_first: whether the gate multiplies what is normalized, or the result.
        rounding: "normal" where n is rounded before it is multiplied by the weight, else "result".
    """

    width: int
    eps: float
    gate_first: bool
    rounding: str

    @cached_property
    def plain(self) -> NormKind:
        """The norm of one group without gate and weight."""
        return NormKind(self.width, False, self.eps, None, None, 0.0, "result")


@dataclass(frozen=True)
class GroupShards(FeatureShards):
    """The division of heads among ranks where the statistics are those of groups of heads.

    Args:
        groups: the group of each head of this rank, numbered over the ranks of `group`.
        total: number of these groups.
    """

    groups: tuple[int, ...] = ()
    total: int = 0

    def sum(self, value: Tensor) -> Tensor:
        """[..., h, 1] of each head -> that of its group. All-reduce of G numbers a token, if a group lies on several
        ranks."""
        index = torch.tensor(self.groups, device=value.device)
        totals = value.new_zeros(*value.shape[:-2], self.total, 1).index_add(-2, index, value)
        return super().sum(totals).index_select(-2, index)


def normalize_gated(
    hidden: Tensor, gate: Tensor | None, weight: Tensor, kind: GatedNormKind, shards: GroupShards
) -> Tensor:
    """Normalize the heads of a rank: [..., h * P] -> the same. Collectives: those of `GroupShards.sum`."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    values = hidden.to(wide)
    factor = None if gate is None else F.silu(gate.to(wide))
    if factor is not None and kind.gate_first:
        values = values * factor
    dtype = hidden.dtype if kind.rounding == "normal" else wide
    normal = normalize(values.unflatten(-1, (-1, shards.counts[0])), None, None, kind.plain, shards, dtype)
    result = weight * normal.flatten(-2)
    if factor is not None and not kind.gate_first:
        result = result * factor
    return result if kind.rounding == "normal" else result.to(hidden.dtype)


class ChannelSum(GatheredParameters):
    """A Linear of all channels inside of a mixer, of whose weight a rank uses the columns of its own channels. Global
    [B, S, I] -> [B, S, N], local [B, S, I/(x*y)] -> [B, S, N], the same on all ranks of (x, y).

    Collectives: those of GatheredParameters, and an all-reduce over (x, y), or HEADS, forward and backward: every rank
    goes on with all of the output, for its own channels.

    Args:
        exchanges: whether context divides the channels too, and each rank has whole rows of its own.

    Attributes:
        gathers_rows: whether context divides rows, which the mixer gathers.
    """

    def __init__(self, state: ParallelState, module: nn.Module, *, exchanges: bool = False, **arguments: Any) -> None:
        super().__init__(state, module, **arguments)
        self.gathers_rows = state.grid.context > 1 and not exchanges
        self.over = HEADS if exchanges else ("x", "y")

    def _forward(self, original: Callable, *args, **kwargs) -> Tensor:
        return self.add_up(super()._forward(original, *args, **kwargs))

    def add_up(self, share: Tensor) -> Tensor:
        """The sum over ranks of what each has made of its own channels."""
        group = self.state.grid_mesh.group(*self.over)
        return all_reduce_backward(all_reduce(share, group), group)


class GatedNorm:
    """A `GatedNormKind` over the features of all heads. Global [B, S, I], local [B, S, h * P].

    Its weight is replicated, and each rank has the gradient of its own heads: shares of a sum, over context as of
    everything that is computed of own positions.
    Collectives: where a group lies on several ranks, an all-reduce over the axes of the heads of G numbers a token,
    forward and backward.
    """

    def __init__(self, state: ParallelState, module: nn.Module, kind: GatedNormKind, heads: Heads) -> None:
        self.state, self.module, self.kind = state, module, kind
        self.axes = tuple(axis for axis in heads.axes if axis != "context")
        mesh = state.grid_mesh
        (size,) = module.get_parameter("weight").shape
        self.exchange = HeadExchange(size, ("query",), heads, mesh)
        self.shards = group_shards(size, kind, heads, mesh)
        patch_forward(module, self._forward)

    def _forward(self, _original: Callable, hidden: Tensor, gate: Tensor | None = None) -> Tensor:
        weight = cast(nn.Parameter, self.module._parameters["weight"])  # not what a reader is shown in its place
        full = replicated_local(weight, self.state.grid_mesh, self.axes)
        return normalize_gated(hidden, gate, self.exchange.take(full), self.kind, self.shards)


def group_shards(size: int, kind: GatedNormKind, heads: Heads, mesh: GridMesh) -> GroupShards:
    """Return the groups of this rank's heads, of `size` features in all; over the ranks only where one lies on
    several."""
    width, own = size // heads.query, heads.own_query(mesh)
    first = mesh.index(*heads.axes) * own
    groups = [(first + head) * width // kind.width for head in range(own)]
    if own * width % kind.width == 0:
        return GroupShards(
            (width,), groups=tuple(each - groups[0] for each in groups), total=groups[-1] - groups[0] + 1
        )
    over = HEADS if "context" in heads.axes else heads.axes
    return GroupShards((width,), group=mesh.group(*over), groups=tuple(groups), total=size // kind.width)
