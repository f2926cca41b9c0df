"""The way of a rank's tokens to the ranks that have the experts which they chose, and back.

    spread       [T, ...] -> [S, ...]   a row for each (token, rank that has experts of the token), by rank
    exchange     [S, ...] -> [R, ...]   the rows arrive, by sender (distributed/collectives.py)
    add_up       [S, ...] -> [T, ...]   what has come back for a token is added up, in the order of the ranks

Backward of `spread` is `add_up` and the other way round. Sums are taken in float32, or in a wider dtype, always in one
order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hf_axonn.distributed.collectives import exchange, exchange_rows
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

    def send(self, values: Tensor, group: ProcessGroup) -> Tensor:
        """[T, ...] -> [R, ...] of the rows that this rank receives. One exchange over the group; backward: another."""
        return exchange_rows(_Spread.apply(values, self), self.sent, self.received, group)

    def send_back(self, results: Tensor, group: ProcessGroup) -> Tensor:
        """[R, ...] of the rows that were received -> [T, ...], the sum of a token's. As `send`, the other way."""
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
        tokens=by_rank.nonzero_static(size=sum(sent))[:, 1],
        rows=rows[:, : choices.shape[1]],
        sent=sent,
        received=received,
        pairs=[sum(place) for place in pairs],
    )


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, routes):
        ctx.routes = routes
        return routes.spread(values)

    @staticmethod
    def backward(ctx, grad):
        return ctx.routes.add_up(grad), None


class _AddUp(torch.autograd.Function):
    """Saves no tensor: a checkpointed layer that is recomputed ends before its results travel back."""

    @staticmethod
    def forward(ctx, values, routes):
        ctx.routes = routes
        return routes.add_up(values)

    @staticmethod
    def backward(ctx, grad):
        return ctx.routes.spread(grad), None
