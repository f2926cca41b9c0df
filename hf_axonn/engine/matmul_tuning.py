"""Kernel tuning: in which memory order the operands of a matmul are handed to BLAS.

A product of two matrices takes another kernel for each memory order of its operands, and some kernels of some
libraries are several times slower than others. On the first training steps each matmul of a layer (forward, dI, dW) is
timed in all orders, and for its shape the fastest is used from then on:

    as is          the operands as they lie: NT forward, NN for dI, TN for dW
    NN NT TN TT    row-major (N) or column-major (T); an operand that lies in the other order is copied first
    NN swapped     the same for the transposed product B.T @ A.T, whose result is copied into place

When and where. A decision inside a matmul could hang: ranks of other samples have other numbers of tokens, so not all
of them meet the same shapes. There matmuls are only counted; `tune` decides, and is called where all ranks of the
world meet anyway: in `sync_gradients`, whose contract (every rank calls it, after the last backward of a step) is all
that it needs. Rank 0 times the shapes that it has met since the last call and broadcasts its choices, in the first
STEPS calls, whether it has met any or not, for SECONDS at most. Evaluation between them, other numbers of tokens on
other ranks and any number of micro-batches change only which shapes rank 0 has met; one that it has not met stays as
it is, on all ranks. Numbers of tokens count as equal up to the next power of two.

What it does to bits. A layout changes the order of a sum, so the choice, which a timing makes, is part of the state of
a run: `save_sharded` writes it and `load_sharded` takes it up again. Two runs from the start may differ in rounding.

Source: AxoNN (arXiv 2502.08145), section on BLAS kernel tuning.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hf_axonn.compat.messages import get_logger
from hf_axonn.distributed.collectives import broadcast_text, world_rank


logger = get_logger(__name__)

VERSION = 1  # of the text
STEPS = 3  # steps after which new shapes are timed
SECONDS = 60.0  # after one step; ranks wait meanwhile, and a collective that waits for minutes is taken for dead
AS_IS = "as is"
ORDERS = ("NN", "NT", "TN", "TT")
OPERAND_LAYOUTS = (AS_IS, *ORDERS, *(f"{order} swapped" for order in ORDERS))
MARGIN = 0.95  # a layout wins a round if it takes less than this part of the time of the operands as they lie
Trials = dict[str, list[float]]  # seconds by layout, AS_IS first; those that cannot win any more have fewer rounds


class Matmul(Protocol):
    """out = a @ b, or out += a @ b, for a [M, K], b [K, N] and out [M, N]. `which`: forward, dinput or dweight.

    All of one dtype; out = a @ b on CUDA also in float32 of 16-bit factors.
    """

    def __call__(self, which: str, out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool = False) -> None: ...


def plain(which: str, out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool = False) -> None:
    """The `Matmul` without tuning."""
    multiply_as(AS_IS, out, a, b, accumulate=accumulate)


class Key(NamedTuple):
    """The products that share a choice.

    `m`, `n`, `k` with the number of tokens rounded up to a power of two; `dtype` is that of the operands, and where
    the result has another, as `bfloat16 to float32`.
    """

    which: str
    m: int
    n: int
    k: int
    orders: str
    dtype: str
    device: str
    accumulate: bool

    @classmethod
    def from_operands(cls, which: str, out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool) -> Key:
        """The key of a product [M, K] @ [K, N]; tokens are M, in dW they are K."""
        (m, k), n = a.shape, b.shape[1]
        if which == "dweight":
            k = _power_of_two(k)
        else:
            m = _power_of_two(m)
        dtype = " to ".join(dict.fromkeys(str(each.dtype)[6:] for each in (a, out)))
        return cls(which, m, n, k, order_of(a) + order_of(b), dtype, a.device.type, accumulate)

    def layouts(self) -> list[str]:
        """Return what to time, as it is first.

        A sum that continues in `out` is not swapped: in a small dtype its parts would be rounded once more.
        """
        return [
            layout
            for layout in OPERAND_LAYOUTS
            if layout != self.orders and not (self.accumulate and layout.endswith("swapped"))
        ]


def _power_of_two(tokens: int) -> int:
    return 1 << (tokens - 1).bit_length()


class MatmulTuner:
    """The `Matmul` that times layouts on the first steps and uses the fastest from then on.

    Attributes:
        choices: the layout of every shape that was timed.
        steps: how many calls of `tune` have timed new shapes, up to STEPS.
        counts: how often each shape was met since the last of these.
    """

    def __init__(self) -> None:
        self.choices: dict[Key, str] = {}
        self.steps = 0
        self.counts: Counter[Key] = Counter()
        self._samples: dict[Key, Sample] = {}
        self._faster: dict[Key, str] = {}

    def __call__(self, which: str, out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool = False) -> None:
        layout = AS_IS
        if out.numel() and a.numel() and (self._faster or self.steps < STEPS):  # else it never pays, not even to look
            key = Key.from_operands(which, out, a, b, accumulate=accumulate)
            layout = self._faster.get(key, AS_IS)
            if self.steps < STEPS:
                self.counts[key] += 1
                if key not in self.choices and key not in self._samples:
                    self._samples[key] = Sample.take(out, a, b)
        multiply_as(layout, out, a, b, accumulate=accumulate)

    def tune(self, device: torch.device) -> None:
        """Choose the layout of every shape that rank 0 has met since the last call. Called by `sync_gradients`.

        Rank 0 logs one line: how many shapes gain, the estimated time of the matmuls of a step before and after, and
        what the timing took.

        Args:
            device: of this rank; what is broadcast lies there.
        Collectives: in the first STEPS calls two broadcasts over the world, of the length and the text of the choices.
        """
        if self.steps == STEPS:
            return
        self.steps += 1
        chosen: dict[Key, str] = {}
        if world_rank() == 0:
            begin = time.perf_counter()
            trials = self.time_layouts(SECONDS)
            chosen = {key: fastest(each) for key, each in trials.items()}
            if trials:
                # A warning, because nothing less is seen by default, and who switches this on wants to see it.
                logger.warning(self._summary(trials, chosen, time.perf_counter() - begin))
        self._learn(_from_entries(json.loads(broadcast_text(json.dumps(_to_entries(chosen)), device))))
        self.counts.clear()
        self._samples.clear()

    def time_layouts(self, seconds: float = math.inf) -> dict[Key, Trials]:
        """Return trials of the layouts of every shape met since the last call of `tune`. No communication.

        Args:
            seconds: after them no further shape is begun; the next step meets those that are left again.
        """
        end = time.monotonic() + seconds
        trials: dict[Key, Trials] = {}
        for key, sample in self._samples.items():
            if time.monotonic() >= end:
                break
            trials[key] = measure(sample, key.layouts(), accumulate=key.accumulate)
        return trials

    def _learn(self, choices: dict[Key, str]) -> None:
        self.choices |= choices
        self._faster |= {key: layout for key, layout in choices.items() if layout != AS_IS}

    def _summary(self, trials: dict[Key, Trials], chosen: dict[Key, str], overhead: float) -> str:
        before = sum(statistics.median(trials[key][AS_IS]) * self.counts[key] for key in trials)
        after = sum(statistics.median(trials[key][layout]) * self.counts[key] for key, layout in chosen.items())
        better = sum(layout != AS_IS for layout in chosen.values())
        if not better:
            result = f"none of {len(trials)} matmul shapes is faster in another operand layout"
        else:
            result = (
                f"{better} of {len(trials)} matmul shapes are faster in another operand layout: matmuls of a step "
                f"{1e3 * before:.1f} ms -> {1e3 * after:.1f} ms, {100 * (1 - after / before):.1f}% less"
            )
        return f"kernel tuning after step {self.steps}: {result}; timing took {overhead:.2f} s"

    def to_json(self) -> str:
        """Choices and steps, for a checkpoint."""
        return json.dumps({"version": VERSION, "steps": self.steps, "choices": _to_entries(self.choices)}, indent=1)

    def adopt(self, text: str, *, same_grid: bool) -> None:
        """Take up what `to_json` wrote. No communication: every rank reads the same text.

        Args:
            same_grid: whether the text comes from a run on this grid. Then the steps count as done, so that nothing is
                timed again; on another grid there are other shapes.
        Raises:
            ValueError: the text is not what `to_json` writes.
        """
        try:
            content = json.loads(text)
            if content["version"] != VERSION:
                raise ValueError(f"version {content['version']!r}, but this program reads version {VERSION}")
            steps, choices = int(content["steps"]), _from_entries(content["choices"])
        except (ValueError, TypeError, KeyError, AttributeError) as problem:
            raise ValueError(f"these are not matmul layouts of ours: {problem!r}") from problem
        self._learn(choices)
        if same_grid:
            self.steps = max(self.steps, min(steps, STEPS))


def _to_entries(choices: dict[Key, str]) -> list[dict[str, Any]]:
    """One JSON object a shape."""
    return [{**key._asdict(), "layout": layout} for key, layout in choices.items()]


def _from_entries(entries: Iterable[dict[str, Any]]) -> dict[Key, str]:
    """The inverse of `_to_entries`. What is not such an entry raises one of several errors."""
    choices = {}
    for entry in entries:
        key, layout = Key(**{name: value for name, value in entry.items() if name != "layout"}), entry["layout"]
        if layout not in OPERAND_LAYOUTS:
            raise ValueError(f"{layout!r} is not a layout: {', '.join(OPERAND_LAYOUTS)}")
        choices[key] = layout
    return choices


def multiply_as(layout: str, out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool = False) -> None:
    """out = a @ b or out += a @ b in one of OPERAND_LAYOUTS.

    Autocast changes none of these calls, as all of them write to a tensor that is there.
    """
    if layout != AS_IS:
        a, b = _put_in_order(a, layout[0]), _put_in_order(b, layout[1])
        if layout.endswith("swapped"):
            product = out.new_empty(out.shape[::-1])
            _write_product(product, b.t(), a.t())
            out.add_(product.t()) if accumulate else out.copy_(product.t())
            return
    if accumulate:
        out.addmm_(a, b)
    else:
        _write_product(out, a, b)


def _write_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a @ b, on CUDA also in float32 of 16-bit factors."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out.dtype, out=out)


def order_of(matrix: Tensor) -> str:
    """Return N if rows are contiguous, T if columns are, S if neither."""
    return "N" if matrix.stride(1) == 1 else "T" if matrix.stride(0) == 1 else "S"


def _put_in_order(matrix: Tensor, order: str) -> Tensor:
    if order_of(matrix) == order:
        return matrix
    return matrix.contiguous() if order == "N" else matrix.t().contiguous().t()


@dataclass(frozen=True)
class Sample:
    """Sizes and strides of one matmul, from which operands like its own are made. Contents do not matter."""

    sizes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device

    @classmethod
    def take(cls, out: Tensor, a: Tensor, b: Tensor) -> Sample:
        tensors = (out, a, b)
        return cls(
            tuple(each.shape for each in tensors),
            tuple(each.stride() for each in tensors),
            tuple(each.dtype for each in tensors),
            out.device,
        )

    def make(self) -> list[Tensor]:
        """out, a, b of random numbers, not from the generator that training uses."""
        generator = torch.Generator(self.device).manual_seed(0)
        made = []
        for size, stride, dtype in zip(self.sizes, self.strides, self.dtypes, strict=True):
            length = 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
            flat = torch.randn(length, generator=generator, device=self.device, dtype=dtype)
            made.append(flat.as_strided(size, stride))
        return made


def fastest(trials: Trials) -> str:
    """The layout of the least median among those that were steadily faster than as it is, else as it is."""
    rounds = len(trials[AS_IS])
    steady = [layout for layout in trials if len(trials[layout]) == rounds and not _drops_out(trials, layout, rounds)]
    return min(steady, key=lambda layout: statistics.median(trials[layout]), default=AS_IS)


def _drops_out(trials: Trials, layout: str, rounds: int) -> bool:
    """Return whether a layout lost more than a tenth of the rounds: other work on the machine must not choose."""
    pairs = zip(trials[layout], trials[AS_IS], strict=False)
    return sum(own >= MARGIN * as_is for own, as_is in pairs) > rounds // 10


def measure(sample: Sample, layouts: list[str], *, accumulate: bool) -> Trials:
    """Return the seconds that each layout takes, copies included, in rounds through all that can still win.

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
    """Return the seconds that `work` takes on the CPU; with one thread those of the thread: ranks may share cores."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    work()
    return clock() - begin


def gpu_seconds(work: Callable[[], None]) -> float:
    """Return the seconds that `work` takes on the GPU. Waits for it."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
