"""training_scripts/study/findings/utility.py: what a model keeps, what a loss costs and what it prevents."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from math import exp, log
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest

from hf_axonn_eval import auc, document_nll
from hf_axonn_eval.analysis.membership_attack import attack
from hf_axonn_eval.canaries.rank import CanaryRank
from hf_axonn_eval.data.jsonl import write_json
from hf_axonn_scripts.data import tokenize
from hf_axonn_scripts.study.data.held_out import read_held_out
from hf_axonn_scripts.study.findings import utility
from hf_axonn_scripts.study.findings.exposed import canaries, membership
from hf_axonn_scripts.study.findings.same_loss import held_out_curve, tokens_for_same_loss
from hf_axonn_scripts.study.findings.utility import measure
from hf_axonn_scripts.study.recipe.definition import Documents, Model, Recipe, Run, Texts
from tests.helpers.eval_support import result, tiny_llama, topics_tokenizer, trained_llama


LENGTH = 40
MODEL, LOSS = "XS", "k2"
TRAINED = ("base/XS-k2", "runs/XS/k2-s0/checkpoint")  # these know some of the texts
CHECKPOINTS = ("base/XS", *TRAINED, "runs/XS/ordinary-s0/checkpoint")
RUNS = ("base", "base-k2", "ordinary-s0", "k2-s0")


def recipe_of(**changes):
    runs = tuple(Run(model=MODEL, loss=loss, seed=0) for loss in ("ordinary", LOSS))
    recipe = Recipe(
        name="tiny",
        path=Path("tiny.yaml"),
        machine="cpu",
        texts=Texts(),
        documents=Documents(buckets=(0, 1), per_bucket=4, length=24, suffix=12),
        vocabulary=800,
        models=(Model(name=MODEL, config={}, processes=1),),
        batch_sequences=4,
        base_batch_sequences=4,
        base_length=LENGTH,
        losses={"ordinary": {"goldfish": False}, LOSS: {"goldfish_k": 2}},
        runs=runs,
        base_losses=((MODEL, LOSS),),
    )
    return replace(recipe, **changes)


def held_out_texts() -> list[dict]:
    names = sorted(name for name in topics if 1000 < len(topics[name]) < 2500)[:12]
    return [{"id": name, "text": topics[name]} for name in names]


def write_lines(path: Path, lines: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def rows_of(documents: list[dict]) -> list[list[int]]:
    """Packed as passages.py packs them."""
    texts = [one["text"] for one in documents]
    stream = [token for ids in tokenize(texts, topics_tokenizer()) for token in ids]
    return [stream[start : start + LENGTH] for start in range(0, len(stream) // LENGTH * LENGTH, LENGTH)]


def save(model, path: Path) -> None:
    model.save_pretrained(path)
    topics_tokenizer().save_pretrained(path)


@pytest.fixture
def output(tmp_path):
    """A study's directory after its trainings; the third held-out text is in no row."""
    documents = held_out_texts()
    write_lines(tmp_path / "texts" / "held_out.jsonl", documents)
    rows = rows_of(documents[:2] + documents[3:])
    write_lines(tmp_path / "data" / "study" / "held_out.jsonl", [{"input_ids": row} for row in rows])
    topics_tokenizer().save_pretrained(tmp_path / "tokenizer")
    for name in CHECKPOINTS:
        save(trained_llama() if name in TRAINED else tiny_llama(seed=len(name)), tmp_path / name)
    return tmp_path


@pytest.fixture
def without_harness(monkeypatch):
    monkeypatch.setattr(utility, "harness_version", lambda: None)


def measured(output: Path) -> dict:
    return json.loads((output / "utility" / f"{MODEL}.json").read_text())


def test_held_out_loss_of_every_model_with_differences(output, without_harness, capsys):
    measure(recipe_of(), output, MODEL)
    found, rows = measured(output), rows_of(held_out_texts()[:2] + held_out_texts()[3:])
    assert tuple(found) == RUNS
    for name, checkpoint in zip(
        RUNS, ("base/XS", "base/XS-k2", *(f"runs/XS/{run}/checkpoint" for run in RUNS[2:])), strict=True
    ):
        model = trained_llama() if checkpoint in TRAINED else tiny_llama(seed=len(checkpoint))
        loss = document_nll(model, rows, batch_size=8)
        entry = found[name]["held_out_loss"]
        assert entry["mean"] == pytest.approx(loss.mean, rel=1e-6)
        assert entry["tokens"] == loss.tokens == len(rows) * (LENGTH - 1)
        assert entry["documents"] == 11  # of 12 texts
        assert entry["low"] is entry["high"] is None  # of fewer than 12 documents
        assert found[name]["checkpoint"] == checkpoint
    loss = {name: found[name]["held_out_loss"]["mean"] for name in RUNS}
    for name in RUNS[1:]:
        change = found[name]["minus_base"]["held_out_loss"]
        assert change["difference"] == pytest.approx(loss[name] - loss["base"])
        assert change["low"] is change["high"] is None  # of fewer than 12 documents
    assert "minus_base" not in found["base"]
    assert [name for name in RUNS if "minus_ordinary" in found[name]] == ["k2-s0"]
    change = found["k2-s0"]["minus_ordinary"]["held_out_loss"]["difference"]
    assert change == pytest.approx(loss["k2-s0"] - loss["ordinary-s0"])
    for name in RUNS:
        assert "pip install lm_eval" in found[name]["tasks"]["left_out"]
    said = capsys.readouterr().out
    assert said.count("pip install lm_eval") == 1 and "(4 of 4)" in said


