"""planner/: each equation against numbers worked by hand, and what must hold on every machine."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_axonn.planner import confidence
from hf_axonn.planner.candidate import Candidate
from hf_axonn.planner.dense import FAMILIES, GPT_VOCAB, GPTS, DenseShape, load_shape
from hf_axonn.planner.digits import decimals, gib, percent
from hf_axonn.planner.job import Job
from hf_axonn.planner.machine import FACTORS, FOLDER, OPTIONAL, Machine, known_machines, load_machine
from hf_axonn.planner.memory import local_parameters, memory
from hf_axonn.planner.predict import predict, refusal
from hf_axonn.planner.search import grids
from hf_axonn.planner.shapes import GatheredShape, ModelShape, WeightShape
from hf_axonn.planner.step import Step
from hf_axonn.planner.time import compute
from hf_axonn.planner.time.layer_traffic import step_traffic
from hf_axonn.planner.time.links import Links
from hf_axonn.planner.traffic.ledger import LedgerKey, Volume, sent_bytes
from hf_axonn.planner.traffic.volumes import volumes
from hf_axonn.topology.grid import Grid
from hf_axonn.topology.weight_kind import WeightKind
from tests.benchmarks.planner import published


# Four GPUs a node; numbers that are easy to divide by.
TOY = Machine(
    name="toy",
    gpus_per_node=4,
    peak_flops=200e12,
    gemm_flops=100e12,
    gemm_fraction=0.5,
    memory=2**40,
    memory_bandwidth=1e12,
    units=4,
    intra={(1, 2): 50e9, (1, 4): 100e9, (2, 2): 25e9},
    inter=40e9,
    base=10e-6,
    intra_step=1e-6,
    inter_step=5e-6,
)
LLAMA = DenseShape(layers=4, hidden=1024, heads=16, kv_heads=8, intermediate=2816, vocab=32000)
JOB = Job(shape=LLAMA, machine=TOY, sequences=64, seq=512)
SOME = [Grid(data=16), Grid(z=16), Grid(x=4, data=4), Grid(y=4, z=4), Grid(data=2, z=2, y=2, x=2), Grid(x=16)]
SOME += [Grid(data=2, z=4, x=2, context=2), Grid(z=4, y=2, x=2, context=4)]


def test_seconds_of_collectives_by_hand():
    links = Links(TOY, Grid(x=4, data=2))
    # In a node: 10 us + 3 steps + 3 blocks of 1 MB at 100 GB/s.
    assert links.seconds("all_gather", ("x",), 1e6) == pytest.approx(10e-6 + 3e-6 + 30e-6)
    assert links.seconds("reduce_scatter", ("x",), 2e6, 2) == pytest.approx(2 * 13e-6 + 60e-6)
    # Over two nodes, 4 ranks apart: one step of 5 us, 40 / 4 GB/s.
    assert links.seconds("all_gather", ("data",), 1e6) == pytest.approx(10e-6 + 5e-6 + 1e6 / 10e9)
    # Ring: 10 us + 2 * 5 us + half of 2 MB at 10 GB/s; a tree would send all of it.
    assert links.seconds("all_reduce", ("data",), 1e6) == pytest.approx(20e-6 + 2 * 0.5 * 1e6 / 10e9)
    # All eight ranks: 7 steps, of which one crosses, twice; 2 * 7/8 of 1 MB at 40 GB/s.
    assert links.seconds("all_reduce", ("data", "x"), 1e6) == pytest.approx(10e-6 + 2 * 11e-6 + 1.75e6 / 40e9)
    # All-to-all of 8 MB over 8: 7 MB are sent, 4 of 7 parts leave the node, whose 4 ranks share 40 GB/s.
    world = links.seconds("all_to_all", ("data", "x"), 8e6)
    assert world == pytest.approx(10e-6 + 11e-6 + 7e6 * (4 / 7) * 4 / 40e9)
    assert links.seconds("all_reduce", ("y", "z"), 1e9) == 0.0
    # x and data with z between them: each node has two of such groups, whose rings share 40 GB/s.
    apart = Links(TOY, Grid(x=2, z=2, data=2))
    assert apart.seconds("all_gather", ("data", "x"), 1e6) == pytest.approx(10e-6 + 5e-6 + 2 * 1e-6 + 3e6 / 20e9)
    assert links.entry_seconds(LedgerKey("forward", "all_gather", ("x",)), Volume(1, 10**6)) == pytest.approx(43e-6)


def test_the_ranks_of_context_are_neighbours_of_stride_x_y():
    links = Links(TOY, Grid(z=8, x=2, context=2))
    assert links.ring(("context",)).stride == 2 and links.ring(("rows",)).stride == links.ring(("z",)).stride * 2 == 4
    # In a node: 10 us + a step + half of 2 MB at 25 GB/s.
    assert links.seconds("all_to_all", ("context",), 2e6) == pytest.approx(10e-6 + 1e-6 + 1e6 / 25e9)
    # Of 4 ranks 2 lie on another node, as do 2 of 3 receivers: 4 GPUs share 40 GB/s for two thirds of what they send.
    far = Links(TOY, Grid(z=8, x=2, context=4))
    assert far.seconds("all_to_all", ("context",), 4e6) == pytest.approx(10e-6 + 5e-6 + 2 * 1e-6 + 3e6 / 15e9)
    outer = Links(TOY, Grid(z=8, x=2, context=2), ("z", "x", "y", "data", "pipe"))
    assert outer.ring(("context",)).stride == 1 and outer.ring(("rows",)).stride == 2


def test_a_small_all_reduce_over_many_nodes_goes_by_a_tree():
    links = Links(TOY, Grid(data=4096))
    # log2(1024) = 10 steps between nodes and 3 inside, both ways.
    assert links.seconds("all_reduce", ("data",), 4) == pytest.approx(10e-6 + 2 * (3e-6 + 50e-6), rel=1e-3)


def test_the_order_of_axes_decides_which_links_they_use():
    grid = Grid(x=4, z=4)
    inner, outer = Links(TOY, grid), Links(TOY, grid, ("z", "x", "y", "data"))
    assert inner.ring("x").bandwidth == outer.ring("z").bandwidth == 100e9
    assert inner.ring("z").bandwidth == outer.ring("x").bandwidth == 10e9
    assert outer.ring("x").nodes == 4 and inner.ring("x").nodes == 1
    with pytest.raises(ValueError, match="names each axis once"):
        Links(TOY, grid, ("x", "y", "z"))


def test_seconds_of_a_product_by_hand():
    """100 TFLOP/s at one half; 4 multiprocessors, tiles of 128."""
    flops = 2 * 1024**3
    assert compute.product(TOY, 1024, 1024, 1024) == pytest.approx(flops / 50e12)
    # 640 x 128 are five tiles: two waves of four.
    assert compute.share(TOY, 640, 4096, 128) == 5 / 8
    assert compute.share(TOY, 64, 4096, 128) == 0.5
    # Thin: 2 (8192^2 + 2 * 8192) bytes at 800 GB/s.
    thin = 2 * (8192 * 8192 + 2 * 8192) / 0.8e12
    assert compute.product(TOY, 1, 8192, 8192) == pytest.approx(max(thin, 2 * 8192**2 / 50e12 * 128))
    assert compute.product(TOY, 1, 1, 1) == TOY.kernel and compute.product(TOY, 0, 5, 5) == 0
    table = replace(TOY, gemm_by_size=((100, 0.2), (200, 0.6)))
    assert [compute.share(table, size, 999, 999) for size in (50, 100, 150, 400)] == pytest.approx(
        [0.1, 0.2, 0.4, 0.6]
    )


def test_products_are_counted_as_they_are_computed():
    """y = 2: q, k, v are six products and o is two; up and gate four, down two. Here each takes a second."""
    slow = replace(TOY, kernel=1.0)
    found = compute.Compute(LLAMA, slow, Grid(y=2, x=2), Step(rows=1, seq=64)).groups(LLAMA.kinds[0][0])
    assert [group[:3] for group in found] == [(count, count, count) for count in (6, 2, 4, 2)]
    repeated = compute.Compute(LLAMA, slow, Grid(y=2, x=16), Step(rows=1, seq=64)).groups(LLAMA.kinds[0][0])
    assert repeated[1][:3] == (1, 1, 1)  # o has all features of x at once


def test_a_product_that_is_added_reads_the_sum():
    """4096 x 8 x 4096: 2 (2 * 8 * 4096 + 4096^2) bytes at 800 GB/s, and once more the result."""
    thin = [compute.product(TOY, 4096, 8, 4096, accumulate=accumulate) for accumulate in (False, True)]
    assert thin == pytest.approx([2 * (2 * 8 * 4096 + times * 4096**2) / 0.8e12 for times in (1, 2)])


def test_flops_of_a_step_are_those_of_the_paper():
    """96 B s L h^2 (1 + s / 6h + V / 16 L h), recomputation included."""
    shape = load_shape("gpt-80b")
    job = Job(shape=shape, machine=TOY, sequences=8192, seq=2048)
    layers, h, s, v = 42, 12288, 2048, GPT_VOCAB
    expected = 96 * 8192 * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert job.hardware_flops() == pytest.approx(expected, rel=1e-12)
    assert replace(job, checkpointing=False).hardware_flops() == job.model_flops()


@pytest.mark.parametrize("grid", SOME, ids=str)
def test_what_travels_is_what_the_engine_sends(grid):
    """All entries of the model's traffic together are the ledger that the engine's own traffic is tested against."""
    candidate = Candidate(JOB, grid, 1)
    step, traffic = candidate.step, candidate.traffic
    sent: dict[tuple[str, ...], Fraction] = {}

    def enter(kind, axes, payload, times):
        ranks = 1
        for axis in axes:
            ranks *= getattr(grid, axis)
        sent[axes] = sent.get(axes, Fraction(0)) + times * sent_bytes(kind, ranks, payload)

    ((_, layer, count),) = traffic.layers
    assert count == LLAMA.layers
    for gather, reduce in zip(layer.gathers, layer.reduces, strict=True):
        if grid.z > 1:
            enter(
                "all_gather", ("z",), gather, 2 * LLAMA.layers
            )  # forward, recomputation; backward has what that kept
            enter("reduce_scatter", ("z",), reduce, LLAMA.layers)
    for each in filter(None, layer.hidden):
        enter(each[0], (each[1],), each[2], LLAMA.layers)
    for times, ledger in ((count, layer.ledger), (1, traffic.rest), (1, traffic.gradients)):
        for key, volume in ledger.entries.items():
            enter(key.kind, key.axes, volume.payload, times)
    whole = volumes(LLAMA, grid, step, layout=LLAMA.layout(grid))
    assert {axes for axes, volume in sent.items() if volume} == {key.axes for key in whole.entries}
    for axes, volume in sent.items():
        assert volume == whole.bytes_sent(axes=axes), axes


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("grid", SOME, ids=str)
def test_seconds_by_axes_are_those_of_the_ledger_of_a_step(grid, checkpointing):
    candidate = Candidate(replace(JOB, checkpointing=checkpointing), grid, 2)
    step, layout = candidate.step, LLAMA.layout(grid)
    links = Links(TOY, grid)
    ((layer, _),) = LLAMA.runs
    router = replace(layer, gathered=(GatheredShape(640, 1024, partial=True),))
    routed = ModelShape(runs=((router, 4),), hidden=LLAMA.hidden, vocab=LLAMA.vocab, final=LLAMA.final)
    for shape in (LLAMA, routed):
        expected: dict[str, float] = {}
        for key, volume in volumes(shape, grid, step, layout=layout).entries.items():
            name = "+".join(key.axes)
            expected[name] = expected.get(name, 0.0) + links.entry_seconds(key, volume)
        found = step_traffic(shape, grid, step, layout).by_axes(links, step.micro_batches)
        assert step.micro_batches == 2
        assert found == pytest.approx({axes: seconds for axes, seconds in expected.items() if seconds}, rel=1e-12)


def test_parameters_without_a_gradient_are_held_as_well():
    grid = Grid(z=2, y=2, x=2)
    stack = ModelShape(runs=LLAMA.runs, hidden=LLAMA.hidden, vocab=LLAMA.vocab, final=LLAMA.final)
    assert local_parameters(stack, grid) == local_parameters(LLAMA, grid)
    # A rank has [2, 11] and [1, 3] of them.
    idle = (WeightShape(WeightKind.LINEAR, 5, 21), WeightShape(WeightKind.GATHERED, 7, 3))
    assert local_parameters(replace(stack, idle=idle), grid) == local_parameters(stack, grid) + 22 + 3


def test_a_small_number_is_not_printed_as_0():
    for number, digits, text in (
        (0, 1, "0.0"),
        (0.05, 1, "0.1"),
        (0.04, 1, "0.04"),
        (-0.001, 2, "-0.001"),
        (2.2e-16, 1, "0.0"),
        (1234.5678, 3, "1,234.568"),
        (0.4, 0, "0.4"),
        (7e7, 0, "70,000,000"),
    ):
        assert decimals(number, digits) == text
    assert (percent(0.3314), percent(4e-6), gib(2**20)) == ("33.1%", "0.0004%", "0.00098")


def test_one_rank_of_x_y_z_sends_no_tensors():
    found = predict(JOB, Grid(data=16))
    assert set(found.traffic) == {"data"}
    assert found.seconds["exposed x/y"] == found.seconds["exposed z"] == found.seconds["other"] == 0.0
    alone = predict(JOB, Grid())
    assert not alone.traffic and alone.exposed == 0.0


def test_more_bandwidth_and_faster_products_are_never_slower():
    for grid in grids(16):
        if refusal(JOB, grid):
            continue
        before = predict(JOB, grid)
        for changes in ({"bandwidth": 2.0}, {"bandwidth": 1.1}, {"gemm": 2.0}):
            after = predict(replace(JOB, machine=TOY.scale(**changes)), grid)
            assert after.total <= before.total * (1 + 1e-12), (grid, changes)
        assert predict(replace(JOB, machine=TOY.scale(bandwidth=0.5)), grid).total >= before.total * (1 - 1e-12)


@pytest.mark.parametrize("capacity", [2**40, 2**30], ids=["roomy", "tight"])
def test_doubling_the_batch_never_lowers_utilisation(capacity):
    job = replace(JOB, machine=replace(TOY, memory=capacity))
    twice, several = replace(job, sequences=128), 0
    for grid in grids(16):
        before, after = predict(job, grid), predict(twice, grid)
        several += after.micro_batches > 1
        if after.micro_batches > 2 * before.micro_batches:
            # Gradients that wait for a second micro-batch leave no room for one of the old size.
            assert before.micro_batches == 1 and not predict(replace(twice, micro_batches=2), grid).fits
            after = predict(replace(twice, micro_batches=2), grid)
        assert after.hfu >= before.hfu * (1 - 1e-9), grid
    assert bool(several) == (capacity == 2**30)


def test_overlaps_hide_and_never_cost():
    switches = ("all_gather", "reduce_scatter", "all_reduce")
    gained = dict.fromkeys(switches, 0.0)
    for grid in SOME:
        on = predict(JOB, grid).total
        for switch in switches:
            off = predict(replace(JOB, **{switch: False}), grid).total
            assert off >= on * (1 - 1e-12)
            gained[switch] += off - on
    assert all(gain > 0 for gain in gained.values())


def test_where_cores_move_the_data_overlaps_hide_less():
    off = replace(JOB, all_gather=False, reduce_scatter=False, all_reduce=False)
    for grid in SOME:
        shares = [predict(replace(JOB, machine=replace(TOY, overlap=share)), grid).total for share in (1, 0.5, 0)]
        assert shares == sorted(shares)
        assert shares[2] == pytest.approx(predict(off, grid).total, rel=1e-12)


def test_collectives_of_a_kind_may_cost_more_than_a_gather():
    dear = replace(TOY, relative_cost={"reduce_scatter": 3.0, "all_reduce": 2.0, "all_to_all": 4.0})
    links = Links(dear, Grid(x=4))
    assert links.seconds("all_gather", ("x",), 1e6) == pytest.approx(10e-6 + 3e-6 + 30e-6)
    assert links.seconds("reduce_scatter", ("x",), 1e6) == pytest.approx(10e-6 + 3e-6 + 3 * 30e-6)
    assert links.seconds("all_reduce", ("x",), 4e6) == pytest.approx(10e-6 + 6e-6 + 2 * 60e-6)
    assert links.seconds("all_to_all", ("x",), 4e6) == pytest.approx(10e-6 + 3e-6 + 4 * 30e-6)


def test_latencies_of_a_kind_may_be_measured():
    """A factor for the 13 us of a gather by 4 ranks, whatever the steps of the kind; a tree is not thought of."""
    measured = {"reduce_scatter": 2.0, "all_reduce": 0.5, "all_to_all": 4.0}
    for links in (Links(replace(TOY, relative_latency=measured), Grid(x=4)), Links(TOY, Grid(x=4))):
        assert links.seconds("all_gather", ("x",), 1e6, 2) == pytest.approx(2 * 13e-6 + 30e-6)
    links = Links(replace(TOY, relative_latency=measured, relative_cost={"all_reduce": 2.0}), Grid(x=4))
    assert links.seconds("reduce_scatter", ("x",), 1e6, 3) == pytest.approx(3 * 2 * 13e-6 + 30e-6)
    assert links.seconds("all_reduce", ("x",), 4e6, 2) == pytest.approx(2 * 0.5 * 13e-6 + 2 * 60e-6)
    assert links.seconds("all_to_all", ("x",), 4e6) == pytest.approx(4 * 13e-6 + 30e-6)
    far = Links(replace(TOY, relative_latency=measured), Grid(data=4096))
    # Of 4,095 steps 1,023 cross between nodes.
    ring = 10e-6 + 1023 * 5e-6 + 3072 * 1e-6
    assert far.seconds("all_reduce", ("data",), 4) == pytest.approx(0.5 * ring, rel=1e-6)


def test_checkpointing_trades_time_for_memory():
    grid = Grid(z=4, x=2, y=2)
    on, off = predict(JOB, grid), predict(replace(JOB, checkpointing=False), grid)
    assert on.total > off.total and on.memory.activations < off.memory.activations
    assert on.hfu > on.mfu and off.hfu == off.mfu


CHANGED = [
    ("starcoder2", {"use_bias": False}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("granite", {"attention_bias": True, "mlp_bias": True}),
    ("smollm3", {"attention_bias": True, "mlp_bias": True}),
    ("gemma", {"attention_bias": True}),
    ("gpt2", {"n_inner": 40}),
    ("opt", {"tie_word_embeddings": False}),
]


@pytest.mark.parametrize(("kind", "changes"), [*((kind, {}) for kind in FAMILIES), *CHANGED])
def test_a_config_gives_the_parameters_of_the_model(kind, changes, tmp_path):
    sizes = dict(hidden_size=48, intermediate_size=40, num_hidden_layers=3, num_attention_heads=6, vocab_size=131)
    sizes |= dict(max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    if kind not in ("gpt2", "opt"):
        sizes |= dict(num_key_value_heads=3)
    if kind.startswith(("gemma", "qwen3")):
        sizes |= dict(head_dim=10)
    if kind == "gpt2":
        sizes = dict(n_embd=48, n_layer=3, n_head=6, vocab_size=131, n_positions=64)
    if kind == "opt":
        sizes |= dict(ffn_dim=40, word_embed_proj_dim=48)
    config = AutoConfig.for_model(kind, **sizes | changes)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert load_shape(str(tmp_path)).parameters() == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("kind", ["llama", "mistral", "starcoder2", "phi3", "qwen2", "qwen3", "gemma2", "gemma3_text"])
def test_a_config_gives_the_windows_of_the_model(kind, written, tmp_path):
    """As Transformers' modules have them; also where config.json says nothing of layers, as older ones do not."""
    sizes = dict(hidden_size=48, intermediate_size=40, num_hidden_layers=8, num_attention_heads=6, vocab_size=131)
    sizes |= dict(num_key_value_heads=3, pad_token_id=0, bos_token_id=1, eos_token_id=2, sliding_window=32)
    sizes |= dict(use_sliding_window=True, max_window_layers=5) if kind.startswith("qwen") else {}
    config = AutoConfig.for_model(kind, **sizes)
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    text = json.loads(file.read_text())
    if not written:
        text.pop("layer_types", None)
    file.write_text(json.dumps(text))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    attention = [layer.self_attn for layer in model.model.layers]
    # Modules of some types read it from the config.
    windows = [
        getattr(module, "sliding_window", config.sliding_window if kind != "llama" else 0) for module in attention
    ]
    windows = [window or 0 for window in windows]
    shape = load_shape(str(file))
    assert [layer.blocks[0].window for layer, count in shape.runs for _ in range(count)] == windows
    assert any(windows) == (kind != "llama") and shape.parameters() == sum(each.numel() for each in model.parameters())
    assert shape.max_positions == config.max_position_embeddings


