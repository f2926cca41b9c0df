"""Ranks every legal grid by predicted time.

    plan(job, gpus)      -> GridRanking: what fits, fastest first; what does not, and why
    sweep(job, counts)   -> the best grid of each number of GPUs: strong or weak scaling

A grid is legal if its sizes multiply to the number of GPUs and data * z divides the batch. All are ranked with y
innermost, then x, z, pipe, data, as the engine numbers ranks (topology/grid.py); the CONTENDERS first then get the
order of axes that is fastest for them, if it gains GAIN, and are ranked again (topology/axis_order.py brings it
about). Where settings are free (planner/settings.py), each grid has those that are fastest on it.

Each grid has the size of context that is fastest on it. Larger ones than 1 are tried where whole rows are too few to
be divided among its ranks, or do not fit with all of the free settings (with a pipeline: with none of them): elsewhere
they would only send more.

Pipelines are ranked by the closed forms of their schedules, and those of the first places are then played. Beside a
pipeline x * y stays inside a node: tensor parallelism beyond it is slower than more stages (Narayanan et al., arXiv
2104.04473, takeaway 1). Grids with a pipeline that take FAR times as long as the fastest so far are passed over.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from hf_axonn.planner.candidate import Candidate
from hf_axonn.planner.digits import gib
from hf_axonn.planner.job import Job
from hf_axonn.planner.memory import RESERVE
from hf_axonn.planner.predict import OMIT, Prediction, fastest_pipeline, predict, predict_candidate, refusal
from hf_axonn.planner.settings import keep_weights, on_grid, variants
from hf_axonn.topology.axis_order import ORDER, check_order, trim_order
from hf_axonn.topology.grid import Grid, divisors


OFF = 0.2  # error of bandwidth or of the speed of products, when the first two places are compared
CONTENDERS = 10  # places that get an order of their own, and among which a slower or faster machine may choose anew
PIPES = (1,)  # sizes of the axis pipe that are planned by default
FAR = 1.5
GAIN = 0.01  # what another order of axes than the engine's own has to save


@dataclass(frozen=True, kw_only=True)
class GridRanking:
    """The grids of a job on a number of GPUs.

    Args:
        job, gpus: the job, and the number of GPUs.
        ranked: grids that fit, the fastest first; of those with a pipeline the ones that are not FAR behind.
        too_big: grids that do not fit a GPU's memory, the smallest first.
        impossible: grids over which the batch cannot be divided, with the reason.
    """

    job: Job
    gpus: int
    ranked: tuple[Prediction, ...]
    too_big: tuple[Prediction, ...]
    impossible: tuple[tuple[Grid, str], ...]

    @property
    def best(self) -> Prediction:
        """The fastest grid that fits.

        Raises:
            ValueError: none fits; the message says what comes closest and what to change.
        """
        if self.ranked:
            return self.ranked[0]
        raise ValueError(self.why_none())

    def why_none(self) -> str:
        """Return why no grid is left."""
        if self.too_big:
            least = self.too_big[0]
            needs, has = gib(least.memory.total), self.job.machine.memory / 2**30
            return (
                f"no grid of {self.gpus} GPUs fits: the smallest, {least.grid}, needs {needs} of {has:.0f} GiB (a "
                "tenth is kept free): take more GPUs, or shorter sequences."
            )
        if not self.impossible:
            why = f"no size of pipe or context to plan with divides {self.gpus}"
            return f"no grid of {self.gpus} GPUs is possible: {why}."
        grid, why = self.impossible[0]
        other = "".join(f", or another {axis}" for axis in ("context", "pipe") if getattr(grid, axis) > 1)
        remedy = "" if why.endswith(OMIT) else f" Take a larger batch{other}."
        return f"no grid of {self.gpus} GPUs is possible, for instance {grid}: {why}.{remedy}"


def factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write `number` as an ordered product of `parts` factors."""
    if parts == 1:
        yield (number,)
        return
    for first in divisors(number):
        for rest in factorizations(number // first, parts - 1):
            yield (first, *rest)


def grids(gpus: int, pipes: Iterable[int] = (1,)) -> list[Grid]:
    """List every grid of `gpus` ranks with these sizes of pipe."""
    return [
        Grid(data=data, pipe=pipe, z=z, y=y, x=x)
        for pipe in pipes
        if gpus % pipe == 0
        for data, z, y, x in factorizations(gpus // pipe, 4)
    ]


def plan(
    job: Job,
    gpus: int,
    *,
    order: tuple[str, ...] | None = None,
    free: Collection[str] = (),
    pipes: Collection[int] | None = PIPES,
    contexts: Collection[int] | None = None,
) -> GridRanking:
    """Rank all grids of `gpus` ranks.

    Args:
        job, gpus: what is trained, and on how many GPUs.
        order: of the axes on the machine, from the innermost on, for all grids; None: chosen for the first ones.
        free: settings of the job that each grid may choose (planner/settings.py).
        pipes: sizes of the axis pipe; None: any.
        contexts: sizes of context, of which each grid has one; None: any.
    Raises:
        ValueError: gpus is below 1.
    """
    if gpus < 1:
        raise ValueError(f"gpus is {gpus}, but a job needs at least 1.")
    if pipes is None:
        pipes = [pipe for pipe in divisors(gpus) if pipe <= job.shape.depth]
    jobs = variants(job, free)
    ranked: list[Prediction] = []
    too_big: list[Prediction] = []
    impossible: list[tuple[Grid, str]] = []
    least = math.inf
    for grid in grids(gpus, pipes):
        if grid.pipe > 1 and grid.x * grid.y > job.machine.gpus_per_node:
            continue
        refused: list[tuple[Grid, str]] = []
        found: list[Prediction | None] = []
        for divided in _divisions(grid, contexts):
            if why := refusal(job, divided):
                refused.append((divided, why))
                continue
            here = on_grid(jobs, divided)
            if divided.pipe > 1:
                piped = fastest_pipeline(here, divided, order or ORDER, limit=FAR * least)
                found.append(piped)
                if piped is None or piped.fits or not _weights_fit(piped):
                    break
            else:
                prediction, done = _fastest(here, divided, order or ORDER)
                found.append(prediction)
                if done:
                    break
        best = min(filter(None, found), key=_by_time_or_memory, default=None)
        if best is not None:
            (ranked if best.fits else too_big).append(best)
            least = min(least, best.total) if best.fits else least
        elif not found:
            impossible += refused[:1]
    ranked.sort(key=lambda entry: (entry.total, str(entry.grid)))
    ranked = [keep_weights(entry, free) for entry in ranked[: 3 * CONTENDERS]] + ranked[3 * CONTENDERS :]
    ranked.sort(key=lambda entry: (entry.total, str(entry.grid)))
    if order is None:
        ranked[:CONTENDERS] = map(in_best_order, ranked[:CONTENDERS])
    ranked[: 2 * CONTENDERS] = [entry.simulate() for entry in ranked[: 2 * CONTENDERS]]
    ranked[: 2 * CONTENDERS] = sorted(ranked[: 2 * CONTENDERS], key=lambda entry: entry.total)
    too_big.sort(key=lambda entry: (entry.memory.total, str(entry.grid)))
    return GridRanking(job=job, gpus=gpus, ranked=tuple(ranked), too_big=tuple(too_big), impossible=tuple(impossible))


def _divisions(grid: Grid, contexts: Collection[int] | None) -> Iterator[Grid]:
    """Yield a grid with each size of context that its z allows, ascending."""
    if contexts is None or 1 in contexts:
        yield grid
    for size in divisors(grid.z)[1:]:
        if contexts is None or size in contexts:
            yield replace(grid, context=size)


def _weights_fit(entry: Prediction) -> bool:
    """Return whether weights, gradients and moments alone fit, which no context divides."""
    return entry.memory.states <= (1 - RESERVE) * entry.job.machine.memory


def _by_time_or_memory(entry: Prediction) -> tuple[bool, float]:
    """A key by which what fits is first, the fastest before others, and the smallest of what does not fit."""
    return not entry.fits, entry.total if entry.fits else entry.memory.total


def _fastest(jobs: list[Job], grid: Grid, order: tuple[str, ...]) -> tuple[Prediction, bool]:
    """Return the fastest job on a grid, of those that fit it, or the smallest where none fits; and whether a larger
    context can be no better: all fit, or weights and moments alone do not."""
    candidates = [Candidate.fewest(job, grid) for job in jobs]
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        smallest = predict_candidate(min(candidates, key=lambda candidate: candidate.memory.total), order)
        return smallest, not _weights_fit(smallest)
    # To compute the same again only takes time, unless it makes for fewer micro-batches.
    slower = {
        (replace(candidate.job, checkpointing=True), candidate.micro_batches)
        for candidate in fitting
        if not candidate.job.checkpointing
    }
    entries = [
        predict_candidate(candidate, order)
        for candidate in fitting
        if (candidate.job, candidate.micro_batches) not in slower
    ]
    return min(entries, key=lambda entry: entry.total), len(fitting) == len(candidates)


def other_order(prediction: Prediction) -> Prediction:
    """Return the same grid with its axes in the fastest order on the machine; its own where none is faster."""
    long_axes = [axis for axis in ORDER if getattr(prediction.grid, axis) > 1]
    short = [axis for axis in ORDER if axis not in long_axes]
    orders: Iterable[tuple[str, ...]] = (
        check_order(trim_order([*order, *short], prediction.grid)) for order in itertools.permutations(long_axes)
    )
    if prediction.grid.pipe > 1:  # what travels along pipe and data is little, or once a step
        ends = (("pipe", "data"), ("data", "pipe"))
        orders = ((*inner, *outer) for inner in itertools.permutations(("y", "x", "z")) for outer in ends)
    return min([prediction, *(prediction.reorder(order) for order in orders)], key=lambda entry: entry.total)


def in_best_order(prediction: Prediction) -> Prediction:
    """Return the same grid in the fastest order, or in its own where that gains less than GAIN."""
    better = other_order(prediction)
    return better if better.total < (1 - GAIN) * prediction.total else prediction


def alternatives(found: GridRanking) -> list[tuple[str, Prediction]]:
    """Return the first place if links or products were OFF slower or faster, among the CONTENDERS first.

    Where these are not one grid, the order of the first places depends on numbers that are not known well enough.
    """
    first = found.ranked[:CONTENDERS]
    answers = []
    for name, changes in (
        ("links 20% slower", {"bandwidth": 1 - OFF}),
        ("links 20% faster", {"bandwidth": 1 + OFF}),
        ("products 20% slower", {"gemm": 1 - OFF}),
        ("products 20% faster", {"gemm": 1 + OFF}),
    ):
        machine = found.job.machine.scale(**changes)
        again = [
            predict(replace(each.job, machine=machine, micro_batches=each.micro_batches), each.grid, order=each.order)
            for each in first
        ]
        if again:
            answers.append((name, min(again, key=lambda entry: entry.total)))
    return answers


def sweep(
    job: Job,
    counts: Iterable[int],
    *,
    weak: bool = False,
    free: Collection[str] = (),
    pipes: Collection[int] | None = PIPES,
    contexts: Collection[int] | None = None,
) -> list[GridRanking]:
    """Plan for several numbers of GPUs.

    Args:
        job: the batch is that of every plan; with `weak`, that of the first one, and grows with the GPUs.
        counts: numbers of GPUs, ascending.
        free, pipes, contexts: as `plan`.
    """
    counts = list(counts)
    plans = []
    for gpus in counts:
        sequences = max(1, job.sequences * gpus // counts[0]) if weak else job.sequences
        plans.append(plan(replace(job, sequences=sequences), gpus, free=free, pipes=pipes, contexts=contexts))
    return plans