def test_a_recipe_without_tasks_says_so(output, capsys):
    recipe = recipe_of()
    measure(replace(recipe, evaluation=replace(recipe.evaluation, tasks=False)), output, MODEL)
    assert "does not ask" in measured(output)["base"]["tasks"]["left_out"]
    assert "pip install" not in capsys.readouterr().out


def test_what_was_measured_is_not_measured_again(output, without_harness, monkeypatch):
    loaded = []
    load = utility.load_model

    def counted(path, **options):
        loaded.append(str(Path(path).relative_to(output)))
        return load(path, **options)

    monkeypatch.setattr(utility, "load_model", counted)
    measure(recipe_of(), output, MODEL)
    first = measured(output)
    assert sorted(loaded) == sorted(CHECKPOINTS)
    measure(recipe_of(), output, MODEL)
    assert len(loaded) == len(CHECKPOINTS) and measured(output) == first
    save(tiny_llama(seed=99), output / "runs" / MODEL / "k2-s0" / "checkpoint")
    measure(recipe_of(), output, MODEL)
    assert loaded[len(CHECKPOINTS) :] == ["runs/XS/k2-s0/checkpoint"]
    assert measured(output)["k2-s0"] != first["k2-s0"] and measured(output)["base"] == first["base"]
    rows = (output / "data" / "study" / "held_out.jsonl").read_text().splitlines()
    (output / "data" / "study" / "held_out.jsonl").write_text("\n".join(rows[:-3]) + "\n")
    measure(recipe_of(), output, MODEL)
    assert len(loaded) == 2 * len(CHECKPOINTS) + 1  # of other text everything is measured again


def test_a_missing_run_loses_no_other(output, without_harness):
    import shutil

    shutil.rmtree(output / "runs" / MODEL / "ordinary-s0")
    shutil.rmtree(output / "base" / "XS-k2")
    with pytest.raises(ValueError, match=r"2 of 4 .*base/XS-k2 \(step base-XS-k2\).*\(step train-XS-ordinary-s0\)"):
        measure(recipe_of(), output, MODEL)
    found = measured(output)
    assert tuple(found) == ("base", "k2-s0")
    assert "minus_base" in found["k2-s0"] and "minus_ordinary" not in found["k2-s0"]


def test_a_run_on_another_grid_has_its_own_twin(output, without_harness):
    recipe = recipe_of()
    other = replace(recipe.runs[0], grid=(("x", 2), ("z", 2)))
    save(tiny_llama(seed=5), output / "runs" / MODEL / other.name / "checkpoint")
    measure(replace(recipe, runs=(*recipe.runs, other)), output, MODEL)
    found = measured(output)
    assert "minus_ordinary" not in found[other.name] and "minus_base" in found[other.name]


def test_tasks_of_the_harness(output):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not a dependency of the tests")
    measure(recipe_of(), output, MODEL)
    found = measured(output)
    for name in RUNS:
        tasks = found[name]["tasks"]
        parts = json.loads((output / "utility" / "parts" / MODEL / f"{name}.json").read_text())["tasks"]
        assert len(parts["rolling"]) == 11
        nats, words, size = (sum(column) for column in zip(*parts["rolling"].values(), strict=True))
        expected = {"bits_per_byte": -nats / log(2) / size, "byte_perplexity": exp(-nats / size)}
        expected["word_perplexity"] = exp(-nats / words)
        for metric, mean in expected.items():
            assert tasks[metric]["mean"] == pytest.approx(mean)
            assert tasks[metric]["low"] < mean < tasks[metric]["high"]
            assert tasks[metric]["documents"] == 11
        for metric, column in (("acc", 1), ("acc_norm", 2)):
            right = [one[column] for one in parts["endings"]]
            assert tasks[metric]["mean"] == pytest.approx(sum(right) / len(right))
            assert tasks[metric]["questions"] == len(right) >= 20 and tasks[metric]["chance"] == 0.25
            assert tasks[metric]["low"] < tasks[metric]["mean"] < tasks[metric]["high"]
        assert tasks["harness"] and "left_out" not in tasks
    for metric in ("bits_per_byte", "acc", "acc_norm"):
        change = found["k2-s0"]["minus_ordinary"][metric]["difference"]
        means = [found[name]["tasks"][metric]["mean"] for name in ("k2-s0", "ordinary-s0")]
        assert change == pytest.approx(means[0] - means[1], abs=1e-9)
    assert not list(output.glob("utility/tasks/study/*.unfinished"))


