"""Communication under way: what is begun ahead, in which order things happen, and that none of it changes a number."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from hf_axonn import parallelize
from hf_axonn.compat.peft import without_peft
from hf_axonn.config import AxonnConfig, Overlap
from hf_axonn.distributed import collectives
from hf_axonn.engine import gathering, matmul3d, overlap
from hf_axonn.engine import gradient_sync as gradients
from hf_axonn.engine.gradient_sync import sync_gradients, syncing
from hf_axonn.engine.overlap import GatherAhead, GradientSchedule, ReductionQueue
from hf_axonn.topology.grid import Grid
from tests.helpers.equality import give_gradients, local, rows_of
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks


pytestmark = pytest.mark.usefixtures("device")


class Weights:
    """Weights with a value and a version, which is what was gathered; each launch is noted, as the keys it gathers."""

    def __init__(self, keys, dtypes=""):
        self.values = dict.fromkeys(keys, 0.0)
        self.launched = []
        self.gatherings = {key: Weight(self, key, dtypes[i : i + 1]) for i, key in enumerate(keys)}

    def start(self, gatherings):
        self.launched.append("".join(gathering.key for gathering in gatherings))
        return [collectives.Pending(torch.tensor(self.values[gathering.key])) for gathering in gatherings]

    def take(self, ahead, key):
        return ahead.take(key, self.gatherings[key], self.gatherings[key].version).item()


class Weight:
    def __init__(self, weights, key, dtype):
        self.weights, self.key, self.travels = weights, key, dtype

    @property
    def version(self):
        return int(self.weights.values[self.key])


def gathering_ahead(keys, size=1, *, dtypes="", **options):
    """Gathers of weights that are as large as their letter is far on in the alphabet."""
    weights = Weights(keys, dtypes)
    ahead = GatherAhead(weights.start, **{"enabled": True, **options})
    ahead.set_bundle_size(size, lambda gathering: ord(gathering.key) - ord("a") + 1)
    return ahead, weights


def a_pass(ahead, weights, keys):
    """The launches of a pass, by the key at which they happened."""
    ahead.begin_pass()
    found = []
    for key in keys:
        weights.launched.clear()
        assert weights.take(ahead, key) == weights.values[key]
        found.append(" ".join(weights.launched))
    return found


def test_gathers_begin_one_ahead_once_the_order_is_known():
    ahead, weights = gathering_ahead("abc")
    assert a_pass(ahead, weights, "abc") == ["a", "b", "c"]
    assert a_pass(ahead, weights, "abc") == a_pass(ahead, weights, "abc") == ["a b", "c", ""]


def test_bundles_begin_when_the_one_before_is_used():
    ahead, weights = gathering_ahead("abcdefghij", size=5)
    a_pass(ahead, weights, "abcdefghij")
    assert a_pass(ahead, weights, "abcdefghij") == ["a bc", "de", "", "f", "", "g", "h", "i", "j", ""]
    ahead, weights = gathering_ahead("abcdef", size=100)
    a_pass(ahead, weights, "abcdef")
    assert a_pass(ahead, weights, "abcdef") == ["a bcdef", "", "", "", "", ""]


def test_a_bundle_has_one_dtype_no_key_twice_and_nothing_needless():
    ahead, weights = gathering_ahead("abcd", size=100, dtypes="xxyy")
    a_pass(ahead, weights, "abcd")
    assert a_pass(ahead, weights, "abcd") == ["a b", "cd", "", ""]
    ahead, weights = gathering_ahead("abc", size=100)
    a_pass(ahead, weights, "abccba")  # a layer that runs again and then backward
    assert a_pass(ahead, weights, "abccba") == ["a bc", "", "cba", "", "", ""]
    ahead, weights = gathering_ahead("abcd", size=4, needless="c".__contains__)
    a_pass(ahead, weights, "abcd")
    assert a_pass(ahead, weights, "abd") == ["a bd", "", ""]


def test_the_first_weights_of_a_pass_count_in_their_bundle():
    """So a bundle ends where a layer does, in backward, too; not weights as large as one, such as an embedding's."""
    ahead, weights = gathering_ahead("abcdef", size=6)
    a_pass(ahead, weights, "abcdef")
    assert a_pass(ahead, weights, "abcdef") == ["a bc", "de", "", "f", "", ""]
    ahead, weights = gathering_ahead("zabc", size=3)
    a_pass(ahead, weights, "zabc")
    assert a_pass(ahead, weights, "zabc") == ["z ab", "c", "", ""]


