"""Communication that is under way while the GPU computes: the paper's three overlaps.

    OAG  `GatherAhead`       the gathers of the next layer begin while this one multiplies; the order is what the
                             previous pass did, so it needs no knowledge of the model
    OAR  `GatheredInput`     the reduction of dI is launched, the weight gradients are computed, then it is waited for
    ORS  `ReductionQueue`    the reduce-scatter of dW runs on while earlier layers compute; `GradientSchedule` has the
                             finished gradient handed over soon after, so that its average over data can begin

Autograd runs the newest ready node first. The reduction of dW is split over two nodes: the newer one launches it and
returns a placeholder, the older one waits and returns the result, and what was created between them runs in between.

Source: AxoNN (arXiv 2502.08145), section on overlapping communication.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from hf_axonn.compat.torch import in_backward, reshaped_result
from hf_axonn.distributed.collectives import Pending, start_all_gather, start_reduce_scatter
from hf_axonn.engine.activation_layouts import Tokens, pad_dim
from hf_axonn.engine.gathering import Gathering


class _Order:
    """The order in which weights were gathered in the pass before, and how far this one has come."""

    def __init__(self, learned: Sequence[Hashable] = ()) -> None:
        self.learned = learned
        self.seen: list[Hashable] = []
        self.begun = 0  # how many of `learned` have been used or begun
        self.bundle = 0  # where in `learned` the last bundle begins

    def advance(self, key: Hashable) -> bool:
        """Note that this pass has come to `key`; return whether the one before did so here."""
        self.seen.append(key)
        here = len(self.seen)
        self.begun = max(self.begun, here)
        return here <= len(self.learned) and self.learned[here - 1] == key


class GatherAhead:
    """Starts the gathers that the previous pass did next, in bundles. Forward and backward have an order of their own.

    A bundle begins when the one before begins to be used, so there are buffers for two: the weights in use, and the
    next ones on their way. A wrong guess costs unused gathers, never a wrong result. Every rank runs the same modules
    in the same order and knows how large their weights are, so every rank guesses alike.

    Args:
        start: begins several gathers; a launch for all of them.
        enabled: whether anything is begun ahead.
        needless: whether the weights of a key are at hand without a gather.
    """

    def __init__(
        self,
        start: Callable[[list[Gathering]], list[Pending]],
        *,
        enabled: bool,
        needless: Callable[[Hashable], bool] = lambda key: False,
    ) -> None:
        self.enabled = enabled
        self.set_bundle_size(1, lambda gathering: 1)
        self._start = start
        self._needless = needless
        self._orders = {False: _Order(), True: _Order()}
        self._known: dict[Hashable, Gathering] = {}
        self._ahead: dict[Hashable, tuple[Pending, int]] = {}

    def set_bundle_size(self, size: int, measure: Callable[[Gathering], int]) -> None:
        """Let a bundle end where its gathers, by this measure, add up to `size`. Ranks have to measure alike."""
        self._size, self._measure = size, measure

    def begin_pass(self) -> None:
        """Drop what was started for a pass that is over (its weights may change now), and learn its order."""
        for pending, _ in self._ahead.values():
            pending.wait()
        self._ahead.clear()
        for phase, order in self._orders.items():
            self._orders[phase] = _Order(order.seen or order.learned)

    def take(self, key: Hashable, gathering: Gathering, version: int) -> Any:
        """Return the gathered weights of `key`; begin those that come next, when these have arrived and been unpacked.

        Args:
            key: the same whenever these weights are gathered.
            gathering: how they are.
            version: of the weights as they now are; what was begun before they changed is not used.
        """
        pending, begun_at = self._ahead.pop(key, (None, None))
        if pending is not None and begun_at != version:
            pending.wait()
            pending = None
        alone = pending is None
        if pending is None:
            (pending,) = self._start([gathering])
        arrived = pending.wait()
        if self.enabled:
            self._known[key] = gathering
            order = self._orders[in_backward()]
            if order.advance(key) and len(order.seen) > order.bundle:
                self._begin(order, self._measure(gathering) if alone else 0)
        return arrived

    def _begin(self, order: _Order, size: int) -> None:
        """Begin the next bundle: what travels in one dtype, none twice. `size`: of what belongs to it and is here, as
        the first weights of a pass, so that bundles end where layers end."""
        keys: list[Hashable] = []
        size, end = size if size < self._size else 0, order.begun
        while end < len(order.learned) and size < self._size:
            key = order.learned[end]
            if key in self._ahead or key in keys:
                break
            if not self._needless(key):
                if keys and self._known[key].travels != self._known[keys[0]].travels:
                    break
                keys.append(key)
                size += self._measure(self._known[key])
            end += 1
        if end > order.begun:
            order.bundle, order.begun = order.begun, end
        if keys:
            bundle = [self._known[key] for key in keys]
            versions = [gathering.version for gathering in bundle]
            for key, pending, version in zip(keys, self._start(bundle), versions, strict=True):
                self._ahead[key] = pending, version


class ReductionQueue:
    """Weight-gradient reductions in flight: a third one waits for the first, so memory stays bounded."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._in_flight: deque[Pending] = deque()

    def make_room(self) -> None:
        """Wait until one more fits in. Called before its gradient is computed, so that at most two exist."""
        while len(self._in_flight) >= 2:
            self._in_flight.popleft().wait()

    def add(self, pending: Pending) -> Pending:
        self.make_room()
        if self._enabled:
            self._in_flight.append(pending)
        else:
            pending.wait()
        return pending


