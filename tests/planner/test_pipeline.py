"""Schedules of pipelines: played against closed forms, and against the orders that torch's own classes hold."""

import random
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules

from hf_axonn.planner.time.pipeline import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Action,
    StageTime,
    estimate,
    in_flight,
    order,
    pipeline_time,
    play,
    problem,
)


WAYS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1), ("zero_bubble", 2)]
SIZES = [(2, 2), (4, 4), (4, 12), (8, 16), (3, 15), (4, 10)]  # ranks, micro-batches
KINDS = {"F": FORWARD, "B": BACKWARD, "I": INPUT, "W": WEIGHT}  # as torch writes them


def equal(ranks, per_rank, forward=1.0, input_gradient=1.0, weight_gradient=1.0):
    """Stages that cost a rank this much together."""
    each = (forward / per_rank, input_gradient / per_rank, weight_gradient / per_rank)
    return [StageTime(*each)] * (ranks * per_rank)


def orders(schedule, ranks, per_rank, micro_batches):
    return [order(schedule, ranks, rank, per_rank, micro_batches) for rank in range(ranks)]


def free(stages):
    return [0.0] * (len(stages) - 1)


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
@pytest.mark.parametrize(("schedule", "per_rank"), WAYS)
def test_bubbles_of_equal_stages_are_the_closed_forms(schedule, per_rank, ranks, micro_batches):
    if problem(schedule, ranks, per_rank, micro_batches) or (per_rank > 1 and micro_batches % ranks):
        pytest.skip("the closed form is of whole rounds")
    f, i, w = 1.0, 1.25, 0.75
    stages = equal(ranks, per_rank, f, i, w)
    found = pipeline_time(schedule, stages, ranks, micro_batches, free(stages))
    idle = (ranks - 1) * (f + i - w if schedule == "zero_bubble" else f + i + w) / per_rank
    assert max(found.ends) == pytest.approx(micro_batches * (f + i + w) + idle)
    assert found.busy == pytest.approx([micro_batches * (f + i + w)] * ranks)
    if schedule != "zero_bubble":
        # Narayanan et al., arXiv 2104.04473: (p - 1) / (v m) of the ideal time, here of all the time
        share = (ranks - 1) / (per_rank * micro_batches + ranks - 1)
        assert found.bubble == pytest.approx(share)
    assert estimate(schedule, stages, ranks, micro_batches, free(stages)) == pytest.approx(max(found.ends))


