"""Samplers of Transformers' Trainer that need to know of a grid.

`group_by_length` shuffles by torch's global generator, which a Trainer sets alike on all ranks. Its order is made that
of one process.

`batch_rebalance` divides samples among ranks by itself; on a grid it is among positions.

Checked with transformers 5.23.0 (trainer_pt_utils.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

from hf_axonn.grid import Grid


class GridLengthGroupedSampler(LengthGroupedSampler):
    """The order of one process. Made by `for_grid`. No communication."""

    def __iter__(self) -> Iterator[int]:
        # On one process the loader draws a number for its workers first. Here it has a generator of its own for that
        # (accelerator_data.py).
        torch.empty((), dtype=torch.int64).random_()
        return super().__iter__()


def for_grid(sampler: Sampler | None, grid: Grid, rank: int, batch_size: int) -> Sampler | None:
    """What a Trainer on a grid takes instead of its stock sampler of training samples.

    Args:
        sampler: the stock one.
        grid, rank: where this rank is.
        batch_size: rows of a micro-batch at one position.
    """
    if type(sampler) is LengthGroupedSampler and sampler.generator is None:
        sampler.__class__ = GridLengthGroupedSampler
    if isinstance(sampler, BatchRebalanceSampler):
        here = grid.coordinates(rank)
        return BatchRebalanceSampler(
            lengths=sampler.lengths,
            effective_batch_size=batch_size * sampler.grad_accum * grid.samples_size,
            dp_size=grid.samples_size,
            grad_accum=sampler.grad_accum,
            rank=here["data"] * grid.z + here["z"],
            drop_last=sampler.drop_last,
        )
    return sampler