def test_switched_off_nothing_begins_ahead():
    ahead, weights = gathering_ahead("ab", enabled=False)
    for _ in range(3):
        assert a_pass(ahead, weights, "ab") == ["a", "b"]


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize("second", ["acb", "ca", "aab", "abcabc", "cba", "a"])
def test_a_wrong_guess_is_harmless(second, size):
    ahead, weights = gathering_ahead("abc", size)
    a_pass(ahead, weights, "abc")
    for number, order in enumerate((second, "abc", second, second), 1):
        weights.values.update(a=number, b=10.0 + number, c=20.0 + number)
        a_pass(ahead, weights, order)


def test_what_was_begun_before_the_weights_changed_is_not_used():
    ahead, weights = gathering_ahead("ab")
    a_pass(ahead, weights, "ab")
    assert a_pass(ahead, weights, "a") == ["a b"]
    weights.values["b"] = 7.0
    assert weights.take(ahead, "b") == 7.0  # without a new pass
    a_pass(ahead, weights, "ab")
    assert a_pass(ahead, weights, "a") == ["a b"]
    assert a_pass(ahead, weights, "b") == ["b"]  # dropped by the new pass


class Noted(collectives.Pending):
    waited = []

    def wait(self):
        self.waited.append(self)
        return super().wait()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_queue_keeps_only_two_in_flight(enabled):
    queue = ReductionQueue(enabled=enabled)
    Noted.waited.clear()
    made = [Noted(torch.tensor(float(number))) for number in range(5)]
    for number, pending in enumerate(made):
        assert queue.add(pending) is pending
        assert Noted.waited == made[: max(0, number + 1 - (2 if enabled else 0))]
    queue.make_room()  # for the gradient that is computed next
    assert Noted.waited == made[: 5 - (1 if enabled else 0)]


class Node:
    """A weight; notes the step of the pass at which its node was made."""

    def __init__(self):
        self.made_at = None

    def make_node(self):
        self.made_at = Node.step if self.made_at is None else self.made_at


def passes(order, groups, sequence):
    """A forward pass over groups of weights; the step at which each node was made, in the order of `groups`."""
    Node.step = 0
    weights = [weight for group in groups.values() for weight in group]
    for weight in weights:
        weight.made_at = None
    order.begin_pass(weights)
    for step, name in enumerate(sequence, 1):
        Node.step = step
        order.enter(groups[name])
    return [weight.made_at for weight in weights]


def test_nodes_are_made_so_many_groups_ahead_once_the_order_is_known():
    groups = {"a": [Node()], "b": [Node(), Node()], "c": [Node()], "d": [Node()], "e": [Node()]}
    order = GradientSchedule(distance=2)
    assert passes(order, groups, "abcde") == [0] * 6
    assert passes(order, groups, "abcde") == [0, 0, 0, 1, 2, 3]
    assert passes(order, groups, "abced") == [0, 0, 0, 1, 2, 3]  # a wrong guess: d and e were made already
    assert passes(order, groups, "bacde") == [0, 0, 0, 1, 1, 1]  # lost at once: all that are missing
    order = GradientSchedule(distance=1)
    passes(order, groups, "abcd")
    assert passes(order, groups, "abcd") == [0, 1, 1, 2, 3, 0]  # e has no place in the order
    passes(order, groups, "cabc")
    assert passes(order, groups, "cabc") == [1, 2, 2, 0, 0, 0]  # c is used twice: before the first time
    assert passes(GradientSchedule(distance=0), groups, "abcde") == [None] * 6


def frozen(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1.self_attn" not in name and "layers.0.mlp.up" not in name)
    return model


def adapted(model):
    return get_peft_model(model, LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False))


def checkpointed(model, **options):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model


def selected():
    """Keep the results of matrix products, as TRL's selective checkpoints do: torch then looks at every operator."""
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])


MODES = {
    "plain": lambda model: model,
    "recomputed": functools.partial(checkpointed, use_reentrant=False),
    "recomputed in part": functools.partial(checkpointed, use_reentrant=False, context_fn=selected),
    "recomputed reentrantly": functools.partial(checkpointed, use_reentrant=True),
    "frozen weights": frozen,
    "LoRA": adapted,
}
OF_DENSE = ("all_gather", "reduce_scatter", "all_reduce")
SWITCHES = [Overlap(**dict(zip(OF_DENSE, on, strict=True))) for on in itertools.product([False, True], repeat=3)]


def made(mode, grid, *, switches=SWITCHES[-1], keep="none", kind="llama"):
    """A model in a mode, on a grid, in training."""
    model = MODES[mode](tiny_model(kind, dtype=torch.float32))
    parallelize(model, grid, config=AxonnConfig(grid=grid, overlap=switches, keep_gathered=keep))
    return model.train()