def test_windows_are_counted_as_windows():
    """Each query has its causal mask's keys, at most as many as the window; FLOPs and seconds follow."""
    seq, window = 4096, 512
    block = replace(LLAMA.attention, window=window)
    exact = sum(min(query + 1, window) for query in range(seq)) / seq
    assert block.keys(seq) == pytest.approx(exact, rel=2e-3)
    assert LLAMA.attention.keys(seq) == block.keys(window) * seq / window == seq / 2
    slides = replace(LLAMA, windows=(window, 0, window, 0))
    assert [count for _, count in slides.runs] == [1, 1, 1, 1] and slides.parameters() == LLAMA.parameters()
    full = LLAMA.flops(seq) - LLAMA.flops(1)
    assert slides.flops(seq) - LLAMA.flops(1) == pytest.approx(full * (0.5 + 0.5 * 2 * exact / seq), rel=1e-2)
    step, free = Step(rows=4, seq=seq), replace(TOY, kernel=1e-9)
    rates = [replace(free, attention={"": (rate, rate)}) for rate in (1e12, 1e30)]
    seconds = [
        [compute.Compute(LLAMA, machine, Grid(), step).attention(each, 1)[0] for machine in rates]
        for each in (LLAMA.attention, block)
    ]
    (every, moved), (few, _) = seconds
    assert (few - moved) / (every - moved) == pytest.approx(exact / (seq / 2), rel=3e-3)
    with pytest.raises(ValueError, match="3 windows are not those of 4 layers"):
        replace(LLAMA, windows=(1, 2, 3))


