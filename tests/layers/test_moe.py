"""Mixture of experts on every kind of grid equals one process: experts, router, auxiliary loss, checkpoints.

Experts are gathered over z but where a test says otherwise; test_moving_experts.py has those to which tokens travel.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM

from hf_axonn import Grid, from_pretrained, load_sharded, parallelize, save_sharded
from hf_axonn.architectures.plan import ShardingPlan, derive
from hf_axonn.checkpoint import lazy_tensors as unread
from hf_axonn.config import AxonnConfig, Overlap
from hf_axonn.distributed.collectives import observe
from hf_axonn.engine.state import parallel_state
from hf_axonn.engine.weight_layout import ExpertLayout, vocabulary_range
from hf_axonn.layers.moe import Experts, is_experts
from tests.helpers.devices import few_foreign_on_gpus, rank_device
from tests.helpers.equality import Case, compare, exact, fit, rows_of, too_large
from tests.helpers.float64 import checkpointed, largest_difference, relative_errors
from tests.helpers.models import DEEPSEEK, tiny_batch, tiny_model
from tests.helpers.ranks import fake_mesh, run_ranks


pytestmark = pytest.mark.usefixtures("device")


# Float64 has no grouped matmul; 21 features are divided by none of 2 and 4. Half of the loss is the auxiliary one.
EXPERTS = dict(experts_implementation="eager", num_experts_per_tok=2, moe_intermediate_size=21, initializer_range=0.2)
ROUTED = dict(output_router_logits=True, router_aux_loss_coef=0.5)
KINDS = {
    "mixtral": dict(num_local_experts=4, intermediate_size=21, **ROUTED),
    "qwen3_moe": dict(num_experts=4, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=False, **ROUTED),
    "olmoe": dict(num_experts=4, intermediate_size=21, num_key_value_heads=12, **ROUTED),
    "granitemoeshared": dict(
        num_local_experts=4, intermediate_size=21, shared_intermediate_size=20, num_key_value_heads=12, **ROUTED
    ),
    "gpt_oss": dict(num_local_experts=4, intermediate_size=21, attention="eager", sliding_window=5, **ROUTED),
    "deepseek_v3": dict(
        n_routed_experts=4,
        **DEEPSEEK,
    ),
    "llama4_text": dict(
        num_local_experts=4, intermediate_size=21, intermediate_size_mlp=40, interleave_moe_layer_step=1
    ),
}
CHOOSING = [kind for kind in KINDS if kind != "llama4_text"]  # whose experts get the tokens that chose them
TWO = [Grid(x=2), Grid(y=2), Grid(z=2), Grid(data=2)]
FOUR = [Grid(y=2, x=2), Grid(z=2, x=2)]
MORE = [Grid(z=4), Grid(z=2, y=2), Grid(data=2, z=2), Grid(z=2, context=2, x=2)]
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
NO_OVERLAP = Overlap(all_gather=False, reduce_scatter=False, all_reduce=False)


def moe(kind, **changes):
    model = tiny_model(kind, **(EXPERTS | KINDS[kind] | changes))
    assert any(map(is_experts, model.modules()))
    return model


def biased(model: torch.nn.Module) -> None:
    """Let routers that choose groups of experts first be corrected, so that they choose otherwise (DeepSeek-V3)."""
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            with torch.no_grad():
                bias.copy_(torch.linspace(0.3, -0.3, len(bias)))


def gathered(grid: Grid, **settings) -> AxonnConfig:
    return AxonnConfig(grid=grid, experts="gather", **settings)


def moved(grid: Grid) -> AxonnConfig:
    return AxonnConfig(grid=grid, experts="move")


def plan_blocks(planned: bool, put=setattr) -> None:
    """Let `parallelize` cut by blocks, or Linear by Linear, whatever it would do by itself."""

    def plan_for(model, *, divided_rows, allow_untested):
        if not planned:
            return ShardingPlan(reason="for a test")
        return derive(model, model.config.model_type, divided_rows=divided_rows)

    put(importlib.import_module("hf_axonn.parallel.parallelize"), "plan_for", plan_for)


@pytest.fixture
def by_blocks(monkeypatch):
    plan_blocks(True, monkeypatch.setattr)


@dataclasses.dataclass
class Planned:
    """Cases on grids, cut by blocks or Linear by Linear."""

    cases: list
    grids: list[Grid]
    by_blocks: bool = True


def _compare_planned(each):
    table = {}
    for planned, with_truth in each:
        plan_blocks(planned.by_blocks)  # for this rank alone
        how = "blocks" if planned.by_blocks else "linears"
        found = compare(with_truth, planned.grids)
        table |= {(f"{case}, {how}", grid): errors for (case, grid), errors in found.items()}
    return table


def errors(*each: Planned):
    """List the errors that are too large, of all cases in one start of the ranks."""
    with_truth = [(planned, [(case, case.truth()) for case in planned.cases]) for planned in each]
    table = run_ranks(_compare_planned, each[0].grids[0].size, with_truth)[0]
    assert len(table) == sum(len(planned.cases) * len(planned.grids) for planned in each)
    return too_large(table, 1e-10)


def two_steps(kind, before=None, **changes):
    options = {} if before is None else {"before": before}
    return Case(kind, functools.partial(moe, kind, **changes), steps=2, config=gathered, **options)


LINEARS = ("gpt_oss", "llama4_text")


def test_two_steps():
    """Each kind on one of the grids. qwen3_moe has the ways of training below; olmoe differs from it in its sizes."""
    llama4 = [two_steps("llama4_text", num_hidden_layers=1)]
    assert not errors(Planned([two_steps("gpt_oss"), two_steps("deepseek_v3", before=biased)], FOUR[1:]))
    assert not errors(
        Planned([two_steps("mixtral", num_hidden_layers=1)], [Grid(y=2)]),
        Planned(llama4, [Grid(x=2)]),
        Planned(llama4, [Grid(z=2)], by_blocks=False),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "grids"),
    [(KINDS, TWO), (KINDS, FOUR), (CHOOSING, MORE)],
    ids=["two", "four", "four of more axes"],
)
def test_two_steps_of_every_kind_cut_by_blocks(kinds, grids):
    corrected = two_steps("deepseek_v3", before=biased)
    assert not errors(Planned([two_steps(kind) for kind in kinds if kind != "deepseek_v3"] + [corrected], grids))


@pytest.mark.slow
@pytest.mark.parametrize("grids", [TWO, FOUR], ids=["two", "four"])
def test_two_steps_linear_by_linear_on_more_grids(grids):
    assert not errors(Planned([two_steps(kind) for kind in LINEARS], grids, by_blocks=False))


def test_experts_that_do_not_divide():
    assert not errors(Planned([two_steps("gpt_oss", num_hidden_layers=1)], [Grid(x=3)]))


@pytest.mark.slow
@pytest.mark.parametrize("by_blocks", [True, False], ids=["blocks", "linears"])
@pytest.mark.parametrize("grid", [Grid(x=3), Grid(z=2, x=3), Grid(z=2, y=2, x=2)], ids=str)
def test_experts_that_do_not_divide_and_eight_ranks(grid, by_blocks):
    assert not errors(Planned([two_steps(kind) for kind in LINEARS], [grid], by_blocks=by_blocks))


def counted(batch):
    return batch | {"num_items_in_batch": (batch["labels"][:, 1:] != -100).sum()}


def packed(batch):
    return {key: value for key, value in batch.items() if key != "attention_mask"}


def frozen_experts(model):
    for module in filter(is_experts, model.modules()):
        module.requires_grad_(False)


@pytest.mark.parametrize("all_grids", [False, SLOW(True)])
def test_ways_of_training(all_grids):
    make = functools.partial(moe, "qwen3_moe", num_hidden_layers=1)
    again = functools.partial(make, output_router_logits=False)
    batches = [tiny_batch(8, 7), tiny_batch(8, 5, seed=4)]
    case, kept = functools.partial(Case, config=gathered), functools.partial(gathered, keep_gathered="all")
    cases = [
        case("num_items_in_batch", make, [counted(batch) for batch in batches]),
        case("no mask", make, [packed(batch) for batch in batches]),
        case("checkpointed", make, before=functools.partial(checkpointed, reentrant=False)),
        # Its first pass has no graph, so on one process too no auxiliary loss would reach the routers.
        case("checkpointed, reentrant", again, before=functools.partial(checkpointed, reentrant=True)),
        case("frozen experts", make, before=frozen_experts),
        case("kept", make, config=kept),
        case("kept, checkpointed", make, before=functools.partial(checkpointed, reentrant=False), config=kept),
        case("no overlap", make, config=lambda grid: gathered(grid, overlap=NO_OVERLAP)),
    ]
    if not all_grids:  # experts that no host reads are checkpointed, too, and test_worst_order.py overlaps nothing
        cases = [case for case in cases if case.name not in ("checkpointed", "kept", "no overlap")]
    on_each = (cases, cases) if all_grids else (cases[::2], cases[1::2])
    grids = FOUR if all_grids else [Grid(y=2), Grid(z=2)]
    assert not errors(*(Planned(some, [grid]) for grid, some in zip(grids, on_each, strict=True)))


class GroupedMatmul(torch.autograd.Function):
    """`grouped_mm` in float64, which it is not written for. Of rows behind the last group it makes NaN, as it may."""

    @staticmethod
    def forward(ctx, rows, weights, offs):
        ctx.save_for_backward(rows, weights)
        ctx.ends = [0, *offs.tolist()]
        result = rows.new_full((len(rows), weights.shape[2]), torch.nan)
        for i, (begin, end) in enumerate(itertools.pairwise(ctx.ends)):
            result[begin:end] = rows[begin:end] @ weights[i]
        return result

    @staticmethod
    def backward(ctx, grad):
        rows, weights = ctx.saved_tensors
        of_rows, of_weights = torch.full_like(rows, torch.nan), torch.empty_like(weights)
        for i, (begin, end) in enumerate(itertools.pairwise(ctx.ends)):
            of_rows[begin:end] = grad[begin:end] @ weights[i].t()
            of_weights[i] = rows[begin:end].t() @ grad[begin:end]
        return of_rows, of_weights, None


UNREAD = functools.partialmethod(few_foreign_on_gpus, dtype=torch.bfloat16)
NUMBER = dict.fromkeys(("mixtral", "granitemoeshared", "gpt_oss"), "num_local_experts")
NUMBER |= {"deepseek_v3": "n_routed_experts"}


def errors_without_reading(monkeypatch, kinds, grids, number, sizes=(), **options):
    """Of experts whose choices no host reads, as in bfloat16 on GPUs, against a loop over them on one process."""
    plan_blocks(True, monkeypatch.setattr)
    cases = []
    for kind in kinds:
        make = functools.partial(moe, kind, **{NUMBER.get(kind, "num_experts"): number}, **dict(sizes))
        case = Case(kind, make, config=gathered, **options)
        grouped = dataclasses.replace(case, make=functools.partial(make, experts_implementation="grouped_mm"))
        cases.append((grouped, case.truth()))
    monkeypatch.setattr(Experts, "_few_foreign", UNREAD)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda *args, offs: GroupedMatmul.apply(*args, offs))
    table = run_ranks(compare, grids[0].size, cases, grids)[0]
    assert len(table) == len(cases) * len(grids)
    return too_large(table, 1e-10)


def test_experts_that_no_host_reads(monkeypatch):
    """With biases and without, recomputed in backward, on ranks of two, of one and of no expert."""
    again = functools.partial(checkpointed, reentrant=False)
    short = {"num_hidden_layers": 1}
    assert not errors_without_reading(monkeypatch, ["mixtral", "gpt_oss"], FOUR[:1], 5, short, before=again)


@pytest.mark.slow
@pytest.mark.parametrize("grids", [TWO, [*FOUR, Grid(x=4), Grid(y=4)], [Grid(z=2, x=3)]], ids=["two", "four", "six"])
def test_experts_of_every_kind_that_no_host_reads(monkeypatch, grids):
    assert not errors_without_reading(monkeypatch, CHOOSING, grids, 8, steps=2)


def one_sided():
    """Tokens below 66 choose expert 0, the others expert 1."""
    model = moe("qwen3_moe", num_experts=2, num_experts_per_tok=1, num_hidden_layers=1, output_router_logits=False)
    side = torch.where(torch.arange(131) < 66, 1.0, -1.0).double()
    direction = torch.ones(48).double()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(side[:, None] * direction + 0.1 * model.model.embed_tokens.weight)
        model.model.layers[0].self_attn.o_proj.weight.mul_(0.01)
        model.model.layers[0].mlp.gate.weight.copy_(torch.stack([direction, -direction]) / 48)
        model.model.layers[0].post_attention_layernorm.weight.fill_(1)
    return model


Z2X2, Z2Y2 = Grid(z=2, x=2), Grid(z=2, y=2)


@pytest.mark.parametrize(("blocks", "linears"), [(Z2X2, Z2Y2), SLOW(Z2Y2, Z2X2)], ids=["some", "others"])
def test_a_rank_without_a_token_takes_part(blocks, linears):
    batch = tiny_batch(8, 7)
    ids = batch["input_ids"] % 60 + 3
    ids[4:] += 66
    batch |= {"input_ids": ids, "labels": torch.where(batch["labels"] == -100, -100, ids)}
    cases = [
        Case("one-sided", one_sided, [batch], config=gathered),
        Case("again", one_sided, [batch], config=gathered, before=functools.partial(checkpointed, reentrant=False)),
    ]
    chosen = []
    model = one_sided()
    model.model.layers[0].mlp.gate.register_forward_hook(lambda module, args, output: chosen.append(output[2]))
    model(input_ids=ids, attention_mask=batch["attention_mask"])
    assert chosen[0].view(8, 7)[:4].eq(0).all() and chosen[0].view(8, 7)[4:].eq(1).all()
    assert not errors(Planned(cases, [blocks]), Planned(cases[:1], [linears], by_blocks=False))


def _outputs(batch, of_blocks, of_linears):
    _outputs_of(batch, of_blocks, True)
    _outputs_of(batch, of_linears, False)


def _outputs_of(batch, kind, planned):
    plan_blocks(planned)
    grid = Grid(z=2)
    mine = rows_of(batch, grid, torch.distributed.get_rank())
    plain, (model, _) = moe(kind), parallelize(moe(kind), config=gathered(grid))
    with exact():
        for training in (True, False):
            plain.train(training), model.train(training)
            with torch.set_grad_enabled(training):
                theirs, ours = plain(**mine), model(**mine)
            assert isinstance(ours.router_logits, tuple) and len(ours.router_logits) == 2
            for its, own in zip(theirs.router_logits, ours.router_logits, strict=True):
                torch.testing.assert_close(own, its, rtol=1e-10, atol=1e-12)
        # Without gradients the loss of tokens is that of this rank's own samples; so is the auxiliary loss where
        # there are no labels, and nobody waits for others.
        unlabelled = {name: its for name, its in mine.items() if name != "labels"}
        with torch.no_grad():
            of_all, alone = plain(**batch).aux_loss, model(**unlabelled).aux_loss
        torch.testing.assert_close(alone, theirs.aux_loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(ours.aux_loss, of_all, rtol=1e-6, atol=0)
        expected = theirs.loss + plain.router_aux_loss_coef * (of_all - theirs.aux_loss)
        torch.testing.assert_close(ours.loss, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("blocks", "linears"), [("mixtral", "gpt_oss"), SLOW("gpt_oss", "mixtral")])
def test_router_logits_are_those_of_the_plain_model(blocks, linears):
    run_ranks(_outputs, 2, tiny_batch(8, 7), blocks, linears)


def _memory(kind):
    storages = []
    block = ExpertLayout.block

    def recording(self, gathered):
        result = block(self, gathered)
        storages.append(StorageWeakRef(result.untyped_storage()))
        return result

    ExpertLayout.block = recording
    model, _ = parallelize(moe(kind).train(), config=gathered(Grid(z=2)))
    calls = []
    with exact(), observe(lambda name, size, group: calls.append((name, size))):
        loss = model(**rows_of(tiny_batch(8, 7), Grid(z=2), torch.distributed.get_rank())).loss
        forward = len(storages)
        assert forward == 4 and all(storage.expired() for storage in storages)
        loss.backward()
    assert len(storages) == 2 * forward and all(storage.expired() for storage in storages)
    sizes = [
        len(vocabulary_range(4, model.axonn.grid_mesh)) * rows * -(-cols // 2) * 8
        for rows, cols in ((42, 48), (48, 21))
    ]
    for size in sizes:  # two layers; forward and backward
        assert calls.count(("all_gather", size)) == 4 and calls.count(("reduce_scatter", size)) == 2


def test_gathered_weights_do_not_live_from_forward_to_backward(by_blocks):
    run_ranks(_memory, 2, "mixtral")


def _other_ways(name, configs, truth, unread):
    batch = tiny_batch(6, 7)
    if unread:
        Experts._few_foreign = UNREAD
    for config in configs:
        grid = config.grid
        mine = rows_of(batch, grid, torch.distributed.get_rank())
        model, _ = parallelize(one_precision(name), config=config)
        with torch.autocast(rank_device().type, dtype=torch.bfloat16):
            loss = model(**mine).loss
        loss.backward()
        for key, grad in truth.gradients.items():
            if is_experts(model.get_submodule(key.rpartition(".")[0])):
                rounded = model.get_parameter(key).grad
                assert rounded.dtype == torch.float32
                assert (rounded.full_tensor() - grad).norm() < 0.1 * grad.norm(), (name, str(grid), key)
        model.zero_grad()
        worst = relative_errors(fit(model, [mine]).gradients, truth.gradients)
        assert max(worst.values()) < 2e-4, (name, str(grid), worst)


def one_precision(name):
    sizes = dict(intermediate_size=32, num_experts_per_tok=4)  # all experts, so that rounding changes no choice
    return moe("mixtral", dtype=torch.float32, experts_implementation=name, **sizes).train()


@pytest.mark.parametrize(
    ("name", "fours", "threes"),
    [
        ("grouped_mm", FOUR[1:], [Grid(x=3)]),
        SLOW("grouped_mm", FOUR, [Grid(z=3), Grid(x=3)]),
        SLOW("batched_mm", FOUR, [Grid(z=3), Grid(x=3)]),
    ],
    ids=["grouped", "grouped on more grids", "batched"],
)
def test_other_ways_of_multiplying(by_blocks, name, fours, threes):
    """Transformers' grouped and batched matmuls: the same within float32, and roughly in bfloat16."""
    truth = fit(one_precision(name), [tiny_batch(6, 7)])
    run_ranks(_other_ways, 4, name, [way(grid) for way in (gathered, moved) for grid in fours], truth, False)
    run_ranks(_other_ways, 3, name, list(map(gathered, threes)), truth, True)


