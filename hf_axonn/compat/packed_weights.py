"""Weights on a CPU in the layout of its kernels, as long as a model is only evaluated.

A decoding step multiplies few rows by every weight. torch's own product then spends most of its time on bringing the
weight into the order in which it is read, in every step anew. Here that is done once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from torch import Tensor

from hf_axonn.compat.torch import can_be_packed, packed_product


_CALLS = 6  # with torch's own product: a copy costs what it saves in about as many decoding steps
PackedProduct = Callable[[Tensor, Tensor | None], Tensor]  # of rows [..., K] and a bias [N] or None: [..., N]


class PackedWeights:
    """Products with packed copies of weights, from the seventh call of each on.

    The copies do not follow changes of the weights. Sums are added in another order than torch's.

    Args:
        room: bytes that all copies together may take; a weight that has no room left keeps torch's product.
    """

    def __init__(self, room: float) -> None:
        self._room = room
        self._products: dict[Hashable, list[PackedProduct] | None] = {}
        self._calls: Counter[Hashable] = Counter()

    def products(self, key: Hashable, weights: Callable[[], Sequence[Tensor]]) -> list[PackedProduct] | None:
        """Return a product for each weight of a group; None in the first calls, and where one of them cannot be packed
        or no room is left.

        Args:
            key: of the group.
            weights: returns the matrices [N, K] of the group; called once.
        """
        if key not in self._products:
            self._calls[key] += 1
            if self._calls[key] <= _CALLS:
                return None
            group = weights()
            needed = sum(weight.nbytes for weight in group)
            packed = needed <= self._room and all(can_be_packed(weight) for weight in group)
            self._products[key] = [packed_product(weight) for weight in group] if packed else None
            self._room -= needed if packed else 0
        return self._products[key]
