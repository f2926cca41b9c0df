"""training_scripts/study/training: base training, continuations, asking, on grids and resumed."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_axonn import Grid
from hf_axonn_eval import load_model, read_run, read_samples
from hf_axonn_eval.data.results import RunDirectory
from hf_axonn_eval.extraction import batching
from hf_axonn_eval.extraction.work_split import WorkSplit
from hf_axonn_scripts.study.findings.results import read_study
from hf_axonn_scripts.study.recipe.reader import read_recipe
from hf_axonn_scripts.study.training import asking, train, training
from hf_axonn_scripts.study.training.training import Rows, collate, make_arguments
from tests.helpers.launching import assert_quiet
from tests.study.conftest import FOLDER
from tests.study.small_study import SmallStudy


X2, Z2 = Grid(x=2), Grid(z=2)
# Training is in float32, and AdamW makes a full step of a gradient that is almost 0, whatever its rounding: weights of
# two grids differ by 2e-5, what they say of a suffix by 1e-7 of it.
AS_ONE = {"rtol": 0, "atol": 2e-4}
CHOSEN = {"learning_rate": 5e-3, "suffix": 8, "tried": []}


@pytest.fixture(scope="module")
def with_data(tmp_path_factory):
    return SmallStudy.made(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def with_base(with_data, tmp_path_factory):
    """With a base model, trained over x, and what a pilot writes."""
    small = with_data.copy(tmp_path_factory.mktemp("base"))
    assert_quiet(small.do("base-tiny", grid=X2))
    (small.output / "pilot").mkdir()
    (small.output / "pilot" / "chosen.json").write_text(json.dumps(CHOSEN))
    return small


@pytest.fixture(scope="module")
def with_run(with_base, tmp_path_factory):
    small = with_base.copy(tmp_path_factory.mktemp("run"))
    assert_quiet(small.do("train-tiny-k2-s0", grid=X2))
    return small


@pytest.fixture
def small(with_base, tmp_path):
    return with_base.copy(tmp_path)


def weights_of(directory):
    return AutoModelForCausalLM.from_pretrained(directory).state_dict()


def same(left, right, **tolerance):
    assert left.keys() == right.keys()
    return all(torch.allclose(left[name], right[name], **(tolerance or {"rtol": 0, "atol": 0})) for name in left)


def log(directory):
    return json.loads((directory / "trainer_state.json").read_text())["log_history"]


def held_out_losses(directory):
    return {entry["step"]: entry["eval_loss"] for entry in log(directory) if "eval_loss" in entry}


def results_of(directory):
    return {one.sample_id: one for one in read_run(directory / "extraction")[1]}


def rows_of(small, name):
    return [json.loads(line) for line in (small.output / "data" / "study" / name).read_text().splitlines()]


def mean_nll(directory, rows):
    """In nats a token, of the plain model on one process."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    total = tokens = 0
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row["input_ids"]])
            count = ids.shape[1] - 1
            total, tokens = total + model(input_ids=ids, labels=ids).loss.item() * count, tokens + count
    return total / tokens


def test_base_learns_and_is_evaluated_on_the_way(with_base):
    base = with_base.output / "base" / "tiny"
    losses = held_out_losses(base)
    assert list(losses) == sorted(losses) and list(losses)[0] == 0 and list(losses)[-1] == 16
    assert len(losses) >= 8
    assert losses[0] == pytest.approx(math.log(512), abs=0.15)
    assert losses[16] < losses[0] - 0.3
    rows = rows_of(with_base, "held_out.jsonl")
    assert losses[16] == pytest.approx(mean_nll(base, rows), rel=1e-5)
    assert not (with_base.output / "work" / "tiny" / "base-ordinary").exists()
    loaded = load_model(base)
    assert loaded.tokenizer.eos_token_id == loaded.model.config.eos_token_id


