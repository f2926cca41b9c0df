"""The weights of one product on their way from the shards of z: what travels, and what is made of it.

Several gathers can begin as one (`start_gathers`): a launch costs the host about as much as several kernels, and links
are used best by messages of some size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_axonn.compat.torch import unseen_by_checkpoints
from hf_axonn.distributed.collectives import Pending, start_all_gathers
from hf_axonn.distributed.mesh import GridMesh
from hf_axonn.engine.weight_layout import WeightLayout


if TYPE_CHECKING:
    from hf_axonn.engine.sharded_weight import ShardedWeight


def versions_of(weights: Sequence[ShardedWeight]) -> int:
    """Return a number that changes whenever one of the weights changes in place."""
    return sum([weight.version for weight in weights])


class Gathering:
    """A group of weights that one product gathers over z in one dtype.

    Args:
        weights, layouts: the group.
        dtype: of the products.

    Attributes:
        elements: of the full weights, the same on every rank, so that all ranks decide alike by it; bytes: of what
            travels of them, likewise.
        travels: the dtype of what travels: that of the weights, or uint8 where some of them are of 4 bits.
    """

    def __init__(self, weights: Sequence[ShardedWeight], layouts: Sequence[WeightLayout], dtype: torch.dtype) -> None:
        self.weights = weights
        self.layouts = layouts
        self.dtype = dtype
        self.elements = sum([weight.elements for weight in weights])
        kinds = [weight.travels_as(dtype) for weight in weights]
        self.travels = kinds[0] if len(set(kinds)) == 1 else torch.uint8
        sizes = [weight.parameter.numel() * kind.itemsize for weight, kind in zip(weights, kinds, strict=True)]
        self.bytes = sum(sizes)

    @property
    def version(self) -> int:
        """A number that changes whenever one of the weights changes in place."""
        return versions_of(self.weights)

    def shards(self) -> list[Tensor]:
        """Return what this rank sends of each weight, flat."""
        return [
            layout.pad(weight.to_gather(self.dtype)).reshape(-1).view(self.travels)
            for weight, layout in zip(self.weights, self.layouts, strict=True)
        ]

    def blocks(self, gathered: list[Tensor]) -> list[Tensor]:
        """Unpack what has arrived of each weight, [z, elements] -> its [Q, n, P, k]."""
        return [
            weight.from_gathered(_seen_as(weight.travels_as(self.dtype), part), layout, self.dtype)
            for weight, part, layout in zip(self.weights, gathered, self.layouts, strict=True)
        ]


def _seen_as(dtype: torch.dtype, part: Tensor) -> Tensor:
    """View bytes that have travelled beside those of weights of 4 bits in their own dtype."""
    return part if part.dtype == dtype else part.clone(memory_format=torch.contiguous_format).view(dtype)


def start_gathers(gatherings: Sequence[Gathering], mesh: GridMesh) -> list[Pending]:
    """Begin to join the z shards of several groups of weights, which travel in one dtype. Result: of each one
    [Q, n, P, k] for each weight. An all-gather over z for each group, in one launch."""
    with unseen_by_checkpoints():
        started = start_all_gathers([gathering.shards() for gathering in gatherings], mesh.group("z"))
    return [pending.then(gathering.blocks) for pending, gathering in zip(started, gatherings, strict=True)]
