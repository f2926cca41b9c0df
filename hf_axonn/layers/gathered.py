"""Large parameters that belong to no Linear and no embedding: experts of a kind of their own, kernels of convolutions,
attention that multiplies by [H, heads, head_dim]. Nothing is known about their use, so they are stored in shards and
gathered in full while their module runs.

    stored     [A / (y * x * z), ...]   sharded along the first dim, as a vocabulary is
    in use     [A, ...]                 gathered for each forward pass, kept by autograd for backward
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from hf_axonn.distributed.collectives import all_gather, gather_replicated
from hf_axonn.engine.matmul3d import Product, gathered_weight
from hf_axonn.engine.state import ParallelState
from hf_axonn.engine.weight_layout import weight_layout
from hf_axonn.layers.base import Replicated
from hf_axonn.layers.vocabulary import in_order
from hf_axonn.topology.weight_kind import WeightKind


# A parameter is sharded if it has at least this part of the elements of the model's largest one: what is
# smaller costs more time to gather than memory to hold.
SMALLEST_PART = 1 / 64


class GatheredParameters(Replicated):
    """A module some of whose parameters (`names`) are sharded; its code sees full plain tensors, or `own` parts.

    Collectives: for each of them an all-gather over z and one over (x, y); backward: reduce-scatter over z, and over
    (x, y) where ranks do different work with it (`partial_axes`), else none there.
    """

    def __init__(
        self,
        state: ParallelState,
        module: nn.Module,
        partial_axes: tuple[str, ...],
        names: list[str],
        *,
        own: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    ) -> None:
        self.products: dict[str, Product] = {}
        for name in names:
            first, *others = module._parameters[name].shape
            layout = weight_layout(WeightKind.GATHERED, first, math.prod(others), state.grid_mesh)
            self.products[name] = Product(state, [state.weight_of(module, name, flat=True)], [layout])
        super().__init__(state, module, partial_axes, own=own)

    def full(self, name: str) -> Tensor:
        if name not in self.products:
            return super().full(name)
        mesh, shape = self.state.grid_mesh, self.module._parameters[name].shape
        blocks = gathered_weight(self.products[name])
        for axis in ("y", "x"):
            gather = all_gather if axis in self.partial_axes else gather_replicated
            blocks = gather(blocks, mesh.group(axis))  # [x, y, A / (x * y), others] in the end
        return in_order(blocks.flatten(0, 1), shape[0], mesh).view(shape)
