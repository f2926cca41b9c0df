"""tests/benchmarks/planner/planning_measured.py: what it makes of times, and one visit to a small grid."""

import json

import pytest
import torch

from hf_axonn.planner.machine import FOLDER
from tests.benchmarks.planner import planning_measured as benchmark


def test_verdict_by_hand():
    """The predicted best is 25% slower; one pair of neighbours of four has changed places: 1 - 6 * 2 / (4 * 15)."""
    measured = {"a": 4.0, "b": 5.0, "c": 6.0, "d": 7.0}
    behind, alike = benchmark.verdict(measured, {"a": 2.0, "b": 1.0, "c": 3.0, "d": 4.0})
    assert behind == pytest.approx(0.25) and alike == pytest.approx(0.8)
    assert benchmark.places([3.0, 1.0, 3.0, 0.0]) == [2.5, 1.0, 2.5, 0.0]


def test_two_rounds_agree_as_they_do():
    visits = {"a": [[1.0, 9.0, 1.0], [1.1]], "b": [[2.0], [2.0]], "c": [[3.0], [1.5]], "d": [[4.0]]}
    (line,) = benchmark.agreement(visits)
    assert "rank correlation 0.50, 10.0% apart" in line
    assert benchmark.agreement({"a": visits["a"]}) == []


def test_a_report_tells_what_holds(tmp_path):
    (tmp_path / "machine-2.json").write_text((FOLDER / "frontier.json").read_text())
    predicted = {name: its.total for name, its in benchmark.predictions(2, tmp_path, "tiny").items()}
    assert set(predicted) == {"data=2", "z=2", "y=2", "x=2"}
    visits = {name: [[2 * seconds] * 2, [2 * seconds]] for name, seconds in predicted.items()}
    (tmp_path / "measured-2.json").write_text(json.dumps(visits))
    text = "\n".join(benchmark.report(2, tmp_path, "tiny"))
    assert "- holds: the predicted best is 0.0% slower" in text and "- holds: rank correlation 1.00" in text
    assert "4 of 4 grids; measured over predicted seconds: 2.00" in text and "apart in the median" in text
    best = min(predicted, key=predicted.get)
    visits[best] = [[1e3]]
    (tmp_path / "measured-2.json").write_text(json.dumps(visits))
    assert "DOES NOT HOLD: the predicted best" in "\n".join(benchmark.report(2, tmp_path, "tiny"))


def test_a_visit_counts_quiet_steps_only(tmp_path, monkeypatch):
    config = benchmark.model_config("tiny", sequence=benchmark.SEQ)
    benchmark.save_weights(config, tmp_path / "weights")
    batches = torch.randint(config.vocab_size, (1, benchmark.ROWS, benchmark.SEQ))
    monkeypatch.setattr(benchmark, "QUIET", 1.0)
    seconds, others = benchmark.visit("x=2", 2, tmp_path, batches, 2)
    assert len(seconds) == len(others) == 2 and all(0 < each < 60 for each in seconds)
    monkeypatch.setattr(benchmark, "QUIET", -1.0)
    seconds, others = benchmark.visit("x=2", 2, tmp_path, batches, 1)
    assert seconds == [] and len(others) == benchmark.ATTEMPTS
