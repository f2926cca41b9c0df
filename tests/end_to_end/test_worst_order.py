"""By the worst order of an asynchronous backend no bit changes, and all ranks issue their collectives in one order.

Whatever is begun ahead is compared with the same run with all overlaps off on plain gloo. All buffers under way are
watched meanwhile (tests/helpers/buffers.py). What plain gloo hides, and this must not, is planted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.pipelining import schedules
from torch.utils.data import DataLoader

from hf_axonn import AxonnPlugin, finish_saves, parallelize, save_sharded
from hf_axonn.compat.accelerate import forget_state
from hf_axonn.compat.replaced import replace_attributes
from hf_axonn.config import AxonnConfig, Overlap
from hf_axonn.distributed import collectives
from hf_axonn.distributed.collectives import together
from hf_axonn.engine import gathering, gradient_sync, matmul3d
from hf_axonn.engine.gradient_sync import sync_gradients, syncing
from hf_axonn.topology.grid import Grid
from tests.engine.test_gradient_sync import Shared, gradients_of
from tests.helpers.adversary import Issued, backend, problems_of_order
from tests.helpers.crashes import values_of
from tests.helpers.equality import give_gradients, local, rows_of
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import collate, make_trainer, numbers, token_data


NO_OVERLAP = Overlap(all_gather=False, reduce_scatter=False, all_reduce=False, all_to_all=False)
MOE = dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=21, initializer_range=0.2)
EAGER = dict(num_experts_per_tok=2, moe_intermediate_size=21, initializer_range=0.2, experts_implementation="eager")
LATENT = dict(n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16)
LATENT |= dict(qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, num_key_value_heads=12)


def llama():
    return tiny_model("llama", dtype=torch.float32)


def partly_frozen():
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1.self_attn" not in name and "layers.0.mlp.up" not in name)
    return model


def adapted():
    return get_peft_model(llama(), LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False))


def mixture():
    return tiny_model("mixtral", dtype=torch.float32, experts_implementation="eager", **MOE)


def latent():
    return tiny_model("deepseek_v3", dtype=torch.float32, **EAGER, **LATENT)


def shared_first():
    sizes = dict(shared_expert_intermediate_size=20, num_experts=4, decoder_sparse_step=1, mlp_only_layers=[])
    return tiny_model("qwen2_moe", dtype=torch.float32, **EAGER, **sizes)


def shared_outside():
    sizes = MOE | dict(shared_intermediate_size=20, num_key_value_heads=12)
    return tiny_model("granitemoeshared", dtype=torch.float32, experts_implementation="eager", **sizes)


def recomputed(make=llama, *, use_reentrant):
    model = make()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    return model


MODES = {
    "plain": llama,
    "frozen weights": partly_frozen,
    "LoRA": adapted,
    "MoE": mixture,
    "MoE, recomputed": functools.partial(recomputed, mixture, use_reentrant=False),
    "MoE, gathered": mixture,
    "qwen3_moe": lambda: tiny_model("qwen3_moe", dtype=torch.float32, num_experts=4, **EAGER),
    "deepseek_v3": latent,
    "deepseek_v3, recomputed": functools.partial(recomputed, latent, use_reentrant=False),
    "qwen2_moe": shared_first,
    "granitemoeshared, recomputed": functools.partial(recomputed, shared_outside, use_reentrant=False),
    "latents of whole rows": functools.partial(recomputed, latent, use_reentrant=False),
    "bfloat16": lambda: tiny_model("llama", dtype=torch.bfloat16),
    "autocast": llama,
    "tied weights": lambda: tiny_model("smollm2", dtype=torch.float32),
    "recomputed": functools.partial(recomputed, use_reentrant=False),
    "recomputed reentrantly": functools.partial(recomputed, use_reentrant=True),
    "interleaved": lambda: tiny_model("smollm2", dtype=torch.float32, num_hidden_layers=4),
    "zero bubble": llama,
    "zero bubble, recomputed": functools.partial(recomputed, use_reentrant=False),
    "zero bubble, two stages": lambda: tiny_model("qwen3", dtype=torch.float32, num_hidden_layers=4),
}


SETTINGS = {"MoE, gathered": {"experts": "gather"}}
# Of grids with context.
OF_CUT_ROWS = {"latents of whole rows": {"context_attention": "keys"}}
# Of grids with pipe.
SCHEDULES = {
    "interleaved": {"schedule": "interleaved", "stages_per_rank": 2},
    "zero bubble": {"schedule": "zero_bubble"},
    "zero bubble, recomputed": {"schedule": "zero_bubble"},
    "zero bubble, two stages": {"schedule": "zero_bubble", "stages_per_rank": 2},
}


def made(mode, grid, *, overlap=True, keep="none"):
    settings = (SETTINGS | OF_CUT_ROWS | SCHEDULES).get(mode, {})
    config = AxonnConfig(grid=grid, overlap=Overlap() if overlap else NO_OVERLAP, keep_gathered=keep, **settings)
    model, _ = parallelize(MODES[mode](), grid, config=config)
    if mode == "autocast":
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    return model.train()


def trained(model, grid, folder=None, *, overlap=True, steps=2, micro_batches=2):
    """Everything that some clipped AdamW steps leave on this rank, and with a folder, what is written after them.

    Clipping and AdamW work on the shards as plain tensors, because DTensor plans each operation for seconds; they work
    on DTensors in LOOPS, which save an optimizer, too.
    """
    parameters = {name: its for name, its in model.named_parameters() if its.requires_grad}
    updated = {name: local(its) for name, its in parameters.items()}
    optimizer = torch.optim.AdamW(updated.values(), lr=1e-2, weight_decay=0.1)
    found = {}
    for step in range(steps):
        for micro in range(micro_batches):
            batch = rows_of(tiny_batch(4, 7, seed=10 * step + micro), grid, dist.get_rank())
            loss = model(**batch).loss
            found[f"loss {step}.{micro}"] = loss.detach()
            with syncing(model) if overlap and micro + 1 == micro_batches else contextlib.nullcontext():
                loss.backward()
        if not overlap:
            sync_gradients(model)
        shards = {name: its.grad.to_local() for name, its in parameters.items()}
        found |= {f"gradient {step} {name}": shard.clone() for name, shard in shards.items()}
        found[f"norm {step}"] = norm = torch.nn.utils.get_total_norm(shards.values(), foreach=False)
        for shard in shards.values():
            shard.mul_((0.5 / norm).clamp(max=1.0))
        give_gradients(parameters.values(), updated.values())
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
    if folder:
        save_sharded(model, folder, async_save=True)
        prompt = rows_of(tiny_batch(4, 5, seed=7), grid, dist.get_rank())["input_ids"]
        found["written"] = model.eval().generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=3,
            eos_token_id=None,
            pad_token_id=0,
        )
        finish_saves()
        collectives.barrier()
        adapters = folder / "adapter_model.safetensors"
        saved = load_file(adapters) if adapters.exists() else values_of(folder)
        found |= {f"saved {name}": value for name, value in saved.items()}
    return found | {f"parameter {name}": its.to_local().detach().clone() for name, its in parameters.items()}


def by_trainer(mode, grid, folder, overlap, keep):
    """What a Trainer with gradient accumulation, bf16, evaluation and a checkpoint leaves on this rank."""
    forget_state()
    plugin = AxonnPlugin(
        grid=grid, overlap=Overlap() if overlap else NO_OVERLAP, keep_gathered=keep, async_save=overlap
    )
    options = dict(parallelism_config=plugin, bf16=mode == "Trainer, bf16", max_steps=2, save_steps=2, eval_steps=2)
    trainer = make_trainer(folder, grid, model=llama(), **options)
    trainer.train()
    finish_saves()
    logged = enumerate(numbers(trainer.state.log_history))
    found = {f"log {i}: {key}": torch.tensor(value) for i, entry in logged for key, value in entry.items()}
    found |= {f"saved {name}": value for name, value in values_of(folder / "checkpoint-2").items()}
    return found | own_parameters(trainer.accelerator.unwrap_model(trainer.model))


def by_accelerate(mode, grid, folder, overlap, keep):
    """What a loop of Accelerate leaves on this rank: it accumulates, clips, gathers and saves its state."""
    forget_state()
    plugin = AxonnPlugin(grid=grid, overlap=Overlap() if overlap else NO_OVERLAP, keep_gathered=keep)
    accelerator = Accelerator(
        cpu=True, parallelism_config=plugin, mixed_precision="bf16", gradient_accumulation_steps=2
    )
    model = llama().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(token_data(16, seed=2), batch_size=4 // grid.dp_size, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = {}
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                found[f"norm {number}"] = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        found[f"loss {number}"] = loss.detach()
        found[f"ids {number}"] = accelerator.gather_for_metrics(batch["input_ids"].sum(dim=1))
    accelerator.save_state(str(folder))
    return found | own_parameters(accelerator.unwrap_model(model))


def own_parameters(model):
    return {f"parameter {name}": its.to_local().detach().clone() for name, its in model.named_parameters()}


LOOPS = {"Trainer": by_trainer, "Trainer, bf16": by_trainer, "Accelerate": by_accelerate}


def run(mode, grid, folder, *, overlap=True, keep="none", micro_batches=2):
    """`trained`, or by one of LOOPS, which need a folder and have two micro-batches."""
    if mode in LOOPS:
        return LOOPS[mode](mode, grid, folder, overlap, keep)
    model = made(mode, grid, overlap=overlap, keep=keep)
    return trained(model, grid, folder, overlap=overlap, micro_batches=micro_batches)


def differences(truth, ours):
    assert truth.keys() == ours.keys() and len(truth) > 6
    assert all(value.isfinite().all() for value in truth.values())
    return [name for name, value in truth.items() if not torch.equal(value, ours[name])]


def by_the_worst_order(cases, folder, alone):
    """For each (grid, mode, branch, keep, full): what differs on this rank, and what it issued.

    Cases that differ in what they keep share one truth. `alone`: the step of a case that is not full has one
    micro-batch.
    """
    found, truths = [], {}
    for number, (grid, mode, like, keep, full) in enumerate(cases):
        here = [folder / f"{which} {number}" if full else None for which in ("truth", "ours")]
        micro_batches = 1 if alone and not full else 2
        if (case := (grid, mode, like)) not in truths:
            with backend(like):
                truths[case] = run(mode, grid, here[0], overlap=False, micro_batches=micro_batches)
        with backend(like, tracked=True) as late:
            ours = run(mode, grid, here[1], keep=keep, micro_batches=micro_batches)
        assert (late.between_stages > 0) == (grid.pipe > 1) and late.buffers.count > 0
        truth = truths[case]
        if not full:  # what another case wrote is not looked at
            truth = {name: truth[name] for name in truth if name != "written" and not name.startswith("saved ")}
        found.append((differences(truth, ours), late.issued))
    return found


def check(cases, folder, timeout=240, alone=False):
    """Run cases, all of them on as many ranks; returns the kinds of collectives that were issued."""
    ranks = run_ranks(by_the_worst_order, cases[0][0].size, cases, folder, alone, timeout=timeout)
    kinds = set()
    for number, case in enumerate(cases):
        differing, issued = zip(*(found[number] for found in ranks), strict=True)
        assert not any(differing), (case, differing)
        assert not problems_of_order(issued), case
        kinds |= {each.op for own in issued for each in own}
    return kinds


# Every axis, and both branches; two axes for what is begun over both. Each mode on every grid is slow, and a bare loop
# of Accelerate, which Trainer has. The full ones accumulate.
ON_FOUR = [
    (Grid(z=2, x=2), "plain", "nccl", "none", True),
    (Grid(data=2, z=2), "frozen weights", "gloo", "all", False),
]
ON_TWO = [
    (Grid(x=2), "MoE, gathered", "gloo", "none", False),
    (Grid(y=2), "Trainer, bf16", "gloo", "none", True),
    (Grid(pipe=2), "zero bubble", "nccl", "none", False),
    (Grid(z=2, context=2), "plain", "nccl", "none", False),
]
KINDS = {
    *("all_gather", "reduce_scatter", "all_to_all", "irecv +1", "isend +1", "barrier", "broadcasts"),
    *("all_reduce avg", "all_reduce max", "all_reduce sum", "functional all_reduce sum", "broadcast from 0"),
}


def test_no_bit_changes_and_all_ranks_issue_one_order(tmp_path):
    assert check(ON_FOUR, tmp_path / "four", alone=True) | check(ON_TWO, tmp_path / "two", alone=True) >= KINDS


def a_step(grid):
    """For each branch what two steps issue, in order."""
    found = {}
    for like in ("nccl", "gloo"):
        with backend(like, late=True) as late:
            trained(made("plain", grid), grid, steps=2, micro_batches=1)
        found[like] = late.issued
    return found


def test_on_nccl_gradients_do_not_wait_behind_weights():
    ranks = run_ranks(a_step, 2, Grid(z=2))
    issued, turns = [found["nccl"] for found in ranks], ["reduce_scatter", "all_gather", "reduce_scatter"]
    assert not problems_of_order(issued)
    for own in issued:
        over_z = [its for its in own if its.group[0].startswith("axonn_z")]  # the world's compares batches
        groups = {op: {its.group[0].partition(":")[0] for its in over_z if its.op == op} for op in turns[:2]}
        assert groups == {"all_gather": {"axonn_z"}, "reduce_scatter": {"axonn_z_reductions"}}
        # Both are under way at once: the gather of what comes next is launched between two reductions.
        order = [its.op for its in over_z]
        assert any(order[at : at + 3] == turns for at in range(len(order)))
    for own in (found["gloo"] for found in ranks):  # where the world's group does both
        assert not any(its.group[0].startswith("axonn_z") for its in own)


ALL_GRIDS = [
    *(Grid(z=2, x=2), Grid(y=2, x=2), Grid(z=2, y=2), Grid(data=2, x=2), Grid(data=2, y=2), Grid(data=2, z=2)),
    *(Grid(x=4), Grid(y=4), Grid(z=4), Grid(data=4)),
]


@pytest.mark.slow
@pytest.mark.parametrize("like", ["gloo", "nccl"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in OF_CUT_ROWS | SCHEDULES])
def test_no_bit_changes_on_any_grid(tmp_path, mode, like):
    """Both branches together generate and save on each of its grids. What is kept of gathers is the same in both."""
    grids = (
        ALL_GRIDS if mode in ("plain", "MoE", "MoE, gathered") else ALL_GRIDS[:3]
    )  # the others send no more kinds of messages
    cases = [(grid, mode, like, "none", number % 2 == (like == "gloo")) for number, grid in enumerate(grids)]
    if like == "nccl":
        cases += [(grid, mode, like, keep, False) for grid in grids if grid.z > 1 for keep in ("all", 1)]
    check(cases, tmp_path, timeout=560)


@pytest.mark.slow
@pytest.mark.parametrize("like", ["gloo", "nccl"])
def test_no_bit_changes_where_rows_are_divided(tmp_path, like):
    grids = [Grid(z=2, x=2, context=2), Grid(z=4, context=2)]
    modes = ("plain", "MoE", "bfloat16", "recomputed", *OF_CUT_ROWS)
    check([(grid, mode, like, "none", False) for grid in grids for mode in modes], tmp_path, timeout=560)


@pytest.mark.slow
@pytest.mark.parametrize("like", ["gloo", "nccl"])
@pytest.mark.parametrize("mode", LOOPS)
def test_no_bit_changes_in_others_loops(tmp_path, mode, like):
    grids = ALL_GRIDS[:6] if like == "gloo" else ALL_GRIDS[:3]
    check([(grid, mode, like, "none", True) for grid in grids], tmp_path, timeout=560)


@pytest.mark.slow
@pytest.mark.parametrize("like", ["gloo", "nccl"])
def test_no_bit_changes_between_stages(tmp_path, like):
    grids = [Grid(pipe=2, **{axis: 2}) for axis in ("z", "x", "y", "data")]
    modes = [*SCHEDULES, "tied weights", "bfloat16", "autocast", "MoE", "recomputed"]
    cases = [(grid, mode, like, "none", False) for number, mode in enumerate(modes) for grid in grids[number % 2 :: 2]]
    cases += [(grid, mode, like, "none", True) for grid in grids[:2] for mode in LOOPS]
    cases += [(grids[0], "zero bubble", like, keep, False) for keep in ("all", 1)]
    check(cases, tmp_path, timeout=560)


@pytest.mark.slow
@pytest.mark.parametrize("like", ["gloo", "nccl"])
def test_no_bit_changes_on_eight_ranks(tmp_path, like):
    modes = ("plain", "MoE", "bfloat16", "Accelerate")
    cases = [(Grid(z=2, y=2, x=2), mode, like, "none", mode in LOOPS) for mode in modes]
    check([*cases, (Grid(data=2, z=2, x=2), "plain", like, "none", False)], tmp_path, timeout=560)


START_REDUCTION, START_GATHERS = matmul3d.start_reduction, gathering.start_all_gathers
REDUCTION, GATHERS = (matmul3d, "start_reduction"), (gathering, "start_all_gathers")
START_ALL_REDUCE = gradient_sync.start_all_reduce


def changed_under_way(late, *args):
    """Launches the reduction of weight gradients, and changes them then."""
    pending = START_REDUCTION(*args)
    if not late:
        pending.wait()  # gloo has mostly sent by then; here it always has
    for grad in args[0]:
        grad.mul_(3)
    return pending


def never_waited_for(late, *args):
    """Gathers of weights, whose results are used at once."""
    started = START_GATHERS(*args)
    if not late:
        for pending in started:
            pending.wait()
    for pending in started:
        for each in pending._result:
            each._work = None
    return started


def backward_on_rank_1(late, bundle, group):
    """Gathers the weights of a bundle one by one; one rank begins with the last."""
    every = [(i, j) for i, blocks in enumerate(bundle) for j in range(len(blocks))]
    begun = {}
    for i, j in every[::-1] if dist.get_rank() == 1 else every:
        (begun[i, j],) = START_GATHERS([[bundle[i][j]]], group)
    found = [together([begun[i, j] for j in range(len(blocks))]) for i, blocks in enumerate(bundle)]
    return [pending.then(lambda each: [blocks[0] for blocks in each]) for pending in found]


def with_mistake(place, mistake, lates):
    """For gloo (late is false) and the worst order: what one step leaves that is not right, and what was issued."""
    grid, found = Grid(z=2), {}
    one_step = functools.partial(trained, grid=grid, steps=1, micro_batches=1)
    with backend("nccl"):
        truth = one_step(made("plain", grid, overlap=False), overlap=False)
    for late in lates:
        with backend("nccl", late=late) as it, replace_attributes({place: functools.partial(mistake, late)}):
            ours = one_step(made("plain", grid))
            wrong = {name: ours[name] for name, value in truth.items() if not torch.equal(value, ours[name])}
            found[late] = wrong, it.issued
    return found


def with_mistake_in_loop(mode, place, mistake, folder):
    """How many of the values that a loop leaves are not right."""
    grid = Grid(z=2)
    with backend("nccl"):
        truth = run(mode, grid, folder / "truth", overlap=False)
    with backend("nccl", late=True), replace_attributes({place: functools.partial(mistake, True)}):
        return len(differences(truth, run(mode, grid, folder / "ours")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "place", "mistake"),
    [("Accelerate", GATHERS, never_waited_for), ("Trainer", REDUCTION, changed_under_way)],
)
def test_mistakes_are_seen_in_others_loops(tmp_path, mode, place, mistake):
    assert all(wrong > 20 for wrong in run_ranks(with_mistake_in_loop, 2, mode, place, mistake, tmp_path))


def test_a_gradient_that_changes_after_its_launch_is_seen():
    for found in run_ranks(with_mistake, 2, REDUCTION, changed_under_way, (False, True)):
        assert not found[False][0]  # plain gloo does not see it
        assert any(name.startswith("gradient") for name in found[True][0])


def test_weights_that_are_read_before_they_arrive_are_seen():
    for found in run_ranks(with_mistake, 2, GATHERS, never_waited_for, (False, True)):
        assert not found[False][0]
        assert found[True][0]["loss 0.0"].isnan()


def without_waits_between_stages():
    """The loss of a step whose stages read what they get before they have waited for it."""
    grid = Grid(pipe=2)
    with backend("nccl", late=True) as it, replace_attributes({(schedules, "_wait_batch_p2p"): lambda works: None}):
        found = trained(made("plain", grid), grid, steps=1, micro_batches=1)
    return found["loss 0.0"], it.between_stages


def test_what_another_stage_sends_is_read_after_it_arrives():
    for loss, messages in run_ranks(without_waits_between_stages, 2):
        assert loss.isnan() and messages == 4 * 2  # of four rows, forward and backward


def test_another_order_on_one_rank_is_seen():
    ranks = run_ranks(with_mistake, 2, GATHERS, backward_on_rank_1, (True,))
    wrong, issued = zip(*(found[True] for found in ranks), strict=True)
    assert not any(wrong)  # no number tells, as each is waited for in its turn
    (problem,) = problems_of_order(issued)
    assert re.search(r"collective \d+ is all_gather of \[\d+\] float32 on rank 0 and all_gather of", problem)


def write_to_an_average():
    def start_all_reduce(value, *args, **options):
        pending = START_ALL_REDUCE(value, *args, **options)
        if options["op"] == "mean":
            value.mul_(2)
        return pending

    grid = Grid(data=2)
    with backend("nccl", late=True), replace_attributes({(gradient_sync, "start_all_reduce"): start_all_reduce}):
        with pytest.raises(AssertionError, match="an output of all_reduce avg .* was written to before"):
            trained(made("plain", grid), grid)


def test_an_output_that_is_written_to_before_it_arrives_is_seen():
    run_ranks(write_to_an_average, 2)


class WithoutFinish(gradient_sync._Average):
    """Averages that are not waited for before more is added to their gradients."""

    @contextlib.contextmanager
    def watching(self):
        hooks = [parameter.register_post_accumulate_grad_hook(self._note_gradient) for parameter in self.trained]
        yield
        for hook in hooks:
            hook.remove()


def arrive_in_parts():
    """Gradients of a layer that is used twice; the average of the first part is under way when the second arrives.

    For each branch whether no bit changes by the worst order, and whether none does where the wait is forgotten.
    """
    found = {}
    value = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
    torch.manual_seed(0)
    model, _ = parallelize(Shared(use_reentrant=True), Grid(data=2))
    alone = {(gradient_sync, "BUCKET_BYTES"): 1, (collectives, "ALONE_BYTES"): 1}
    for like in ("nccl", "gloo"):
        with backend(like), replace_attributes(alone):
            truth = gradients_of(model, value, ahead=True)
        for average in (gradient_sync._Average, WithoutFinish):
            with backend(like, late=True), replace_attributes(alone | {(gradient_sync, "_Average"): average}):
                ours = gradients_of(model, value, ahead=True)
            found[like, average] = all(map(torch.equal, truth, ours))
    return found


def test_a_gradient_in_parts_is_averaged_alike():
    for found in run_ranks(arrive_in_parts, 2):
        for (like, average), equal in found.items():
            assert equal == (average is gradient_sync._Average), (like, average)


def one_of_each():
    """For each collective: its output before the wait, and after it when the input was multiplied by 10 in between."""
    world, rank, functional = dist.group.WORLD, dist.get_rank(), torch.ops._c10d_functional
    own = torch.tensor([1.0, 2.0]).add(rank).unsqueeze(1)
    many = own[:1].repeat(1000, 1)
    found = {}

    def look(name, input_, early, wait):
        early = early.clone()
        input_.mul_(10)
        found[name] = early.flatten().tolist()[-1], wait().flatten().tolist()[-1]

    with backend("nccl", late=True) as it:
        for name, input_, begin in (
            ("all_gather", own.clone(), collectives.start_all_gather),
            ("of integers", own.long(), collectives.start_all_gather),
            ("reduce_scatter", own.clone(), collectives.start_reduce_scatter),
        ):
            pending = begin(input_, world)
            look(name, input_, pending._result, pending.wait)
        flat = own.flatten().clone()
        (pending,) = collectives.start_all_gathers([[flat, flat.clone()]], world)
        look("gathers in one launch", flat, pending._result[0]._result, lambda: pending.wait()[0])
        both = own.clone()
        pending = collectives.start_reduce_scatters([both, both.clone()], world)
        look("reductions in one launch", both, pending._result[0], lambda: pending.wait()[0])
        for name, input_, begin in (
            ("functional all_gather", own.clone(), functional.all_gather_into_tensor),
            ("functional reduce_scatter", own.clone(), functional.reduce_scatter_tensor),
            ("functional all_reduce", own.clone(), functional.all_reduce),
        ):
            options = ("sum",) * ("reduce" in name) + (2,) * ("all_reduce" not in name) + (world.group_name,)
            output = begin(input_, *options)
            look(name, input_, output, functools.partial(functional.wait_tensor, output))
        value = own.clone()
        pending = collectives.start_all_reduce(value, world)
        found["all_reduce"] = value[1].item(), pending.wait()[1].item()
        issued = it.issued
    with backend("gloo", late=True) as it:
        pending = collectives.start_all_gather(many, world)
        early = pending._result[1 - rank][-1].item()
        found["messages"] = early, pending.wait()[1 - rank][-1].item()
        pending = collectives.start_reduce_scatter(own, world)
        look("all_to_all", own, pending._result, pending.wait)
    return found, [str(each) for each in issued + it.issued]


def test_every_collective_is_held_until_the_wait():
    largest = torch.iinfo(torch.int64).max
    for rank, (found, issued) in enumerate(run_ranks(one_of_each, 2)):
        early = {name: values[0] for name, values in found.items()}
        assert early.pop("of integers") == largest and all(map(math.isnan, early.values())), early
        summed = (30.0, 50.0)[rank]
        assert {name: values[1] for name, values in found.items()} == {
            "all_gather": 30.0,
            "of integers": 30,
            "reduce_scatter": summed,
            "gathers in one launch": 30.0,
            "reductions in one launch": summed,
            "functional all_gather": 30.0,
            "functional reduce_scatter": summed,
            "functional all_reduce": 50.0,
            "all_reduce": 5.0,  # in place: what its input becomes is its output's, and an error
            "messages": 2.0 - rank,
            "all_to_all": summed,
        }
        assert issued == [
            "all_gather of [2] float32",
            "all_gather of [2] int64",
            "reduce_scatter of [2] float32",
            *["all_gather of [2] float32"] * 2,
            *["reduce_scatter of [2] float32"] * 2,
            "functional all_gather of [2, 1] float32",
            "functional reduce_scatter sum of [2, 1] float32",
            "functional all_reduce sum of [2, 1] float32",
            "all_reduce sum of [2, 1] float32",
            "irecv +1 of [1000, 1] float32",
            "isend +1 of [1000, 1] float32",
            "all_to_all of [2, 1] float32",
        ]


def test_orders_that_differ_or_wait_in_a_circle_are_found():
    first, second = ("first", (0, 1)), ("second", (0, 1))
    one, two, other = Issued(first, "all_gather", (3,), "float32"), Issued(second, "all_gather", (3,), "float32"), None
    assert not problems_of_order([[one, two, one], [one, two, one]])
    assert not problems_of_order([[], []])
    for field, value in (("op", "barrier"), ("shape", (4,)), ("dtype", "int64")):
        other = dataclasses.replace(one, **{field: value})
        (problem,) = problems_of_order([[one, other, two], [other, two, one]])
        assert f"on group first of the ranks [0, 1], collective 0 is {one} on rank 0 and {other} on rank 1" == problem
    (problem,) = problems_of_order([[one, two], [one, two, one]])
    assert "collective 1 is missing on rank 0" in problem
    (problem,) = problems_of_order([[one], []])
    assert "missing on rank 1" in problem
    (problem,) = problems_of_order([[one, two], [two, one]])  # each group has its own order
    assert "these wait for each other" in problem and "group second of [0, 1]" in problem
    rings = [(name, ranks) for name, ranks in (("a", (0, 1)), ("b", (1, 2)), ("c", (0, 2)))]
    a, b, c = (Issued(group, "barrier", (), "None") for group in rings)
    assert not problems_of_order([[a, c], [a, b], [b, c]])
    assert problems_of_order([[c, a], [a, b], [b, c]])
