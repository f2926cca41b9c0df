"""Gathered weights that outlive the multiplication they were gathered for: memory for traffic over z.

    training     `keep_gathered` in the settings: kept from forward to backward, or from when a checkpointed layer runs
                 again, instead of gathered again there; over pipe through all micro-batches of a step
    generate()   kept until it ends, instead of gathered again for every token

What is kept is what was gathered, so no number changes. Weights that have changed since are never used: in training
each pass gathers its own, and a change during one is seen by their version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from weakref import WeakValueDictionary

from torch import Tensor


class GatheredBlocks:
    """The blocks [Q, n, P, k] of one group of weights.

    Args:
        blocks: one for each weight.
        version: changes when the weights change.
    """

    def __init__(self, blocks: list[Tensor], version: int) -> None:
        self.blocks = blocks
        self.version = version


class GatherCache:
    """Gathered weights of one model. A graph holds what its own backward pass needs; this finds it and holds the rest.

    The rest: everything under `keep_everything`; under `through_passes` what is kept; in training what a layer gathers
    without a graph, until backward runs it again (reentrant gradient checkpointing).

    Attributes:
        everything: whether a `keep_everything` is under way.
        through: whether a `through_passes` is.
    """

    def __init__(self) -> None:
        self._alive: WeakValueDictionary[Hashable, GatheredBlocks] = WeakValueDictionary()
        self._held: dict[Hashable, GatheredBlocks] = {}
        self.everything = self.through = False

    def __contains__(self, key: Hashable) -> bool:
        return key in self._alive

    def find(self, key: Hashable, version: int) -> GatheredBlocks | None:
        """Return what was kept under this key; None if nothing was, or the weights have changed."""
        gathered = self._alive.get(key)
        return gathered if gathered is not None and gathered.version == version else None

    def add(self, key: Hashable, gathered: GatheredBlocks, *, hold: bool = False) -> None:
        """Let `gathered` be found for as long as anything holds it; `hold` it here too."""
        self._alive[key] = gathered
        if hold or self.everything or self.through:
            self._held[key] = gathered

    def release(self, key: Hashable) -> None:
        """Stop holding it here, unless it is kept for longer."""
        if not (self.everything or self.through):
            self._held.pop(key, None)

    def begin_pass(self) -> None:
        """Forget what earlier passes gathered: weights change between passes, by `.data` without a trace."""
        if not (self.everything or self.through):
            self._held.clear()
            self._alive.clear()

    @contextlib.contextmanager
    def keep_everything(self) -> Iterator[None]:
        """Keep all that is gathered inside, until the end. Memory: all weights of the model that this rank uses."""
        before, self.everything = self.everything, True
        try:
            yield
        finally:
            self.everything = before
            self.begin_pass()

    @contextlib.contextmanager
    def through_passes(self) -> Iterator[None]:
        """The passes inside have the same weights: what is kept is gathered once. Memory: of that, one copy."""
        self.begin_pass()
        self.through = True
        try:
            yield
        finally:
            self.through = False
            self.begin_pass()
