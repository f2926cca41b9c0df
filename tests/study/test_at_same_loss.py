"""training_scripts/study/findings/at_same_loss.py: what is extractable where held-out losses are equal."""

from __future__ import annotations

from dataclasses import replace
from math import log

import numpy as np
import pytest

from hf_axonn_eval import n_needed, read_run
from hf_axonn_scripts.study.findings.at_same_loss import (
    CHANCE,
    DRAWS,
    INCOMPARABLE,
    LESS,
    MORE,
    UNDECIDED,
    Place,
    Point,
    decide,
    extraction_at_same_loss,
    find_place,
    match,
    pairs,
)
from hf_axonn_scripts.study.findings.effects import Cell
from hf_axonn_scripts.study.findings.findings import measure
from hf_axonn_scripts.study.findings.results import read_study
from hf_axonn_scripts.study.recipe.steps import curve_directory
from hf_axonn_scripts.study.report import figures, tables
from hf_axonn_scripts.study.report.sentences import opening
from tests.study.planted import START, STEPS, SUFFIX, Plan, plant, planted_gain


RISES = {"ordinary": 0.1, "k2": 0.12, "k4": 0.05, "random": -0.05}
KEPT = {"k2": 0.25, "k4": 0.5, "random": 0.9}


def curve(*losses: float) -> list[Point]:
    return [Point(10 * place, loss) for place, loss in enumerate(losses)]


class TestPlaces:
    def test_between_two_steps_by_the_loss(self):
        assert find_place(curve(5.0, 5.2, 5.6), 5.3) == Place(10, 20, pytest.approx(0.25))
        assert find_place(curve(5.6, 5.2, 5.0), 5.3) == Place(0, 10, pytest.approx(0.75))

    def test_of_several_the_latest(self):
        assert find_place(curve(5.0, 5.4, 5.2, 5.4), 5.3) == Place(20, 30, pytest.approx(0.5))
        assert find_place(curve(5.0, 5.4, 5.4), 5.4) == Place(10, 20, 1.0)

    def test_nothing_is_extrapolated(self):
        assert find_place(curve(5.0, 5.2), 5.21) is None and find_place(curve(5.0, 5.2), 4.99) is None

    def test_the_loss_is_that_with_which_one_ends_and_which_the_other_has(self):
        high, low, falling = curve(5.0, 5.8), curve(5.0, 5.4), curve(5.0, 4.0)
        found = match(high, low)
        assert found is not None and (found.held_out, found.end_of) == (5.4, "reference")
        assert found.own == Place(0, 10, pytest.approx(0.5)) and found.reference == Place(10, 10, 1.0)
        found = match(low, high)
        assert found is not None and (found.held_out, found.end_of) == (5.4, "loss")
        assert found.own == Place(10, 10, 1.0) and found.reference == Place(0, 10, pytest.approx(0.5))
        assert match(falling, high) is None and match(high, falling) is None

    def test_where_each_has_the_loss_of_the_other_the_later_place_is_taken(self):
        """At 7.5 the first is half trained, at 7.6 the second three quarters."""
        one, two = curve(6.5, 7.2, 7.6, 7.7, 7.6), curve(6.5, 7.2, 7.6, 7.8, 7.5)
        found = match(one, two)
        assert found is not None and (found.held_out, found.end_of) == (7.6, "loss")
        assert found.own == Place(40, 40, 1.0) and found.reference == Place(30, 40, pytest.approx(2 / 3))
        found = match(two, one)
        assert found is not None and (found.held_out, found.end_of) == (7.6, "reference")
        same = match(one, one)
        assert same is not None and same.own.step == same.reference.step == 40


