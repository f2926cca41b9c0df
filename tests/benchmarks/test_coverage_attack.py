"""tests/benchmarks/eval/coverage_attack.py: its intervals of many data sets are those of the package, its truths are
true, and the intervals hold them."""

import sys

import numpy as np
import pytest

from hf_axonn_eval.analysis.membership_attack import attack
from tests.benchmarks.eval import coverage_attack as coverage


CASES = (coverage.Drawn((12, 100), 1, 0.0), coverage.Drawn((20, 15), 10, 0.5), coverage.Drawn((9, 14), 3, 1.0))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.text)
@pytest.mark.parametrize("name", coverage.KINDS)
def test_many_data_sets_at_once_get_the_intervals_of_the_package(name, case):
    kind = coverage.KINDS[name]
    base, controls = next(coverage.drawings(kind, case, 4))
    members = kind.members(base, 0.9)
    measured = coverage.areas_and_variances(members, controls, case, ties=kind.ties)
    low, high = coverage.ours(*measured, case.documents)
    documents = [np.arange(count).repeat(case.windows).tolist() for count in case.documents]
    for place in range(4):
        found = attack(members[place], controls[place], member_documents=documents[0], control_documents=documents[1])[
            "auc"
        ]
        expected = {"value": measured[0, place], "low": low[place], "high": high[place]}
        assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", coverage.KINDS)
def test_the_truths_are_those_of_many_scores(name):
    kind, case = coverage.KINDS[name], coverage.Drawn((20_000, 20_000), 1, 0.0)
    base, controls = next(coverage.drawings(kind, case, 1))
    for area in (0.5, 0.7, 0.99):
        members = kind.members(base, area)
        measured = coverage.areas_and_variances(members, controls, case, ties=kind.ties)[0, 0]
        assert measured == pytest.approx(area, abs=4 * (area * (1 - area) / 20_000) ** 0.5)
        for rate in (0.1, 0.01):
            level = np.sort(controls[0])[-int(rate * 20_000) - 1]
            assert (members > level).mean() == pytest.approx(kind.caught(area, rate), abs=0.03)  # the level errs, too


def test_windows_that_agree_are_one_window():
    kind = coverage.KINDS["normal"]
    case = coverage.Drawn((12, 12), 10, 1.0)
    base, controls = next(coverage.drawings(kind, case, 50))
    members = kind.members(base, 0.9)
    ten = coverage.areas_and_variances(members, controls, case, ties=True)
    one = coverage.areas_and_variances(members[:, ::10], controls[:, ::10], case._replace(windows=1), ties=True)
    np.testing.assert_allclose(ten, one, atol=1e-12)


def test_what_is_drawn_correlates_as_asked():
    (base, _), *_ = coverage.drawings(coverage.KINDS["normal"], coverage.Drawn((2000, 2), 2, 0.5), 1)
    pairs = base.reshape(-1, 2)  # standard errors of 2000 pairs: 0.017, and 0.025 of the variance
    assert np.corrcoef(pairs.T)[0, 1] == pytest.approx(0.5, abs=0.08) and pairs.var() == pytest.approx(1, abs=0.08)


@pytest.mark.parametrize("name", coverage.KINDS)
def test_our_intervals_hold_the_truth_in_93_of_100_data_sets(name):
    """400 data sets a case: of a coverage of 0.95 fewer than 0.91 are 1 in 5,000."""
    kind = coverage.KINDS[name]
    for documents in ((12, 12), (12, 100), (50, 50)):
        found = coverage.areas(kind, coverage.Drawn(documents, 1, 0.0), 400)
        assert all(methods["ours"].coverage > 0.91 for methods in found.values())
    found = coverage.rates(kind, coverage.Drawn((100, 100), 1, 0.0), 0.1, 400)
    assert all(one.coverage > 0.91 for one in found.values())


def test_the_report_has_every_method_and_case(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(coverage, "KINDS", {"normal": coverage.KINDS["normal"]})
    monkeypatch.setattr(coverage, "SIZES", ((3, 3),))
    monkeypatch.setattr(coverage, "RATES", ((0.1, 100),))
    monkeypatch.setattr(coverage, "MEMBERS", (12,))
    output = tmp_path / "new" / "coverage.md"
    monkeypatch.setattr(sys, "argv", ["coverage_attack", "--data_sets", "100", "--output", str(output)])
    assert coverage.main() == 0
    text = output.read_text(encoding="ascii")
    assert text == capsys.readouterr().out[:-1]
    assert all(f"| {method} |" in text for method in coverage.METHODS)
    assert "| normal | 3 / 3, 10 windows, 0.5 | 100 |" in text and "| normal, FPR 0.1 | 12 / 100 | 100 |" in text


def test_large_data_sets_are_drawn_less_often():
    effort = coverage.Effort(1000, 30_000)
    cases = [coverage.Drawn(documents, 10, 0.5) for documents in ((1, 2), (5, 5), (200, 100))]
    assert [effort.times(case) for case in cases] == [1000, 300, 100]
