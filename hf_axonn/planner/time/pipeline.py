"""Schedules of pipelines: the actions of each rank, and the seconds of a step's micro-batches through the stages.

    order(schedule, ...)     the actions of a rank in their order: torch.distributed.pipelining's own
    play(orders, ...)        their times: an action begins when its rank is free and its input has arrived
    pipeline_time(...)       both; of many micro-batches the first rounds, and the rest by the last round's length
    estimate(...)            the closed form, for a search

Stage s of P * V stages lies on rank s mod P of the P ranks along the axis. Schedules:

    gpipe         all forward passes, then all backward passes (Huang et al., arXiv 1811.06965); V = 1
    1f1b          P - 1 - r forward passes first, then one of each in turn (PipeDream-Flush; Narayanan et al., arXiv
                  2104.04473, section 2.2.1); V = 1
    interleaved   the same with V stages a rank, P micro-batches a round (section 2.2.2)
    zero_bubble   weight gradients apart from input gradients, those of rank r as many as r passes later (ZB-H1: Qi et
                  al., arXiv 2401.10241)

With m micro-batches, equal stages and free links the ranks are idle for (P - 1) / V of a micro-batch's forward and
backward: a share of (P - 1) / (m V + P - 1); with zero_bubble for (P - 1) / V of forward + input gradient - weight
gradient. tests/planner/test_pipeline.py holds the orders against torch's and the times against these forms.

A transfer delays the rank that receives and occupies no rank. Rounds become alike at once where stages are about
equal; of interleaved ones that differ by 20% three rounds are off by up to 2.5%.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


PIPELINES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
ROUNDS = 3  # rounds of micro-batches that are played; each further one takes as long as the last of them
FORWARD, BACKWARD, INPUT, WEIGHT = "F", "FB", "I", "W"  # BACKWARD: both gradients


class Action(NamedTuple):
    """An action of a rank: kind (FORWARD, BACKWARD, INPUT, WEIGHT), stage and micro-batch."""

    kind: str
    stage: int
    micro_batch: int


class StageTime(NamedTuple):
    """Seconds of a stage and micro-batch; `input_gradient` with what runs again under checkpointing."""

    forward: float
    input_gradient: float
    weight_gradient: float


class Timeline(NamedTuple):
    """Seconds at which each rank has finished, and those that it has worked until then."""

    ends: list[float]
    busy: list[float]

    @property
    def bubble(self) -> float:
        """Share of all ranks' time until the last one has finished in which they are idle."""
        return 1 - sum(self.busy) / (len(self.busy) * max(self.ends))