@pytest.mark.slow
@pytest.mark.parametrize("grid", [None, Z2], ids=["one process", "z=2"])
def test_base_is_the_same_on_every_grid(with_base, with_data, tmp_path, grid):
    other = with_data.copy(tmp_path)
    torch.manual_seed(20)  # what forks of this process would draw is not what those of the fixture did
    assert_quiet(other.do("base-tiny", grid=grid))
    mine, theirs = (held_out_losses(small.output / "base" / "tiny") for small in (other, with_base))
    assert mine[0] == pytest.approx(theirs[0], rel=1e-6)  # the same random weights
    assert mine[16] == pytest.approx(theirs[16], rel=1e-5)


@pytest.mark.slow
def test_bfloat16_is_of_products_alone(with_base, with_data, tmp_path):
    other = with_data.copy(tmp_path)
    other.change("warmup_steps: 2}", "warmup_steps: 2, bf16: true}")
    assert_quiet(other.do("base-tiny", grid=X2))
    base = other.output / "base" / "tiny"
    mine, theirs = (held_out_losses(small.output / "base" / "tiny") for small in (other, with_base))
    # Logits have 8 bits: a loss of 6.2 nats is off by less than one unit of the last, 2**-8 of it.
    assert mine == pytest.approx(theirs, rel=2**-8) and mine != theirs
    assert {weight.dtype for weight in weights_of(base).values()} == {torch.float32}
    assert mine[16] == pytest.approx(mean_nll(base, rows_of(other, "held_out.jsonl")), rel=2**-8)


def test_base_with_another_loss_stands_beside(small):
    ended = small.do("base-tiny-k2")
    assert_quiet(ended)
    other = small.output / "base" / "tiny-k2"
    fractions = [entry["goldfish_dropped_fraction"] for entry in log(other) if "goldfish_dropped_fraction" in entry]
    assert 0.2 < sum(fractions) / len(fractions) < 0.6
    assert not same(weights_of(other), weights_of(small.output / "base" / "tiny"))


def test_the_learning_rate_is_the_models_or_the_pilots(tmp_path):
    recipe = read_recipe(FOLDER / "recipes" / "cpu.yaml")
    own = recipe.model("smollm2-135m")
    assert train.learning_rate(recipe, own, tmp_path) == own.learning_rate == 1e-4
    with pytest.raises(ValueError, match="chosen.json is not there: the step pilot writes it"):
        train.learning_rate(recipe, recipe.model("1M"), tmp_path)
    (tmp_path / "pilot").mkdir()
    (tmp_path / "pilot" / "chosen.json").write_text(json.dumps(CHOSEN))
    assert train.learning_rate(recipe, recipe.model("1M"), tmp_path) == CHOSEN["learning_rate"]
    assert train.learning_rate(replace(recipe, pilot=None), recipe.model("1M"), tmp_path) is None