def test_models_of_the_paper_have_their_sizes():
    for name, (layers, hidden, _) in GPTS.items():
        billions = load_shape(name).parameters() / 1e9
        assert billions == pytest.approx(float(name[4:-1]), rel=0.06)
        assert billions > 12 * layers * hidden**2 / 1e9


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "it holds no keys"),
        ({"model_type": "mamba"}, "model_type is 'mamba'; the planner knows llama"),
        ({"model_type": "llama", "hidden_size": 8}, "it has no num_hidden_layers or n_layer"),
        ({"model_type": "llama", "hidden_size": "8"}, "hidden_size is '8', but it is a whole number"),
    ],
)
def test_wrong_configs_are_refused(config, message, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_shape(str(file))


def test_a_missing_model_names_what_there_is():
    with pytest.raises(ValueError, match="there is no model 'gpt-9b': give gpt-5b"):
        load_shape("gpt-9b")


def test_an_adapter_is_refused_with_what_to_plan_instead(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds an adapter: give its base model, and the adapter"):
        load_shape(str(tmp_path))


def test_every_machine_has_a_source_for_every_number():
    names = known_machines()
    assert {"perlmutter", "frontier", "alps", "dgx-a100", "dgx-h100", "hgx-h800", "mi300x", "b200-nvl72"} < set(names)
    for name in names:
        machine = load_machine(name)
        assert machine.name == name and machine.peak_flops > machine.gemm_flops > 1e14
        assert machine.bandwidth(1, 2) > machine.bandwidth(machine.gpus_per_node, 2) > 1e9
        assert all(len(source) > 10 for source in machine.sources.values())


def test_the_authors_database_is_looked_up_and_never_interpolated():
    frontier = load_machine("frontier")
    table = {(1, 2): 129, (1, 4): 52, (1, 8): 135, (2, 2): 50, (2, 4): 72, (4, 2): 36}
    assert {key: frontier.bandwidth(*key) / 1e9 for key in table} == table
    assert [frontier.bandwidth(stride, 16) / 1e9 for stride in (1, 2, 4, 8, 512)] == [40, 20, 10, 5, 5]
    perlmutter = load_machine("perlmutter")
    assert [perlmutter.bandwidth(stride, 16) / 1e9 for stride in (1, 2, 4, 64)] == [80, 40, 20, 20]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inter_gbs": 0}, "inter_gbs is 0, but it is a number above 0"),
        ({"memory_gib": "64"}, "memory_gib is '64'"),
        ({"units": 1.5}, "units is 1.5, but it is a whole number"),
        ({"sources": {}}, "sources says nothing of gpus_per_node"),
        ({"sources": "a data sheet"}, "sources is 'a data sheet', but it maps keys"),
        ({"gemm_fraction": 72}, "gemm_fraction is 72, but it is a number above 0 and at most 1"),
        ({"gemm_by_size": {"64": 90}}, "gemm_by_size.64 is 90, but it is a number above 0 and at most 1"),
        ({"latency_us": {"base": 1}}, "latency_us is"),
        ({"intra_gbs": {"1x16": 5}}, "intra_gbs has the key '1x16'"),
        ({"intra_gbs": {}}, "intra_gbs is empty"),
        ({"gemm_by_size": {"big": 1}}, "gemm_by_size is"),
        ({"overlap": 1.5}, "overlap is 1.5, but it is a share from 0 to 1"),
        ({"relative_cost": {"gather": 2}}, "relative_cost is .*it maps kinds of collectives .all_gather"),
        ({"relative_cost": {"all_reduce": 0}}, "relative_cost.all_reduce is 0"),
        ({"relative_latency": [2]}, "relative_latency is .2., but it maps kinds of collectives"),
        ({"relative_latency": {"all_reduce": "2"}}, "relative_latency.all_reduce is '2'"),
        ({"kernel_us": -1}, "kernel_us is -1"),
        ({"speed": 3}, "speed is unknown"),
        ({"slowdown": -0.1}, "slowdown is -0.1, but it is a share from 0 to 1"),
        ({"attention_tflops": {"flash2": 200}}, "attention_tflops is .*kernels to the keys forward and backward"),
        ({"attention_tflops": {"flash2": {"forward": 1, "backward": 0}}}, "attention_tflops.flash2.backward is 0"),
    ],
)
def test_wrong_machine_files_are_refused(change, message, tmp_path):
    text = json.loads((FOLDER / "frontier.json").read_text())
    text["sources"] |= dict.fromkeys(OPTIONAL + FACTORS, "here")
    file = tmp_path / "me@here.json"  # no speed of links
    file.write_text(json.dumps(text | change))
    with pytest.raises(ValueError, match=message):
        load_machine(str(file))
    with pytest.raises(ValueError, match="there is no machine 'fronteer'"):
        load_machine("fronteer")


