"""training_scripts/one_layer.py: it equals one process, counts what it sends, and sees a sum over the wrong axis."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.launching import TORCHRUN, run
from tests.helpers.ranks import run_ranks


SCRIPT = ROOT / "training_scripts" / "one_layer.py"


def call_main(script: Path) -> tuple[int, str]:
    """Run a script on one rank; return its exit code and what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = runpy.run_path(str(script))["main"]()
    return code, printed.getvalue()


def assert_equal_to_one_process(output: str) -> None:
    assert output.startswith("8 ranks: data=1, z=2, x=2, y=2\n")
    assert "column      [32, 24] -> [8, 12]   rows over x and z, columns over y\n" in output
    assert re.findall(r" (equal|WRONG)$", output, re.MULTILINE) == ["equal"] * 5
    # Both layers gather 8 * 12 or 6 * 16 numbers of 8 bytes over z, twice, and reduce as many once. An all-reduce over
    # two ranks sends as many bytes as it sums: [8, 12] twice over x, [8, 16] twice over y.
    bytes_sent = dict(re.findall(r"^    (\S+ over \w+) +(\d+)$", output, re.MULTILINE))
    assert bytes_sent == {
        "all-gather over z": str(2 * 2 * 8 * 12 * 8),
        "reduce-scatter over z": str(2 * 8 * 12 * 8),
        "all-reduce over x": str(2 * 8 * 12 * 8),
        "all-reduce over y": str(2 * 8 * 16 * 8),
        "all-reduce over data": "0",
    }


def test_it_equals_one_process():
    (first, output), *others = run_ranks(call_main, 8, SCRIPT)
    assert first == 0 and others == [(0, "")] * 7
    assert_equal_to_one_process(output)


def test_it_equals_one_process_with_data():
    (code, output), *_ = run_ranks(call_main, 16, SCRIPT)
    assert code == 0 and output.startswith("16 ranks: data=2, z=2, x=2, y=2\n")


@pytest.mark.slow  # nine processes import torch; the test above runs the same lines in forks
def test_it_runs_by_torchrun(tmp_path):
    ended = run(tmp_path, *TORCHRUN, "--nproc-per-node", 8, SCRIPT)
    assert ended.code == 0, ended.output
    assert_equal_to_one_process(ended.output[ended.output.index("8 ranks") :])


@pytest.mark.parametrize(
    ("right", "wrong", "seen"),
    [
        ("layer.in_axis.all_reduce", "layer.out_axis.all_reduce", "hidden"),
        ("layer.out_axis.all_reduce", "layer.in_axis.all_reduce", "grad_input"),
        ('grid["data"].all_reduce', 'grid["z"].all_reduce', "grad_column"),
    ],
)
def test_a_sum_over_the_wrong_axis_is_seen(tmp_path, right, wrong, seen):
    source = SCRIPT.read_text(encoding="ascii")
    assert source.count(right) == 1
    copy = tmp_path / "one_layer.py"
    copy.write_text(source.replace(right, wrong), encoding="ascii")
    results = run_ranks(call_main, 8, copy)
    assert [code for code, _ in results] == [1] * 8
    assert re.search(rf"^    {seen} .*WRONG$", results[0][1], re.MULTILINE), results[0][1]