def writer(kind):
    """Transformers itself cannot generate and return router logits."""
    model = moe(kind, output_router_logits=False).eval()
    model.generation_config.eos_token_id = None
    return model


def _generate(expected, prompt, grids):
    for (kind, truth), (grid, way) in zip(expected.items(), zip(grids, (gathered, moved), strict=True), strict=True):
        model, _ = parallelize(writer(kind), config=way(grid))
        mine = rows_of(prompt | {"written": truth}, grid, torch.distributed.get_rank())
        truth_here = mine.pop("written")
        with torch.no_grad(), exact():
            assert torch.equal(model.generate(**mine, max_new_tokens=5), truth_here), (kind, str(grid))


@pytest.mark.parametrize("grids", [FOUR, SLOW(FOUR[::-1])], ids=["one grid each", "the other grids"])
def test_generate_writes_what_one_process_writes(by_blocks, grids):
    prompt = {key: tiny_batch(4, 5)[key].flip(1) for key in ("input_ids", "attention_mask")}
    with torch.no_grad(), exact():
        expected = {kind: writer(kind).generate(**prompt, max_new_tokens=5) for kind in ("deepseek_v3", "mixtral")}
    assert all(len(ids[:, 5:].unique()) > 5 for ids in expected.values())
    run_ranks(_generate, 4, expected, prompt, grids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Plain checkpoints; those of all but gpt_oss hold every expert apart, as they are published."""
    folder = tmp_path_factory.mktemp("moe")
    for kind in KINDS:
        moe(kind, dtype=torch.float32).save_pretrained(folder / kind)
    return folder


def _read(folder, pairs):
    read = []
    stock = unread._copy

    def counting(copy):
        read.append(copy[2].numel())
        stock(copy)

    unread._copy = counting
    for kind, config, plain in pairs:
        read.clear()
        model = from_pretrained(folder / kind, config=config)
        held = sum(parameter.to_local().numel() for parameter in model.parameters())
        held += sum(buffer.numel() for name, buffer in model.named_buffers() if name in model.state_dict())
        assert sum(read) == held < 0.45 * sum(parameter.numel() for parameter in plain.values())
        assert plain.keys() == dict(model.named_parameters()).keys()
        for name, parameter in plain.items():
            assert largest_difference(model.get_parameter(name), parameter) == 0, (kind, config, name)


def check_read(folder, pairs):
    """Kinds with settings; every rank looks at its own shards."""
    pairs = list(pairs)
    kinds = {kind for kind, _ in pairs}
    plain = {kind: dict(AutoModelForCausalLM.from_pretrained(folder / kind).named_parameters()) for kind in kinds}
    run_ranks(_read, 4, folder, [(kind, config, plain[kind]) for kind, config in pairs])


READ_ON = [gathered(FOUR[0]), moved(FOUR[1]), gathered(Grid(z=4)), moved(Grid(z=4))]


def test_a_rank_reads_only_its_slices_of_every_expert(folder):
    """Each kind in one of the ways; files hold the experts of olmoe as those of qwen3_moe."""
    kinds = [kind for kind in CHOOSING if kind != "olmoe"]
    check_read(folder, [(kind, READ_ON[place % len(READ_ON)]) for place, kind in enumerate(kinds)])


@pytest.mark.slow
def test_a_rank_reads_only_its_slices_of_every_expert_on_every_grid(folder):
    configs = [way(grid) for way in (gathered, moved) for grid in (*FOUR, Grid(z=4))]
    check_read(folder, itertools.product(CHOOSING, configs))
    check_read(folder, itertools.product(["llama4_text"], configs[: len(configs) // 2]))


def _round_trip(folder, target, one, other):
    """Experts saved in one way are read where they lie in the other, with the state of an optimizer."""
    plain = dict(AutoModelForCausalLM.from_pretrained(folder / "mixtral").named_parameters())
    model = from_pretrained(folder / "mixtral", config=one)
    optimizer = stepped(model)
    saved = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    save_sharded(model, target, optimizer=optimizer)
    second, _ = parallelize(moe("mixtral", dtype=torch.float32, seed=5), config=other)
    momentum = stepped(second)
    load_sharded(second, target, optimizer=momentum)
    third = from_pretrained(target, config=moved(Grid(data=2, x=2)))
    for name, value in saved.items():
        assert not torch.equal(value, plain[name]) and torch.equal(third.get_parameter(name).full_tensor(), value)
        assert torch.equal(second.get_parameter(name).full_tensor(), value), name
        states = optimizer.state[model.get_parameter(name)], momentum.state[second.get_parameter(name)]
        assert torch.equal(*(state["exp_avg"].full_tensor() for state in states)), name


def stepped(model) -> torch.optim.Optimizer:
    """An optimizer that has made a step, whose gradients are the parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("one", "other"),
    [(moved(FOUR[1]), gathered(Grid(z=4))), SLOW(gathered(FOUR[1]), moved(Grid(y=4)))],
    ids=["moved", "gathered"],
)
def test_a_checkpoint_of_one_grid_is_read_on_another(folder, tmp_path, one, other):
    run_ranks(_round_trip, 4, folder, tmp_path, one, other)