def test_run_trains_in_order_and_asks(with_run):
    directory = with_run.output / "runs" / "tiny" / "k2-s0"
    checkpoint = directory / "checkpoint"
    losses = held_out_losses(checkpoint)
    base = held_out_losses(with_run.output / "base" / "tiny")
    rows = rows_of(with_run, "train-s0.jsonl")
    assert list(losses) == [0, len(rows) // 4]
    assert losses[0] == pytest.approx(base[16], rel=1e-6)
    first = next(entry for entry in log(checkpoint) if "loss_all" in entry)
    assert first["step"] == 1 and first["learning_rate"] == CHOSEN["learning_rate"]
    assert first["loss_all"] == pytest.approx(mean_nll(with_run.output / "base" / "tiny", rows[:4]), rel=1e-5)
    record, results = read_run(directory / "extraction")
    assert [one.sample_id for one in results] == [
        one.sample_id for one in read_samples(with_run.output / "data" / "study" / "samples-s0.jsonl")
    ]
    loaded = load_model(checkpoint)
    assert record["model"] == {**loaded.record, "path": str(checkpoint)}
    assert record["identity"]["sampler"] == "temperature 1, top-k 40"
    assert all(one.membership and one.logprobs and one.generated is not None for one in results)
    ranks = json.loads((directory / "canaries.json").read_text())
    assert [canary["insertions"] for canary in ranks["canaries"]] == [4, 1, 0]
    about = json.loads((checkpoint / "training.json").read_text())
    assert about["settings"]["training"]["learning_rate"] == CHOSEN["learning_rate"]
    assert about["grid"] == "data=1,z=1,y=1,x=2" and set(about["seconds"]) >= {"start", "load", "train", "save"}


def test_run_equals_one_process_and_memorizes(with_run, small):
    assert_quiet(small.do("train-tiny-k2-s0"))
    here, there = (one.output / "runs" / "tiny" / "k2-s0" for one in (small, with_run))
    assert same(weights_of(here / "checkpoint"), weights_of(there / "checkpoint"), **AS_ONE)
    mine, theirs = results_of(here), results_of(there)
    assert [mine[name].logprob for name in theirs] == pytest.approx([one.logprob for one in theirs.values()], rel=1e-5)
    before = small.do("ask-tiny", grid=Z2)
    assert_quiet(before)
    asked = results_of(small.output / "runs" / "tiny" / "base")
    gains = {
        bucket: [mine[name].logprob - asked[name].logprob for name in asked if asked[name].bucket == bucket]
        for bucket in (0, 4)
    }
    assert sum(gains[4]) / 8 > sum(gains[0]) / 8 + 1  # nats, of 8 tokens seen four times


def test_goldfish_is_in_the_run_that_asks_for_it(with_run, small):
    assert_quiet(small.do("train-tiny-ordinary-s0"))
    dropped = {
        name: [
            entry["goldfish_dropped_fraction"]
            for entry in log(one.output / "runs" / "tiny" / name / "checkpoint")
            if "goldfish_dropped_fraction" in entry
        ]
        for name, one in (("ordinary-s0", small), ("k2-s0", with_run))
    }
    assert set(dropped["ordinary-s0"]) == {0.0}
    assert 0.2 < min(dropped["k2-s0"])


def test_what_is_done_is_not_done_again(with_run, tmp_path):
    small = with_run.copy(tmp_path)
    watched = [*small.output.glob("base/tiny/*"), *small.output.glob("runs/tiny/k2-s0/checkpoint/*")]
    watched += [
        small.output / "runs/tiny/k2-s0/canaries.json",
        small.output / "runs/tiny/k2-s0/extraction/results.jsonl",
    ]
    times = {path: path.stat().st_mtime_ns for path in watched}
    assert_quiet(small.do("base-tiny", grid=Z2))
    assert_quiet(small.do("train-tiny-k2-s0"))
    assert times == {path: path.stat().st_mtime_ns for path in watched}


@pytest.mark.slow
def test_a_run_is_asked_on_its_way_and_ends_as_if_it_had_not(with_run, small):
    """The curve has the start, two places and the end; weights and answers are those of the run without it."""
    small.change("tasks: false", "tasks: false, curve_points: 3")
    assert_quiet(small.do("train-tiny-k2-s0", grid=X2))
    run, plain_run = (one.output / "runs" / "tiny" / "k2-s0" for one in (small, with_run))
    losses = held_out_losses(run / "checkpoint")
    assert len(losses) == 4 and min(losses) == 0
    assert {path.name for path in (run / "curve").iterdir()} == {f"step-{step}" for step in losses}
    assert same(weights_of(run / "checkpoint"), weights_of(plain_run / "checkpoint"))
    ended = results_of(run)
    last = {one.sample_id: one for one in read_run(run / "curve" / f"step-{max(losses)}")[1]}
    for name, one in last.items():
        assert one.logprobs == pytest.approx(ended[name].logprobs, abs=1e-4) and one.ranks == ended[name].ranks
    recipe = read_recipe(small.recipe)
    assert read_study(recipe, small.output).on_the_way(recipe.runs[1], 0).column("logprob").shape == (len(last),)


def end_after(monkeypatch, steps):
    """The process ends, as if it were killed, after so many steps of training, each of which was saved."""
    monkeypatch.setattr(training, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(training, "SAVE_SHARE", math.inf)
    monkeypatch.setattr(training, "STEPS_BETWEEN_LOOKS", 1)
    step, done = training.GoldfishTrainer.training_step, []

    def one(self, *args, **kwargs):
        if len(done) == steps:
            os._exit(9)
        done.append(1)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(training.GoldfishTrainer, "training_step", one)


def killed_run(small, grid):
    """One that is killed after seven of its twelve steps."""
    with pytest.MonkeyPatch.context() as patches:
        end_after(patches, 7)
        assert small.do("train-tiny-k2-s0", grid=grid).code
    return small


@pytest.fixture(scope="module")
def killed(with_base, tmp_path_factory):
    return killed_run(with_base.copy(tmp_path_factory.mktemp("killed")), None)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(None, None, id="one"),
        pytest.param(X2, X2, id="x=2", marks=pytest.mark.slow),
        pytest.param(X2, None, id="x=2 to one", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on(with_base, with_run, killed, tmp_path, monkeypatch, first, second):
    small = killed.copy(tmp_path) if first is None else killed_run(with_base.copy(tmp_path), first)
    work = small.output / "work" / "tiny" / "k2-s0"
    assert [path.name for path in work.glob("checkpoint-*")] == ["checkpoint-7"]
    directory = small.output / "runs" / "tiny" / "k2-s0"
    assert not directory.exists()
    with monkeypatch.context() as patches:
        end_after(patches, 12 - 7)  # would end it, if it began from the start
        assert_quiet(small.do("train-tiny-k2-s0", grid=second))
    assert not work.exists()
    whole = with_run.output / "runs" / "tiny" / "k2-s0"
    tolerance = {} if first == second == X2 else AS_ONE
    assert same(weights_of(directory / "checkpoint"), weights_of(whole / "checkpoint"), **tolerance)
    if first == second == X2:
        assert held_out_losses(directory / "checkpoint") == held_out_losses(whole / "checkpoint")
        assert [vars(one) for one in results_of(directory).values()] == [
            vars(one) for one in results_of(whole).values()
        ]


@pytest.mark.slow
def test_a_killed_base_goes_on_in_the_same_shuffled_order(with_base, with_data, tmp_path, monkeypatch):
    small = with_data.copy(tmp_path)
    with monkeypatch.context() as patches:
        end_after(patches, 5)
        assert small.do("base-tiny", grid=X2).code
    assert (small.output / "work" / "tiny" / "base-ordinary" / "checkpoint-5").is_dir()
    assert_quiet(small.do("base-tiny", grid=X2))
    mine, theirs = (one.output / "base" / "tiny" for one in (small, with_base))
    assert same(weights_of(mine), weights_of(theirs))
    assert held_out_losses(mine) == held_out_losses(theirs)


def test_a_training_with_other_settings_does_not_go_on(killed, tmp_path):
    small = killed.copy(tmp_path)
    (small.output / "pilot" / "chosen.json").write_text(json.dumps({**CHOSEN, "learning_rate": 1e-3}))
    assert_quiet(small.do("train-tiny-k2-s0"))
    checkpoint = small.output / "runs" / "tiny" / "k2-s0" / "checkpoint"
    rates = {entry["learning_rate"] for entry in log(checkpoint) if "learning_rate" in entry}
    assert rates == {1e-3}
    assert held_out_losses(checkpoint).keys() == {0, 12}  # from the start


@pytest.mark.slow  # of runs that are killed, those in training are quick; extraction goes on in tests/eval, too
def test_a_killed_extraction_goes_on_with_the_trained_weights(with_run, small, monkeypatch):
    append = RunDirectory.append
    extract, done = asking.extract, []

    def once(self, results):
        if done:
            os._exit(9)
        done.append(1)
        append(self, results)

    with monkeypatch.context() as patches:
        patches.setattr(asking, "extract", lambda *args, **options: extract(*args, **{**options, "batch_size": 4}))
        patches.setattr(batching, "MOST_TOGETHER", 1)
        patches.setattr(RunDirectory, "append", once)
        assert small.do("train-tiny-k2-s0", grid=Z2).code
    directory = small.output / "runs" / "tiny" / "k2-s0"
    first = (directory / "extraction" / "results.jsonl").read_text()
    assert len(first.splitlines()) == 8  # four of each rank
    with monkeypatch.context() as patches:
        end_after(patches, 0)  # would end at the first step of a training
        assert_quiet(small.do("train-tiny-k2-s0", grid=X2))
    assert (directory / "extraction" / "results.jsonl").read_text().startswith(first)
    assert len(read_run(directory / "extraction")[1]) == 24
    mine, theirs = results_of(directory), results_of(with_run.output / "runs" / "tiny" / "k2-s0")
    assert [mine[name].logprob for name in theirs] == pytest.approx([one.logprob for one in theirs.values()], rel=1e-5)


def utility_of(small, grid):
    ended = small.do("utility-tiny", grid=grid)
    # Two of the four models that the recipe names were not trained; the others are measured.
    assert ended.code
    assert "2 of 4 checkpoints of tiny are not there: base/tiny-k2 (step base-tiny-k2)" in ended.output
    assert ended.output.count("utility of tiny: ") == 2
    assert json.loads((small.output / "utility" / "tiny.json").read_text()).keys() == {"base", "k2-s0"}
    parts = small.output / "utility" / "parts" / "tiny"
    return {part.stem: json.loads(part.read_text()) for part in parts.iterdir()}


@pytest.fixture(scope="module")
def utility_alone(with_run, tmp_path_factory):
    return utility_of(with_run.copy(tmp_path_factory.mktemp("utility")), None)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [X2, Z2], ids=["x=2", "z=2"])
def test_utility_on_a_grid_is_that_of_one_process(with_run, utility_alone, tmp_path, grid):
    found = utility_of(with_run.copy(tmp_path), grid)
    assert found.keys() == utility_alone.keys() == {"base", "k2-s0"}
    for name, one in utility_alone.items():
        other = found[name]
        assert other["identity"] == one["identity"] and other["held_out"].keys() == one["held_out"].keys()
        for document, nll in one["held_out"].items():
            assert other["held_out"][document] == pytest.approx(nll, rel=1e-6)


def test_training_that_diverges_is_an_error(small):
    small.change(
        "training: {lr_scheduler_type: constant}", "training: {lr_scheduler_type: constant, max_grad_norm: 0}"
    )
    (small.output / "pilot" / "chosen.json").write_text(json.dumps({**CHOSEN, "learning_rate": 1e30}))
    ended = small.do("train-tiny-ordinary-s0")
    assert ended.code == 2
    assert "the held-out loss is" in ended.output and "learning rate of 1e+30" in ended.output
    assert not (small.output / "runs" / "tiny" / "ordinary-s0" / "checkpoint" / "training.json").exists()


@pytest.mark.parametrize(
    ("missing", "name", "step"),
    [
        ("data/study/train-s0.jsonl", "train-tiny-k2-s0", "data-study"),
        ("data/study/samples-s0.jsonl", "ask-tiny", "data-study"),
        ("data/study/canaries", "ask-tiny", "data-study"),
        ("data/study/held_out.jsonl", "base-tiny", "data-study"),
        ("tokenizer", "base-tiny", "tokenizer"),
        ("base/tiny/training.json", "train-tiny-k2-s0", "base-tiny"),
        ("base/tiny/training.json", "ask-tiny", "base-tiny"),
        ("pilot/chosen.json", "train-tiny-k2-s0", "pilot"),
    ],
)
def test_what_is_missing_is_named_with_the_step_that_makes_it(small, missing, name, step):
    (small.output / missing).rename(small.output / "elsewhere")
    ended = small.do(name)
    assert ended.code == 2
    place = missing if step != "base-tiny" else "base/tiny"
    assert f"{small.output / place} " in ended.output and f"the step {step} writes it" in ended.output


def test_a_step_that_the_recipe_does_not_have(small):
    ended = small.do("train-tiny-k9-s0")
    assert ended.code == 2 and "has no step 'train-tiny-k9-s0'" in ended.output


class TestRows:
    def test_every_row_once_and_filled_without_targets(self, tmp_path):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps({"id": str(n), "input_ids": [n, n + 1, 7]}) + "\n" for n in range(5)))
        rows = Rows(file, step="data-study", multiple=4)
        assert [row["input_ids"][0] for row in rows] == [0, 1, 2, 3, 4, 0, 0, 0]
        assert [row["labels"] for row in rows][4:6] == [[4, 5, 7], [-100] * 3]
        assert len(Rows(file, step="data-study", multiple=5)) == 5

    def test_an_empty_file_is_refused(self, tmp_path):
        (tmp_path / "rows.jsonl").write_text("\n")
        with pytest.raises(ValueError, match=r"rows.jsonl has no rows: the step data-study"):
            Rows(tmp_path / "rows.jsonl", step="data-study")

    def test_rows_of_different_lengths_are_masked(self):
        rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8], "labels": [8]}]
        batch = collate(rows)
        assert batch["labels"].tolist() == [[5, 6, 7], [8, -100, -100]]
        assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
        assert "attention_mask" not in collate(rows[:1])