def of_torch(schedule, ranks, per_rank, micro_batches):
    """The order that torch's class holds, without its idle slots."""
    if schedule in ("gpipe", "1f1b"):
        kind = schedules.ScheduleGPipe if schedule == "gpipe" else schedules.Schedule1F1B
        held = SimpleNamespace(_num_stages=ranks, _n_microbatches=micro_batches)
        found = kind._get_pipeline_order(held)
    else:
        kind = schedules.ScheduleInterleaved1F1B
        kind = schedules.ScheduleInterleavedZeroBubble if schedule == "zero_bubble" else kind
        rounds = max(1, micro_batches // ranks)
        held = SimpleNamespace(
            pp_group_size=ranks,
            n_local_stages=per_rank,
            microbatches_per_round=micro_batches // rounds,
            _n_microbatches=micro_batches,
        )
        found = {rank: kind._calculate_single_rank_operations(held, rank) for rank in range(ranks)}
    # Of 1f1b the list of the last rank counts its forward passes from 1; what runs (_step_microbatches) counts from 0.
    shift = {ranks - 1: 1} if schedule == "1f1b" else {}
    return [
        [
            Action(kind, stage, micro_batch - (shift.get(rank, 0) if kind == FORWARD else 0))
            for stage, kind, micro_batch in (
                (action.stage_index, KINDS.get(action.computation_type.value), action.microbatch_index)
                for action in found[rank]
                if action is not None
            )
            if kind is not None
        ]
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(("ranks", "micro_batches"), [*SIZES, (4, 3)])
@pytest.mark.parametrize(("schedule", "per_rank"), WAYS)
def test_orders_and_bubbles_are_those_of_torch(schedule, per_rank, ranks, micro_batches):
    if problem(schedule, ranks, per_rank, micro_batches):
        pytest.skip("torch refuses it, too")
    theirs, ours = (make(schedule, ranks, per_rank, micro_batches) for make in (of_torch, orders))
    assert theirs == ours
    stages = [StageTime(1 + 0.1 * index, 2.0, 1.5) for index in range(ranks * per_rank)]
    hops = [0.25] * (len(stages) - 1)
    assert play(theirs, stages, hops) == play(ours, stages, hops)


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
@pytest.mark.parametrize(("schedule", "per_rank"), WAYS)
def test_what_is_in_flight_is_counted_along_the_order(schedule, per_rank, ranks, micro_batches):
    if problem(schedule, ranks, per_rank, micro_batches):
        pytest.skip("torch refuses it")
    for rank, actions in enumerate(orders(schedule, ranks, per_rank, micro_batches)):
        saved = waiting = most_saved = most_waiting = 0
        for kind, *_ in actions:
            saved += {FORWARD: 1, BACKWARD: -1, INPUT: -1}.get(kind, 0)
            waiting += {INPUT: 1, WEIGHT: -1}.get(kind, 0)
            most_saved, most_waiting = max(most_saved, saved), max(most_waiting, waiting)
        # The weight gradient that follows its input gradient at once waits for nothing.
        expected = (most_saved, max(0, most_waiting - 1) if rank < per_rank * micro_batches else most_waiting)
        assert in_flight(schedule, ranks, rank, per_rank, micro_batches) == expected


def test_the_known_numbers_in_flight():
    assert [in_flight("1f1b", 4, rank, 1, 8)[0] for rank in range(4)] == [4, 3, 2, 1]
    assert in_flight("gpipe", 4, 3, 1, 8)[0] == 8
    # Megatron's interleaved schedule holds (v - 1) p + 2 (p - 1) + 1 of its v p: arXiv 2205.05198, section 4.2.3
    assert in_flight("interleaved", 4, 0, 2, 8)[0] == 4 + 2 * 3 + 1


@pytest.mark.parametrize(("schedule", "per_rank"), WAYS)
@pytest.mark.parametrize("seed", range(4))
def test_many_micro_batches_go_on_as_the_first_rounds(schedule, per_rank, seed):
    draw = random.Random(seed)
    ranks, micro_batches = draw.choice([(4, 32), (6, 60), (8, 67)])
    micro_batches -= micro_batches % ranks if per_rank > 1 or schedule == "zero_bubble" else 0
    stages = [StageTime(*(draw.uniform(0.8, 1.2) for _ in range(3))) for _ in range(ranks * per_rank)]
    hops = [draw.uniform(0, 0.2) for _ in stages[1:]]
    all_of_it = play(orders(schedule, ranks, per_rank, micro_batches), stages, hops)
    found = pipeline_time(schedule, stages, ranks, micro_batches, hops)
    # Rounds of interleaved stages that are as unequal as these take longer to become alike.
    assert max(found.ends) == pytest.approx(max(all_of_it.ends), rel=0.025 if schedule == "interleaved" else 1e-9)
    assert found.busy == pytest.approx(all_of_it.busy)
    closed = estimate(schedule, stages, ranks, micro_batches, hops)
    assert closed == pytest.approx(max(all_of_it.ends), rel=0.12)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_slowest_stage_sets_the_pace(schedule):
    stages = [StageTime(1, 1, 1)] * 3 + [StageTime(2, 1, 1)]  # the last one has the head
    found = pipeline_time(schedule, stages, 4, 16, [0.0] * 3)
    assert max(found.ends) == 16 * 4 + 3 * 3
    assert found.busy == [48, 48, 48, 64]


def test_transfers_delay_who_receives():
    stages = [StageTime(1, 1, 0)] * 2
    assert play(orders("gpipe", 2, 1, 1), stages, [0.5]).ends == [1 + 0.5 + 2 + 0.5 + 1, 3.5]


def test_what_torch_refuses_is_refused():
    assert "needs 4 micro-batches for 4 stages, and there are 3" in problem("1f1b", 4, 1, 3)
    assert "7 micro-batches do not make" not in problem("interleaved", 4, 2, 7)
    assert "11 micro-batches do not make 2 rounds" in problem("interleaved", 4, 2, 11)
    assert "has one stage a rank, not 2" in problem("gpipe", 4, 2, 8)
    with pytest.raises(ValueError, match=r"pipeline ranks \[0, 1\] wait for each other"):
        play([[Action(BACKWARD, 0, 0)], [Action(FORWARD, 1, 0)]], [StageTime(1, 1, 1)] * 2, [0.0])
