"""The memory orders in which the two operands of a matmul can be handed to BLAS, and how long each takes.

    as is          the operands as they lie: NT forward, NN for dI, TN for dW
    NN NT TN TT    row-major (N) or column-major (T); an operand that lies in the other order is copied first
    NN swapped     the same for the transposed product B.T @ A.T, whose result is copied into place

Source: AxoNN (arXiv 2502.08145), section on BLAS kernel tuning.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


logger = logging.getLogger(__name__)

AS_IS = "as is"
ORDERS = ("NN", "NT", "TN", "TT")
LAYOUTS = (AS_IS, *ORDERS, *(f"{order} swapped" for order in ORDERS))
MARGIN = 0.95  # a layout wins a round if it takes less than this part of the time of the operands as they lie
Trials = dict[str, list[float]]  # seconds by layout, AS_IS first; those that cannot win any more have fewer rounds


def multiply_as(layout: str, out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool = False) -> None:
    """out = a @ b or out += a @ b in one of LAYOUTS."""
    if layout != AS_IS:
        a, b = _ordered(a, layout[0]), _ordered(b, layout[1])
        if layout.endswith("swapped"):
            product = torch.mm(b.t(), a.t()).t()
            out.add_(product) if accumulate else out.copy_(product)
            return
    if accumulate:
        out.addmm_(a, b)
    else:
        torch.mm(a, b, out=out)


def order_of(matrix: Tensor) -> str:
    """N: rows are contiguous; T: columns are; S: neither."""
    return "N" if matrix.stride(1) == 1 else "T" if matrix.stride(0) == 1 else "S"


def _ordered(matrix: Tensor, order: str) -> Tensor:
    if order_of(matrix) == order:
        return matrix
    return matrix.contiguous() if order == "N" else matrix.t().contiguous().t()


@dataclass(frozen=True)
class Sample:
    """Sizes and strides of one matmul, from which operands like its own are made. Contents do not matter."""

    sizes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, out: Tensor, a: Tensor, b: Tensor) -> Sample:
        tensors = (out, a, b)
        return cls(
            tuple(each.shape for each in tensors), tuple(each.stride() for each in tensors), out.dtype, out.device
        )

    def make(self) -> list[Tensor]:
        """out, a, b of random numbers, not from the generator that training uses."""
        generator = torch.Generator(self.device).manual_seed(0)
        made = []
        for size, stride in zip(self.sizes, self.strides, strict=True):
            length = 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
            flat = torch.randn(length, generator=generator, device=self.device, dtype=self.dtype)
            made.append(flat.as_strided(size, stride))
        return made


def fastest(trials: Trials) -> str:
    """The layout of the least median among those that were steadily faster than as it is, else as it is."""
    rounds = len(trials[AS_IS])
    steady = [layout for layout in trials if len(trials[layout]) == rounds and not _drops_out(trials, layout, rounds)]
    return min(steady, key=lambda layout: statistics.median(trials[layout]), default=AS_IS)


def _drops_out(trials: Trials, layout: str, rounds: int) -> bool:
    """Whether a layout lost more than a tenth of the rounds: other work on the machine must not choose."""
    pairs = zip(trials[layout], trials[AS_IS], strict=False)
    return sum(mine >= MARGIN * as_is for mine, as_is in pairs) > rounds // 10


def measure(sample: Sample, layouts: list[str], *, accumulate: bool) -> Trials:
    """Seconds that each layout takes, copies included, in rounds through all that can still win.

    Where memory does not suffice nothing is raised, as the other ranks wait for a choice: the shape stays as it is.
    """
    seconds = gpu_seconds if sample.device.type == "cuda" else cpu_seconds
    try:
        operands = sample.make()
        works = {layout: partial(multiply_as, layout, *operands, accumulate=accumulate) for layout in layouts}
        once = min(seconds(work) for work in works.values())  # first calls choose kernels and allocate
        trials: Trials = {layout: [] for layout in layouts}
        rounds = min(max(int(0.05 / max(once, 1e-6)), 7), 20)
        running = layouts
        for _ in range(rounds):
            for layout in running:
                trials[layout].append(seconds(works[layout]))
            running = [layout for layout in running if layout == AS_IS or not _drops_out(trials, layout, rounds)]
            if running == [AS_IS]:
                break
    except RuntimeError as problem:
        logger.warning(f"kernel tuning: {problem}; this shape stays as it is")
        return {AS_IS: [0.0]}
    return trials


def cpu_seconds(work: Callable[[], None]) -> float:
    """What `work` takes on the CPU. With one thread it is that thread's own time: ranks may share the cores."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    work()
    return clock() - begin


def gpu_seconds(work: Callable[[], None]) -> float:
    """What `work` takes on the GPU. Waits for it."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