def test_attention_takes_as_long_as_its_kernel():
    """Half of 4 T S a forward, 2.5 times that backward, at the speeds of the machine's kernel; rotation beside it."""
    step = Step(rows=2, seq=4096)
    toy = replace(TOY, kernel=1e-9)  # as good as none: the smallest of these parts takes longer
    machine = replace(toy, attention={"fast": (80e12, 40e12), "slow": (20e12, 10e12)})

    def seconds(kernel, on=machine):
        found = compute.Compute(LLAMA, on, Grid(), step, attention=kernel)
        return found.attention(LLAMA.attention, 1)

    flops = 2 * step.rows * step.seq**2 * LLAMA.hidden
    for there, back, kernel in ((80e12, 40e12, None), (80e12, 40e12, "fast"), (20e12, 10e12, "slow")):
        forward, backward = seconds(kernel)
        rotated, rotated_back = seconds("free", replace(toy, attention={"free": (1e30, 1e30)}))
        assert forward - rotated == pytest.approx(flops / there, rel=1e-3)
        assert backward - rotated_back == pytest.approx(2.5 * flops / back, rel=1e-3)
    # A file that names no kernel: shares of the fastest product.
    assert seconds(None, toy) == seconds("shares", replace(toy, attention={"shares": (71e12, 62e12)}))
    with pytest.raises(
        ValueError, match="toy has no speed of the attention kernel 'flash9'; its file knows fast, slow"
    ):
        seconds("flash9")


