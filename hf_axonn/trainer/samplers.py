"""Samplers of Transformers' Trainer that need to know of a grid.

`group_by_length` shuffles by torch's global generator. Its order is made that of one process, and the same on all
ranks: their generators part when a script draws from them on some ranks only.

`batch_rebalance` divides samples among ranks by itself; on a grid it is among data-parallel ranks.

Checked with transformers 5.20 to 5.24 (trainer_pt_utils.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from accelerate.utils import RNGType, synchronize_rng_state
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler, get_length_grouped_indices

from hf_axonn.distributed.mesh import ROWS
from hf_axonn.topology.grid import Grid


class GridLengthGroupedSampler(LengthGroupedSampler):
    """The order of one process. Made by `for_grid`.

    Collectives: a broadcast over the world of a generator's state, whenever an epoch begins.
    """

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.set_state(torch.get_rng_state())
        synchronize_rng_state(RNGType.GENERATOR, generator)  # with that of rank 0
        for source in (None, generator):  # each rank's own moves on as that of one process
            # On one process the loader draws a number for its workers first. Here it has a generator of its own for
            # that (accelerator/data.py).
            torch.empty((), dtype=torch.int64).random_(generator=source)
            order = get_length_grouped_indices(self.lengths, self.batch_size, generator=source)
        return iter(order)


def for_grid(
    sampler: Sampler | None, grid: Grid, rank: int, batch_size: int, *, dispatched: bool = False
) -> Sampler | None:
    """Return the sampler of training samples that a Trainer on a grid takes instead of its stock one.

    Args:
        sampler: the stock one.
        grid, rank: where this rank is.
        batch_size: rows of a micro-batch of one data-parallel rank.
        dispatched: whether rank 0 alone reads, for all.
    Raises:
        ValueError: a sampler that gives each data-parallel rank its own samples is to be read by rank 0 for all.
    """
    if type(sampler) is LengthGroupedSampler and sampler.generator is None:
        sampler.batch_size *= grid.dp_size  # by it rows are grouped; one process has those of all of them
        if not dispatched:
            sampler.__class__ = GridLengthGroupedSampler
    if isinstance(sampler, BatchRebalanceSampler):
        if dispatched:
            raise ValueError(
                "train_sampling_strategy='batch_rebalance' divides samples among data-parallel ranks by itself, so "
                "that rank 0 cannot read for all: omit dispatch_batches of accelerator_config."
            )
        return BatchRebalanceSampler(
            lengths=sampler.lengths,
            effective_batch_size=batch_size * sampler.grad_accum * grid.dp_size,
            dp_size=grid.dp_size,
            grad_accum=sampler.grad_accum,
            rank=grid.place(rank).index(*ROWS),
            drop_last=sampler.drop_last,
        )
    return sampler