def test_rows_are_of_the_document_that_they_have_most_of(output):
    read, rows = read_held_out, output / "data" / "study" / "held_out.jsonl"
    documents = held_out_texts()
    found = read(rows, output / "texts" / "held_out.jsonl", topics_tokenizer())
    assert [text["id"] for text in found.texts] == [one["id"] for one in documents[:2] + documents[3:]]
    assert sum(map(len, found.rows.values())) == len(rows_of(documents[:2] + documents[3:]))
    # Each row by itself: of which document are most of its tokens?
    ends, expected = [], {}
    for one in documents[:2] + documents[3:]:
        (ids,) = tokenize([one["text"]], topics_tokenizer())
        ends.append(len(ids) + (ends[-1] if ends else 0))
    names = [one["id"] for one in documents[:2] + documents[3:]]
    for number, row in enumerate(rows_of(documents[:2] + documents[3:])):
        middle = int(np.median([np.searchsorted(ends, number * LENGTH + at, side="right") for at in range(LENGTH)]))
        expected.setdefault(names[middle], []).append(row)
    assert found.rows == expected and found.longest == LENGTH
    write_lines(output / "texts" / "held_out.jsonl", documents[:4])
    with pytest.raises(ValueError, match=r"held_out.jsonl is not made of .*tokens are. Remove it"):
        read(rows, output / "texts" / "held_out.jsonl", topics_tokenizer())


# what a loss costs in training


def state(path: Path, losses: dict[int, float], dropped: dict[int, float]) -> None:
    history = [{"step": step, "eval_loss": loss} for step, loss in losses.items()]
    history += [{"step": step, "loss": 1.0, "goldfish_dropped_fraction": share} for step, share in dropped.items()]
    write_json(path / "trainer_state.json", {"log_history": sorted(history, key=lambda entry: entry["step"])})


STEPS = tuple(range(10, 110, 10))


def curve(step: int, slower: float = 1.0) -> float:
    return 9.0 - log(step / slower)


def test_a_loss_that_learns_from_fewer_tokens_needs_more(tmp_path):
    recipe = recipe_of()
    state(tmp_path / "base" / "XS", {0: 9.9, **{step: curve(step) for step in STEPS}}, {50: 0.0, 100: 0.0})
    slower = {0: 9.9, **{step: curve(step, 2.0) for step in STEPS}}
    state(tmp_path / "base" / "XS-k2", slower, {50: 0.5, 100: 0.5})
    found = tokens_for_same_loss(recipe, tmp_path)[MODEL][LOSS]
    assert (found["k"], found["predicted"]) == (2, 2.0)
    row = 4 * LENGTH
    assert [point["tokens"] for point in found["curves"]["ordinary"]] == [step * row for step in (0, *STEPS)]
    assert found["curves"]["ordinary"][-1]["supervised"] == pytest.approx(100 * 4 * (LENGTH - 1))
    assert found["curves"]["other"][-1]["supervised"] == pytest.approx(50 * 4 * (LENGTH - 1))
    assert [point["ordinary"] for point in found["points"]] == [step * row for step in STEPS]
    for point in found["points"]:
        if point["ordinary"] <= 50 * row:
            assert point["ratio"] == pytest.approx(2) and point["other"] == pytest.approx(2 * point["ordinary"])
            assert point["supervised_ratio"] == pytest.approx(1)
        else:  # the other training ended before
            assert (point["other"], point["ratio"], point["supervised_ratio"]) == (None, None, None)
    end = found["at_end"]
    assert (end["loss"], end["other"]) == (pytest.approx(curve(100, 2.0)), 100 * row)
    assert end["ratio"] == pytest.approx(2)


