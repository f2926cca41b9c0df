"""Accelerate's own scripts under `accelerate launch`, unmodified, and our counterpart of them; docs/accelerate.md."""

from __future__ import annotations

from pathlib import Path

import accelerate
import pytest

from hf_axonn import Grid
from tests.helpers import ROOT
from tests.helpers.launching import assert_quiet, forked, launch


SCRIPTS = Path(accelerate.__file__).parent / "test_utils" / "scripts"
COUNTERPART = ROOT / "tests" / "helpers" / "accelerate_counterpart.py"
SLOW = pytest.mark.slow
END = {
    "test_ops": "",
    "test_sync": "Test `accumulate` gradient accumulation with optimizer and scheduler",
    "test_script": "**Test reinstantiated state**",
    "external_deps/test_metrics": "**Test that `drop_last` is taken into account**",
}


@pytest.mark.parametrize(
    ("script", "grid", "start"),
    [
        ("test_ops", Grid(x=2), forked),  # a quick launch, of another script, is in test_end_to_end.py
        pytest.param("test_ops", Grid(x=2), launch, marks=SLOW),
        pytest.param("test_ops", Grid(data=2), launch, marks=SLOW),
        pytest.param("test_sync", Grid(data=2), launch, marks=SLOW),
        pytest.param("test_script", Grid(data=2), launch, marks=SLOW),
        pytest.param("external_deps/test_metrics", Grid(data=2), launch, marks=SLOW),
        pytest.param("external_deps/test_metrics", Grid(x=2), launch, marks=SLOW),
    ],
    ids=lambda its: getattr(its, "__name__", str(its)),
)
def test_scripts_of_accelerate_pass(tmp_path, script, grid, start):
    ended = start(tmp_path, grid, SCRIPTS / f"{script}.py")
    assert_quiet(ended)
    assert END[script] in ended.output, "it did not come to its last part"


@SLOW
def test_the_script_that_joins_uneven_inputs_is_refused_at_once(tmp_path):
    """Stock accelerate does not end here on CPUs: its join does nothing, and rank 0 has a batch more."""
    ended = launch(tmp_path, Grid(data=2), SCRIPTS / "test_distributed_data_loop.py")
    assert ended.code == 1 and not ended.left
    assert ended.output.count("hf_axonn: the run ends") == 1
    assert "even_batches=False gives 2 batches to some ranks and 1 to others" in ended.output
    assert "Test joining uneven inputs" in ended.output and "Test overriding" not in ended.output


@SLOW
@pytest.mark.parametrize(
    ("grid", "parts"),
    [
        (Grid(data=2), ["data_loop"]),
        (Grid(z=2), ["data_loop"]),
        (Grid(x=2), []),
        (Grid(y=2), []),
        (Grid(z=2), []),
        (Grid(data=2, y=2), []),
        (Grid(z=2, x=2), []),
    ],
    ids=str,
)
def test_our_counterpart_passes(tmp_path, grid, parts, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # it imports tests.helpers
    ended = launch(tmp_path, grid, COUNTERPART, *parts)
    assert_quiet(ended)
    assert "ALL IS WELL" in ended.output
