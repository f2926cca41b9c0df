"""Tokens that travel to experts in a plan: rows, bytes, memory, and the choice between them and gathered weights."""

from __future__ import annotations

import functools
import itertools
import math
import re
from dataclasses import replace
from fractions import Fraction

import pytest
import yaml
from transformers import AutoConfig, Qwen3MoeConfig

from hf_axonn.cli.main import main
from hf_axonn.planner.candidate import Candidate
from hf_axonn.planner.expert_bytes import compare_bytes
from hf_axonn.planner.experts import expected_rows, place_experts, why_gathered
from hf_axonn.planner.from_settings import resolve_auto
from hf_axonn.planner.job import Job
from hf_axonn.planner.machine import load_machine
from hf_axonn.planner.memory import local_parameters, memory
from hf_axonn.planner.predict import predict
from hf_axonn.planner.search import plan
from hf_axonn.planner.settings import EXACT, as_text
from hf_axonn.planner.shapes import ExpertsShape, own_experts
from hf_axonn.planner.step import Step
from hf_axonn.planner.time.layer_traffic import layer_traffic
from hf_axonn.planner.time.links import Links
from hf_axonn.planner.traffic.volumes import StepAccount, volumes
from hf_axonn.profiling.read_shape import shape_of
from hf_axonn.topology.experts import bytes_sent, expert_owners
from hf_axonn.topology.grid import Grid


SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
SIZES = dict(vocab_size=4096, hidden_size=1024, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4)
ROUTED = dict(num_experts=12, decoder_sparse_step=1, mlp_only_layers=[])
CONFIG = Qwen3MoeConfig(
    **SIZES, **ROUTED, head_dim=64, intermediate_size=512, moe_intermediate_size=512, num_experts_per_tok=2
)
MODEL = shape_of(CONFIG.to_dict())
DENSE = replace(MODEL, runs=tuple((replace(layer, parts=layer.parts[:1]), count) for layer, count in MODEL.runs))
STEP = Step(rows=2, seq=512)


@pytest.mark.parametrize(("number", "chosen"), [(6, 2), (5, 3), (4, 4), (8, 1)])
@pytest.mark.parametrize("grid", [Grid(z=2, x=2), Grid(z=2, y=2), Grid(y=3), Grid(data=2, z=4)], ids=str)
def test_rows_are_the_mean_over_all_sets_of_experts(number, chosen, grid):
    experts = ExpertsShape(number=number, chosen=chosen, weights=(), moves=True)
    owners = expert_owners(number, grid)
    sets = [set(each) for each in itertools.combinations(range(number), chosen)]
    reached = [Fraction(sum(bool(each & set(owned)) for each in sets), len(sets)) for owned in owners]
    for rank in range(grid.size):
        here = grid.place(rank).index("z", "x", "y")
        there, back = expected_rows(experts, grid, rank)
        assert there == sum(reached) - reached[here] <= min(chosen, len(owners))
        assert back == (len(owners) - 1) * reached[here]
    assert sum(reached) <= chosen and own_experts(experts, grid, grid.coordinates(0)) == max(map(len, owners))


