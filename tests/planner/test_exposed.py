"""What overlaps leave of backward where gathers and reductions over z have a communicator each."""

import random
from fractions import Fraction

import pytest

from hf_axonn.planner.time.compute import Group
from hf_axonn.planner.time.exposed import Overlaps, exposed_seconds
from hf_axonn.planner.time.layer_traffic import Dispatch, LayerSeconds


def backward(windows, *, apart):
    """Exposed seconds over z, and slack, of a layer with these windows of backward: gather, reduction, computation."""
    groups = [Group(0, room, 0, 0, 0) for *_, room in reversed(windows)]
    count = len(windows)
    # Window i is that of group count - 1 - i: weights of the group before it come, gradients of the next leave.
    gathers, reduces = [0] * count, [0] * count
    for index, (gather, reduce, _) in enumerate(reversed(windows)):
        gathers[index - 1], reduces[(index + 1) % count] = gather, reduce
    layer = LayerSeconds(gathers, reduces, False, 0, 0, [0] * count)
    overlaps = Overlaps(
        all_gather=True, reduce_scatter=True, all_reduce=True, checkpointing=False, share=1, apart=apart
    )
    found = exposed_seconds(overlaps, layer, (), groups)
    return found.backward_z, found.slack


@pytest.mark.parametrize(
    ("windows", "one", "two"),
    [
        ([(2, 0, 3), (1, 0, 3)], 0, 0),
        ([(0, 3, 1), (0, 0, 5)], 2, 0),  # a reduction lasts into the window after
        ([(1, 2, 2), (1, 2, 2)], 2, 2),  # the link has more to move than computation takes
        ([(3, 4, 4), (0, 0, 4)], 3, 2),  # at half of the link the weights come after 6
    ],
)
def test_by_hand(windows, one, two):
    assert backward(windows, apart=False)[0] == one
    assert backward(windows, apart=True)[0] == two


def moment_by_moment(windows):
    """The second layer's exposed and idle time, from one event to the next; reductions run in turn, each channel has
    the link alone or half of it."""
    queue, found = [], (0, 0)
    for _ in range(2):
        found = (Fraction(0), Fraction(0))
        for gather, reduce, room in windows:
            gather, now, idle = Fraction(gather), Fraction(0), Fraction(0)
            earlier = len(queue)
            queue.append(Fraction(reduce))
            while now < room or gather or any(queue[:earlier]):
                busy = [left for left in (gather, next(filter(None, queue), 0)) if left]
                if not busy:
                    idle += room - now
                    now = Fraction(room)
                    continue
                wait = min(busy) * len(busy)
                if now < room:
                    wait = min(wait, room - now)
                moved = wait / len(busy)
                for index, left in enumerate(queue):
                    if left:
                        queue[index] -= moved
                        break
                gather = max(gather - moved, Fraction(0))
                now += wait
            queue = [left for left in queue if left]
            found = (found[0] + now - room, found[1] + idle)
    return found


def test_as_moment_by_moment_and_never_more_than_with_one_communicator():
    choose, gained = random.Random(0), 0
    for _ in range(300):
        windows = [tuple(choose.choice((0, 1, 2, 3, 5, 8)) for _ in range(3)) for _ in range(4)]
        two, one = backward(windows, apart=True), backward(windows, apart=False)
        assert two == pytest.approx(tuple(map(float, moment_by_moment(windows)))), windows
        assert two[0] <= one[0], windows
        gained += two[0] < one[0]
    assert gained > 30


# forward, dI, dW, and what comes after the products in forward and backward.
SHARED = [Group(4, 3, 2, 1, 1), Group(2, 2, 2, 0, 0)]
EXPERTS = Group(10, 10, 10, 0, 0)


@pytest.mark.parametrize(
    ("sent", "returned", "settings", "expected", "first"),
    [
        # Forward of the shared experts is 5 + 2, backward 6 + 4, of which a sum over x hides behind a dW of 2.
        (3, 5, {}, (13 - 3) + (17 - 5), 13 - 3),
        (9, 12, {}, (13 - 7) + (17 - 8), 13 - 7),
        (9, 12, {"share": 0.5}, (13 - 3.5) + (17 - 4.5) + 1, 13 - 3.5),  # of 7, of 10 - 1, and 1 of the reduction
        (9, 12, {"checkpointing": True}, (13 - 7) + (17 - 7 - 8), 13 - 7),  # sent again beside them
        (9, 12, {"all_reduce": False}, (13 - 7) + (17 - 6) + 2, 13 - 7),  # their dW comes later
    ],
)
def test_tokens_travel_beside_shared_experts(sent, returned, settings, expected, first):
    """13 and 17 seconds over x and y in all, and 2 of a reduction beside the dW of the first group."""
    tokens = Dispatch([sent / 3, 2 * sent / 3], [returned], range(2))
    layer = LayerSeconds([0] * 3, [0] * 3, False, 13, 17, [2, 0, 0], dispatches=(tokens,))
    options = dict(all_gather=True, reduce_scatter=True, all_reduce=True, checkpointing=False, share=1) | settings
    found = exposed_seconds(Overlaps(**options), layer, (), [*SHARED, EXPERTS])
    assert found.xy == pytest.approx(expected) and found.first_xy == pytest.approx(first)
    alone = exposed_seconds(Overlaps(**options), layer._replace(dispatches=()), (), [*SHARED, EXPERTS])
    assert found.xy + found.hidden == pytest.approx(alone.xy + alone.hidden) == pytest.approx(13 + 17 + 2)


def test_what_hides_tokens_hides_no_gathers():
    """12 seconds of the layer's forward are left for a gather of 20, beside 5 that tokens take."""
    tokens = Dispatch([5], [0], range(2))
    layer = LayerSeconds([20, 0, 0], [0] * 3, False, 5, 0, [0] * 3, dispatches=(tokens,))
    overlaps = Overlaps(
        all_gather=True, reduce_scatter=True, all_reduce=True, checkpointing=False, share=1, layer_ahead=True
    )
    assert exposed_seconds(overlaps, layer, (), [*SHARED, EXPERTS]).first_z == 20 - 12
    alone = layer._replace(dispatches=(), forward=0)
    assert exposed_seconds(overlaps, alone, (), [*SHARED, EXPERTS]).first_z == 20 - 17