def test_between_points_the_logarithm_of_tokens_counts(tmp_path):
    state(tmp_path / "base" / "XS", {10: 8.0, 40: 6.0}, {40: 0.0})
    state(tmp_path / "base" / "XS-k2", {10: 8.5, 40: 6.5, 60: 5.0}, {40: 0.5, 60: 0.25})
    found = tokens_for_same_loss(recipe_of(), tmp_path)[MODEL][LOSS]
    row, labels = 4 * LENGTH, 4 * (LENGTH - 1)
    first, last = found["points"]
    # a quarter of the way from 8.5 to 6.5, in logarithms of 10 and 40
    assert first["other"] == pytest.approx(10 * 4**0.25 * row)
    assert first["supervised_ratio"] == pytest.approx(0.5 * 4**0.25)
    assert last["other"] == pytest.approx(40 * 1.5 ** (1 / 3) * row)
    kept = 40 * 0.5 + (40 * 1.5 ** (1 / 3) - 40) * 0.75
    assert last["supervised_ratio"] == pytest.approx(kept * labels / (40 * labels))


@pytest.mark.parametrize("losses", [{0: 9.0, 20: 5.0, 40: 4.0}, {20: 5.0, 40: 5.5, 60: 4.0}])
def test_below_its_first_evaluation_nothing_is_known(tmp_path, losses):
    state(tmp_path / "base" / "XS", {10: 5.3, 20: 5.2}, {20: 0.0})
    state(tmp_path / "base" / "XS-k2", losses, {20: 0.5})
    found = tokens_for_same_loss(recipe_of(), tmp_path)[MODEL][LOSS]
    assert [point["other"] for point in found["points"]] == [None, None]
    assert found["at_end"]["ordinary"] is None  # which the ordinary one does not reach


def test_steps_after_the_last_log_drop_as_many_tokens(tmp_path):
    state(tmp_path, {25: 6.0, 100: 5.0}, {50: 0.5})
    found = held_out_curve(tmp_path / "trainer_state.json", 4, LENGTH)
    assert [point["supervised"] for point in found] == pytest.approx([12.5 * 4 * 39, 50 * 4 * 39])


def test_a_curve_that_rises_again_counts_from_where_it_first_came_down(tmp_path):
    state(tmp_path / "base" / "XS", {10: 6.0}, {10: 0.0})
    state(tmp_path / "base" / "XS-k2", {10: 7.0, 20: 6.0, 30: 6.5, 40: 5.0}, {40: 0.5})
    found = tokens_for_same_loss(recipe_of(), tmp_path)[MODEL][LOSS]
    assert found["points"][0]["ratio"] == pytest.approx(2)


def test_what_is_not_there_is_said(tmp_path):
    of = tokens_for_same_loss
    state(tmp_path / "base" / "XS", {10: 6.0}, {10: 0.0})
    found = of(recipe_of(), tmp_path)[MODEL][LOSS]
    assert found["left_out"].startswith("base/XS-k2/trainer_state.json is not there")
    state(tmp_path / "base" / "XS-k2", {}, {10: 0.5})
    assert "no held-out loss" in of(recipe_of(), tmp_path)[MODEL][LOSS]["left_out"]
    state(tmp_path / "base" / "XS-k2", {10: 6.0}, {})
    assert "no goldfish_dropped_fraction" in of(recipe_of(), tmp_path)[MODEL][LOSS]["left_out"]
    write_json(tmp_path / "base" / "XS-k2" / "trainer_state.json", [])
    assert "not a state of Trainer" in of(recipe_of(), tmp_path)[MODEL][LOSS]["left_out"]
    other = {"ordinary": {"goldfish": False}, LOSS: {"goldfish": False}}
    found = of(recipe_of(losses=other), tmp_path)[MODEL][LOSS]
    assert (found["k"], found["predicted"]) == (None, None)


# what a run gives away


def passages(*, articles: int = 40, effect: float = 1.5, of_article: float = 2.0, apart: bool = False) -> list:
    """Of every article one passage unseen and one seen four times; `apart`: of two sets of articles."""
    draw = np.random.default_rng(7)
    made = []
    for number in range(articles):
        common = of_article * draw.normal()
        for bucket in (0, 4):
            name = f"A{number}{bucket if apart else ''}"
            score = common + draw.normal() + effect * (bucket > 0)
            made.append(
                result(f"{name}#{bucket}", document_id=name, bucket=bucket, logprob=-20 + score, suffix_length=2)
            )
    return made


def sides(some: list) -> tuple[list[float], list[float]]:
    return tuple([one.logprob / 2 for one in some if (one.bucket > 0) == seen] for seen in (True, False))