def test_a_rank_of_context_attends_as_long_as_one_with_whole_rows():
    """A rank attends to an eighth of the heads of 8 rows, in place of all heads of one, and copies what travels."""
    whole, divided = Grid(z=8), Grid(z=8, context=8)
    alone, shared = (
        compute.Compute(LLAMA, TOY, grid, Step(rows=rows, seq=4096)) for grid, rows in ((whole, 1), (divided, 8))
    )
    assert shared.tokens == alone.tokens == 4096
    extra = [
        there - here
        for here, there in zip(alone.attention(LLAMA.attention, 1), shared.attention(LLAMA.attention, 1), strict=True)
    ]
    # q, k, v and the output, 16 + 2 * 8 + 16 heads of 64, in bf16: read and written twice.
    assert extra == pytest.approx([4 * 4096 * 48 * 64 * 2 / 0.8e12] * 2)
    for layer, _ in LLAMA.kinds:
        for one, other in zip(alone.groups(layer), shared.groups(layer), strict=True):
            assert one == other or one.attends
    assert alone.head() == shared.head()
    # A third of a row: 1,366 positions, of which the last rank fills up two.
    assert compute.Compute(LLAMA, TOY, Grid(z=3, context=3), Step(rows=2, seq=4096)).tokens == 2 * 1366


