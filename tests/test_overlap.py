"""Communication under way: what is begun ahead, in which order things happen, and that none of it changes a number."""

import functools

import pytest
import torch
import torch.distributed as dist
from models import tiny_batch, tiny_model
from ranks import run_ranks

from hf_axonn import collectives, matmul3d, overlap
from hf_axonn.config import AxonnConfig, Overlap
from hf_axonn.gradients import sync_gradients
from hf_axonn.grid import Grid
from hf_axonn.overlap import GatherAhead, GradientSlot, ReductionQueue, placeholder, wait_gradient
from hf_axonn.parallelize import parallelize


class Weights:
    """Weights with a value and a version; every gather of one is noted."""

    def __init__(self, *keys):
        self.values = dict.fromkeys(keys, 0.0)
        self.begun = []

    def start(self, key):
        self.begun.append(key)
        return collectives.Pending(torch.tensor(self.values[key]))

    def take(self, ahead, key):
        return ahead.take(key, functools.partial(self.start, key), lambda: int(self.values[key])).item()


def a_pass(ahead, weights, keys):
    ahead.begin_pass()
    weights.begun.clear()
    return [weights.take(ahead, key) for key in keys]


def test_gathers_begin_one_ahead_once_the_order_is_known():
    ahead, weights = GatherAhead(enabled=True), Weights("a", "b", "c")
    a_pass(ahead, weights, "abc")
    assert weights.begun == ["a", "b", "c"]
    ahead.begin_pass()
    weights.begun.clear()
    weights.take(ahead, "a")
    assert weights.begun == ["a", "b"]
    weights.take(ahead, "b")
    assert weights.begun == ["a", "b", "c"]
    weights.take(ahead, "c")
    assert weights.begun == ["a", "b", "c"]


def test_switched_off_nothing_begins_ahead():
    ahead, weights = GatherAhead(enabled=False), Weights("a", "b")
    a_pass(ahead, weights, "ab")
    ahead.begin_pass()
    weights.begun.clear()
    weights.take(ahead, "a")
    assert weights.begun == ["a"]


@pytest.mark.parametrize("second", ["acb", "ca", "aab", "abcabc", "cba", "a"])
def test_a_wrong_guess_is_harmless(second):
    ahead, weights = GatherAhead(enabled=True), Weights("a", "b", "c")
    a_pass(ahead, weights, "abc")
    for number, order in enumerate((second, "abc", second, second), 1):
        weights.values.update(a=number, b=10.0 + number, c=20.0 + number)
        assert a_pass(ahead, weights, order) == [weights.values[key] for key in order]


def test_what_was_begun_before_the_weights_changed_is_not_used():
    ahead, weights = GatherAhead(enabled=True), Weights("a", "b")
    a_pass(ahead, weights, "ab")
    a_pass(ahead, weights, "a")  # has begun b
    assert weights.begun == ["a", "b"]
    weights.values["b"] = 7.0
    assert weights.take(ahead, "b") == 7.0  # without a new pass
    a_pass(ahead, weights, "a")
    ahead.begin_pass()
    weights.begun.clear()
    weights.take(ahead, "b")
    assert weights.begun == ["b"]  # dropped by the new pass


class Noted(collectives.Pending):
    waited = []

    def wait(self):
        self.waited.append(self)
        return super().wait()


@pytest.mark.parametrize(("enabled", "depth"), [(True, 2), (True, 1), (False, 2)])
def test_the_queue_keeps_only_so_many_in_flight(enabled, depth):
    queue = ReductionQueue(enabled=enabled, depth=depth)
    Noted.waited.clear()
    made = [Noted(torch.tensor(float(number))) for number in range(5)]
    for number, pending in enumerate(made):
        assert queue.add(pending) is pending
        assert Noted.waited == made[: max(0, number + 1 - (depth if enabled else 0))]


def test_a_slot_sums_and_empties():
    slot = GradientSlot()
    assert slot.take() is None
    slot.add(lambda: torch.tensor(1.0))
    slot.add(lambda: torch.tensor(2.0))
    assert slot.take() == 3
    assert slot.take() is None
    slot.add(lambda: torch.tensor(1.0))
    slot.clear()
    assert slot.take() is None


def test_a_placeholder_holds_no_memory():
    like = torch.empty(1000, 1000)
    assert placeholder(like).shape == like.shape
    assert placeholder(like).untyped_storage().nbytes() == 4


