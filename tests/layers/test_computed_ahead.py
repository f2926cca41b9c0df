"""Shared experts are computed while tokens travel to the others, once, with hooks and adapters."""

from __future__ import annotations

import contextlib
import functools
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_axonn import Grid, parallelize
from hf_axonn.compat.later import Later
from hf_axonn.config import AxonnConfig, Overlap
from hf_axonn.distributed.collectives import observe, watch_waits
from hf_axonn.layers.base import patch_forward
from hf_axonn.layers.computed_ahead import Beside, ComputedAhead
from tests.helpers.adapting import adapt
from tests.helpers.equality import Case, exact, rows_of
from tests.helpers.float64 import checkpointed
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks
from tests.layers.test_moe import EXPERTS, ROUTED, Planned, errors, moe, moved
from tests.layers.test_moe import KINDS as MIXTURES
from tests.layers.test_moving_experts import case


class Mixture(nn.Module):
    """Calls an Identity as experts, then two Linears, one of them with what `second` makes of its input."""

    def __init__(self, second=lambda hidden: hidden):
        super().__init__()
        self.experts, self.first, self.then = nn.Identity(), nn.Linear(3, 3), nn.Linear(3, 3)
        self.second = second

    def forward(self, hidden_states):
        hidden = hidden_states
        flat = hidden.view(-1, 3)
        routed = self.experts(flat).view(hidden.shape)
        assert self.first.weight.shape == (3, 3)
        return routed + self.first(hidden) + self.then(self.second(flat)).view(hidden.shape)


def ahead(mixture) -> list[str]:
    """Let both Linears be computed when the experts are called; returns what is then called, in order."""
    computed = ComputedAhead(mixture, {"first": Beside.OF_MIXTURE, "then": Beside.OF_EXPERTS})
    seen: list[str] = []

    def experts(original, hidden):
        seen.append("experts")
        computed.compute(hidden)
        seen.append("experts are done")
        return original(hidden)

    patch_forward(mixture.experts, experts)
    for name in ("first", "then"):
        module = mixture.get_submodule(name)
        module.register_forward_pre_hook(lambda *_, name=name: seen.append(name))
    return seen


def test_modules_run_once_while_experts_do():
    mixture, hidden = Mixture(), torch.randn(2, 5, 3)
    expected = mixture(hidden)
    seen = ahead(mixture)
    assert torch.equal(mixture(hidden), expected) and torch.equal(mixture(hidden_states=hidden), expected)
    assert seen == 2 * ["experts", "first", "then", "experts are done"]
    assert not any(isinstance(value, nn.Module) for value in vars(mixture).values())


class Viewing(nn.Module):
    """Calls a Linear after an Identity as experts, with `view` of what the experts got."""

    def __init__(self, view=lambda flat, hidden: flat.view(hidden.shape)):
        super().__init__()
        self.experts, self.shared = nn.Identity(), nn.Linear(3, 3)
        self.view = view

    def forward(self, hidden_states):
        flat = hidden_states.view(-1, 3)
        return self.experts(flat).view(hidden_states.shape) + self.shared(self.view(flat, hidden_states))


def viewing(mixture) -> list[str]:
    computed = ComputedAhead(mixture, {"shared": Beside.OF_MIXTURE})
    seen: list[str] = []
    patch_forward(mixture.experts, lambda original, hidden: (computed.compute(hidden), original(hidden))[1])
    mixture.shared.register_forward_pre_hook(lambda *_: seen.append("shared"))
    return seen