def test_hidden_communication_slows_what_hides_it():
    """As many seconds as all communication minus what is exposed, times the machine's slowdown."""
    grid = Grid(data=2, z=4, x=2)
    for slowdown in (0.0, 0.25):
        found = predict(replace(JOB, machine=replace(TOY, slowdown=slowdown)), grid)
        hidden = sum(found.traffic.values()) - found.exposed
        assert hidden > 0.1 * sum(found.traffic.values())
        assert found.seconds["slowdown"] == pytest.approx(slowdown * hidden)


def test_the_last_layers_are_kept():
    """As the engine keeps them: of two narrow and two wide layers the wide ones, in traffic, seconds and memory."""
    wide = replace(LLAMA, intermediate=4 * LLAMA.intermediate)
    sizes = {"hidden": LLAMA.hidden, "vocab": LLAMA.vocab, "final": LLAMA.final}
    shape = ModelShape(runs=((LLAMA.kinds[0][0], 2), (wide.kinds[0][0], 2)), **sizes)
    grid, job = Grid(z=4), replace(JOB, checkpointing=False, micro_batches=1)
    alone = {2: replace(job, shape=wide), 4: replace(job, shape=LLAMA)}
    found = [predict(replace(job, shape=shape, keep_gathered=count), grid) for count in (0, 2, 4)]
    for count, fewer, more in ((2, *found[:2]), (4, *found[1:])):
        none, two = (predict(replace(alone[count], keep_gathered=kept), grid) for kept in (0, 2))
        assert fewer.traffic["z"] - more.traffic["z"] == pytest.approx(none.traffic["z"] - two.traffic["z"])
        steps = [(each.job.shape, grid, Candidate(each.job, grid, 1).step) for each in (fewer, more, none, two)]
        held = [memory(*each).activations for each in steps]
        assert held[1] - held[0] == held[3] - held[2] > 0
        sent = [volumes(*each).bytes_sent(axes=("z",)) for each in steps]
        assert sent[0] - sent[1] == sent[2] - sent[3] > 0


