"""An all-gather of large blocks on gloo without copies, and the local half of its reduce-scatter.

Torch has gloo gather into a buffer of its own and copies the result out of it. On one machine, whose processors do
both, that takes about as long as the transport. Here every block is received where it belongs, by messages between
pairs of ranks. A message is announced, asked for and sent, which for small blocks costs more than their copies where
processes outnumber processors. tests/benchmarks/kernels/gather.py compares the two.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


LARGE_BYTES = 2**19  # of a block


class Messages:
    """Several messages under way; `wait()` returns when all have been sent and have arrived."""

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def start_all_gather(block: Tensor, result: Tensor, group: ProcessGroup) -> Messages:
    """Begin to fill `result` [p, ...] with the `block` [...] of every rank.

    As with every collective, all ranks begin those over one group in one order: of two messages between the same ranks
    the first to be sent arrives first.
    """
    size, rank = group.size(), group.rank()
    rows = result.unbind()
    rows[rank].copy_(block)
    works = []
    for step in range(1, size):
        source, target = (rank - step) % size, (rank + step) % size
        works.append(dist.irecv(rows[source], group=group, group_src=source))
        works.append(dist.isend(rows[rank], group=group, group_dst=target))
    return Messages(works)


def sum_blocks(blocks: Tensor) -> Tensor:
    """[p, ...] -> [...]. Tensor.sum over the first dim takes two to four times as long on a CPU."""
    if len(blocks) > 2 and blocks.dtype not in (torch.float32, torch.float64):
        return blocks.sum(dim=0)  # which rounds only once
    total = blocks[0] + blocks[1]
    for block in blocks[2:]:
        total += block
    return total
