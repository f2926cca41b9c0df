"""Kernel tuning: in which memory order the operands of a matmul are handed to BLAS.

A product of two matrices takes another kernel for each memory order of its operands, and some kernels of some
libraries are several times slower than others. On the first training steps each matmul of a layer (forward, dI, dW) is
timed in all orders (operand_layouts.py), and for its shape the fastest is used from then on.

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
import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hf_axonn.distributed.collectives import broadcast_text, world_rank
from hf_axonn.engine.operand_layouts import AS_IS, LAYOUTS, Sample, Trials, fastest, measure, multiply_as, order_of


logger = logging.getLogger(__name__)

STEPS = 3  # steps after which new shapes are timed
SECONDS = 60.0  # after one step; ranks wait meanwhile, and a collective that waits for minutes is taken for dead


class Matmul(Protocol):
    """out = a @ b, or out += a @ b, for a [M, K], b [K, N] and out [M, N]. `which`: forward, dinput or dweight."""

    def __call__(self, which: str, out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool = False) -> None: ...


def plain(which: str, out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool = False) -> None:
    """The `Matmul` without tuning."""
    multiply_as(AS_IS, out, a, b, accumulate=accumulate)


class Key(NamedTuple):
    """What a choice is made for. `m`, `n`, `k` with the number of tokens rounded up to a power of two."""

    which: str
    m: int
    n: int
    k: int
    orders: str
    dtype: str
    device: str
    accumulate: bool

    @classmethod
    def of(cls, which: str, a: Tensor, b: Tensor, *, accumulate: bool) -> Key:
        """The key of a product [M, K] @ [K, N]; tokens are M, in dW they are K."""
        (m, k), n = a.shape, b.shape[1]
        if which == "dweight":
            k = _power_of_two(k)
        else:
            m = _power_of_two(m)
        return cls(which, m, n, k, order_of(a) + order_of(b), str(a.dtype)[6:], a.device.type, accumulate)

    def layouts(self) -> list[str]:
        """What to time, as it is first.

        A sum that goes on in `out` is not swapped: in a small dtype its parts would be rounded once more.
        """
        return [
            layout
            for layout in LAYOUTS
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
            key = Key.of(which, a, b, accumulate=accumulate)
            layout = self._faster.get(key, AS_IS)
            if self.steps < STEPS:
                self.counts[key] += 1
                if key not in self.choices and key not in self._samples:
                    self._samples[key] = Sample.of(out, a, b)
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
                # A warning, because without set-up nothing less is seen, and who switches this on wants to see it.
                logger.warning(self._summary(trials, chosen, time.perf_counter() - begin))
        self._learn(_from_entries(json.loads(broadcast_text(json.dumps(_to_entries(chosen)), device))))
        self.counts.clear()
        self._samples.clear()

    def time_layouts(self, seconds: float = math.inf) -> dict[Key, Trials]:
        """Trials of the layouts of every shape met since the last call of `tune`. No communication.

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
        return json.dumps({"version": 1, "steps": self.steps, "choices": _to_entries(self.choices)}, indent=1)

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
        if layout not in LAYOUTS:
            raise ValueError(f"{layout!r} is not a layout: {', '.join(LAYOUTS)}")
        choices[key] = layout
    return choices