@pytest.mark.parametrize("checkpointing", [True, False])
def test_kept_layers_gather_once(checkpointing):
    """Layers whose gathered weights are kept: seconds over z are those of the ledger, and none is gathered again."""
    job = replace(JOB, checkpointing=checkpointing, keep_gathered=1)
    found = predict(job, Grid(z=4, x=2))
    step = Candidate(job, found.grid, found.micro_batches).step
    links = Links(TOY, found.grid)
    ledger = volumes(LLAMA, found.grid, step).chosen(axes=("z",))
    assert found.traffic["z"] == pytest.approx(sum(links.entry_seconds(key, volume) for key, volume in ledger))
    every = predict(replace(job, keep_gathered="all", micro_batches=found.micro_batches), found.grid)
    none = predict(replace(job, keep_gathered="none", micro_batches=found.micro_batches), found.grid)
    assert every.traffic["z"] < found.traffic["z"] < none.traffic["z"]
    assert every.memory.total > found.memory.total > none.memory.total


def test_nodes_may_be_joined_by_other_links():
    """AWS p4d has 400 Gb/s where DGX A100 has 1,600: a quarter of the bandwidth between nodes, all else the same."""
    dgx, cloud = load_machine("dgx-a100-40"), load_machine("dgx-a100-40@400")
    assert cloud == replace(dgx, name="dgx-a100-40@400", inter=dgx.inter / 4) and cloud.inter == 40e9
    for name in ("dgx-a100@", "dgx-a100@fast", "dgx-a100@0"):
        with pytest.raises(ValueError, match=f"{name} is no machine: write the Gb/s of a node after @"):
            load_machine(name)