class TestArguments:
    def made(self, tmp_path, training=(), **changes):
        options = {"work": tmp_path, "sequences": 16, "seed": 3, "in_order": True, "evaluations": 0}
        return make_arguments(dict(training), {"goldfish": False}, **{**options, **changes})

    def test_a_step_has_as_many_rows_on_every_grid(self, tmp_path, monkeypatch):
        for grid, ranks in (({"x": 2}, 1), ({"z": 2, "x": 2}, 2), ({"data": 2, "z": 4}, 8)):
            monkeypatch.setenv("AXONN_CONFIG", json.dumps({"grid": grid}))
            monkeypatch.setattr(training, "GoldfishConfig", lambda **options: SimpleNamespace(**options))
            made = self.made(tmp_path, {"gradient_accumulation_steps": 2})
            rows = made.per_device_train_batch_size * made.gradient_accumulation_steps * ranks
            assert rows == 16 and made.seed == 3

    def test_in_order_means_once(self, tmp_path, monkeypatch):
        monkeypatch.setattr(training, "GoldfishConfig", lambda **options: SimpleNamespace(**options))
        made = self.made(tmp_path, {"num_train_epochs": 5})
        assert (made.num_train_epochs, made.train_sampling_strategy) == (1, "sequential")
        made = self.made(tmp_path, {"num_train_epochs": 5}, in_order=False, evaluations=4)
        assert (made.num_train_epochs, made.train_sampling_strategy, made.eval_steps) == (5, "random", 0.25)

    def test_rows_that_ranks_cannot_share(self, tmp_path, monkeypatch):
        monkeypatch.setenv("AXONN_CONFIG", json.dumps({"grid": {"data": 3, "x": 2}}))
        with pytest.raises(ValueError, match=r"a step has 16 rows, which 3 ranks .* cannot share in 1 part"):
            self.made(tmp_path)

    def test_an_argument_of_nothing(self, tmp_path):
        with pytest.raises(ValueError, match="unexpected keyword argument 'learning_speed'"):
            self.made(tmp_path, {"learning_speed": 1})


def test_checkpoints_come_by_the_clock_and_slow_ones_rarely(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(training.time, "monotonic", lambda: now[0])
    callback = training.SaveByTime(WorkSplit())
    callback.on_train_begin(None, None, None)
    saved = []
    for step in range(1, 1001):
        now[0] += 1.0  # a second each
        control = SimpleNamespace(should_save=False)
        callback.on_step_end(None, SimpleNamespace(global_step=step, max_steps=1000), control)
        if control.should_save:
            now[0] += 20.0  # to save takes
            callback.on_save(None, None, None)
            saved.append(step)
    # After 120 steps, and from then on every 20 s / 5% = 400 s; looked at every 8 steps.
    assert saved == [120, 520, 920]