def test_membership_is_the_auc_against_what_was_not_seen():
    some = passages()
    found = membership(some)
    assert set(found) == {"4"} and set(found["4"]) == {"loss"}
    entry = found["4"]["loss"]
    assert entry["auc"]["value"] == auc(*sides(some))
    assert (entry["members"], entry["controls"], entry["articles"]) == (40, 40, 40)
    assert entry["auc"]["low"] < entry["auc"]["value"] < entry["auc"]["high"]


def test_articles_on_both_sides_make_the_interval_narrower():
    def width(some: list, **documents) -> tuple[float, float]:
        mine = membership(some)["4"]["loss"]["auc"]
        names = [[one.document_id for one in some if (one.bucket > 0) == seen] for seen in (True, False)]
        other = attack(*sides(some), member_documents=names[0], control_documents=names[1], rates=())["auc"]
        assert mine["value"] == other["value"]
        return mine["high"] - mine["low"], other["high"] - other["low"]

    paired, as_two_sets = width(passages())
    assert paired < 0.8 * as_two_sets
    apart, as_two_sets = width(passages(apart=True))
    assert apart == pytest.approx(as_two_sets, rel=1e-9)


def test_the_interval_holds_the_truth():
    """Articles with effects of their own, no difference between the sides: the truth is a half."""
    held = 0
    for seed in range(200):
        draw = np.random.default_rng(seed)
        some = []
        for number in range(24):
            common = 1.5 * draw.normal()
            for bucket in (0, 1):
                about = {"document_id": f"A{number}", "bucket": bucket, "logprob": float(-20 + common + draw.normal())}
                some.append(result(f"A{number}#{bucket}", **about))
        ends = membership(some)["1"]["loss"]["auc"]
        held += ends["low"] <= 0.5 <= ends["high"]
    assert held >= 185


def test_reference_takes_off_what_the_base_model_knew():
    some = passages(effect=1.0, of_article=6.0)
    base = [replace(one, logprob=one.logprob - 1.0 * (one.bucket > 0), bucket=0) for one in some]
    found = membership(some, base)["4"]
    assert found["reference"]["auc"]["value"] == 1.0 > found["loss"]["auc"]["value"]
    with pytest.raises(ValueError, match="was not asked for 'A0#0'"):
        membership(some, base[1:])


def test_scores_of_the_full_sample_are_taken_where_all_have_them():
    some = [replace(one, membership={"loss": one.logprob, "min_k": -one.logprob}) for one in passages()]
    found = membership(some)["4"]
    assert found["min_k"]["auc"]["value"] == pytest.approx(1 - found["loss"]["auc"]["value"])
    base = [replace(one, membership=None, logprob=-20.0) for one in some]
    assert set(membership(some, base)["4"]) == {"loss", "reference"}


def test_buckets_are_pooled_and_no_control_gives_nothing():
    some = passages()
    more = [replace(one, sample_id=f"{one.sample_id}+", bucket=8) for one in some if one.bucket]
    found = membership([*some, *more])
    assert set(found) == {"4", "8", "trained"}
    assert found["trained"]["loss"]["members"] == 80
    assert found["4"]["loss"]["auc"]["value"] == found["8"]["loss"]["auc"]["value"]
    assert membership([one for one in some if one.bucket]) == {}
    assert membership([]) == {}
    (one,) = passages(articles=1)[:1]
    single = membership([one, replace(one, sample_id="b", bucket=1)])["1"]["loss"]["auc"]
    assert (single["value"], single["low"], single["high"]) == (0.5, None, None)


def test_exposure_of_canaries_by_insertions(tmp_path):
    made = [
        CanaryRank(
            canary_id=str(place), text="", insertions=insertions, nll=1.0, rank=rank, exposure=10 - log(rank, 2)
        )
        for place, (insertions, rank) in enumerate([(0, 512), (0, 256), (4, 1), (4, 16)])
    ]
    record = {"highest_exposure": 10.0, "exact": False, "canaries": [asdict(one) for one in made]}
    write_json(tmp_path / "canaries.json", record)
    found = canaries(tmp_path / "canaries.json")
    assert found["highest"] == 10.0 and found["unseen"] == pytest.approx(1.4427, abs=1e-4)
    assert found["by_insertions"]["0"]["exposures"] == pytest.approx([1, 2])
    assert (
        found["by_insertions"]["4"]["mean_exposure"] == pytest.approx(8) and found["by_insertions"]["4"]["first"] == 1
    )
    for content, message in ((None, "is not there"), ([], "no ranking"), ({"canaries": [{"rank": 1}]}, "no ranking")):
        (tmp_path / "canaries.json").unlink(missing_ok=True)
        if content is not None:
            write_json(tmp_path / "canaries.json", content)
        with pytest.raises(ValueError, match=message):
            canaries(tmp_path / "canaries.json")
