"""training_scripts/study/training/pilot.py: what is counted, what is chosen, and a pilot from start to end."""

from __future__ import annotations

import json

import pytest

from hf_axonn import Grid
from hf_axonn_scripts.study.recipe.definition import Pilot
from hf_axonn_scripts.study.training.pilot import choose, count
from tests.helpers.eval_support import result
from tests.helpers.launching import assert_quiet
from tests.study.small_study import SmallStudy


@pytest.fixture(scope="module")
def with_base(tmp_path_factory):
    small = SmallStudy.made(tmp_path_factory.mktemp("pilot"))
    assert_quiet(small.do("base-tiny"))
    return small


def row(rate, suffix, largest, none):
    return {"learning_rate": rate, "suffix": suffix, "largest": largest, "none": none, "held_out_loss": 5.0}


def asked(**changes):
    return Pilot(model="tiny", learning_rates=(1e-3,), suffixes=(4, 8), **changes)


def test_a_shorter_suffix_is_the_first_tokens():
    points = {4: (8, 5, 3, 8), 0: (0, 4, 1, 0), 1: (8,)}
    results = [
        result(f"{bucket}-{place}", bucket=bucket, divergence_point=point, suffix_length=8)
        for bucket, some in points.items()
        for place, point in enumerate(some)
    ]
    assert count(results, (3, 4, 8), largest=4) == [
        {"suffix": 3, "largest": 1.0, "none": 0.25},
        {"suffix": 4, "largest": 0.75, "none": 0.25},
        {"suffix": 8, "largest": 0.5, "none": 0.0},
    ]


@pytest.mark.parametrize(
    ("tried", "chosen"),
    [
        # the longest suffix that satisfies both, not the share
        ([row(1e-3, 4, 0.9, 0.0), row(1e-3, 8, 0.5, 0.05)], (1e-3, 8)),
        # what comes back unseen counts against a short one
        ([row(1e-3, 4, 1.0, 0.06), row(1e-3, 8, 0.6, 0.0)], (1e-3, 8)),
        ([row(1e-3, 4, 0.6, 0.0), row(1e-3, 8, 0.49, 0.0)], (1e-3, 4)),
        # of two rates that at which more comes back, and of equals the smaller
        ([row(1e-3, 8, 0.6, 0.0), row(2e-3, 8, 0.8, 0.0)], (2e-3, 8)),
        ([row(2e-3, 8, 0.8, 0.0), row(1e-3, 8, 0.8, 0.0)], (1e-3, 8)),
    ],
)
def test_choice(tried, chosen):
    found = choose(tried, asked())
    assert (found["learning_rate"], found["suffix"]) == chosen


@pytest.mark.parametrize(
    ("tried", "advice"),
    [
        ([row(1e-3, 4, 0.3, 0.0), row(1e-3, 8, 0.1, 0.0)], "too little comes back of the largest bucket"),
        ([row(1e-3, 4, 0.9, 0.3), row(1e-3, 8, 0.8, 0.1)], "too much comes back of bucket 0"),
        ([row(1e-3, 4, 0.9, 0.3), row(1e-3, 8, 0.1, 0.0)], "longer suffixes between them"),
    ],
)
def test_no_choice_shows_what_was_tried_and_what_to_change(tried, advice):
    with pytest.raises(ValueError, match="found no learning rate and suffix") as raised:
        choose(tried, asked())
    message = str(raised.value)
    assert advice in message and "Change `pilot` in the recipe" in message
    for one in tried:
        assert f"{one['suffix']:>8} {one['largest']:>10.1%} {one['none']:>10.1%}" in message


def test_a_pilot_chooses_and_is_not_measured_twice(with_base, tmp_path):
    small = with_base.copy(tmp_path)
    small.change("at_least: 0.02, at_most: 0.01", "at_least: 1.0, at_most: 0.0")
    ended = small.do("pilot", grid=Grid(x=2))
    assert ended.code and "found no learning rate and suffix" in ended.output
    directory = small.output / "pilot"
    assert not (directory / "chosen.json").exists()
    files = {file: file.stat().st_mtime_ns for file in directory.glob("rate-*.json")}
    assert sorted(file.name for file in files) == ["rate-0.001.json", "rate-0.01.json"]

    # Other conditions do not measure again.
    small.change("at_least: 1.0, at_most: 0.0", "at_least: 0.0, at_most: 0.0")
    assert_quiet(small.do("pilot"))
    assert files == {file: file.stat().st_mtime_ns for file in files}
    chosen = json.loads((directory / "chosen.json").read_text())
    tried = chosen["tried"]
    assert [(one["learning_rate"], one["suffix"]) for one in tried] == [(1e-3, 2), (1e-3, 8), (1e-2, 2), (1e-2, 8)]
    assert chosen["suffix"] == 8
    losses = {one["learning_rate"]: one["held_out_loss"] for one in tried}
    base = json.loads((small.output / "base" / "tiny" / "trainer_state.json").read_text())["log_history"]
    before = [entry["eval_loss"] for entry in base if "eval_loss" in entry][-1]
    # Each rate began with the base: the small one has left it less far.
    assert abs(losses[1e-3] - before) < abs(losses[1e-2] - before)
    assert not (small.output / "work" / "tiny" / "pilot-0.01").exists()

    # The second one alone gives the same.
    (directory / "rate-0.01.json").unlink()
    small.change("learning_rates: [1e-3, 1e-2]", "learning_rates: [1e-2]")
    assert_quiet(small.do("pilot"))
    alone = json.loads((directory / "chosen.json").read_text())["tried"]
    assert [one["held_out_loss"] for one in alone] == pytest.approx([losses[1e-2]] * 2, rel=1e-4)


def test_a_rate_is_measured_again_for_other_rows(with_base, tmp_path):
    small = with_base.copy(tmp_path)
    small.change("learning_rates: [1e-3, 1e-2]", "learning_rates: [1e-2]")
    small.change("at_least: 0.02, at_most: 0.01", "at_least: 0.0, at_most: 0.0")
    assert_quiet(small.do("pilot"))
    file = small.output / "pilot" / "rate-0.01.json"
    first = file.stat().st_mtime_ns
    rows = small.output / "data" / "study" / "train-s1.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[::-1]))
    assert_quiet(small.do("pilot"))
    assert file.stat().st_mtime_ns != first