def test_the_waiting_node_hands_over_what_the_slot_was_promised():
    slot = GradientSlot()
    leaf = torch.zeros(3, requires_grad=True)
    wait_gradient(leaf, slot).sum().backward()  # nothing was promised: the gradient itself
    assert leaf.grad.tolist() == [1, 1, 1]
    leaf.grad = None
    slot.add(lambda: torch.full((3,), 5.0))
    wait_gradient(leaf, slot).sum().backward()
    assert leaf.grad.tolist() == [5, 5, 5]


def gradients(model, grid):
    model.train()
    batch = {key: value[: 4 // grid.samples_size] for key, value in tiny_batch(4, 7).items()}
    for _ in range(3):  # the order of gathers is known from the second pass on
        model.zero_grad()
        model(**batch).loss.backward()
    sync_gradients(model)
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


def switches_change_no_bit():
    for grid in (Grid(z=2, x=2), Grid(z=2, y=2), Grid(y=2, x=2), Grid(z=4)):
        results = []
        for names in ((), ("all_gather",), ("reduce_scatter",), ("all_reduce",), tuple(vars(Overlap()))):
            switches = Overlap(**{name: name in names for name in vars(Overlap())})
            model, _ = parallelize(
                tiny_model("qwen2", dtype=torch.float32), grid, config=AxonnConfig(grid=grid, overlap=switches)
            )
            assert model.axonn.gather_ahead.enabled == (switches.all_gather and grid.z > 1)
            results.append(gradients(model, grid))
        for other in results[1:]:
            for name, gradient in results[0].items():
                assert torch.equal(other[name], gradient), (grid, name)


def test_switches_change_no_bit():
    run_ranks(switches_change_no_bit, 4)


def events_of_backward(grid, switches):
    """What one block's backward does, in order: launches and waits of reductions, and weight gradients."""
    model, _ = parallelize(tiny_model("llama"), grid, config=AxonnConfig(grid=grid, overlap=switches))
    model.train()
    loss = model(**tiny_batch(4 // grid.samples_size, 8)).loss
    events = []
    replaced = {
        (overlap, "start_reduce_scatter"): None,
        (matmul3d, "weight_gradient"): None,
        (matmul3d, "input_gradient"): None,
    }

    def noting(name, original):
        def call(*args, **kwargs):
            events.append(name)
            result = original(*args, **kwargs)
            if name == "launch":
                wait = result.wait
                result.wait = lambda: (events.append("wait"), wait())[1]
            return result

        return call

    names = {"start_reduce_scatter": "launch", "weight_gradient": "dW", "input_gradient": "dI"}
    try:
        for owner, attribute in replaced:
            replaced[owner, attribute] = getattr(owner, attribute)
            setattr(owner, attribute, noting(names[attribute], getattr(owner, attribute)))
        loss.backward()
    finally:
        for (owner, attribute), original in replaced.items():
            setattr(owner, attribute, original)
    return events


def check_order():
    """OAR: a reduction of dI is launched, then the weight gradients are computed, then it is waited for.

    x = 2: the entrance of a block is gathered over x. y = 2: the input of its row layer is gathered over y.
    """
    layer = {
        Grid(x=2): ["dI", "dW", "dI", "launch", "dW", "dW", "wait"],  # MLP: down, then gate and up
        Grid(y=2): ["dI", "launch", "dW", "wait", "dI", "dW", "dW"],
    }
    for grid, mlp in layer.items():
        events = events_of_backward(grid, Overlap())
        assert events[: len(mlp)] == mlp, (grid, events)
        assert events.count("launch") == events.count("wait") == 4  # two layers of two blocks
        events = events_of_backward(grid, Overlap(all_reduce=False))
        # Without the overlap it is waited for at once (and, being done, once more where the result is taken).
        assert all(events[place + 1] == "wait" for place, event in enumerate(events) if event == "launch")


def test_all_reductions_hide_behind_weight_gradients():
    run_ranks(check_order, 2)


def reductions_in_flight():
    """ORS: a reduce-scatter of dW is not waited for when it is launched, but by the third one or at the very end."""
    grid = Grid(z=2)
    for switches, most in ((Overlap(), 2), (Overlap(reduce_scatter=False), 0)):
        model, _ = parallelize(tiny_model("llama"), grid, config=AxonnConfig(grid=grid, overlap=switches))
        queue = model.axonn.reductions
        depths = []
        add = queue.add
        queue.add = lambda pending, add=add, queue=queue, depths=depths: (
            add(pending),
            depths.append(len(queue._in_flight)),
        )[0]
        model.train()(**tiny_batch(2, 7)).loss.backward()
        assert max(depths) == most and len(depths) == 2 * 4 + 2  # q k v, o, gate up, down; head and embedding
    assert dist.get_world_size() == 2


def test_reductions_of_weight_gradients_stay_in_flight():
    run_ranks(reductions_in_flight, 2)