def test_where_tokens_travel_no_weight_of_an_expert_does():
    """Gradients of experts are averaged over data alone, not over z."""
    grid = Grid(data=2, z=3, x=2)
    gathered, moving = (volumes(place_experts(MODEL, grid, way), grid, STEP) for way in ("gather", "move"))
    weights = MODEL.experts[0].weights
    layers, each = MODEL.depth, sum(rows * cols for rows, cols, _ in weights)

    def of_z(ledger, kind):
        return next(iter(ledger.chosen(phase="backward", kind=kind, axes=("z",))))[1]

    padded = sum(6 * rows * math.ceil(cols / 3) for rows, cols, _ in weights)  # six experts are on a position of x
    for kind, size in (("all_gather", 2), ("reduce_scatter", 4)):
        assert of_z(gathered, kind).payload - of_z(moving, kind).payload == layers * padded * size
        assert of_z(gathered, kind).calls - of_z(moving, kind).calls == 2 * layers
    averaged = [next(iter(ledger.chosen(kind="all_reduce", axes=("data",))))[1] for ledger in (gathered, moving)]
    assert averaged[1].payload == averaged[0].payload - layers * (padded - 2 * each) * 4
    tokens = 2 * 512 // 2
    sent = [volume for _, volume in moving.chosen(phase="forward", kind="exchange", axes=("z", "x"))]
    there = expected_rows(place_experts(MODEL, grid, "move").experts[0], grid, 0)
    bytes_there, bytes_back = 1024 * 2 + 2 * 2 * 4, 1024 * 2
    assert sum(volume.calls for volume in sent) == 3 * layers
    assert sum(volume.payload for volume in sent) == pytest.approx(
        layers * tokens * float(there.sent * bytes_there + there.received * bytes_back), abs=3 * layers
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_recomputed_layer_sends_its_tokens_again_and_asks_for_no_sizes(checkpointing):
    grid = Grid(z=2, x=2)
    ledger = volumes(place_experts(MODEL, grid, "move"), grid, replace(STEP, checkpointing=checkpointing))
    assert ledger.calls(kind="all_to_all", axes=("z", "x")) == MODEL.depth
    again = ledger.calls(phase="backward", kind="exchange", axes=("z", "x")) // MODEL.depth
    assert again == (3 + 2 if checkpointing else 3), "results of the last product do not travel again"


SHARED = {
    # Parts of a layer that are computed while tokens travel.
    "qwen2_moe": (dict(shared_expert_intermediate_size=256, **ROUTED), 1),
    "qwen3_moe": (ROUTED, 0),
    "deepseek_v3": (dict(n_routed_experts=12, first_k_dense_replace=0, n_group=1, topk_group=1), 1),
    "granitemoeshared": (dict(num_local_experts=12, shared_intermediate_size=256), 1),
}


@pytest.mark.parametrize("kind", ["qwen2_moe", "granitemoeshared", *map(SLOW, ("qwen3_moe", "deepseek_v3"))])
def test_tokens_travel_beside_shared_experts(kind):
    """The groups of the shared experts, which are called before or after the others, or outside of the mixture."""
    options, count = SHARED[kind]
    sizes = SIZES | options | dict(num_experts_per_tok=2, num_key_value_heads=16)
    model = shape_of(AutoConfig.for_model(kind, **sizes).to_dict())
    grid, step = Grid(z=2, x=2), replace(STEP, checkpointing=True)
    layer = place_experts(model, grid, "move").runs[-1][0]
    (index,) = [place for place, part in enumerate(layer.parts) if isinstance(part, ExpertsShape)]
    meanwhile = layer.find_meanwhile(index)
    assert len(meanwhile) == count and meanwhile.stop == index
    gathered = model.runs[-1][0]
    assert not any(gathered.find_meanwhile(place) for place in range(len(gathered.parts)))
    account = StepAccount(place_experts(model, grid, "move"), grid, step, "token")
    traffic = layer_traffic(account, layer, kept=False)
    links = Links(load_machine("dgx-h100"), grid, ("y", "x", "z", "pipe", "data"))
    assert len(traffic.dispatches) == (count > 0)
    for tokens in traffic.dispatches:
        sent = account.find_dispatched(layer.parts[index])
        assert (tokens.sent, tokens.returned) == (sent["forward"], sent["backward"])
        groups = [part.groups() for part in layer.parts]
        assert tokens.groups == range(len(sum(groups[: meanwhile.start], [])), len(sum(groups[:index], [])))
        (seconds,) = traffic.seconds(links).dispatches
        assert seconds.sent == [links.seconds("exchange", ("z", "x", "y"), each) for each in tokens.sent]


def test_a_rank_holds_whole_experts_the_first_one_most():
    grid = Grid(z=5, x=2)
    experts = sum(rows * cols for rows, cols, _ in MODEL.experts[0].weights)
    gathered, moving = (local_parameters(place_experts(MODEL, grid, way), grid) for way in ("gather", "move"))
    shards = sum(6 * rows * math.ceil(cols / 5) for rows, cols, _ in MODEL.experts[0].weights)
    assert moving - gathered == MODEL.depth * (2 * experts - shards), "six experts of a position of x over five of z"
    held = {way: memory(place_experts(MODEL, grid, way), grid, STEP) for way in ("gather", "move")}
    assert held["move"].gathered < held["gather"].gathered and held["move"].states > held["gather"].states


def test_where_tokens_cannot_travel_weights_are_gathered():
    assert why_gathered(MODEL, Grid(data=4)) == "z * x * y is 1: every expert is on every rank"
    assert "16 ranks are more than the 12 experts of a layer" in why_gathered(MODEL, Grid(z=16))
    assert place_experts(MODEL, Grid(z=16), "auto") is MODEL
    llama4 = replace(MODEL, runs=tuple((replace(layer, parts=sort(layer.parts)), n) for layer, n in MODEL.runs))
    assert why_gathered(llama4, Grid(z=2)) == "its experts are handed all tokens"
    assert why_gathered(DENSE, Grid(z=2)) == "no layer has experts"


def sort(parts):
    return tuple(replace(part, sorted=True) if isinstance(part, ExpertsShape) else part for part in parts)


JOB = Job(shape=MODEL, machine=load_machine("dgx-h100"), sequences=64, seq=512)


def test_the_search_takes_the_faster_way_on_each_grid():
    found = plan(JOB, 8, free=EXACT)
    assert {entry.experts for entry in found.ranked} > {""} and found.best.experts
    for entry in found.ranked:
        ways = ("move", "gather") if entry.experts else ("gather",)
        each = {way: Candidate.fewest(replace(entry.job, experts=way), entry.grid) for way in ways}
        assert entry.job.experts in each and as_text(entry.job)["experts"] == entry.job.experts
        if entry.experts and entry.job.keep_gathered == "recomputed":
            times = {
                way: predict(replace(entry.job, experts=way), entry.grid, order=entry.order).total for way in each
            }
            assert times[entry.experts] == min(times.values())
    assert as_text(predict(replace(JOB, shape=DENSE), Grid(z=8)).job).get("experts") is None


def test_move_is_refused_where_it_is_not_possible():
    with pytest.raises(
        ValueError, match="experts is move, but z . x . y = 16 . 1 . 1 = 16 ranks are more than the 12"
    ):
        predict(replace(JOB, experts="move"), Grid(z=16))
    with pytest.raises(ValueError, match="experts is 'both', but it is one of auto, gather, move"):
        replace(JOB, experts="both")


def test_the_command_and_the_launch_file_say_the_choice(tmp_path, capsys):
    CONFIG.save_pretrained(tmp_path)
    command = f"plan --model {tmp_path} --machine dgx-h100 --gpus 8 --batch-sequences 64 --seq 512".split()
    assert main([*command, "--fix", "experts=move"]) == 0
    printed = capsys.readouterr().out
    assert re.search(
        r"\n  experts move, each whole on one of \d ranks; a token travels to \d.\d others in the mean", printed
    )
    assert yaml.safe_load(printed.partition("\naxonn_config:")[2].partition("#")[0])["experts"] == "move"
    assert main([*command, "--fix", "experts=gather"]) == 0
    assert "  experts gather, their weights over z and tokens over x and y (move: " in capsys.readouterr().out
    section = {
        "grid": "auto",
        "plan": {"model": str(tmp_path), "machine": "dgx-h100", "batch_tokens": "32768", "seq": 512},
    }
    read = lambda _: MODEL  # noqa: E731
    chosen, notes = resolve_auto(section, 8, mixed_precision="bf16", read=read)
    assert chosen["experts"] in ("gather", "move") and f", experts {chosen['experts']}" in notes[0]
    kept, _ = resolve_auto(section | {"experts": "gather"}, 8, mixed_precision="bf16", read=read)
    assert kept["experts"] == "gather"


@pytest.mark.parametrize("grid", [Grid(z=4, x=2), Grid(z=2, y=2, x=2), Grid(data=2, z=6)], ids=str)
def test_from_some_tokens_on_gather_sends_fewer_bytes(grid):
    """The report's arithmetic, of the experts alone, and the planner's, of a whole step, are one to the byte."""
    step = replace(STEP, checkpointing=False, micro_batches=1)
    (experts, *_), own = MODEL.experts, step.padded_tokens(grid) // (grid.x * grid.y)
    layers = MODEL.depth * [(experts.number, [weight[:2] for weight in experts.weights])]
    sent = bytes_sent(layers, experts.chosen, MODEL.hidden, grid)
    found = compare_bytes(MODEL, grid, step)
    fewer = sent.weights + sent.gathered * own - sent.sizes - sent.moved * own
    # The planner's exchanges, six of a layer, are of whole bytes.
    assert found.gather - found.move == pytest.approx(fewer, rel=0, abs=6 * MODEL.depth)
    if found.tokens is not None:
        assert sent.fewer_by_gather() == pytest.approx(found.tokens, rel=0, abs=1)
        assert (found.gather < found.move) == (own >= found.tokens)
    else:
        assert sent.fewer_by_gather() is None


def test_bytes_are_compared_where_tokens_can_travel_alone():
    assert compare_bytes(MODEL, Grid(z=64), STEP) is None
    once, again = (compare_bytes(MODEL, Grid(z=4), replace(STEP, checkpointing=on)) for on in (False, True))
    assert again.move > once.move and again.tokens < once.tokens  # tokens travel again, weights that are kept do not
    for grid in (Grid(x=2), Grid(z=2, y=2, x=2)):  # gathers of all tokens are more than two rows for each
        assert compare_bytes(MODEL, grid, STEP).tokens is None