class Deliverable(Protocol):
    """A weight whose node in the graph can be made ahead of its use."""

    def make_node(self) -> None: ...


class GradientSchedule:
    """Makes the nodes at which backward waits for finished weight gradients and hands them to autograd.

    Autograd reaches a node the later, the earlier it was made. If all were made when the forward pass begins, every
    gradient would be delivered at the very end of backward. Here the node of a group is made when the group
    `distance` before it is entered, so it is reached when that one's weight gradients have been computed. The order is
    that of the previous pass; after a wrong guess all nodes that are missing are made, which only delivers later. With
    a distance of 0 nothing is made ahead: a weight's node is made where it is used.
    """

    def __init__(self, distance: int) -> None:
        self._distance = distance
        self._learned: list[tuple[Deliverable, ...]] = []
        self._seen: list[tuple[Deliverable, ...]] = []

    def begin_pass(self, weights: Sequence[Deliverable]) -> None:
        """Learn the order of the pass before; weights that have no place in it get their nodes now."""
        if not self._distance:
            return
        if self._seen:
            self._learned, self._seen = self._seen, []
        expected = {weight for group in self._learned[self._distance :] for weight in group}
        for weight in weights:
            if weight not in expected:
                weight.make_node()
        self._make(self._learned[: self._distance])

    def enter(self, group: Sequence[Deliverable]) -> None:
        """A group is about to multiply: make the nodes of the one that comes `distance` later."""
        if not self._distance:
            return
        position, here = len(self._seen), tuple(group)
        self._seen.append(here)
        as_before = position < len(self._learned) and self._learned[position] == here
        last = position + self._distance + 1 if as_before else len(self._learned)
        self._make(self._learned[position:last])

    @staticmethod
    def _make(groups: Sequence[Sequence[Deliverable]]) -> None:
        for group in groups:
            for weight in group:
                weight.make_node()


class GatheredInput:
    """The input of a product on its way to this rank, and its gradient on its way back (OAR).

    Args:
        block: [..., h] of this rank, T / p tokens.
        group: over which it is gathered. One all-gather.
        tokens: how those that are gathered make a batch; None: the blocks stay apart.
        overlap: whether the reduction of the gradient runs on until it is waited for.
    """

    def __init__(self, block: Tensor, group: ProcessGroup, tokens: Tokens | None, *, overlap: bool) -> None:
        self.tokens = tokens
        self._group = group
        self._overlap = overlap
        rows = block.detach().reshape(-1, block.shape[-1])
        self._blocks = (group.size(), *rows.shape)
        self._pending: Pending | None = start_all_gather(rows, group)

    def wait(self) -> Tensor:
        """[p, T / p, h]; with tokens [B, S, h] without padding. Once only: it is not kept here."""
        assert self._pending is not None
        gathered, self._pending = self._pending.wait(), None
        if self.tokens is None:
            return gathered
        shape = self.tokens.batch, self.tokens.seq, self._blocks[-1]
        return reshaped_result(gathered.flatten(0, 1)[: self.tokens.count], shape)

    def start_reduction(self, grad: Tensor) -> Pending:
        """Begin to sum a gradient of what `wait` returned; result: of this rank's block [T / p, h]. One
        reduce-scatter."""
        ranks, rows, size = self._blocks
        if self.tokens is not None:
            grad = pad_dim(grad.reshape(-1, size), 0, ranks * rows)
        pending = start_reduce_scatter(grad.view(self._blocks), self._group)
        if not self._overlap:
            pending.wait()
        return pending