class TestVerdicts:
    def cells(self, *means: float) -> dict[int, list]:
        """Differences of 40 articles with a standard error of 0.1."""
        noise = np.random.default_rng(0).normal(size=(len(means), 40))
        noise = (noise - noise.mean(1, keepdims=True)) / noise.std(1, keepdims=True) * 0.1 * 40**0.5
        return {key: [(1.0, Cell(mean + noise[key], np.ones(40)))] for key, mean in enumerate(means)}

    def test_a_sign_says_which_side_is_more(self):
        assert decide(self.cells(0.5, -0.5), 1) == {0: MORE, 1: LESS}
        assert decide(self.cells(0.5, -0.5), -1) == {0: LESS, 1: MORE}

    def test_holm_decides_what_is_decided_alone_only_if_the_surer_ones_are(self):
        """0.25 is 2.5 standard errors: p = 0.017, below 0.05 / 2 and above 0.05 / 3."""
        assert decide(self.cells(0.25), 1) == {0: MORE}
        assert decide(self.cells(0.25, 0.5, 0.0), 1) == {0: MORE, 1: MORE, 2: UNDECIDED}
        assert decide(self.cells(0.25, 0.0, 0.0), 1) == dict.fromkeys(range(3), UNDECIDED)

    def test_without_an_interval_nothing_is_decided(self):
        assert decide({0: [(1.0, Cell(np.ones(40), np.ones(40)))]}, 1) == {0: UNDECIDED}
        assert decide({}, 1) == {}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Two sizes; what each loss keeps of the gain, and how fast its held-out loss rises, is planted."""
    plan = Plan(models=("S", "XL"), losses=tuple(RISES), seeds=(0, 1), articles=16, kept=KEPT, rises=RISES)
    output = tmp_path_factory.mktemp("planted")
    return read_study(plant(plan, output), output)


@pytest.fixture(scope="module")
def content(study):
    return extraction_at_same_loss(study)


def one_of(rows, **values):
    (row,) = [row for row in rows if all(row[name] == value for name, value in values.items())]
    return row


def gain_on_the_way(study, model: str, loss: str, seed: int, place) -> float:
    """Nats a token that passages seen 16 times gain beyond unseen ones, between two steps, by a run's files."""
    (run,) = [run for run in study.runs if (run.model, run.loss, run.seed) == (model, loss, seed)]
    before, after, share = place
    _, base = read_run(study.output / "runs" / model / "base" / "extraction")
    at_first = {one.sample_id: one.logprob for one in base}
    gain = 0.0
    for step, weight in ((before, 1 - share), (after, share)):
        _, asked = read_run(curve_directory(run, study.output) / f"step-{step}")
        for bucket, sign in ((16, 1), (0, -1)):
            learnt = [one.logprob - at_first[one.sample_id] for one in asked if one.bucket == bucket]
            gain += sign * weight * sum(learnt) / len(learnt) / SUFFIX
    return gain


def test_gains_are_compared_where_held_out_losses_are_equal(study, content):
    """k2 has the last loss of `ordinary` after 2.5 steps of 3; `ordinary` has that of k4 after 1.5."""
    for model in ("S", "XL"):
        full = planted_gain(study.parameters[model], 16) / SUFFIX
        for loss, (own, at_reference) in {"k2": (2.5 * KEPT["k2"], 3), "k4": (3 * KEPT["k4"], 1.5)}.items():
            row = one_of(content["rows"], model=model, loss=loss, reference="ordinary", bucket=16)
            assert set(row["seeds"]) == {"0", "1"} and not {"_terms", "why"} & row.keys()
            for seed in row["seeds"].values():
                assert seed["held_out"] == pytest.approx(START + (0.3 if loss == "k2" else 0.15))
                assert seed["end_of"] == ("reference" if loss == "k2" else "loss")
            for side, of in {"own": loss, "at_reference": "ordinary"}.items():
                gains = [gain_on_the_way(study, model, of, int(seed), row["seeds"][seed][side]) for seed in ("0", "1")]
                assert row["gain"][side] == pytest.approx(sum(gains) / 2, abs=1e-12)
            # That is what is planted and its noise, of one nat a passage of 16 tokens at the end of a run and less
            # before, in a mean over 32 passages that were seen (16 articles, 2 seeds) less one over 32 that were not:
            # a standard error of 1/16 (2/32)^1/2 = 0.0156. 3.2 of them hold these 8 numbers for 99 seeds in 100.
            assert row["gain"]["own"] == pytest.approx(full * own / STEPS, abs=0.05)
            assert row["gain"]["at_reference"] == pytest.approx(full * at_reference / STEPS, abs=0.05)
            difference = row["gain"]["difference"]
            assert difference["mean"] == pytest.approx(row["gain"]["own"] - row["gain"]["at_reference"])
            assert difference["low"] < difference["mean"] < difference["high"]


def test_verdicts_are_of_the_passages_seen_most_often(content):
    rows = [row for row in content["rows"] if row["model"] == "XL" and row["reference"] == "ordinary"]
    verdicts = {(row["loss"], row["bucket"]): row.get("gain", row).get("verdict") for row in rows}
    assert verdicts["k2", 16] == LESS, "0.21 of the gain against all of it"
    assert verdicts["k4", 16] == UNDECIDED, "half of the gain at the end, as the ordinary loss has half-way"
    assert verdicts["random", 16] == INCOMPARABLE, "it ends below where both began, the ordinary loss above"
    assert {verdict for (_, bucket), verdict in verdicts.items() if bucket != 16} == {None, INCOMPARABLE}
    bits = one_of(rows, loss="k2", bucket=16)["bits"]
    assert bits["difference"]["mean"] > 0 and bits["verdict"] == LESS, "more bits are less that can be extracted"


