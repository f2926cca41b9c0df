"""training_scripts/study/findings: what was planted is found, and what is missing is named."""

import csv
import io
import json
from dataclasses import replace

import numpy as np
import pytest

from hf_axonn_eval.data.results import RunDirectory
from hf_axonn_eval.metrics.registry import METRICS
from hf_axonn_scripts.study.findings.findings import measure, size_text
from hf_axonn_scripts.study.findings.results import goldfish_options, read_study, table_csv
from hf_axonn_scripts.study.recipe.definition import ORDINARY
from tests.study.planted import BUCKETS, PREFIX, SUFFIX, Plan, plant, planted_gain


SIZES = ("XS", "M", "XL")


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A study of three sizes and one apart, four losses and three seeds, that lacks two steps."""
    output = tmp_path_factory.mktemp("planted")
    plan = Plan(
        models=SIZES,
        apart=True,
        losses=("ordinary", "k2", "k4", "random"),
        articles=16,
        grid=True,
        left_out=("train-XL-k2-s2", "ask-M"),
    )
    recipe = plant(plan, output)
    return recipe, output


@pytest.fixture(scope="module")
def found(planted):
    """The study as it is read."""
    return read_study(*planted)


@pytest.fixture(scope="module")
def content(found):
    return measure(found)


def rows_of(rows, **wanted):
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def one_of(rows, **wanted):
    (row,) = rows_of(rows, **wanted)
    return row


def expected_gain(content, model, bucket):
    parameters = one_of(content["models"], model=model)["parameters"]
    return planted_gain(parameters, bucket) / SUFFIX


def test_gains_are_those_that_were_planted(content):
    for model in ("XS", "XL", "Known"):
        for bucket in BUCKETS[1:]:
            found = one_of(content["cells"], model=model, loss="ordinary", bucket=bucket)
            truth = expected_gain(content, model, bucket)
            assert found["gain"]["mean"] == pytest.approx(truth, abs=0.04)
            assert found["gain"]["high"] - found["gain"]["low"] < 0.15
            assert np.mean([seed["gain"] for seed in found["seeds"].values()]) == pytest.approx(found["gain"]["mean"])
            assert set(found["seeds"]) == {"0", "1", "2"}


def test_the_model_before_any_run_has_seen_nothing(content):
    for model in ("XS", "XL", "Known"):
        row = one_of(content["cells"], model=model, loss="base")
        assert (row["bucket"], row["passages"], row["seeds"]) == (0, 16 * len(BUCKETS), {})
        assert "gain" not in row and one_of(content["attacks"], model=model, loss="base")["samples"] == row["passages"]


def test_intervals_hold_most_of_the_planted_gains(content):
    found = [row for row in content["cells"] if row["loss"] == "ordinary" and "gain" in row]
    truths = [expected_gain(content, row["model"], row["bucket"]) for row in found]
    held = [row["gain"]["low"] <= truth <= row["gain"]["high"] for row, truth in zip(found, truths, strict=True)]
    assert len(held) == 9 and sum(held) >= 7


def test_the_slope_is_the_planted_one_and_leaves_out_what_is_apart(content):
    for bucket in BUCKETS[1:]:
        row = one_of(content["slopes"], outcome="gain", loss="ordinary", bucket=bucket)
        assert row["slope"]["mean"] == pytest.approx(1.5 * bucket**0.5 / SUFFIX, abs=0.04)
        assert list(row["residuals"]) == ["XS", "XL"]  # M was not asked before, and Known is apart
    overall = one_of(content["slopes"], outcome="gain", loss="ordinary", bucket="overall")
    each = [row["slope"]["mean"] for row in rows_of(content["slopes"], outcome="gain", loss="ordinary")]
    assert overall["slope"]["mean"] == pytest.approx(np.mean(each[:3]))


def test_what_a_loss_keeps_is_the_planted_share(content):
    for loss, kept in {"k2": 0.25, "k4": 0.5, "random": 0.9}.items():
        for model in ("XS", "XL", "Known"):
            row = one_of(content["goldfish"], model=model, loss=loss, bucket=16)
            assert row["gain_kept"]["mean"] == pytest.approx(kept, abs=0.05)
            less = one_of(content["cells"], model=model, loss=loss, bucket=16)["gain"]["mean"]
            if row["seeds"] == [0, 1, 2]:
                ordinary = one_of(content["cells"], model=model, loss="ordinary", bucket=16)["gain"]["mean"]
                assert row["gain_difference"]["mean"] == pytest.approx(less - ordinary)
    assert one_of(content["goldfish"], model="XL", loss="k2", bucket=16)["seeds"] == [0, 1]
    assert "gain_kept" not in one_of(content["goldfish"], model="XL", loss="k2", bucket=0)


def test_verbatim_is_compared_passage_by_passage(found, content):
    row = one_of(content["goldfish"], model="XL", loss="k2", bucket=16)["verbatim_difference"]
    counts = {}
    for loss in ("ordinary", "k2"):
        runs = [one for one in found.runs_with("XL", loss) if one.seed != 2]
        counts[loss] = sum(result.exact_match for one in runs for result in one.results if result.bucket == 16)
    assert (row["mine"], row["ordinary"], row["passages"]) == (counts["k2"], counts["ordinary"], 32)
    assert row["gained"] - row["lost"] == counts["k2"] - counts["ordinary"] and counts["ordinary"] > 20


def test_dropped_tokens_are_those_that_were_planted(content):
    for model in ("XS", "XL"):
        own = one_of(content["tokens"], model=model, mask="k4", who="k4", bucket=16)
        assert own["dropped"]["hits"] == 0 and own["supervised"]["accuracy"]["mean"] > 0.5
        assert own["difference"]["accuracy"]["difference"] > 0.5
        other = one_of(content["tokens"], model=model, mask="k4", who="ordinary", bucket=16)
        assert other["dropped"]["accuracy"]["mean"] > 0.5
        assert abs(other["difference"]["accuracy"]["difference"]) < 0.1
        base = one_of(content["tokens"], model=model, mask="k4", who="base", bucket=0)
        assert base["dropped"]["n"] + base["supervised"]["n"] == 16 * len(BUCKETS) * SUFFIX
    assert not rows_of(content["tokens"], mask="random")  # its texts do not tell
    assert not rows_of(content["tokens"], mask="ordinary")
    of_two = one_of(content["tokens"], model="XS", mask="k2", who="k2", bucket=1)
    share = of_two["dropped"]["n"] / (of_two["dropped"]["n"] + of_two["supervised"]["n"])
    assert 0.35 < share < 0.65


def test_the_same_passage_unseen_gives_the_gain_again(content):
    row = one_of(content["again"], model="XS", loss="ordinary", bucket=16)
    assert row["gain"]["mean"] == pytest.approx(expected_gain(content, "XS", 16), abs=0.06)
    assert row["pairs"] == 32 and row["articles"] == 16
    pairs = {row["bucket"]: row["pairs"] for row in rows_of(content["again"], model="XL", loss="k2")}
    assert sum(pairs.values()) == 32  # two seeds, each with one bucket whose passages the other does not see


def test_missing_steps_are_named_and_nothing_is_put_in_their_place(content):
    missing = {one["step"]: one for one in content["missing"]}
    assert set(missing) == {"train-XL-k2-s2", "ask-M"} | {f"utility-{name}" for name in (*SIZES, "Known")}
    assert all(one["state"] == "not done" for one in missing.values())
    assert not any("/tmp" in one["why"] for one in missing.values())
    assert content["runs"] == {"asked": 49, "done": 48}
    assert not [row for row in rows_of(content["cells"], model="M") if "gain" in row]
    assert one_of(content["cells"], model="M", loss="ordinary", bucket=16)["verbatim"]["n"] == 48
    assert content["utility"] == dict.fromkeys((*SIZES, "Known"))


def test_a_step_that_failed_says_why(tmp_path):
    recipe = plant(Plan(models=("XS",), losses=("ordinary",), seeds=(0,), left_out=["ask-XS"]), tmp_path)
    (tmp_path / ".stamps").mkdir()
    (tmp_path / ".stamps" / "ask-XS.failed").write_text("2026-01-01 out of memory\n")
    (tmp_path / ".stamps" / "utility-XS.begun").write_text("{}")
    missing = {one.step: one for one in read_study(recipe, tmp_path).missing}
    assert missing["ask-XS"].state == "failed" and missing["ask-XS"].why.endswith("out of memory")
    assert missing["utility-XS"].state == "not finished"


def test_a_run_that_was_stopped_in_the_middle_is_missing(tmp_path):
    recipe = plant(Plan(models=("XS",), losses=("ordinary",), seeds=(0, 1)), tmp_path)
    file = tmp_path / "runs" / "XS" / "ordinary-s1" / "extraction" / "results.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]))
    found = read_study(recipe, tmp_path)
    assert [run.seed for run in found.runs] == [0]
    assert f"{len(lines) - 1} of {len(lines)} samples" in next(iter(found.missing)).why


def test_a_study_without_anything_is_read_and_all_of_it_is_missing(tmp_path):
    recipe = plant(Plan(models=("XS",), losses=("ordinary",), seeds=(0,)), tmp_path / "there")
    content = measure(read_study(recipe, tmp_path / "empty"))
    assert content["cells"] == content["slopes"] == content["goldfish"] == []
    assert {one["step"] for one in content["missing"]} == {"ask-XS", "train-XS-ordinary-s0", "utility-XS"}


def test_losses_are_compared_on_the_seeds_that_both_have(tmp_path):
    plan = Plan(models=("XS",), losses=("ordinary", "k2"), seeds=(0, 1), left_out=["train-XS-ordinary-s1"])
    recipe = plant(plan, tmp_path)
    content = measure(read_study(recipe, tmp_path))
    row = one_of(content["goldfish"], loss="k2", bucket=16)
    assert (row["seeds"], row["gain_difference"]["passages"], row["verbatim_difference"]["passages"]) == ([0], 12, 12)
    assert one_of(content["cells"], loss="k2", bucket=16)["passages"] == 24


def test_models_of_one_size_have_no_slope(tmp_path):
    recipe = plant(Plan(models=("XS", "XS again"), losses=("ordinary",), seeds=(0,), articles=8), tmp_path)
    content = measure(read_study(recipe, tmp_path))
    assert content["slopes"] == [] and len(content["doublings"]) == 8


def test_one_seed_and_no_variance(tmp_path):
    """Every passage gains the same: numbers without intervals, and no division by 0."""
    plan = Plan(models=("XS", "XL"), losses=("ordinary", "k4"), seeds=(0,), noise=0.0, gain=lambda size, bucket: 0.0)
    recipe = plant(plan, tmp_path)
    content = measure(read_study(recipe, tmp_path))
    cell = one_of(content["cells"], model="XS", loss="ordinary", bucket=16)
    assert cell["gain"]["mean"] == pytest.approx(0, abs=1e-12) and cell["gain"]["low"] is None
    assert cell["seeds"].keys() == {"0"}
    slope = one_of(content["slopes"], outcome="gain", loss="ordinary", bucket=16)
    assert slope["slope"]["low"] is None and slope["slope"]["mean"] == pytest.approx(0, abs=1e-9)
    assert one_of(content["goldfish"], model="XS", loss="k4", bucket=16)["gain_kept"]["mean"] is None
    assert all(row["pairs"] == 0 for row in content["again"])


def test_a_shorter_suffix_is_what_a_run_with_it_would_give(tmp_path):
    """The pilot chose 8 tokens of the 16 that were asked for."""
    plan = Plan(models=("M",), losses=("ordinary", "k4"), seeds=(0,), chosen=8)
    recipe = plant(plan, tmp_path)
    found = read_study(recipe, tmp_path)
    (run,) = (run for run in found.runs if run.loss == "ordinary")
    asked = found.runs[run]
    raw = {
        line["document_id"]: line
        for line in map(json.loads, open(tmp_path / "runs" / "M" / run.name / "extraction" / "results.jsonl"))
    }
    samples = found._samples("M")
    for sample in samples:
        full, result = raw[sample.sample_id], asked.results[asked.place[sample.sample_id]]
        assert result.suffix_length == 8 and result.hits == full["hits"][:8]
        assert result.logprob == pytest.approx(sum(full["logprobs"][:8]))
        assert result.ranks == full["ranks"][:8]
        assert result.metric("rank_bits") == METRICS["rank_bits"].function(full["ranks"][:8])
        assert result.exact_match == (full["divergence_point"] >= 8)
        near = METRICS["near_verbatim"].function(full["generated"][:8], sample.suffix[:8])
        assert result.near_verbatim == near
        assert result.extraction_strength == METRICS["extraction_strength"].function(full["hits"][:8])
        assert asked.right[asked.place[sample.sample_id]] == full["divergence_point"]
    content = measure(found)
    cell = one_of(content["cells"], model="M", loss="ordinary", bucket=16)
    assert set(cell["verbatim_at"]) == {"8", "16"} and cell["verbatim_at"]["8"]["count"] == cell["verbatim"]["count"]
    assert cell["verbatim_at"]["16"]["count"] < cell["verbatim"]["count"]
    assert content["sampler"] == "temperature=1" and (content["suffix"], content["asked_for"]) == (8, 16)
    tokens = one_of(content["tokens"], model="M", mask="k4", who="k4", bucket=16)
    assert tokens["dropped"]["n"] + tokens["supervised"]["n"] == 12 * 8


def test_another_grid_is_compared_with_its_twin_and_enters_nothing_else(found, content):
    (row,) = content["grids"]
    assert (row["model"], row["grid"], row["passages"], row["steps"]) == ("XS", "x=2 z=2", 16 * len(BUCKETS), 3)
    runs = found.runs
    (other,) = (asked for run, asked in runs.items() if run.grid)
    twin = runs[replace(other.run, grid=())]
    apart = np.abs(other.column("logprob") - twin.column("logprob"))
    assert row["largest_logprob"] == pytest.approx(apart.max()) and row["largest_loss"] > 0
    assert one_of(content["cells"], model="XS", loss="ordinary", bucket=16)["passages"] == 48


def test_attacks_and_membership_follow_the_log_probabilities(content):
    shares = {
        loss: one_of(content["attacks"], model="XL", loss=loss, bucket=16)["tries"]["1000000"]["share"]
        for loss in ("ordinary", "k2")
    }
    assert shares["ordinary"] > 100 * shares["k2"] > 0
    assert content["sampler"] == "temperature=1"
    rows = rows_of(content["membership"], model="XL", loss="ordinary", bucket=16)
    aucs = {row["score"]: row["auc"]["value"] for row in rows}
    assert set(aucs) == {"loss", "reference"} and aucs["loss"] > 0.9


def test_the_table_has_a_row_for_each_passage_of_each_run(found):
    text = table_csv(found)
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 48 * 16 * len(BUCKETS)
    one = next(row for row in rows if (row["model"], row["loss"], row["seed"], row["grid"]) == ("XL", "k4", "1", ""))
    (run,) = (run for run in found.runs if run.model == "XL" and run.loss == "k4" and run.seed == 1)
    asked = found.runs[run]
    result = asked.results[asked.place[one["passage"]]]
    assert one["article"] == one["passage"].partition("#")[0] and int(one["bucket"]) == result.bucket
    assert float(one["logprob"]) == pytest.approx(result.logprob)
    base = found.bases["XL"]
    before = base.results[base.place[one["passage"]]].logprob
    assert float(one["logprob_base"]) == pytest.approx(before)
    unseen = [row for row in rows if all(row[name] == one[name] for name in ("model", "loss", "seed", "grid"))]
    unseen = [float(row["logprob"]) - float(row["logprob_base"]) for row in unseen if row["bucket"] == "0"]
    assert float(one["gain"]) == pytest.approx(result.logprob - before - np.mean(unseen), abs=1e-6)
    assert int(one["dropped"]) + int(one["supervised"]) == SUFFIX
    own = [row for row in rows if row["loss"] == "k4"]
    dropped = sum(int(row["dropped"]) for row in own)
    assert 0.2 < dropped / (len(own) * SUFFIX) < 0.3 and {row["dropped_hits"] for row in own} == {"0"}
    assert sum(int(row["supervised_hits"]) for row in own) > 0
    assert next(row for row in rows if row["model"] == "M")["gain"] == ""
    assert {row["dropped"] for row in rows if row["loss"] == "random"} == {""}


def test_pages_that_are_in_one_bucket_each(tmp_path):
    """As in sc24.yaml: buckets have different articles, and no comparison of them can be made article by article."""
    plan = Plan(models=SIZES, losses=("ordinary", "k2"), articles=16, seeds=(0, 1), pages=True)
    recipe = plant(plan, tmp_path)
    content = measure(read_study(recipe, tmp_path))
    for model in SIZES:
        row = one_of(content["cells"], model=model, loss="ordinary", bucket=16)
        # 16 pages of the bucket and 16 of the control in each of two seeds, 16 of them in both
        assert (row["gain"]["articles"], row["gain"]["passages"], row["articles"]) == (48, 32, 32)
        assert row["gain"]["low"] < expected_gain(content, model, 16) < row["gain"]["high"]
    row = one_of(content["slopes"], outcome="gain", loss="ordinary", bucket=16)
    assert row["slope"]["mean"] == pytest.approx(1.5 * 4 / SUFFIX, abs=0.05) and row["slope"]["low"] > 0
    assert one_of(content["goldfish"], model="M", loss="k2", bucket=16)["gain_kept"]["mean"] == pytest.approx(
        0.25, abs=0.06
    )


def test_two_samples_of_a_passage_are_refused(tmp_path):
    recipe = plant(Plan(models=("XS",), losses=("ordinary",), seeds=(0,)), tmp_path)
    folder = tmp_path / "runs" / "XS" / "ordinary-s0" / "extraction"
    lines = (folder / "results.jsonl").read_text().splitlines()
    again = {**json.loads(lines[0]), "sample_id": "another"}
    (folder / "results.jsonl").write_text("\n".join([*lines, json.dumps(again)]) + "\n")
    record = json.loads((folder / "run.json").read_text())
    record["identity"]["samples"] += 1
    (folder / "run.json").write_text(json.dumps(record))
    (missing,) = (one for one in read_study(recipe, tmp_path).missing if one.step.startswith("train"))
    assert "several samples of one passage" in missing.why


def test_a_sample_of_no_passage_is_refused(tmp_path):
    recipe = plant(Plan(models=("XS",), losses=("ordinary",), seeds=(0,)), tmp_path)
    folder = tmp_path / "runs" / "XS" / "base" / "extraction"
    results = RunDirectory(folder).results()
    strange = replace(results[0], sample_id="x", document_id="y")
    RunDirectory(folder).append([strange])
    record = json.loads((folder / "run.json").read_text())
    record["identity"]["samples"] += 1
    (folder / "run.json").write_text(json.dumps(record))
    (missing,) = (one for one in read_study(recipe, tmp_path).missing if one.step == "ask-XS")
    assert "'x' is of none of the passages" in missing.why


def test_losses_have_the_defaults_of_the_trainer():
    class Losses:
        losses = {"ordinary": {"goldfish": False}, "k3": {"goldfish_k": 3}, "paper": {"goldfish_strategy": "hash"}}

    assert ORDINARY == "ordinary" and goldfish_options(Losses, "ordinary") == {}
    assert goldfish_options(Losses, "k3") == {"strategy": "hash-table", "k": 3, "context_width": 13}
    assert goldfish_options(Losses, "paper") == {"strategy": "hash", "k": 4, "context_width": 13}


def test_sizes_in_three_digits():
    assert [size_text(number) for number in (307_000, 29_940_000, 1.1e9, 12)] == ["307k", "29.9M", "1.1B", "12"]
    assert PREFIX + SUFFIX == 32