def problem(schedule: str, ranks: int, per_rank: int, micro_batches: int) -> str:
    """Return why a launch or torch's classes refuse a schedule, or nothing."""
    if schedule != "zero_bubble" and (per_rank > 1) != (schedule == "interleaved"):
        stages = "2 stages or more" if schedule == "interleaved" else "one stage"
        return f"the schedule {schedule} has {stages} a rank, not {per_rank}"
    if micro_batches < ranks and schedule == "1f1b":
        return f"the schedule 1f1b needs {ranks} micro-batches for {ranks} stages, and there are {micro_batches}"
    rounds = max(1, micro_batches // ranks)
    if schedule in ("interleaved", "zero_bubble") and micro_batches % rounds:
        return f"{micro_batches} micro-batches do not make {rounds} rounds of one size for {ranks} pipeline ranks"
    return ""


def _round(ranks: int, micro_batches: int) -> int:
    """Micro-batches that go through one of a rank's stages before the next one's turn."""
    return micro_batches // max(1, micro_batches // ranks)


def warmup(schedule: str, ranks: int, rank: int, per_rank: int, micro_batches: int) -> int:
    """Forward passes before the first one that a backward pass follows."""
    if schedule == "gpipe":
        return micro_batches - 1
    behind = ranks - 1 - rank
    first = (per_rank - 1) * _round(ranks, micro_batches) + (2 if schedule == "interleaved" else 1) * behind
    return min(first, per_rank * micro_batches)


def order(schedule: str, ranks: int, rank: int, per_rank: int, micro_batches: int) -> list[Action]:
    """The actions of a rank.

    Args:
        schedule: one of PIPELINES.
        ranks, rank: P, and which one.
        per_rank: V.
        micro_batches: m.
    """
    size, total = _round(ranks, micro_batches), per_rank * micro_batches
    first = warmup(schedule, ranks, rank, per_rank, micro_batches)

    def action(kind: str, place: int) -> Action:
        """The pass at a place in the sequence of all passes of one kind; backward ones begin with the last stage."""
        turn, within = divmod(place, size)
        local = turn % per_rank if kind == FORWARD else per_rank - 1 - turn % per_rank
        return Action(kind, local * ranks + rank, turn // per_rank * size + within)

    actions = [action(FORWARD, place) for place in range(first)]
    backward, apart = (INPUT, rank) if schedule == "zero_bubble" else (BACKWARD, total)
    for place in range(total):
        if first + place < total:
            actions.append(action(FORWARD, first + place))
        actions.append(action(backward, place))
        if place >= apart:
            actions.append(action(WEIGHT, place - apart))
    if backward == INPUT:
        actions += [action(WEIGHT, place) for place in range(max(0, total - apart), total)]
    return actions


def in_flight(schedule: str, ranks: int, rank: int, per_rank: int, micro_batches: int) -> tuple[int, int]:
    """Number of (stage, micro-batch) whose saved activations a rank holds at most, and of those besides for which it
    holds what a weight gradient waits for."""
    total = per_rank * micro_batches
    forward = min(warmup(schedule, ranks, rank, per_rank, micro_batches) + 1, total)
    return forward, min(rank, total) if schedule == "zero_bubble" else 0


def play(orders: Sequence[Sequence[Action]], stages: Sequence[StageTime], hops: Sequence[float]) -> Timeline:
    """Compute when the ranks have finished.

    Args:
        orders: the actions of each rank.
        stages: seconds of each stage.
        hops: seconds between a stage and the next one, either way.
    Raises:
        ValueError: the orders wait for each other.
    """
    last = len(stages) - 1
    lasts = {
        FORWARD: [stage.forward for stage in stages],
        BACKWARD: [stage.input_gradient + stage.weight_gradient for stage in stages],
        INPUT: [stage.input_gradient for stage in stages],
        WEIGHT: [stage.weight_gradient for stage in stages],
    }
    forward: dict[tuple[int, int], float] = {}  # when the input of a stage for a micro-batch arrives
    backward: dict[tuple[int, int], float] = {}
    clocks, places = [0.0] * len(orders), [0] * len(orders)
    busy = [sum(lasts[kind][stage] for kind, stage, _ in actions) for actions in orders]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(orders):
            place, clock = places[rank], clocks[rank]
            while place < len(actions):
                kind, stage, micro_batch = actions[place]
                ready: float | None = 0.0
                if kind == FORWARD:
                    if stage:
                        ready = forward.get((stage, micro_batch))
                elif kind != WEIGHT and stage != last:
                    ready = backward.get((stage, micro_batch))
                if ready is None:
                    break
                clock = max(clock, ready) + lasts[kind][stage]
                if kind == FORWARD:
                    if stage != last:
                        forward[stage + 1, micro_batch] = clock + hops[stage]
                elif kind != WEIGHT and stage:
                    backward[stage - 1, micro_batch] = clock + hops[stage - 1]
                place += 1
            moved = moved or place != places[rank]
            places[rank], clocks[rank] = place, clock
    stuck = [rank for rank, actions in enumerate(orders) if places[rank] < len(actions)]
    if stuck:
        raise ValueError(
            f"pipeline ranks {stuck} wait for each other: {[orders[rank][places[rank]] for rank in stuck]}."
        )
    return Timeline(clocks, busy)


def pipeline_time(
    schedule: str, stages: Sequence[StageTime], ranks: int, micro_batches: int, hops: Sequence[float]
) -> Timeline:
    """Compute when the ranks have finished the micro-batches of a step.

    Args:
        schedule: one of PIPELINES.
        stages: seconds of each of the P * V stages.
        ranks: P.
        micro_batches: m.
        hops: as `play`.
    """
    per_rank = len(stages) // ranks

    def simulate(count: int) -> Timeline:
        return play([order(schedule, ranks, rank, per_rank, count) for rank in range(ranks)], stages, hops)

    size = _round(ranks, micro_batches)
    rounds = micro_batches // size
    if rounds <= ROUNDS:
        return simulate(micro_batches)
    left = rounds - ROUNDS
    most, fewer = simulate(micro_batches - left * size), simulate(micro_batches - (left + 1) * size)
    return Timeline(
        [end + left * (end - before) for end, before in zip(most.ends, fewer.ends, strict=True)],
        [busy + left * (busy - before) for busy, before in zip(most.busy, fewer.busy, strict=True)],
    )


def estimate(
    schedule: str, stages: Sequence[StageTime], ranks: int, micro_batches: int, hops: Sequence[float]
) -> float:
    """Seconds until the last rank has finished, by the closed forms: the busiest rank is busy with all micro-batches,
    and idle while one passes through one stage of each other rank."""
    per_rank = len(stages) // ranks
    busy = [sum(map(sum, stages[rank::ranks])) for rank in range(ranks)]
    idle = busy
    if schedule == "zero_bubble":
        idle = [
            max(0.0, each - 2 * sum(stage.weight_gradient for stage in stages[rank::ranks]))
            for rank, each in enumerate(busy)
        ]
    busiest = max(range(ranks), key=busy.__getitem__)
    return micro_batches * busy[busiest] + (sum(idle) - idle[busiest]) / per_rank + 2 * sum(hops) / per_rank
