"""The run behind the picture of docs/monitoring.md, tiny."""

from __future__ import annotations

from tests.benchmarks.monitoring import run
from tests.tools.pictures import CHARTS, SPENT


def test_a_run_that_is_stopped_and_goes_on_has_what_the_picture_shows():
    found = run(hidden=32, layers=1, steps=4, every=2, crash=3)
    assert set(CHARTS) <= set(found) <= {*CHARTS, "peak_memory_gib", *(f"seconds_{kind}" for kind in SPENT)}
    assert [step for step, _ in found["goodput"]] == [1, 2, 3, 4]
    assert found["seconds_restart"][0][0] == 3, "step 3 was done twice, and the second one counts"
    spent = {kind: found[f"seconds_{kind}"][-1][1] for kind in SPENT}
    assert abs(found["goodput"][-1][1] - spent["step"] / sum(spent.values())) < 1e-4
