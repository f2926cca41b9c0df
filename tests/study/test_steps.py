"""training_scripts/study/recipe/steps.py: which steps there are, their order, and what makes one be done again."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest

from hf_axonn_scripts.study.recipe.definition import Documents, Run
from hf_axonn_scripts.study.recipe.reader import read_recipe
from hf_axonn_scripts.study.recipe.steps import base_of, steps_of, tokenizer_of
from tests.study.conftest import FOLDER


OUTPUT = Path("/somewhere/out")


@pytest.fixture(scope="module")
def recipe(cpu):
    return cpu


def by_name(recipe, output=OUTPUT):
    return {step.name: step for step in steps_of(recipe, output)}


def changed(before, after):
    """Names of the steps that are in both studies with different keys."""
    old, new = by_name(before), by_name(after)
    return {name for name in old.keys() & new.keys() if old[name].key != new[name].key}


def test_every_step_stands_behind_those_it_reads_from(recipe):
    known: set[str] = set()
    for step in steps_of(recipe, OUTPUT):
        assert set(step.after) <= known, step.name
        known.add(step.name)


def test_the_steps_of_the_recipe(recipe):
    steps = by_name(recipe)
    assert {"texts", "tokenizer", "data-study", "pilot", "report"} <= steps.keys()
    for model in recipe.models:
        assert {f"base-{model.name}", f"ask-{model.name}", f"utility-{model.name}"} <= steps.keys()
        assert (f"data-{model.name}" in steps) == (model.config is None)
    trained = [step for step in steps.values() if step.kind == "train"]
    assert {(step.run.model, step.run.name) for step in trained} == {(run.model, run.name) for run in recipe.runs}
    assert {step.name for step in steps.values() if step.kind == "base"} == {
        *(f"base-{model.name}" for model in recipe.models),
        *(f"base-{model}-{loss}" for model, loss in recipe.base_losses),
    }


def test_utility_is_measured_on_the_grid_of_a_cluster(recipe):
    for machine in ("cpu", "frontier"):
        for name, step in by_name(replace(recipe, machine=machine)).items():
            if step.kind == "utility":
                processes = recipe.model(step.model).processes
                assert step.processes == (1 if machine == "cpu" else processes), name
                assert step.launched == (machine != "cpu"), name


def test_what_each_kind_reads(recipe):
    steps = by_name(recipe)
    run = next(run for run in recipe.runs if run.loss != "ordinary")
    train = steps[f"train-{run.model}-{run.name}"]
    assert {f"base-{run.model}", "data-study", "pilot"} <= set(train.after)
    assert train.name in steps[f"utility-{run.model}"].after
    assert set(steps["report"].after) == {step.name for step in steps.values() if step.kind not in ("data", "report")}
    other = next(model for model in recipe.models if model.config is None)
    # The tokenizer of a model that a package brings is in its directory.
    assert f"base-{other.name}" in steps[f"data-{other.name}"].after
    assert f"data-{other.name}" in steps[f"ask-{other.name}"].after
    # The pilot needs one base, and comes before the other bases.
    names = list(steps)
    assert names.index("pilot") < min(
        names.index(f"base-{model.name}") for model in recipe.models if model.name != recipe.pilot.model
    )


def test_a_launched_step_says_how_it_is_launched(recipe):
    steps = by_name(recipe)
    on_another_grid = next(run for run in recipe.runs if run.grid)
    step = steps[f"train-{on_another_grid.model}-{on_another_grid.name}"]
    assert dict(step.grid) == dict(on_another_grid.grid)
    assert step.processes == 4 and step.launched
    usual = next(run for run in recipe.runs if not run.grid)
    assert steps[f"train-{usual.model}-{usual.name}"].processes == recipe.model(usual.model).processes == 2
    model, loss = recipe.base_losses[0]
    assert steps[f"base-{model}-{loss}"].launched
    packaged = next(model for model in recipe.models if model.config is None)
    for name in ("texts", "report", f"utility-{usual.model}", f"base-{packaged.name}"):
        assert not steps[name].launched and steps[name].processes == 1


def test_no_two_steps_write_the_same_file(recipe):
    outputs = [path for step in steps_of(recipe, OUTPUT) for path in step.outputs]
    assert len(set(outputs)) == len(outputs)
    assert not [(a, b) for a in outputs for b in outputs if a != b and a.is_relative_to(b)]


def test_nothing_changes_if_nothing_changes(recipe):
    assert changed(recipe, read_recipe(FOLDER / "recipes" / "cpu.yaml")) == set()
    # Nor if it is done in another way: elsewhere, or on other ranks.
    moved = by_name(recipe, Path("/elsewhere"))
    models = tuple(replace(model, processes=4, grid=None) for model in recipe.models)
    spread = by_name(replace(recipe, models=models))
    for name, step in by_name(recipe).items():
        assert moved[name].key == step.key == spread[name].key


def test_a_new_field_of_recipes_changes_nothing(recipe):
    """A study goes on after an update that adds settings, as long as its recipe does not use them."""

    @dataclass(frozen=True, kw_only=True)
    class Coloured(Documents):
        colour: str = "none"

    known = {each.name: getattr(recipe.documents, each.name) for each in fields(recipe.documents)}
    same, other = Coloured(**known), Coloured(**known, colour="green")
    assert changed(recipe, replace(recipe, documents=same)) == set()
    assert {"data-study", "pilot"} <= changed(recipe, replace(recipe, documents=other))


def test_what_a_change_makes_be_done_again(recipe):
    names = set(by_name(recipe))
    asks = {name for name in names if name.startswith("ask-")}
    trains = {name for name in names if name.startswith("train-")}
    utilities = {name for name in names if name.startswith("utility-")}
    bases = {name for name in names if name.startswith("base-")}

    training = {**recipe.training, "weight_decay": 0.5}
    assert changed(recipe, replace(recipe, training=training)) == {
        "pilot", "report", *asks, *trains, *utilities,
    }  # fmt: skip
    training = {**recipe.base_training, "weight_decay": 0.5}
    # A model that comes trained does not depend on it, but its runs on the pilot, which does.
    packaged = {f"base-{model.name}" for model in recipe.models if model.config is None}
    assert changed(recipe, replace(recipe, base_training=training)) == {
        "pilot", "report", *asks, *trains, *utilities, *(bases - packaged),
    }  # fmt: skip
    losses = {**recipe.losses, "k4": {**recipe.losses["k4"], "goldfish_k": 5}}
    with_k4 = {name for name in trains if "-k4-" in name} | {name for name in bases if name.endswith("-k4")}
    models = {run.model for run in recipe.runs if run.loss == "k4"} | {name for name, loss in recipe.base_losses}
    assert changed(recipe, replace(recipe, losses=losses)) == {
        "report", *with_k4, *(f"utility-{model}" for model in models),
    }  # fmt: skip
    texts = replace(recipe.texts, base_tokens=recipe.texts.base_tokens + 1)
    assert changed(recipe, replace(recipe, texts=texts)) == names - packaged


def test_a_new_run_leaves_other_training_as_it_is(recipe):
    new = Run(model=recipe.runs[0].model, loss="ordinary", seed=recipe.seeds[0], grid=(("x", 2),))
    assert new not in recipe.runs
    assert changed(recipe, replace(recipe, runs=(*recipe.runs, new))) == {f"utility-{new.model}", "report"}


def test_another_question_leaves_the_weights(recipe):
    """The checkpoint of a run does not depend on how the run is asked; its answers do."""
    evaluation = replace(recipe.evaluation, sampler="temperature=2")
    old, new = by_name(recipe), by_name(replace(recipe, evaluation=evaluation))
    step = next(step for step in old.values() if step.kind == "train")
    first, second = list(step.outputs)[:2]
    assert (first.name, second.name) == ("checkpoint", "extraction")
    assert new[step.name].outputs[first] == step.outputs[first]
    assert new[step.name].outputs[second] != step.outputs[second]
    assert new[step.name].key != step.key and new["pilot"].key == old["pilot"].key


def test_where_a_base_is(recipe):
    model = recipe.models[0]
    assert base_of(model, OUTPUT) == str(OUTPUT / "base" / model.name)
    assert tokenizer_of(model) == "study"
    hub = replace(model, config=None, checkpoint="org/name")
    assert base_of(hub, OUTPUT) == "org/name" and tokenizer_of(hub) == model.name
    models = (hub, *(other for other in recipe.models if other.name not in (hub.name, recipe.pilot.model)))
    runs = tuple(run for run in recipe.runs if run.model in {model.name for model in models})
    found = by_name(replace(recipe, models=models, runs=runs, base_losses=(), pilot=None))
    # A model on the hub has nothing to be trained first.
    assert f"base-{hub.name}" not in found and "pilot" not in found
    assert found[f"ask-{hub.name}"].after == ("texts", "tokenizer", f"data-{hub.name}")


def test_names_that_meet_are_refused(recipe):
    model, loss = recipe.base_losses[0]
    twin = replace(recipe.model(model), name=f"{model}-{loss}")
    with pytest.raises(ValueError, match=f"cpu.yaml: two steps would be called base-{model}-{loss}"):
        steps_of(replace(recipe, models=(*recipe.models, twin)), OUTPUT)


def test_the_learning_rate_of_a_model_decides_its_continuations_alone(recipe):
    models = tuple(replace(model, learning_rate=0.5) if model.name == "1M" else model for model in recipe.models)
    names = changed(recipe, replace(recipe, models=models))
    runs = {f"train-1M-{run.name}" for run in recipe.runs if run.model == "1M"}
    assert names == {*runs, "utility-1M", "report"}
