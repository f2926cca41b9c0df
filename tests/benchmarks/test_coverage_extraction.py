"""tests/benchmarks/eval/coverage_extraction.py: what is said of tokens and queries holds in a few draws, and bounds
that do not hold are seen."""

from itertools import islice

import numpy as np
import pytest

from hf_axonn_eval.analysis.attack_cost import attack_cost
from hf_axonn_eval.metrics.discoverability import TRIES
from tests.benchmarks.eval import coverage_extraction as study
from tests.helpers.eval_support import result


def test_intervals_of_tokens_hold_the_truth():
    for case in islice(study.tokens(200), 6):
        assert case.share > 0.88 and case.draws > 150, case


def test_bounds_of_queries_hold_the_truth():
    for case in islice(study.queries(study.AT_ONCE), 3):
        assert case.share > 0.93 and case.draws == study.AT_ONCE, case


def test_bounds_that_are_too_high_are_seen(monkeypatch):
    """With the means themselves in the place of bounds about half of the draws are wrong."""
    monkeypatch.setattr(study, "lower_bound", lambda sums, trials, level: sums / trials)
    cases = list(islice(study.queries(study.AT_ONCE), 1, 5))
    assert any(case.share < 0.8 for case in cases) and any(case.low for case in cases)


@pytest.mark.parametrize("name", study.CHANCES)
def test_chances_are_chances(name):
    chances = study.CHANCES[name](study.RANKS)
    assert chances.shape == study.RANKS.shape and ((chances >= 0) & (chances <= 1)).all()


def test_the_bounds_are_those_of_reports():
    """Of one draw: the study's way to compute all bounds at once, and the function that reports use."""
    drawn = np.array([0.5, 1e-3, 1e-12, 0.2, 1e-5])
    answers = [result(str(place), bucket=1, sampled_logprob=float(np.log(q))) for place, q in enumerate(drawn)]
    reported = [row["low"] for row in attack_cost(answers)["1"]["tries"].values()]
    sums = np.array([study.expected_share(drawn, tries).sum() for tries in TRIES])
    bounds = study.lower_bound(sums, 5, level=0.05 / len(TRIES))
    assert reported == pytest.approx(bounds.tolist()) and max(reported) > 0
