"""Division of samples among ranks: batches are dealt to those that see different rows, rank 0 gathers results.

On a grid with z > 1 every forward pass gathers weights from all ranks of z, so all ranks must make the same calls in
the same number. That is what rounds are for: in a round every coordinate has a batch, a repeated one if none is left.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import hf_axonn  # its names are looked up when they are used, so the command line starts without torch


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class WorkSplit:
    """This rank's part in the measuring.

    Args:
        index: which of the `count` shares of the samples is this rank's.
        count: number of shares.
        reports: whether this rank hands in the results of its share; of ranks with the same share one does.
        rank: rank in the world, 0 without torch.distributed.
        world_size: number of processes.
    """

    index: int = 0
    count: int = 1
    reports: bool = True
    rank: int = 0
    world_size: int = 1

    @classmethod
    def for_model(cls, model) -> "WorkSplit":
        """Make the split for a model: by (data, z) if it is parallelized, else every process is a share of its own.

        By data alone where tokens travel over z to experts, because ranks of z that decode different samples make
        different numbers of passes. No communication.

        Raises:
            ValueError: its grid has stages.
        """
        rank, world_size = _world()
        parallel = hf_axonn.parallel_state(model)
        if parallel is None:
            return cls(index=rank, count=world_size, rank=rank, world_size=world_size)
        grid, here = parallel.grid, parallel.coordinates
        if grid.pipe > 1:
            raise ValueError(
                f"extraction over a grid with pipe ({grid}) is not possible: decoding needs the caches of all layers. "
                "A checkpoint that stages wrote can be measured on one process or on any grid without pipe."
            )
        shares = 1 if parallel.travels_over_z else grid.rows
        each = grid.z // shares  # ranks of z with one share
        return cls(
            index=here["data"] * shares + here["z"] // each,
            count=grid.data * shares,
            reports=here["z"] % each == here["x"] == here["y"] == 0,
            rank=rank,
            world_size=world_size,
        )

    def rounds(self, batches: Sequence[T]) -> Iterator[tuple[T, bool]]:
        """Yield this rank's batches, as many on every rank, and whether each counts or only keeps ranks in step."""
        for start in range(0, len(batches), self.count):
            place = start + self.index
            counts = place < len(batches)
            yield batches[place if counts else -1], counts and self.reports

    def gather(self, values: list[T]) -> list[T]:
        """Join the lists of all ranks on rank 0, in rank order; elsewhere empty. Collective over the world."""
        if self.world_size == 1:
            return values
        import torch.distributed as dist

        lists: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(values, lists)
        return [value for some in lists for value in some] if lists is not None else []

    def maximum(self, value: int) -> int:
        """Return the largest value on any rank. Collective over the world."""
        return max(self._all(value))

    def total(self, values: Sequence[float]) -> list[float]:
        """Sum, place by place, the values of all ranks that report. Collective over the world."""
        everywhere = self._all(list(values) if self.reports else [0.0] * len(values))
        return [sum(column) for column in zip(*everywhere, strict=True)]

    def on_rank_zero(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0 only and give its value to all ranks. Collective over the world.

        Raises:
            ValueError: `function` raised a ValueError or OSError; every rank raises it, so that none is left waiting.
        """
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = function()
            except (ValueError, OSError) as error:
                outcome[1] = str(error)
        if self.world_size > 1:
            import torch.distributed as dist

            dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise ValueError(outcome[1])
        return outcome[0]

    def _all(self, value: T) -> list[T]:
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values


def _world() -> tuple[int, int]:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()
