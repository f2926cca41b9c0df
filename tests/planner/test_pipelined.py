"""Steps on grids with a pipeline: what ranks have, what that takes and needs, and which pipelines a search finds."""

import itertools
import json
from dataclasses import replace
from functools import partial

import pytest
import yaml

from hf_axonn.cli.main import main
from hf_axonn.config import AxonnConfig
from hf_axonn.planner.candidate import Candidate
from hf_axonn.planner.dense import DenseShape, load_shape
from hf_axonn.planner.job import Job
from hf_axonn.planner.machine import load_machine
from hf_axonn.planner.memory import kept_bytes, memory
from hf_axonn.planner.predict import predict
from hf_axonn.planner.search import PIPES, grids, plan
from hf_axonn.planner.settings import EXACT, keep_weights, parse_fixed
from hf_axonn.planner.stages import divide_model, layer_costs
from hf_axonn.planner.time.links import Links
from hf_axonn.topology.grid import Grid
from tests.helpers.calls import calls_of


LLAMA = DenseShape(layers=16, hidden=4096, heads=32, kv_heads=8, intermediate=14336, vocab=32000)
JOB = Job(
    shape=LLAMA, machine=load_machine("dgx-a100"), sequences=64, seq=2048, checkpointing=False, pipeline="1f1b",
    stages_per_rank=1, micro_batches=16,
)  # fmt: skip
COMMAND = "plan --model gpt-40b --machine dgx-a100 --batch-sequences 512 --seq 2048 --gpus 64 --top 3".split()


def test_ranks_have_all_of_the_model_between_them():
    for per_rank in (1, 2):
        found = divide_model(LLAMA, 4, per_rank, 2048)
        assert [index for stage in found.layers for index in stage] == list(range(16))
        assert sum(stack.depth for stack in found.held) == 16
        assert [(stack.begins, stack.ends) for stack in found.held] == [
            (True, False),
            *2 * [(False, False)],
            (False, True),
        ]
        assert sum(stack.parameters() for stack in found.held) == LLAMA.parameters()
    tied = load_shape("gpt-5b")
    held = divide_model(tied, 4, 1, 2048).held
    assert sum(stack.parameters() for stack in held) == tied.parameters() + tied.vocab * tied.hidden
    # Learned positions are with the embedding, the last norm with the head.
    assert held[0].parameters() - held[1].parameters() * held[0].depth / held[1].depth == pytest.approx(
        (tied.vocab + tied.tables[0].rows) * tied.hidden
    )


def test_the_head_weighs_by_its_flop():
    costs, head = layer_costs(LLAMA, 2048)
    # 2 FLOP a weight and token, and attention over half of the square.
    weights = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    assert costs == 16 * [2 * weights + 2 * 2048 / 2 * 2 * 4096]
    assert head == 2 * 32000 * 4096
    wide = replace(LLAMA, vocab=256000)  # the head costs as much as 4.7 layers
    assert [len(stage) for stage in divide_model(wide, 4, 1, 2048).layers] == [5, 5, 5, 1]


def test_a_step_is_that_of_the_rank_that_ends_last():
    grid = Grid(pipe=4, x=4)
    found, alone = predict(JOB, grid), predict(JOB, Grid(x=4))
    # Products of rank 0 are those of its four layers, as without a pipeline.
    assert found.pipelined.rank == 0 and found.pipelined.simulated
    assert found.seconds["gemm"] == pytest.approx(alone.seconds["gemm"] * 4 / 16)
    assert found.total == pytest.approx(sum(found.seconds.values()))
    # Were the stages equal and links free, three micro-batches of 16 + 3 would be bubble.
    work = found.total - found.seconds["bubble"] - found.seconds["optimizer"] - found.seconds["exposed data"]
    assert found.seconds["bubble"] / (work + found.seconds["bubble"]) > 3 / 19
    assert found.pipelined.bubble == pytest.approx(3 / 19, abs=0.07)  # the last stage has the head
    assert found.pipelined.in_flight == (4, 3, 2, 1)
    more = predict(replace(JOB, micro_batches=64), grid)
    assert more.pipelined.bubble < 0.6 * found.pipelined.bubble
    zero = predict(replace(JOB, pipeline="zero_bubble"), grid)
    assert zero.pipelined.bubble < 0.8 * found.pipelined.bubble
    two = predict(replace(JOB, pipeline="interleaved", stages_per_rank=2), grid)
    assert two.pipelined.bubble < 0.75 * found.pipelined.bubble and two.pipelined.in_flight[0] == 4 + 2 * 3 + 1


