"""The way of a rank's tokens to the ranks that have the experts which they chose, and back.

    spread       [T, ...] -> [S, ...]   a row for each (token, rank that has experts of the token), by rank
    exchange     [S, ...] -> [R, ...]   the rows arrive, by sender (distributed/collectives.py)
    add_up       [S, ...] -> [T, ...]   what has come back for a token is added up, in the order of the ranks

Backward of `spread` is `add_up` and the other way round. Sums are taken in float32, or in a wider dtype, always in one
order. The way there is two nodes of the graph, so that ranks compute while rows, or their gradients, are under way
(`Dispatch`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hf_axonn.distributed.collectives import Pending, exchange, exchange_rows, start_exchange_rows
from hf_axonn.engine.activation_layouts import pad_dim


@dataclass(frozen=True)
class Routes:
    """The routes of T tokens of this rank, S rows of which are sent, to the p ranks of a group.

    Args:
        choices: [T, K] experts of each token.
        tokens: [S] the token of each row.
        rows: [T, min(K, p)] the rows of each token, by rank; S where it goes to fewer ranks.
        sent, received: numbers of rows to and from each rank.
        pairs: of all rows that are received and each of the K places of a choice the number that has an expert of this
            rank there.
    """

    choices: Tensor
    tokens: Tensor
    rows: Tensor
    sent: list[int]
    received: list[int]
    pairs: list[int]

    def send_back(self, results: Tensor, group: ProcessGroup) -> Tensor:
        """[R, ...] of the rows that were received -> [T, ...], the sum of a token's. One exchange over the group;
        backward: another."""
        return _AddUp.apply(exchange_rows(results, self.received, self.sent, group), self)

    def spread(self, values: Tensor) -> Tensor:
        return values.index_select(0, self.tokens)

    def add_up(self, values: Tensor) -> Tensor:
        padded = pad_dim(values, 0, len(values) + 1)  # the last row is what a token has from no rank
        first, *others = self.rows.unbind(1)
        total = padded[first].to(torch.promote_types(values.dtype, torch.float32))
        for rows in others:
            total += padded[rows]
        return total.to(values.dtype)


def find_routes(choices: Tensor, owners: Tensor, group: ProcessGroup) -> Routes:
    """Return the routes of tokens by their `choices` [T, K]; `owners` [E] is the rank of each expert in the group.

    The host reads once how many rows are sent and received. One all-to-all over the group, of 1 + K numbers a rank.
    """
    size = group.size()
    chosen = owners[choices].unsqueeze(2) == torch.arange(size, device=owners.device)  # [T, K, p]
    goes = chosen.any(dim=1)
    counts = torch.cat([goes.sum(dim=0).unsqueeze(1), chosen.sum(dim=0).t()], dim=1)
    sent, received, *pairs = torch.cat([counts[:, :1], exchange(counts, group)], dim=1).t().tolist()
    by_rank = goes.t()
    numbers = (by_rank.flatten().cumsum(0) - 1).view(by_rank.shape).t()
    rows = torch.where(goes, numbers, sum(sent)).sort(dim=1).values
    return Routes(
        choices=choices,
        # Copies: views would keep the numbers of all ranks, and a checkpointed layer keeps its routes until backward.
        tokens=by_rank.nonzero_static(size=sum(sent))[:, 1].clone(),
        rows=rows[:, : choices.shape[1]].clone(),
        sent=sent,
        received=received,
        pairs=[sum(place) for place in pairs],
    )


class Dispatch:
    """Values [T, ...] of tokens on their way to the ranks of their experts, where they become rows [R, ...].

    Backward sends the gradients of the rows back, and meanwhile runs what was computed between the start and `wait`:
    autograd takes the newest node that is ready.

    Args:
        values: of the tokens; they leave at once.
        routes: of the tokens.
        group: the ranks that have experts. One exchange over it; backward: another.
        overlap: whether rows are under way until they are waited for.
    """

    def __init__(self, values: Tensor, routes: Routes, group: ProcessGroup, *, overlap: bool) -> None:
        self.routes = routes
        self._group = group
        self._overlap = overlap
        self._under_way: Pending | None = None
        self._handle: Tensor | None = _Leave.apply(values, self)

    def wait(self) -> Tensor:
        """Return the rows that this rank has received. Once only."""
        handle, self._handle = self._handle, None  # the graph refers to this object, which must not refer to it
        return _Arrive.apply(handle, self)

    def start(self, rows: Tensor, send: list[int], receive: list[int]) -> None:
        """Send rows, or their gradients."""
        self._under_way = start_exchange_rows(rows, send, receive, self._group)
        if not self._overlap:
            self._under_way.wait()

    def take(self) -> Tensor:
        """Wait for what was sent last, which is not kept here."""
        assert self._under_way is not None
        arrived, self._under_way = self._under_way.wait(), None
        return arrived


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, dispatch):
        ctx.dispatch, routes = dispatch, dispatch.routes
        dispatch.start(routes.spread(values), routes.sent, routes.received)
        return values.new_zeros(())

    @staticmethod
    def backward(ctx, grad):
        return ctx.dispatch.routes.add_up(ctx.dispatch.take()), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, handle, dispatch):
        ctx.dispatch = dispatch
        return dispatch.take()

    @staticmethod
    def backward(ctx, grad):
        routes = ctx.dispatch.routes
        ctx.dispatch.start(grad, routes.received, routes.sent)
        return grad.new_zeros(()), None


class _AddUp(torch.autograd.Function):
    """Saves no tensor: a checkpointed layer that is recomputed ends before its results travel back."""

    @staticmethod
    def forward(ctx, values, routes):
        ctx.routes = routes
        return routes.add_up(values)

    @staticmethod
    def backward(ctx, grad):
        return ctx.routes.spread(grad), None
