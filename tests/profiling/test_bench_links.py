"""`hf-axonn bench-links`: what it measures on ranks of gloo makes a machine that plans."""

from __future__ import annotations

import os

import pytest
import torch

from hf_axonn.cli.main import main
from hf_axonn.planner.machine import load_machine
from hf_axonn.profiling import bench_links, timings
from tests.helpers.ranks import run_ranks
from tests.planner.test_search_and_cli import COMMAND


def measured(folder):
    """Two nodes of two processes each, as it seems to this rank."""
    bench_links.SIZES = {"cpu": (16, 64)}
    bench_links.PAYLOADS, bench_links.BETWEEN = {"gloo": (2**12, 2**18)}, {"cpu": 16}
    bench_links.COPIED = {"cpu": 2**16}
    bench_links.PASSES = 3
    timings.LONG = 1e-3
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    file = f"{folder}/this.json"
    assert bench_links.bench_links(file) == 0
    late = bench_links.measure(4, torch.device("cpu"), seconds=0.0, peak=2.5)
    assert late["peak_tflops"] == 2.5 and late["sources"]["peak_tflops"] == "given as --peak-tflops"
    return late["sources"]["intra_gbs"], bench_links._siblings(2, 2).size()


def test_bench_links_writes_a_machine_that_plans(tmp_path, capsys):
    for intra, size in run_ranks(measured, 4, str(tmp_path)):
        assert "not measured for want of time" in intra and size == 2
    machine = load_machine(str(tmp_path / "this.json"))
    assert machine.gpus_per_node == 2 and set(machine.intra) == {(1, 2)}
    assert "one ring through 2 nodes" in machine.sources["inter_gbs"]
    assert 0 <= machine.overlap <= 1 == machine.memory_fraction and machine.kernel > 0
    kinds = {"reduce_scatter", "all_to_all", "all_reduce"}
    assert set(machine.relative_cost) == set(machine.relative_latency) == kinds
    assert max(share for _, share in machine.gemm_by_size) == 1.0 == machine.gemm_fraction
    assert main([*COMMAND, "--machine", str(tmp_path / "this.json"), "--gpus", "16"]) in (0, 1)
    assert "of this, " in capsys.readouterr().out


def test_latency_is_a_line_through_two_sizes():
    assert bench_links._latency({2: 12e-6, 8: 24e-6}) == pytest.approx((10e-6, 2e-6))
    assert bench_links._latency({2: 12e-6, 4: 9e-6}) == (pytest.approx(11e-6), bench_links.UNMEASURED)
    assert bench_links._latency({}) == (timings.UNMEASURED,) * 2


def test_bench_links_needs_torchrun(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert main(["bench-links", "--output", "this.json"]) == 2
    assert "start it as torchrun" in capsys.readouterr().err
    for option, value in (("--peak-tflops", "0"), ("--seconds", "nan")):
        with pytest.raises(SystemExit, match="2"):
            main(["bench-links", "--output", "this.json", option, value])
        assert f"argument {option}: {value} is not a number above 0" in capsys.readouterr().err