@pytest.mark.parametrize("pipeline", ["1f1b", "gpipe"])
def test_memory_is_of_the_own_layers_and_of_what_is_in_flight(pipeline):
    grid, job = Grid(pipe=4, x=4), replace(JOB, pipeline=pipeline)
    step = Candidate(job, grid, 16).step
    first, *_, last = divide_model(LLAMA, 4, 1, 2048).held
    needed = [memory(stack, Grid(x=4), step) for stack in (first, last)]
    flights = (4, 1) if pipeline == "1f1b" else (16, 16)
    saved = [count * each.activations for count, each in zip(flights, needed, strict=True)]
    found = predict(job, grid).memory
    expected = [
        each.total - each.activations + held for each, held in zip(needed, saved, strict=True)
    ]  # activations are there at the worst moment
    assert found.total == pytest.approx(max(expected))
    assert needed[0].logits == needed[0].head == needed[1].embedding == 0 < needed[1].logits
    assert needed[0].parameters + needed[1].parameters < memory(LLAMA, Grid(x=4), step).parameters


def test_weight_gradients_that_come_later_keep_what_they_need():
    grid = Grid(pipe=4, x=4)
    held = {
        name: predict(replace(JOB, pipeline=name, checkpointing=True), grid).memory for name in ("1f1b", "zero_bubble")
    }
    assert held["zero_bubble"].activations > 2 * held["1f1b"].activations


def test_gathers_are_made_once_a_step_if_they_are_kept():
    grid = Grid(pipe=2, z=8)
    job = replace(JOB, micro_batches=8, machine=load_machine("dgx-a100@100").scale(bandwidth=0.05))
    again, once = (predict(replace(job, keep_gathered=keep), grid) for keep in ("none", "all"))
    assert once.seconds["exposed z"] < 0.75 * again.seconds["exposed z"]
    stack = again.pipelined.held
    kept = kept_bytes(stack, grid, Candidate(replace(job, keep_gathered="all"), grid, 8).step)
    weights = sum(weight.elements for layer, count in stack.runs for weight in count * layer.weights)
    assert kept == 2 * weights
    assert keep_weights(again, ("keep_gathered",)).job.keep_gathered == "all"
    with pytest.raises(ValueError, match="keep_gathered is 3: with a pipeline it is all, none or recomputed"):
        predict(replace(job, keep_gathered=3), grid)


def test_stages_are_joined_by_the_links_between_their_nodes():
    machine = load_machine("dgx-a100")
    near, far = Links(machine, Grid(pipe=4, x=2)), Links(machine, Grid(pipe=4, x=8))
    payload = 1e9
    inside = machine.base + machine.intra_step + payload / machine.bandwidth(2, 2)
    assert near.hops("pipe", payload) == pytest.approx([inside] * 4)
    # All eight ranks of a node send at once.
    outside = machine.base + machine.inter_step + payload / (machine.inter / 8)
    assert far.hops("pipe", payload) == pytest.approx([outside] * 4)
    between = Links(machine, Grid(pipe=4, x=4)).hops("pipe", payload)
    assert between[0] == between[2] < between[1] == between[3]
    found = predict(JOB, Grid(pipe=4, x=8))
    own = 2048 * 4 * 4096 // 8 * 4  # four sequences a micro-batch; a residual stream in float32
    assert found.pipelined.hop == pytest.approx(far.hops("pipe", own)[0])


def test_what_cannot_be_is_refused_with_numbers():
    for changes, grid, words in (
        ({"micro_batches": 2}, Grid(pipe=4), "needs 4 micro-batches for 4 stages, and there are 2"),
        ({"stages_per_rank": 2}, Grid(pipe=4), "the schedule 1f1b has one stage a rank, not 2: change one of the two"),
        ({"pipeline": "interleaved"}, Grid(pipe=4), "the schedule interleaved has 2 stages or more a rank, not 1"),
        ({}, Grid(pipe=32), "16 layers are fewer than pipe . stages_per_rank = 32 stages"),
        ({"lora": 8}, Grid(pipe=2), "pipelines are not planned with adapters alone"),
    ):
        with pytest.raises(ValueError, match=words):
            predict(replace(JOB, **changes), grid)
    with pytest.raises(ValueError, match="pipeline is '1f2b', but it is one of gpipe, 1f1b, interleaved, zero_bubble"):
        replace(JOB, pipeline="1f2b")
    with pytest.raises(ValueError, match="stages_per_rank is 0"):
        replace(JOB, stages_per_rank=0)
    three = predict(replace(JOB, pipeline=None, stages_per_rank=3), Grid(pipe=4))  # tried by no plan of itself
    assert three.job.pipeline_schedule == ("interleaved", 3)
    assert parse_fixed(["pipeline=interleaved", "stages_per_rank=2"]) == {
        "pipeline": "interleaved",
        "stages_per_rank": 2,
    }


def test_context_gives_a_pipeline_more_micro_batches():
    """Two rows on z = 8 give each rank two eighths with context = 8: as many tokens as in a quarter of one."""
    job = replace(JOB, sequences=16, seq=4096, pipeline="1f1b", stages_per_rank=1, micro_batches=8)
    grid = Grid(pipe=4, z=4, context=4)
    with pytest.raises(ValueError, match="16 sequences are not divisible by data . z = 32"):
        predict(job, Grid(pipe=4, z=32))
    divided, shorter = predict(job, grid), predict(replace(job, sequences=64, seq=1024), Grid(pipe=4, z=4))
    assert divided.pipelined.in_flight == shorter.pipelined.in_flight
    assert divided.pipelined.hop == shorter.pipelined.hop  # of own positions
    assert divided.memory.activations == pytest.approx(shorter.memory.activations, rel=0.1)
    assert divided.seconds["attention"] > 2 * shorter.seconds["attention"]  # to keys of whole rows
    assert divided.seconds["gemm"] == pytest.approx(shorter.seconds["gemm"])
    found = plan(replace(JOB, sequences=8, seq=4096, micro_batches=None), 32, pipes=[2])
    assert {entry.grid.context for entry in found.ranked} > {1}
    assert all(entry.grid.dp_size <= 8 for entry in found.ranked)