def step(model, grid, *, number=0, micro_batches=2, ahead=True):
    """The micro-batches of one optimizer step; returns their losses. With `ahead`, averages begin during backward."""
    losses = []
    for micro in range(micro_batches):
        batch = rows_of(tiny_batch(4, 7, seed=10 * number + micro), grid, dist.get_rank())
        loss = model(**batch).loss
        losses.append(loss.detach())
        with syncing(model) if ahead and micro + 1 == micro_batches else contextlib.nullcontext():
            loss.backward()
    if not ahead:
        sync_gradients(model)
    return losses


def bits(model, grid, *, steps=2, **options):
    """Everything that a few steps leave, as this rank holds it. What begins ahead is known after the first pass."""
    trained = {name: its for name, its in model.named_parameters() if its.requires_grad}
    shards = [local(its) for its in trained.values()]  # DTensor would plan each operation of AdamW
    optimizer = torch.optim.AdamW(shards, lr=1e-2)
    found = {}
    for number in range(steps):
        found |= {
            f"loss {number}.{micro}": loss for micro, loss in enumerate(step(model, grid, number=number, **options))
        }
        found |= {f"gradient {number} {name}": its.grad.to_local().clone() for name, its in trained.items()}
        give_gradients(trained.values(), shards)
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
    return found | {f"parameter {name}": its.to_local().detach().clone() for name, its in trained.items()}


def differences(truth, ours):
    assert truth.keys() == ours.keys()
    return [name for name, value in truth.items() if not torch.equal(value, ours[name])]


KEPT = ("all", "recomputed", 1)


def switches_change_no_bit(grids, modes, combinations):
    """Combinations of the switches, averaging during backward or after it, and weights kept as each mode says."""
    wrong = []
    gradients.BUCKET_BYTES = 20_000  # several buckets
    for grid, (mode, keeps) in itertools.product(grids, modes.items()):
        truth = bits(made(mode, grid, switches=SWITCHES[0]), grid, ahead=False)
        assert len(truth) > 6 and all(value.isfinite().all() for value in truth.values())
        for switches in combinations:
            for name in differences(truth, bits(made(mode, grid, switches=switches), grid)):
                wrong.append(f"{mode} on {grid}, {switches}: {name}")
        for keep in keeps if grid.z > 1 else ():
            for name in differences(truth, bits(made(mode, grid, keep=keep), grid)):
                wrong.append(f"{mode} on {grid}, keep_gathered {keep}: {name}")
    return wrong


@pytest.mark.parametrize(
    ("grid", "modes"),
    [
        (Grid(z=2, x=2), {"plain": [1]}),
        (Grid(z=2), {"recomputed in part": ["recomputed"], "LoRA": ["all"]}),
        pytest.param(Grid(z=2, x=2), dict.fromkeys(MODES, KEPT), marks=pytest.mark.slow),
        pytest.param(Grid(data=2, z=2), dict.fromkeys(MODES, KEPT), marks=pytest.mark.slow),
    ],
    ids=["plain", "some modes", "z and x", "data and z"],
)
def test_switches_and_kept_weights_change_no_bit(grid, modes):
    for wrong in run_ranks(switches_change_no_bit, grid.size, [grid], modes, SWITCHES[-1:]):
        assert not wrong


@pytest.mark.slow
def test_every_switch_on_its_own_changes_no_bit():
    for grid in (Grid(z=2, y=2), Grid(z=2, y=2, x=2)):
        for wrong in run_ranks(switches_change_no_bit, grid.size, [grid], {"plain": KEPT}, SWITCHES[1:-1]):
            assert not wrong


@pytest.mark.slow
def test_switches_and_kept_weights_change_no_bit_on_every_axis():
    grids = [Grid(z=2, y=2, x=2), Grid(data=2, z=2, y=2), Grid(data=4, x=2)]
    for wrong in run_ranks(switches_change_no_bit, 8, grids, dict.fromkeys(MODES, KEPT), SWITCHES[-1:], timeout=900):
        assert not wrong


