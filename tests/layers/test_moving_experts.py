"""Experts to which tokens travel, each whole on one rank of (z, x, y), against one process."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from hf_axonn import Grid, load_sharded, parallelize, save_sharded
from hf_axonn.architectures.expert_choice import ExpertChoice, choose_experts
from hf_axonn.config import AxonnConfig
from hf_axonn.distributed.collectives import observe
from hf_axonn.layers import moe as layers
from hf_axonn.layers.moe import MovingExperts, is_experts
from hf_axonn.topology.experts import expert_owners
from hf_axonn.topology.weight_kind import WeightKind
from tests.helpers.equality import Case, exact, rows_of
from tests.helpers.float64 import checkpointed, largest_difference
from tests.helpers.models import tiny_batch
from tests.helpers.ranks import run_ranks
from tests.layers.test_moe import (
    CHOOSING,
    NUMBER,
    Called,
    Planned,
    biased,
    errors,
    frozen_experts,
    gathered,
    moe,
    moved,
)


pytestmark = pytest.mark.usefixtures("device")

SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
FOUR = [Grid(z=4), Grid(z=2, x=2), Grid(z=2, y=2), Grid(y=2, x=2), Grid(z=2, context=2, x=2), Grid(data=2, z=2)]


def make(kind, number=6, **changes):
    return moe(kind, **{NUMBER.get(kind, "num_experts"): number} | changes)


def case(kind, name="", **options):
    changes = options.pop("changes", {})
    return Case(f"{kind} {name}", functools.partial(make, kind, **changes), config=moved, **options)


def test_moved_experts_equal_one_process():
    """Ranks have two, one or no expert, cut by blocks and Linear by Linear; the larger part is below."""

    def again(model):
        biased(model)
        checkpointed(model, reentrant=False)

    short = {"num_hidden_layers": 1}
    assert not errors(
        Planned([case("qwen3_moe", steps=2), case("deepseek_v3", "again", before=again)], [Grid(z=2, x=2)]),
        Planned([case("gpt_oss", changes=short)], [Grid(z=4)]),
        Planned([case("gpt_oss", changes=short)], [Grid(z=2, y=2)], by_blocks=False),
    )


@pytest.mark.slow
@pytest.mark.parametrize("grids", [[Grid(z=2), Grid(x=2), Grid(y=2)], FOUR, [Grid(z=2, x=3)]], ids=["2", "4", "6"])
def test_moved_experts_of_every_kind_on_every_grid(grids):
    normed = case("qwen3_moe", "normed", changes={"norm_topk_prob": True})
    corrected = case("deepseek_v3", "corrected", before=biased)
    assert not errors(Planned([*(case(kind, steps=3) for kind in CHOOSING), normed, corrected], grids))


def test_the_correction_changes_what_routers_choose():
    plain, other = make("deepseek_v3"), make("deepseek_v3")
    biased(other)
    with exact(), torch.no_grad():
        assert plain(**tiny_batch(2, 7)).loss != other(**tiny_batch(2, 7)).loss


@pytest.mark.slow
@pytest.mark.parametrize("grids", [FOUR[:4], [Grid(z=2, y=2, x=2)]], ids=["4", "8"])
def test_moved_experts_linear_by_linear(grids):
    kinds = ("gpt_oss", "qwen3_moe")
    assert not errors(Planned([case(kind, changes={"number": 8}) for kind in kinds], grids, by_blocks=False))


def tied_routers(model) -> None:
    """Let all logits of a token be equal: a tie is decided as on one process."""
    for name, parameter in model.named_parameters():
        if "gate.weight" in name or "router.weight" in name:
            with torch.no_grad():
                parameter.zero_()


def unequal_rows() -> list[dict[str, torch.Tensor]]:
    batches = [tiny_batch(8, 7), tiny_batch(8, 5, seed=4)]
    for batch in batches:
        batch["labels"][: len(batch["labels"]) // 2, :4] = -100
    return [batch | {"num_items_in_batch": (batch["labels"][:, 1:] != -100).sum()} for batch in batches]


def ways_of_training() -> list[Case]:
    short = {"num_hidden_layers": 1}
    unaided = short | {"output_router_logits": False}
    kind = functools.partial(case, "qwen3_moe")
    return [
        kind("accumulated", changes=short, batches=unequal_rows()),
        kind("checkpointed", before=functools.partial(checkpointed, reentrant=False)),
        kind("reentrant", changes=unaided, before=functools.partial(checkpointed, reentrant=True)),
        kind("frozen", changes=short, before=frozen_experts),
        kind("64 experts", changes=short | {"number": 64}, batches=[tiny_batch(4, 2)]),  # of 8 tokens
        kind("ties", changes=unaided, before=tied_routers),
        kind("one expert a token", changes=short | {"num_experts_per_tok": 1}),
        kind("every expert", changes=short | {"num_experts_per_tok": 6}),
        kind("batched", changes=short | {"experts_implementation": "batched_mm"}),
        kind("as Trainer", changes=short, steps=2, as_trainer=True),
    ]


@pytest.mark.parametrize("every", [False, SLOW(True)], ids=["some", "every"])
def test_ways_of_training(every):
    """Experts that no token chose have zero gradients, and weights that decay, as on one process."""
    ways = ways_of_training()
    if every:
        assert not errors(Planned(ways, FOUR))
    else:
        assert not errors(Planned(ways[::2], [Grid(x=2)]), Planned(ways[1::2], [Grid(z=2)]))


def test_a_rank_without_a_token_sends_none():
    """Three tokens on four ranks, each of which has all of them or a part."""
    few = case("gpt_oss", "few tokens", changes={"num_hidden_layers": 1}, batches=[tiny_batch(1, 3)])
    grids = [Grid(y=2, x=2)]
    assert not errors(Planned([few], grids, by_blocks=False), Planned([few], grids))


def _reads(cases):
    for reentrant in (True, False, None):
        found = []
        find = layers.find_routes
        layers.find_routes = lambda *args: found.append(args) or find(*args)  # noqa: B023
        model, _ = parallelize(make("mixtral", output_router_logits=False).train(), config=moved(Grid(z=2)))
        if reentrant is not None:
            checkpointed(model, reentrant=reentrant)
        own = rows_of(tiny_batch(8, 7), Grid(z=2), dist.get_rank())
        kinds = []
        with exact(), observe(lambda name, size, group: kinds.append(name)):  # noqa: B023
            loss = model(**own).loss
            forward = kinds.count("exchange")
            loss.backward()
        layers.find_routes = find
        assert len(found) == kinds.count("all_to_all") == 2, "one read a layer, none in backward"
        assert forward == 2 * 3
        # Backward of each; a layer that is recomputed sends its tokens again, and needs no results.
        again = {True: 2 * 3, False: 2 * 2, None: 0}[reentrant]
        assert kinds.count("exchange") == forward + 2 * 3 + again, (reentrant, kinds)
        sizes = [tuple(each.shape) for each in model.model.layers[0].mlp.experts.parameters()]
        assert sizes == [(6, 42, 48), (6, 48, 21)]


def test_the_host_reads_once_a_layer_and_never_in_backward():
    run_ranks(_reads, 2, None)


def _storage(grid):
    model, report = parallelize(make("gpt_oss", 9), config=moved(grid))
    layer = model.model.layers[0].mlp.experts
    own = expert_owners(9, grid)[grid.place(dist.get_rank()).index("z", "x", "y")]
    assert isinstance(model.axonn.sharded_layers[layer], MovingExperts)
    assert layer.gate_up_proj.to_local().shape == (len(own), 48, 42)
    whole = make("gpt_oss", 9).model.layers[0].mlp.experts
    assert torch.equal(layer.down_proj.to_local(), whole.down_proj[own.start : own.stop])
    assert "whole on one of 4 ranks (z, x, y)" in report.experts and report.experts in str(report)
    assert "a token to at most 2, 192 bytes each way" in report.experts
    entries = {entry.name: entry for entry in report.entries}
    assert entries["model.layers.0.mlp.experts"].kind == "whole_experts"


def test_every_expert_lies_whole_on_one_rank():
    run_ranks(_storage, 4, Grid(z=2, y=2))


def _refused():
    grid = Grid(z=2)
    with pytest.raises(ValueError, match=r"experts is move.* 2 \* 1 \* 1 = 2 ranks are more than the 1 experts"):
        parallelize(make("mixtral", 1, num_experts_per_tok=1), config=moved(grid))
    with pytest.raises(ValueError, match="Llama4TextExperts sends every token to every expert"):
        parallelize(moe("llama4_text"), config=moved(grid))
    _, report = parallelize(moe("llama4_text"), config=AxonnConfig(grid=grid, experts="auto"))
    assert report.experts == "experts gathered over z: Llama4TextExperts sends every token to every expert"
    model, report = parallelize(moe("mixtral"), config=AxonnConfig(grid=grid, experts="auto"))
    assert "tokens travel" in report.experts and any(map(is_experts, model.modules()))
    unequal = {"use_cache": False, "cache_implementation": "static", "guidance_scale": 1.5, "prefill_chunk_size": 2}
    for name, value in unequal.items():
        with pytest.raises(ValueError, match=rf"generate\({name}.* over z=2 with experts: move"):
            model.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=2, **{name: value})


def test_what_cannot_move_is_refused():
    run_ranks(_refused, 2)


def _exported(folder, grid):
    plain = dict(make("mixtral", dtype=torch.float32).named_parameters())
    model, _ = parallelize(make("mixtral", dtype=torch.float32), config=moved(grid))
    model.save_pretrained(folder / "whole")
    save_sharded(model, folder / "sharded")
    other, _ = parallelize(make("mixtral", dtype=torch.float32, seed=5), config=gathered(Grid(z=2, x=2)))
    load_sharded(other, folder / "sharded")
    read = dict(AutoModelForCausalLM.from_pretrained(folder / "whole").named_parameters())
    for name, parameter in plain.items():
        assert torch.equal(read[name], parameter) and largest_difference(other.get_parameter(name), parameter) == 0


@pytest.mark.parametrize("grid", [Grid(z=4), SLOW(Grid(z=2, y=2))], ids=str)
def test_shards_of_few_experts_are_exported_and_read(tmp_path, grid):
    run_ranks(_exported, 4, tmp_path, grid)


def test_the_experts_of_any_module_can_move():
    """A module without a config moves, too; the report does not know how many bytes travel."""
    choice = choose_experts(nn.Sequential(Called()), Grid(z=2, x=2), requested="auto")
    assert choice.moves and choice.reason.endswith("tokens travel: a token to at most 4")
    assert choose_experts(nn.Linear(3, 4), Grid(z=2), requested="move") == ExpertChoice(WeightKind.EXPERTS)


def _evaluated(grid, batch, expected):
    model, _ = parallelize(make("qwen3_moe"), config=moved(grid))
    own = rows_of(batch, grid, dist.get_rank())
    with exact(), torch.no_grad():
        ours = model(**own)
    torch.testing.assert_close(ours.logits, rows_of({"logits": expected.logits}, grid, dist.get_rank())["logits"])
    torch.testing.assert_close(ours.aux_loss, expected.aux_loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("grid", [Grid(z=2, x=2), SLOW(Grid(data=2, z=2))], ids=str)
def test_evaluation(grid):
    batch = tiny_batch(8, 7)
    with exact(), torch.no_grad():
        expected = make("qwen3_moe")(**batch)
    run_ranks(_evaluated, 4, grid, batch, expected)