@pytest.mark.parametrize("around", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("made", [lambda hidden: hidden, lambda hidden: hidden.view(5, 2, 3), torch.Tensor.exp])
def test_a_view_of_the_input_is_the_input(around, made):
    mixture, hidden = Viewing(), torch.randn(2, 5, 3, requires_grad=True)
    with around():
        expected = mixture(made(hidden))
    seen = viewing(mixture)
    with around():
        output = mixture(made(hidden))
    assert torch.equal(output, expected) and seen == ["shared"]
    if output.requires_grad:
        gradients = [torch.autograd.grad(each.square().sum(), hidden) for each in (output, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "view",
    [
        lambda flat, hidden: flat.detach().view(hidden.shape),
        lambda flat, hidden: flat.detach().requires_grad_().view(hidden.shape),
        lambda flat, hidden: flat.clone().view(hidden.shape),
        lambda flat, hidden: flat.view(hidden.shape).flip(0),
        lambda flat, hidden: flat.view(3, 10).t().reshape(hidden.shape),
        lambda flat, hidden: flat.view(hidden.shape).expand(1, 2, 5, 3),
    ],
)
def test_what_is_no_view_with_all_gradients_is_computed_as_ever(view):
    mixture, hidden = Viewing(view), torch.randn(2, 5, 3, requires_grad=True)
    expected = mixture(hidden)
    seen = viewing(mixture)
    output = mixture(hidden)
    assert torch.equal(output, expected) and seen == ["shared", "shared"]
    gradients = [torch.autograd.grad(each.square().sum(), hidden) for each in (output, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("change", [torch.Tensor.add, torch.Tensor.add_])
def test_another_input_is_computed_as_ever(change):
    mixture, hidden = Mixture(lambda hidden: change(hidden, 1)), torch.randn(2, 5, 3)
    expected = mixture(hidden.clone())
    seen = ahead(mixture)
    assert torch.equal(mixture(hidden), expected)
    assert seen == ["experts", "first", "then", "experts are done", "then"]


def test_after_an_error_nothing_is_left():
    mixture, hidden = Mixture(), torch.randn(2, 5, 3)
    seen = ahead(mixture)
    hook = mixture.then.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mixture(hidden)
    hook.remove()
    seen.clear()
    mixture(hidden)
    assert seen == ["experts", "first", "then", "experts are done"] and "first" not in vars(mixture)


class Waiting(nn.Module):
    """Calls a Linear before an Identity as experts, `use` in between, and adds both."""

    def __init__(self, use=lambda hidden, shared: shared, returns=torch.Tensor.add):
        super().__init__()
        self.experts, self.shared = nn.Identity(), nn.Linear(3, 3)
        self.use, self.returns = use, returns

    def forward(self, hidden_states):
        shared = self.use(hidden_states, self.shared(hidden_states))
        return self.returns(self.experts(hidden_states), shared)


def waiting(mixture, *, around=torch.no_grad, called=True) -> list[str]:
    """Let the Linear be computed when the experts are called, in a context; returns what is then called, in order."""
    computed = ComputedAhead(mixture, {"shared": Beside.BEFORE})
    seen: list[str] = []

    def experts(original, hidden):
        seen.append("experts")
        with around():
            if called:
                computed.compute(hidden)
        seen.append("experts are done")
        return original(hidden)

    patch_forward(mixture.experts, experts)
    mixture.shared.register_forward_pre_hook(lambda *_: seen.append("shared"))
    mixture.shared.register_forward_hook(lambda *call: seen.append(type(call[-1]).__name__))
    return seen


SHARED = ["shared", "Tensor"]
NARROW = functools.partial(torch.autocast, "cpu", torch.bfloat16)


@pytest.mark.parametrize("around", [contextlib.nullcontext, torch.no_grad, NARROW])
def test_a_call_before_the_experts_waits_for_them(around):
    """It runs once, with its hooks, and as it was called: with gradients, and without autocast."""
    mixture, hidden = Waiting(), torch.randn(2, 5, 3, requires_grad=True)
    expected = mixture(hidden)
    gradients = torch.autograd.grad(expected.square().sum(), [hidden, mixture.shared.weight])
    seen = waiting(mixture, around=around)
    output = mixture(hidden)
    assert type(output) is torch.Tensor and torch.equal(output, expected)
    for one, other in zip(
        torch.autograd.grad(output.square().sum(), [hidden, mixture.shared.weight]), gradients, strict=True
    ):
        assert torch.equal(one, other)
    assert seen == ["experts", *SHARED, "experts are done"] and "shared" not in vars(mixture)


class Chained(nn.Module):
    """Calls a Linear, and of its result another, before an Identity as experts, `use` in between."""

    def __init__(self, use=lambda first: None):
        super().__init__()
        self.experts, self.shared, self.then = nn.Identity(), nn.Linear(3, 3), nn.Linear(3, 3)
        self.use = use

    def forward(self, hidden_states):
        first = self.shared(hidden_states)
        second = self.then(first)
        self.use(first)
        return self.experts(hidden_states) + second


def chained(mixture) -> list[str]:
    computed = ComputedAhead(mixture, dict.fromkeys(("shared", "then"), Beside.BEFORE))
    seen: list[str] = []

    def experts(original, hidden):
        seen.append("experts")
        computed.compute(hidden)
        return original(hidden)

    patch_forward(mixture.experts, experts)
    for name in ("shared", "then"):
        module = mixture.get_submodule(name)
        module.register_forward_hook(lambda _, args, __, name=name: seen.append(f"{name} {type(args[0]).__name__}"))
    return seen


@pytest.mark.parametrize(
    ("use", "order"),
    [
        (lambda first: None, ["experts", "shared Tensor", "then Tensor"]),
        (lambda first: first.sum(), ["shared Tensor", "experts", "then Tensor"]),
    ],
)
def test_a_call_with_a_result_that_waits_waits_too(use, order):
    mixture, hidden = Chained(use), torch.randn(2, 5, 3, requires_grad=True)
    expected = mixture(hidden)
    gradients = torch.autograd.grad(expected.square().sum(), [hidden, *mixture.parameters()])
    seen = chained(mixture)
    output = mixture(hidden)
    assert torch.equal(output, expected) and seen == order
    found = torch.autograd.grad(output.square().sum(), [hidden, *mixture.parameters()])
    assert all(map(torch.equal, found, gradients))


def test_where_the_order_is_kept_nothing_waits():
    mixture, hidden = Chained(), torch.randn(2, 5, 3)
    expected = mixture(hidden)
    computed = ComputedAhead(mixture, dict.fromkeys(("shared", "then"), Beside.BEFORE))
    patch_forward(mixture.experts, lambda original, hidden: (computed.compute(hidden), original(hidden))[1])
    computed.keep_order()
    seen: list[type] = []
    mixture.then.register_forward_pre_hook(lambda _, args: seen.append(type(args[0])))
    assert torch.equal(mixture(hidden), expected) and seen == [torch.Tensor]


def test_a_result_that_was_changed_before_the_next_call_ran_is_refused():
    mixture = Chained(lambda first: first.add_(1))
    chained(mixture)
    with pytest.raises(RuntimeError, match="input of a Linear was changed in place.* Use experts: gather"):
        mixture(torch.randn(2, 5, 3))


def test_under_autocast_it_runs_under_autocast():
    mixture, hidden = Waiting(), torch.randn(2, 5, 3)
    with NARROW():
        expected = mixture(hidden)
    waiting(mixture, around=functools.partial(torch.autocast, "cpu", enabled=False))
    with NARROW():
        assert torch.equal(mixture(hidden), expected)


def test_it_waits_on_every_device_and_without_gradients():
    for device in ("cpu", "meta"):
        mixture, hidden = Waiting().to(device), torch.randn(2, 5, 3, device=device)
        waiting(mixture)
        with torch.inference_mode():
            assert mixture(hidden).device.type == device
        assert mixture(hidden).requires_grad


@pytest.mark.parametrize(
    "use",
    [
        lambda hidden, shared: shared if shared.shape == hidden.shape else None,
        lambda hidden, shared: torch.sigmoid(hidden) * shared,
        lambda hidden, shared: torch.cat([shared[..., :1], shared[..., 1:]], dim=-1),
        lambda hidden, shared: torch.add(input=hidden, other=shared),
        lambda hidden, shared: shared.add_(1),
    ],
)
def test_what_is_used_before_the_experts_is_computed_there(use):
    mixture, hidden = Waiting(use), torch.randn(2, 5, 3)
    expected = mixture(hidden)
    seen = waiting(mixture)
    assert torch.equal(mixture(hidden), expected) and seen == [*SHARED, "experts", "experts are done"]


@pytest.mark.parametrize("returns", [lambda routed, shared: shared, lambda routed, shared: {"out": (routed, shared)}])
def test_a_mixture_returns_what_is_computed(returns):
    """Even where the experts computed nothing meanwhile."""
    mixture, hidden = Waiting(returns=returns), torch.randn(2, 5, 3)
    expected = mixture(hidden)
    seen = waiting(mixture, called=False)
    found = mixture(hidden)
    output, right = (each["out"][1] if isinstance(each, dict) else each for each in (found, expected))
    assert type(output) is torch.Tensor and torch.equal(output, right)
    assert seen == ["experts", "experts are done", *SHARED]


def test_an_input_that_was_changed_is_refused():
    mixture = Waiting(lambda hidden, shared: (hidden.add_(1), shared)[1])
    waiting(mixture)
    with pytest.raises(RuntimeError, match="input of a Linear was changed in place.* Use experts: gather"):
        mixture(torch.randn(2, 5, 3))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        return hidden * 2


def doubled(*tensors):
    return Doubled.apply(tensors[-1])


@pytest.mark.parametrize("where", [dict(use=doubled), dict(returns=doubled)], ids=lambda where: next(iter(where)))
def test_a_use_past_torch_is_refused(where):
    """An autograd.Function would lose the gradients, also of what has been computed."""
    mixture = Waiting(**where)
    waiting(mixture)
    with pytest.raises(RuntimeError, match="past torch's functions.* Use experts: gather"):
        mixture(torch.randn(2, 5, 3))


def test_what_was_computed_later_is_freed_with_it():
    hidden = torch.randn(2, 5, 3)
    later = Later(nn.Linear(3, 3), hidden)
    storage = StorageWeakRef(later.output().untyped_storage())
    gc.disable()
    assert not storage.expired()
    del later
    assert storage.expired()
    gc.enable()


KINDS = {
    "qwen2_moe": dict(
        num_experts=4, decoder_sparse_step=1, mlp_only_layers=[], shared_expert_intermediate_size=20, **ROUTED
    ),
    "ernie4_5_moe": dict(moe_num_experts=4, moe_k=2, moe_num_shared_experts=2, moe_layer_start_index=0, **ROUTED),
    "hunyuan_v1_moe": dict(num_experts=4, moe_topk=2, intermediate_size=21, head_dim=4),
    "granitemoeshared": MIXTURES["granitemoeshared"],
    "aria_text": dict(moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1, intermediate_size=20),
    "gemma4_text": dict(
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=20,
        intermediate_size=40,
        # By default the embeddings of every layer are 262144 rows of 256 features, half a GiB. With 4 features a few
        # gradients of q are 8e-12, and AdamW, which divides by them, makes 1e-9 of their rounding; with 32, 2e-11.
        vocab_size_per_layer_input=131,
        hidden_size_per_layer_input=32,
    ),
}
SHARED_IN = {
    "qwen2_moe": "mlp.shared_expert",
    "deepseek_v3": "mlp.shared_experts",
    "granitemoeshared": "shared_mlp",
    "aria_text": "mlp.shared_experts",
    "gemma4_text": "mlp",
}


def shared(kind, **changes):
    """A model with shared experts."""
    return tiny_model(kind, **EXPERTS | KINDS[kind] | changes) if kind in KINDS else moe(kind, **changes)


def launches(kind, overlap, *, reentrant=None, compiled=False):
    """The events of forward and of backward of one layer with experts, by its shared ones."""
    grid = Grid(z=2)
    model = shared(kind).train() if kind == "deepseek_v3" else shared(kind, num_hidden_layers=1).train()
    if reentrant is not None:
        checkpointed(model, reentrant=reentrant)
    parallelize(model, config=AxonnConfig(grid=grid, experts="move", overlap=Overlap(all_to_all=overlap)))
    seen = []

    def note(module, args, output):
        seen.append("shared")
        if output.requires_grad:
            output.register_hook(lambda _: seen.append("shared"))

    @contextlib.contextmanager
    def wait(kind, _):
        if kind == "exchange":
            seen.append("wait")
        yield

    found = model.model.layers[-1].get_submodule(SHARED_IN[kind])
    found.get_submodule("activation" if kind == "granitemoeshared" else "act_fn").register_forward_hook(note)
    if compiled:
        model.compile(backend="aot_eager")
    own = rows_of(tiny_batch(8, 7), grid, dist.get_rank())
    with exact(), observe(lambda kind, *_: seen.append("start") if kind == "exchange" else None), watch_waits(wait):
        loss = model(**own).loss
        forward = seen.copy()
        seen.clear()
        loss.backward()
    return forward, seen


def _in_order():
    there = ["start", "start", "shared", "wait", "wait"]
    one_by_one = 2 * ["start", "wait"] + ["shared"]
    for kind in SHARED_IN:
        assert launches(kind, True) == (there + ["start", "wait"], ["start", "wait"] + there), kind
        assert launches(kind, False) == (one_by_one + ["start", "wait"], ["start", "wait"] + one_by_one), kind
        forward, backward = launches(kind, True, reentrant=False)
        # Recomputed as far as the experts' results, which travel back no more unless a product of them is saved.
        saves = kind in ("qwen2_moe", "gemma4_text")
        again = there + 2 * ["start", "wait"] if saves else ["start", "wait"] + there
        assert forward == there + ["start", "wait"] and backward == again + there, kind


def test_shared_experts_run_between_start_and_wait_and_in_backward_too():
    run_ranks(_in_order, 2)


def _gone():
    """A step that recomputes its layers leaves no tensor for the garbage collector."""
    grid = Grid(z=2)
    model = moe("deepseek_v3").train()
    checkpointed(model, reentrant=False)
    parallelize(model, config=AxonnConfig(grid=grid, experts="move"))
    seen = []
    shared = model.model.layers[1].mlp.shared_experts
    shared.register_forward_hook(lambda *call: seen.append(StorageWeakRef(call[-1].untyped_storage())))
    own = rows_of(tiny_batch(8, 7), grid, dist.get_rank())
    gc.disable()
    with exact():
        model(**own).loss.backward()
    assert len(seen) == 2 and all(storage.expired() for storage in seen)


def test_results_are_freed_at_once():
    run_ranks(_gone, 2)


def adapted():
    """LoRA on all Linears, those of the shared experts included."""
    return adapt(moe("deepseek_v3"))


FOUR = [Grid(z=4), Grid(z=2, x=2), Grid(y=2, x=2), Grid(z=2, context=2, x=2)]


@pytest.mark.slow
@pytest.mark.parametrize("grid", FOUR, ids=str)
def test_ways_of_training_equal_one_process(grid):
    again = functools.partial(checkpointed, reentrant=True)
    ways = [case("deepseek_v3", "three steps", steps=3), case("deepseek_v3", "reentrant", before=again)]
    lora = Case("LoRA", adapted, config=moved)
    linears = [] if grid.context > 1 else [Planned(ways, [grid], by_blocks=False)]
    assert not errors(Planned([*ways, lora], [grid]), *linears)


def of_kind(kind, name="", **options):
    return Case(f"{kind} {name}", functools.partial(shared, kind, num_hidden_layers=1), config=moved, **options)


def test_shared_experts_before_the_others_equal_one_process():
    """And those outside of the mixture; the larger part is below."""
    again = functools.partial(checkpointed, reentrant=False)
    cases = [of_kind("qwen2_moe", steps=2), of_kind("granitemoeshared", before=again)]
    assert not errors(Planned(cases, [Grid(x=2)]))


@pytest.mark.slow
@pytest.mark.parametrize("grid", FOUR, ids=str)
def test_other_orders_of_shared_experts_equal_one_process(grid):
    recomputed = functools.partial(checkpointed, reentrant=False)
    cases = [of_kind(kind, "recomputed", before=recomputed) for kind in KINDS]
    cases += [of_kind(kind, steps=3) for kind in KINDS]
    lora = [Case(f"{kind} LoRA", lambda kind=kind: adapt(shared(kind)), config=moved) for kind in SHARED_IN]
    linears = [] if grid.context > 1 else [Planned(cases[: len(KINDS)], [grid], by_blocks=False)]
    assert not errors(Planned([*cases, *lora], [grid]), *linears)
