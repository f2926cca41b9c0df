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
    """Another number whenever one of the weights has changed in place."""
    return sum([weight.version for weight in weights])


class Gathering:
    """A group of weights that one product gathers over z in one dtype.

    Args:
        weights, layouts: the group.
        dtype: in which they travel.

    Attributes:
        elements: of the full weights, the same on every rank, so that all ranks decide alike by it.
    """

    def __init__(self, weights: Sequence[ShardedWeight], layouts: Sequence[WeightLayout], dtype: torch.dtype) -> None:
        self.weights = weights
        self.layouts = layouts
        self.dtype = dtype
        self.elements = sum([weight.parameter.numel() for weight in weights])

    @property
    def version(self) -> int:
        """Another number whenever one of the weights has changed in place."""
        return versions_of(self.weights)

    def shards(self) -> list[Tensor]:
        """What this rank sends of each weight, flat."""
        return [
            layout.padded(weight.shard.to(self.dtype)).reshape(-1)
            for weight, layout in zip(self.weights, self.layouts, strict=True)
        ]

    def blocks(self, gathered: list[Tensor]) -> list[Tensor]:
        """What has arrived of each weight, [z, elements] -> its [Q, n, P, k]."""
        return [layout.block(part) for part, layout in zip(gathered, self.layouts, strict=True)]


def start_gathers(gatherings: Sequence[Gathering], mesh: GridMesh) -> list[Pending]:
    """Begin to join the z shards of several groups of weights, all of one dtype. Result: of each one [Q, n, P, k] for
    each weight. An all-gather over z for each group, in one launch."""
    with unseen_by_checkpoints():
        started = start_all_gathers([gathering.shards() for gathering in gatherings], mesh.group("z"))
    return [pending.then(gathering.blocks) for pending, gathering in zip(started, gatherings, strict=True)]
