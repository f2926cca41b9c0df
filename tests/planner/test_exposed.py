"""What overlaps leave of backward where gathers and reductions over z have a communicator each."""

import random
from fractions import Fraction

import pytest

from hf_axonn.planner.time.compute import Group
from hf_axonn.planner.time.exposed import Overlaps, exposed_seconds
from hf_axonn.planner.time.layer_traffic import LayerSeconds


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
