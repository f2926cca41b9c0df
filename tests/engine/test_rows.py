"""Rows are dealt to the ranks of context and put together again; no processes."""

from __future__ import annotations

import pytest
import torch

from hf_axonn.engine.rows import Rows
from hf_axonn.topology.grid import Grid


CASES = [
    (striped, context, length) for striped in (False, True) for context in (2, 3, 4) for length in (1, 2, 7, 9, 24)
]


def rows_of_ranks(striped: bool, context: int, length: int) -> list[Rows]:
    grid = Grid(z=context, context=context)
    whole = torch.arange(length).unsqueeze(0)
    return [Rows(grid.place(rank), 1, length, whole, striped=striped) for rank in range(context)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("striped", "context", "length"), CASES)
def test_every_position_is_on_one_rank_and_comes_back_to_its_place(striped, context, length):
    ranks = rows_of_ranks(striped, context, length)
    whole = torch.stack([torch.arange(length), torch.arange(length) + 100])
    parts = [rows.take(whole, fill=-1) for rows in ranks]
    assert {part.shape for part in parts} == {(2, ranks[0].own_length)}
    dealt = sorted(place for part in parts for place in part[0].tolist() if place >= 0)
    assert dealt == list(range(length))
    for rows, part in zip(ranks, parts, strict=True):
        assert torch.equal(rows._in_rows(torch.stack(parts)), whole)
        assert torch.equal(rows._deal(whole), torch.stack([rows.take(whole) for rows in ranks]))
        assert part[0].tolist() == sorted(part[0].tolist(), key=lambda place: (place < 0, place)), "in their order"
        assert sum(part[0].tolist().count(-1) for part in parts) == rows.filled


@pytest.mark.parametrize(("striped", "context", "length"), CASES)
def test_the_last_positions_are_among_those_that_each_rank_computes(striped, context, length):
    ranks = rows_of_ranks(striped, context, length)
    whole = torch.arange(length).unsqueeze(0)
    for keep in range(1, length + 1):
        some = ranks[0].last(keep)
        blocks = torch.stack([rows.take(whole)[:, -some:] for rows in ranks])
        for rows in ranks:
            if some == rows.own_length:
                kept = rows._in_rows(blocks)[:, -keep:]
            else:
                kept = blocks[0 if striped else -1, :, :keep]
            assert torch.equal(kept, whole[:, -keep:])


@pytest.mark.parametrize("context", [2, 4, 8, 16])
def test_ranks_with_two_stripes_see_as_many_pairs_of_a_query_and_a_key(context):
    """Within 5%, for causal attention; with one stripe the last rank has nearly twice the mean."""
    length = 512 * context - 3

    def pairs(striped: bool) -> list[int]:
        whole = torch.arange(length).unsqueeze(0)
        return [int((rows.take(whole, fill=-1) + 1).sum()) for rows in rows_of_ranks(striped, context, length)]

    assert max(pairs(True)) <= 1.05 * min(pairs(True))
    assert sum(pairs(True)) == length * (length + 1) // 2
    assert max(pairs(False)) > 1.4 * sum(pairs(False)) / context