def test_shares_are_interpolated_between_the_counts_of_two_steps(study, content):
    row = one_of(content["rows"], model="XL", loss="k2", reference="ordinary", bucket=16)
    bits = {True: [], False: []}
    for answers in study.runs_with("XL", "k2"):
        for step in (2, 3):
            for one in study.on_the_way(answers.run, step).results:
                if one.bucket == 16:
                    assert one.metrics["rank_bits"] * log(2) <= -one.logprob
                    bits[True].append(n_needed(-one.metrics["rank_bits"] * log(2), CHANCE) <= DRAWS)
                    bits[False].append(n_needed(one.logprob, CHANCE) <= DRAWS)
    assert row["drawable"]["own"] == pytest.approx(np.mean(bits[True]))
    assert row["drawn"]["own"] == pytest.approx(np.mean(bits[False]))
    assert row["drawn"]["own"] <= row["drawable"]["own"]


def test_each_loss_is_compared_with_the_ordinary_one_and_rivals_with_goldfish(study, content):
    ordinary = [("k2", "ordinary"), ("k4", "ordinary"), ("random", "ordinary")]
    assert pairs(study) == ordinary, "goldfish that draws anew is goldfish, and no reference"
    assert {(row["loss"], row["reference"]) for row in content["rows"]} == set(ordinary)
    study.recipe.losses["rival"] = {"loss_strategy": "ngram"}
    try:
        named = type(study)(study.recipe, study.output, {}, dict.fromkeys(_runs_of(study)), {}, ())
        assert pairs(named) == [*ordinary, ("rival", "ordinary"), ("rival", "k2"), ("rival", "k4")]
    finally:
        del study.recipe.losses["rival"]


def _runs_of(study):
    return [*study.runs, replace(next(iter(study.runs)), loss="rival")]


def test_curves_have_every_point(content):
    rows = [row for row in content["curves"] if (row["model"], row["loss"], row["seed"]) == ("S", "k4", 1)]
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert [row["held_out"] for row in rows] == pytest.approx([START + RISES["k4"] * step for step in range(4)])
    assert all(set(content["bounds"]) <= row.keys() for row in rows)


def test_a_study_that_was_asked_at_the_end_alone_compares_nothing(tmp_path):
    plan = Plan(models=("XS",), losses=("ordinary", "k2"), seeds=(0,), articles=4)
    found = extraction_at_same_loss(read_study(plant(plan, tmp_path), tmp_path))
    assert found["rows"] == [] and found["curves"] == []


def test_the_page_has_both_bounds_and_every_verdict(study, content):
    whole = measure(study)
    table = tables.at_same_loss(whole)
    assert len(table.rows) == len(content["rows"])
    row = next(row for row in table.rows if row[:4] == ["XL", "k2", "ordinary", "16x"])
    assert row[4:6] == ["5.300 (2 and 3), 5.300 (2 and 3)", "2 of 2"] and row[6].endswith(f"; {LESS}")
    other = next(row for row in table.rows if row[:4] == ["S", "random", "ordinary", "16x"])
    assert other[4:] == ["-", "0 of 2", *[INCOMPARABLE] * 5]
    for name, cell in zip(content["bounds"], row[6:], strict=True):
        entry = one_of(content["rows"], model="XL", loss="k2", reference="ordinary", bucket=16)[name]
        assert cell.startswith(f"{entry['own']:.2f} and {entry['at_reference']:.2f}: ")
    bounds = tables.bounds(whole)
    assert len(bounds.rows) == len(whole["cells"])
    for row in bounds.rows:
        assert all(low <= high for low, high in (map(float, cell.split(" to ")) for cell in row[3:-2]))
    sentence = next(line for line in opening(whole) if line.startswith("At equal held-out loss"))
    assert (
        "random leaves less than ordinary at 0, 0 and 0 of 2 sizes, and more at 0, 0 and 0, 2 not comparable"
        in sentence
    )


def test_the_figure_has_every_curve(study, content):
    whole = measure(study)
    figure = figures.FIGURES["curves.png"](whole)
    figure.canvas.draw()
    panels = figure.axes
    assert [axes.get_title().partition(",")[0] for axes in panels] == ["S", "XL", "S", "XL"]
    for axes, name in zip(panels, ("drawable", "drawable", "drawn", "drawn"), strict=True):
        lines = [line for line in axes.lines if len(line.get_xdata()) > 1]
        assert len(lines) == len(RISES) * 2, "a loss and a seed"
        model = axes.get_title().partition(",")[0]
        rows = [row for row in content["curves"] if (row["model"], row["loss"], row["seed"]) == (model, "k2", 0)]
        (line,) = [line for line in lines if line.get_label() == "k2"]
        assert list(line.get_xdata()) == [row["held_out"] for row in rows]
        assert list(line.get_ydata()) == [row[name] for row in rows]
    for text in [*(axes.title for axes in panels), *figure.legends[0].get_texts()]:
        box, edge = text.get_window_extent(), figure.bbox
        assert edge.x0 <= box.x0 and box.x1 <= edge.x1 and edge.y0 <= box.y0 and box.y1 <= edge.y1, text.get_text()
    assert "along a vertical" in (figures.FIGURES["curves.png"].__doc__ or "")