def _report():
    model, report = parallelize(moe("gpt_oss"), config=gathered(Grid(z=2, x=2)))
    entries = {entry.name: entry for entry in report.entries}
    experts = model.model.layers[0].mlp.experts
    assert entries["model.layers.0.mlp.experts"].kind == "experts" and parallel_state(model) is not None
    assert experts.gate_up_proj.to_local().shape == (2, 48, 21) and experts.num_experts == 4
    assert all(isinstance(place, Replicate) for place in experts.gate_up_proj_bias.placements)


def test_the_report_names_experts():
    run_ranks(_report, 4)


class Other(nn.Module):
    def __init__(self, experts=4, names=("hidden_states", "top_k_index", "top_k_weights"), dims=(4, 3, 3)):
        super().__init__()
        self.num_experts = experts
        self.weight = nn.Parameter(torch.zeros(dims))


class Called(Other):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states


class CalledOtherwise(Other):
    def forward(self, hidden_states, expert_size):
        return hidden_states


def test_what_experts_are():
    assert is_experts(Called())
    assert not is_experts(CalledOtherwise())
    assert not is_experts(Called(experts=5))
    assert not is_experts(Called(dims=(4, 3)))
    assert not is_experts(nn.Linear(3, 4))


@pytest.mark.parametrize("grid", [Grid(z=2), Grid(z=3, x=2), Grid(z=4, y=2, x=2), Grid(x=3)], ids=str)
def test_the_shards_of_a_cut_make_the_whole(grid):
    full = torch.arange(5 * 3 * 7.0).view(5, 3, 7)
    total = torch.zeros_like(full)
    for rank in range(grid.size):
        mesh = fake_mesh(grid, rank)
        own = vocabulary_range(5, mesh)
        cut = ExpertLayout(len(own), 3, 7, grid.z, mesh.index("z"), grid.z)
        block = full[own.start : own.stop]
        parts = cut.unblock(block)
        assert parts.shape == (grid.z, cut.travels)
        assert torch.equal(cut.block(parts.flatten() if grid.z > 1 else block), block)
        shard = cut.own(parts[mesh.index("z")])
        assert torch.equal(cut.pad(shard).flatten(), parts[mesh.index("z")])
        step = -(-7 // grid.z)
        total[own.start : own.stop, :, mesh.index("z") * step :][..., : shard.shape[2]] += shard
    assert torch.equal(total, full)
