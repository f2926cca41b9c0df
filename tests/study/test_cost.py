"""training_scripts/study/recipe/cost.py: what steps are predicted to cost, counted by hand, and plans on machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hf_axonn.planner.dense import shape_from_config
from hf_axonn.planner.from_settings import make_job
from hf_axonn.planner.predict import predict
from hf_axonn.planner.search import plan
from hf_axonn.topology.grid import Grid
from hf_axonn_scripts.study.recipe import cost as module
from hf_axonn_scripts.study.recipe import planning
from hf_axonn_scripts.study.recipe.cost import cpu_speed
from hf_axonn_scripts.study.recipe.planning import plan_grid, plans_markdown
from hf_axonn_scripts.study.recipe.reader import read_recipe
from hf_axonn_scripts.study.recipe.steps import steps_of
from tests.helpers import ROOT
from tests.study.conftest import FOLDER


RECIPES = FOLDER / "recipes"
SPEED = 100e9
PER_FP32 = {"float32": 1.0, "bfloat16": 2.0}


@pytest.fixture
def cost(monkeypatch):
    """The module on a machine of a known speed."""
    monkeypatch.setattr(module, "cpu_speed", lambda precision: SPEED * PER_FP32[precision])
    return module


def steps(recipe):
    return {step.name: step for step in steps_of(recipe, Path("out"))}


def test_flops_of_a_training_step(cost, cpu):
    """6 a weight and token, where a tied embedding counts once, as head; 12 h of attention a key, layer and token."""
    model = cpu.model("1M")
    hidden, layers, mlp = 96, 6, 256
    weights = layers * (4 * hidden**2 + 3 * hidden * mlp) + cpu.vocabulary * hidden
    attention = 12 * layers * hidden * cpu.documents.length
    tokens = cpu.batch_sequences * cpu.documents.length
    found = cost.training(cpu, model)
    assert found.flops == tokens * (6 * weights + attention)
    assert found.layers == 2 * layers and found.steps == 1
    base = cost.training(cpu, model, 10, base=True)
    tokens = cpu.base_batch_sequences * cpu.base_length
    assert base.flops == 10 * tokens * (6 * weights + 12 * layers * hidden * cpu.base_length)
    assert base.layers == 20 * layers and base.steps == 10


def test_steps_of_a_run(cost, cpu):
    # 64 passages, 31 times in all buckets; two canaries as often; four steps on base text.
    assert cost.run_steps(cpu, cpu.model("1M")) == -(-(64 * 31 + 2 * 31 + 64) // 16)
    assert cost.run_steps(cpu, cpu.model("smollm2-135m")) == -(-(16 * 31 + 2 * 31 + 64) // 16)
    odd = replace(cpu, evaluation=replace(cpu.evaluation, canaries=3))  # 16, 8 and 4 times
    assert cost.run_steps(odd, cpu.model("1M")) == -(-(64 * 31 + 28 + 64) // 16)
    assert cost.base_steps(cpu) == -(-(2_000_000 // 256) // 8)
    twice = replace(cpu, base_training={**cpu.base_training, "num_train_epochs": 2})
    assert cost.base_steps(twice) == -(-2 * (2_000_000 // 256) // 8)


def test_asking_generates_token_by_token(cost, cpu):
    model, passages = cpu.model("1M"), 6 * 64
    assert cpu.longest_suffix == max(cpu.pilot.suffixes)
    found = cost.asking(cpu, model, passages)
    assert found.gathers == 6 * (1 + 50) and found.layers == 6 * found.gathers
    assert found.flops == 2 * passages * 128 * cost.shape_of(cpu, model).model_flops(128) / 3
    assert cost.asking(cpu, model, passages, positions=2).gathers == found.gathers / 2
    fixed = replace(cpu, pilot=None, documents=replace(cpu.documents, suffix=20))
    assert cost.asking(fixed, model, passages).gathers == 6 * (1 + 20)


def test_seconds_on_cpu(cost, cpu):
    """A launch, the passes at the measured speed, and what each layer and step takes beside them."""
    made = steps(cpu)
    step = made["train-3M-ordinary-s0"]
    found, model = cost.cost_of(step, cpu), cpu.model("3M")
    work = [
        cost.training(cpu, model, cost.run_steps(cpu, model)),
        cost.scoring(cpu, model, 2 * cpu.texts.held_out_tokens, precision="bfloat16"),
        cost.asking(cpu, model, 6 * 64, positions=2),
        cost.scoring(cpu, model, cost.CANARY_TEXTS * cost.CANARY_TOKENS, cost.CANARY_TOKENS),
    ]
    assert found.flops == pytest.approx(sum(each.flops for each in work))
    assert [each.precision for each in work] == ["bfloat16", "bfloat16", "float32", "float32"]
    products = sum(each.flops / (cost.EFFICIENCY * SPEED * PER_FP32[each.precision]) for each in work)
    layers = sum(each.layers for each in work) * cost.LAYER_SECONDS
    assert found.seconds == pytest.approx(
        cost.LAUNCH_SECONDS + products + layers + cost.run_steps(cpu, model) * cost.STEP_SECONDS
    )
    assert found.gpu_hours == 0 and found.disk_bytes > 4 * 2_936_560
    # Ranks of data and of z share the questions, those of x do not.
    on_four = cost.cost_of(made["train-3M-ordinary-s0-z2x2"], cpu)
    assert on_four == found
    on_x = cost.cost_of(step, replace(cpu, models=(replace(model, grid={"data": 1, "z": 1, "y": 1, "x": 2}),)))
    assert on_x.flops == found.flops and on_x.seconds > found.seconds


def test_every_step_costs_something(cost, cpu):
    costs = {name: cost.cost_of(step, cpu) for name, step in steps(cpu).items()}
    assert len(costs) > 80 and all(each.seconds > 0 for each in costs.values())
    launched = [name for name in costs if name.split("-")[0] in ("train", "ask", "pilot")]
    assert all(costs[name].flops > 0 for name in launched)
    assert costs["base-1M"] == costs["base-1M-k2"] and costs["train-1M-k4-s2"] == costs["train-1M-ordinary-s0"]
    # Both rates, on the largest bucket alone, and its questions.
    pilot, run = costs["pilot"], costs["train-30M-ordinary-s0"]
    assert run.flops < pilot.flops < 2 * run.flops
    assert costs["data-study"].disk_bytes > costs["data-smollm2-135m"].disk_bytes > 1e6


def test_cpu_takes_hours_not_days(cost, cpu, monkeypatch):
    """About three hours at what two cores of an EPYC 9004 multiply, and no step longer than an hour."""
    speeds = {"float32": 195e9, "bfloat16": 410e9}
    monkeypatch.setattr(cost, "cpu_speed", speeds.__getitem__)
    seconds = [cost.cost_of(step, cpu).seconds for step in steps(cpu).values()]
    assert 2 < sum(seconds) / 3600 < 4
    assert max(seconds) < 3600


def test_speed_is_measured():
    for precision in PER_FP32:
        assert 1e9 < cpu_speed(precision, 0.05) < 1e14


def test_a_cluster_is_planned(cost, sc24):
    """Steps take what `hf-axonn plan` says of them on the grid that it ranks first."""
    model = sc24.model("Llama-2-7B")
    config = {"model_type": "llama", **model.shape}
    job = make_job(
        "", "frontier", 128, 2048, read=lambda _: shape_from_config(config), checkpointing=True, micro_batches=1
    )
    best = plan(job, model.processes, order=("y", "x", "z", "data")).best
    assert cost.grid_of(sc24, model) == best.grid
    found = cost.cost_of(steps(sc24)["train-Llama-2-7B-k2-s0"], sc24)
    count = cost.run_steps(sc24, model)
    assert count == -(-(200 * 11 + 6400) // 128)
    assert found.seconds > count * best.total + cost.GPU_LAUNCH_SECONDS
    assert found.seconds < 1.5 * (count * best.total + cost.GPU_LAUNCH_SECONDS)
    assert found.gpu_hours == pytest.approx(found.seconds * model.processes / 3600)


def test_a_grid_of_the_recipe_holds(cost, sc24):
    model = replace(sc24.model("Llama-2-7B"), grid={"data": 1, "z": 4, "y": 1, "x": 4})
    assert cost.grid_of(sc24, model) == Grid(z=4, x=4)
    assert planning.predict_step(sc24, model).total == predict(planning.job_of(sc24, model), Grid(z=4, x=4)).total


def test_grid_on_cpu(cost, cpu):
    free = replace(cpu.model("10M"), grid=None)  # six heads
    assert cost.grid_of(cpu, replace(free, processes=2)) == Grid(data=2)
    six = replace(free, processes=6, config={**free.config, "intermediate_size": 954})
    assert cost.grid_of(cpu, six) == Grid(data=2, x=3)  # of 16 and 8 sequences, 6 ranks share none evenly
    with pytest.raises(ValueError, match=r"no grid of 7 ranks divides 8 sequences over data and the 6 heads of 10M"):
        cost.grid_of(cpu, replace(free, processes=7))


def test_plans_take_more_gpus_where_memory_asks_for_them(sc24):
    few = replace(sc24, models=(replace(sc24.model("Llama-3.1-405B"), processes=16),))
    found = plan_grid(few, few.models[0], "perlmutter")
    assert found.fits and found.grid.size > 64
    assert f"| Llama-3.1-405B | {found.grid.size} (of 16 none fits) |" in plans_markdown(few, ["perlmutter"])
    with pytest.raises(ValueError, match="there is no machine 'frontiers'"):
        plan_grid(sc24, sc24.models[0], "frontiers")


def test_plans_as_markdown(sc24):
    text = plans_markdown(sc24, ["frontier", "alps"])
    frontier, alps = text.split("**alps**")
    assert frontier.startswith("**frontier**\n\n| model |")
    for part in (frontier, alps):
        rows = [line for line in part.splitlines() if line.startswith("| ")]
        hours = {cells[1].strip(): cells for cells in (row.split("|") for row in rows)}
        model = sc24.models[0]
        found = plan_grid(sc24, model, part.partition("**")[2].partition("**")[0] or "alps")
        seconds = planning.run_steps(sc24, model) * found.total
        assert hours[model.name][7].strip() == f"{seconds / 3600:.2f}"
        assert len(rows) == 2 + len(sc24.models) + 1 and len({row.count("|") for row in rows}) == 1
        hours = [float(row.split("|")[-2].replace(",", "")) for row in rows[2:]]
        assert hours[-1] == pytest.approx(sum(hours[:-1]), abs=len(hours))


def test_the_plans_in_the_docs_are_what_the_command_prints(sc24):
    printed = plans_markdown(sc24, ["perlmutter", "frontier", "alps"])
    assert printed.strip() in (ROOT / "docs" / "study.md").read_text(encoding="utf-8")


def test_rivals_take_a_thirtieth_of_cpu_and_a_pass_for_each_model_that_they_read(cost):
    """docs/study.md has 1.8e15 FLOPs for cpu.yaml."""
    recipe = read_recipe(RECIPES / "rivals.yaml")
    assert len(recipe.runs) == 30 and {run.seed for run in recipe.runs} == {0, 1}
    every = steps(recipe)
    flops = {
        run.loss: cost.cost_of(every[f"train-3M-{run.name}"], recipe).flops
        for run in recipe.runs_of(recipe.model("3M"))
    }
    assert flops["tfidf"] == flops["k4"] == flops["ordinary"]
    training = cost.training(recipe, recipe.model("3M"), cost.run_steps(recipe, recipe.model("3M"))).flops
    assert flops["entrodrop"] - flops["k4"] == pytest.approx(training / 3)
    assert flops["ngram"] - flops["k4"] == pytest.approx(2 * training / 3)
    assert sum(cost.cost_of(step, recipe).flops for step in every.values()) == pytest.approx(1.8e15 / 30, rel=0.15)
    once = replace(recipe, evaluation=replace(recipe.evaluation, curve_points=0))
    more = flops["k4"] - cost.cost_of(steps(once)["train-3M-k4-s0"], once).flops
    tokens = 3 * recipe.texts.held_out_tokens + 5 * 4 * 32 * 64  # evaluations on the way; start and four points
    assert more == pytest.approx(cost.scoring(recipe, recipe.model("3M"), tokens).flops)