class Events:
    """What happens, in order: ("launch", kind, n) and ("wait", kind, n) of collective n of a kind, ("gemm", which).

    Kinds: gather (weights over z), scatter (weight gradients over z), input (gradients of inputs over x or y) and data
    (the average over data). Only the first wait for a collective counts.
    """

    PLACES = {
        (gathering, "start_all_gathers"): "gather",
        (matmul3d, "start_reduction"): "scatter",
        (overlap, "start_reduce_scatter"): "input",
        (gradients, "start_all_reduce"): "data",
    }

    def __init__(self, model):
        self.state = without_peft(model).axonn
        self.seen = []
        self.count = collections.Counter()

    def _noting(self, kind, original):
        def start(*args, **kwargs):
            if kind == "data" and kwargs.get("op") != "mean":
                return original(*args, **kwargs)
            event = (kind, self.count[kind])
            self.count[kind] += 1
            self.seen.append(("launch", *event))
            begun = original(*args, **kwargs)
            for pending in begun if isinstance(begun, list) else [begun]:
                watch(pending, event)
            return begun

        def watch(pending, event):
            wait, then = pending.wait, pending.then
            pending.wait = functools.partial(noted, event, wait)
            pending.then = lambda finish: watch(then(finish), event)
            return pending

        def noted(event, wait):
            if ("wait", *event) not in self.seen:
                self.seen.append(("wait", *event))
            return wait()

        return start

    @contextlib.contextmanager
    def recording(self):
        originals = {place: getattr(*place) for place in self.PLACES}
        matmul = self.state.matmul

        def noted(which, *args, **kwargs):
            self.seen.append(("gemm", which))
            return matmul(which, *args, **kwargs)

        try:
            for place, kind in self.PLACES.items():
                setattr(*place, self._noting(kind, originals[place]))
            self.state.matmul = noted
            yield self
        finally:
            for place, original in originals.items():
                setattr(*place, original)
            self.state.matmul = matmul

    def during(self, kind):
        """For each collective of a kind that was waited for: the GEMMs that ran while it was in flight."""
        spans = []
        for number in range(self.count[kind]):
            assert ("wait", kind, number) in self.seen, f"{kind} {number} was never waited for"
            begin, end = (self.seen.index((what, kind, number)) for what in ("launch", "wait"))
            spans.append([event[1] for event in self.seen[begin:end] if event[0] == "gemm"])
        return spans


def events(mode, grid, switches):
    """The events of the last micro-batch of a step, when the order of things has been learned."""
    model = made(mode, grid, switches=switches)
    step(model, grid, micro_batches=2)
    recorded = Events(model)
    with recorded.recording():
        step(model, grid, number=1, micro_batches=1)
    return recorded


def check_events(modes):
    gradients.BUCKET_BYTES = 8_000
    for mode, grids in modes.items():
        check_events_of(mode, grids)


def check_events_of(mode, grids):
    on = Overlap()
    for grid in grids:
        found = events(mode, grid, on)
        if grid.z > 1:
            gathers, scatters = found.during("gather"), found.during("scatter")
            # All but the first of forward and the first of backward are begun during the GEMMs before them; the
            # embedding's has no GEMM before it, and the head's is not gathered in backward.
            assert sum(map(bool, gathers)) >= len(gathers) - 3, (mode, found.seen)
            # A reduction runs during the two products of the group after it, but for the last group of the model and,
            # with reentrant checkpointing, the last of each layer.
            last = 3 if mode != "recomputed reentrantly" else 5
            assert sum(map(bool, scatters)) >= len(scatters) - last, (mode, found.seen)
            assert any({"dinput", "dweight"} <= set(gemms) for gemms in scatters)
            off = events(mode, grid, Overlap(all_gather=False))
            assert not any(off.during("gather")) and any(off.during("scatter"))
            off = events(mode, grid, Overlap(reduce_scatter=False))
            assert not any(off.during("scatter")) and any(off.during("gather"))
        elif grid.data > 1:
            averages = found.during("data")
            # All but those of the last group of the model and of the embedding.
            assert len(averages) > 6 and sum(map(bool, averages)) >= len(averages) - 5, (mode, found.seen)
            assert all({"dinput", "dweight"} <= set(gemms) for gemms in averages[:3])
            off = events(mode, grid, Overlap(reduce_scatter=False)).during("data")
            assert len(off) == len(averages) and not any(off)
        else:
            inputs = found.during("input")
            assert len(inputs) == 4 and all(gemms and set(gemms) == {"dweight"} for gemms in inputs), (
                mode,
                found.seen,
            )
            assert not any(events(mode, grid, Overlap(all_reduce=False)).during("input"))


AXES = [Grid(z=2), Grid(x=2), Grid(y=2), Grid(data=2)]


@pytest.mark.parametrize(
    "modes",
    [
        {"plain": AXES, "recomputed": AXES[:1]},
        pytest.param({"recomputed": AXES[1:], "recomputed reentrantly": AXES}, marks=pytest.mark.slow),
    ],
    ids=["some", "others"],
)
def test_collectives_are_in_flight_while_gemms_run(modes):
    run_ranks(check_events, 2, modes)