def test_no_pipeline_is_planned_unless_asked_for():
    assert PIPES == (1,)
    job = Job(shape=load_shape("gpt-40b"), machine=load_machine("dgx-a100"), sequences=512, seq=2048)
    assert {entry.grid.pipe for entry in plan(job, 64).ranked} == {1}
    assert {grid.pipe for grid in grids(64, [1, 2, 48, 64])} == {1, 2, 64}
    found = plan(job, 64, free=EXACT, pipes=None)
    best = found.best
    assert best.total == min(entry.total for entry in found.ranked) and {1, 2, 4} <= {
        entry.grid.pipe for entry in found.ranked
    }
    assert all(entry.grid.x * entry.grid.y <= 8 for entry in found.ranked if entry.grid.pipe > 1)
    assert all(entry.pipelined.simulated for entry in found.ranked[:10] if entry.pipelined)
    piped = next(entry for entry in found.ranked if entry.pipelined)
    assert piped.reorder(piped.order).total == pytest.approx(piped.total)
    assert piped.total == pytest.approx(
        predict(replace(piped.job, micro_batches=piped.micro_batches), piped.grid, order=piped.order).total
    )


def test_many_gpus_are_faster_with_a_pipeline():
    job = Job(shape=load_shape("gpt-175b"), machine=load_machine("dgx-a100"), sequences=1536, seq=2048)
    found = plan(job, 1536, free=EXACT, pipes=[1, 16])
    without = min(entry.total for entry in found.ranked if entry.grid.pipe == 1)
    assert found.best.grid.pipe > 1 and found.best.total < 0.85 * without


@pytest.mark.parametrize(
    ("gpus", "pipes", "ranked", "most"),  # 2.9, 7.1 and 12.4 million when this was written, 7.5 with more settings
    [
        (1024, [8], 30, 3_100_000),
        pytest.param(32768, [1, 32], 700, 7_800_000, marks=pytest.mark.slow),
        pytest.param(32768, None, 1000, 15_000_000, marks=pytest.mark.slow),
    ],
    ids=["one", "two", "any"],
)
def test_all_grids_with_a_pipeline_are_ranked_with_little_work(gpus, pipes, ranked, most):
    """Those of 32,768 GPUs under five seconds on one core (docs/planning.md); here counted in calls, which no load
    changes."""
    job = Job(shape=load_shape("gpt-320b"), machine=load_machine("frontier"), sequences=8192, seq=2048)
    plan(job, 64, pipes=pipes)  # imports, tables
    calls, found = calls_of(partial(plan, free=EXACT, pipes=pipes), job, gpus)
    assert found.best.grid.pipe > 1 and len(found.ranked) > ranked
    assert calls < most


def test_the_command_says_how_the_pipeline_lies(capsys):
    assert main([*COMMAND, "--pipe", "4"]) == 0
    printed = capsys.readouterr().out
    assert "pipe=4" in printed and "s for other stages" in printed and "\n  bubble " in printed
    lines = itertools.takewhile(
        lambda line: line[:1] in (" ", "#"), printed.partition("axonn_config:\n")[2].splitlines()
    )
    config = AxonnConfig.from_mapping(yaml.safe_load("\n".join(lines)))
    assert config.grid.pipe == 4 and sum(config.stage_layers) == 38
    assert " data pipe     z" in printed and "grid: {data: " in printed and "pipe: 4, z: " in printed
    assert main([*COMMAND, "--pipe", "4", "--json", "--fix", "pipeline=interleaved", "stages_per_rank=2"]) == 0
    first = json.loads(capsys.readouterr().out)["ranked"][0]
    assert first["grid"]["pipe"] == 4 and first["settings"]["pipeline"] == "interleaved"
    assert first["pipeline"]["stages_per_rank"] == 2 and sum(first["pipeline"]["layers"]) == 38
    assert 0 < first["pipeline"]["bubble"] < 0.5 and len(first["pipeline"]["in_flight"]) == 4
    assert first["step_seconds"] == pytest.approx(sum(first["seconds"].values()))
    assert main([*COMMAND, "--pipe", "2,x"]) == 2
    assert "--pipe is '2,x': write sizes such as 1,2,4,8, or any." in capsys.readouterr().err
    assert main([*COMMAND, "--pipe", "2", "--lora", "8"]) == 2
    assert "--pipe is not planned with --lora" in capsys.readouterr().err
    assert main([*COMMAND]) == 0
    assert "pipe" not in capsys.readouterr().out