@pytest.mark.parametrize("grid", [Grid(z=4), Grid(x=2, y=2)], ids=str)
def test_adapters_take_less_of_everything(grid):
    """No dW of the base, so 4 FLOPs a weight and token in the place of 6; no gradients nor moments of it, and nothing
    summed over z; adapters themselves take a little."""
    job = replace(JOB, machine=replace(TOY, kernel=1e-9), checkpointing=False)
    every = predict(job, grid)
    few, more = (predict(replace(job, lora=rank), grid) for rank in (1, 64))
    weights = LLAMA.weight_flops + 2 * LLAMA.vocab * LLAMA.hidden
    assert every.job.model_flops() - few.job.model_flops() == JOB.tokens * weights
    assert few.seconds["gemm"] < 0.9 * every.seconds["gemm"] and few.seconds["gemm"] < more.seconds["gemm"]
    assert few.total < more.total < every.total and few.memory.total < more.memory.total
    assert few.memory.states < more.memory.states and few.memory.states < every.memory.states / 3
    size = 64 * sum(linear.rows + linear.cols for block in LLAMA.kinds[0][0].blocks for linear in block.linears)
    assert more.memory.trained == LLAMA.layers * size == more.memory.gradients / 4
    assert more.memory.by_kind()["optimizer"] == 8 * more.memory.trained
    layer, _ = few.layers[0]
    assert not any(layer.reduces) and any(layer.gathers) == (grid.z > 1)


def test_a_base_of_4_bits_takes_less_memory_and_traffic_and_some_time():
    """Of the layers' Linears 36 bytes, or 33, of 64 numbers, held and gathered; numbers are made in each pass."""
    job = replace(JOB, machine=replace(TOY, kernel=1e-9), checkpointing=False, lora=16)
    grid = Grid(z=4, x=2)
    full, four, double = (predict(replace(job, base=base), grid) for base in ("full", "4bit", "4bit-double"))
    elements = LLAMA.weight_flops // 2 // grid.size  # of the Linears on one rank, all of which divide
    assert full.memory.states - four.memory.states == elements * job.param_bytes - elements * 36 // 64
    assert four.memory.states - double.memory.states == elements * 3 // 64
    assert full.memory.activations == four.memory.activations
    assert double.memory.gathered < four.memory.gathered < full.memory.gathered
    for layers in zip(full.layers, four.layers, double.layers, strict=True):
        gathers = [sum(layer.gathers) for layer, _ in layers]
        assert gathers[0] > gathers[1] > gathers[2] > 0
    assert four.seconds["gemm"] > full.seconds["gemm"]
    assert "whole blocks of 64" in refusal(replace(job, base="4bit"), Grid(x=LLAMA.intermediate // 64 * 2))


def test_published_runs_are_predicted():
    """docs/planning.md: classes of runs, and what their mean errors may be."""
    outcomes = [published.outcome(run) for run in published.runs()]
    by_kind = published.by_class(outcomes)
    assert {kind: len(found) for kind, found in by_kind.items()} == {
        "FSDP, up to 8,192 tokens": 174,
        "FSDP, beyond 8,192 tokens": 43,
        "FSDP and TP, up to 8,192 tokens": 18,
        "with pipelines": 18,
        "with pipelines, over context": 1,
    }
    errors = {kind: statistics.mean(abs(each.error) for each in found) for kind, found in by_kind.items()}
    assert errors["FSDP, up to 8,192 tokens"] < 0.10
    assert errors["FSDP, beyond 8,192 tokens"] < 0.15
    assert errors["FSDP and TP, up to 8,192 tokens"] < 0.15
    assert errors["with pipelines"] < 0.15
    assert errors["with pipelines, over context"] < 0.15  # a point, of which no interval is made
    # Table 1 of arXiv 2104.04473, whose micro-batches and stages are known.
    exact = [abs(each.error) for each in by_kind["with pipelines"] if each.run.source == "megatron-2021"]
    assert len(exact) == 6 and max(exact) < 0.08 and statistics.mean(exact) < 0.03
    # What a plan says of how far it may be off.
    found = published.spreads(outcomes).items()
    spreads = {key: (round(low, 2), round(high, 2), count) for key, (low, high, count) in found}
    assert spreads == {key: (each.low, each.high, each.runs) for key, each in confidence.SPREADS.items()}
    margins = tuple(round(margin, 2) for margin in published.margins(outcomes))
    assert margins == (confidence.MARGIN_SAME, confidence.MARGIN_OTHER)
    # The number of parameters that the authors print: shapes are read right.
    assert published.shape("mpt-7b", 2048).parameters() == 6_658_859_008
    assert published.shape("mpt-13b", 32768).parameters() == 13_011_240_960
    for model in published.GPT:
        billions = float(model.split("-")[1].removesuffix("b"))  # rounded to two digits
        assert published.shape(model, 2048).parameters() == pytest.approx(billions * 1e9, rel=0.035), model
