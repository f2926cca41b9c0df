"""Weights on a CPU in the layout of its kernels, as long as a model is only evaluated.

A decoding step multiplies few rows by every weight. torch's own product then spends most of its time on bringing the
weight into the order in which it is read, in every step anew. Here that is done once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from torch import Tensor

from hf_axonn.compat.torch import can_be_packed, packed_product


PackedProduct = Callable[[Tensor, Tensor | None], Tensor]  # of rows [..., K] and a bias [N] or None: [..., N]


class PackedWeights:
    """Products with packed copies of weights, which are made when a product first needs them.

    The copies do not follow changes of the weights. Sums are added in another order than torch's.

    Args:
        room: bytes that all copies together may take; a weight that has no room left keeps torch's product.
    """

    def __init__(self, room: float) -> None:
        self._room = room
        self._products: dict[Hashable, list[PackedProduct] | None] = {}

    def products(self, key: Hashable, weights: Callable[[], Sequence[Tensor]]) -> list[PackedProduct] | None:
        """Return a product for each weight of a group, or None where one of them cannot be packed, or no room is left.

        Args:
            key: of the group.
            weights: returns the matrices [N, K] of the group; called once.
        """
        if key not in self._products:
            group = weights()
            needed = sum(weight.nbytes for weight in group)
            packed = needed <= self._room and all(can_be_packed(weight) for weight in group)
            self._products[key] = [packed_product(weight) for weight in group] if packed else None
            self._room -= needed if packed else 0
        return self._products[key]
