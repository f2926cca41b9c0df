"""tests/benchmarks/host/host_time.py: how many nodes a layer adds to the graph, and that all contenders run.

A node costs the host about as much as a small kernel, whatever the machine, so the number is held where it is.
"""

from __future__ import annotations

import pytest

from tests.benchmarks.host import host_shares, host_time


# Lower a number when nodes are gone; none may come back.
NODES = {"x=2": 57, "z=2": 62, "y=2": 62, "z=2, y=2, x=2": 67}


@pytest.mark.parametrize("name", NODES)
def test_a_layer_adds_no_more_nodes_than_these(name):
    assert host_time.nodes_of_a_layer(name) <= NODES[name]


def test_a_grid_of_one_adds_what_the_stock_model_adds():
    assert host_time.nodes_of_a_layer("grid of one") == host_time.nodes_of_a_layer(host_time.STOCK)


@pytest.mark.parametrize("phase", host_time.PHASES)
def test_every_contender_runs(phase):
    found = host_time.measure(phase, rounds=1, repeats=1)
    assert list(found) == host_time.contenders(phase) and all(len(times) == 1 for times in found.values())


def test_ratios_are_those_of_a_round():
    found = {host_time.DECODING: {"x=2": [(3.0, 1.0), (4.0, 2.0), (9.0, 3.0)]}}
    assert host_time.table(found).splitlines()[-1] == "| decoding | x=2 |  | 4000000 | 3.00 [2.50, 3.00] | 1.50 |"


def test_shares_are_of_all_samples():
    found = host_shares.shares("z=2", 20)
    assert found.total() >= 20 and any(name.startswith("engine/") for name in found)
    lines = host_shares.table({"z=2": host_shares.Counter({"a.py": 3, "b.py": 1})}, least=0.5).splitlines()
    assert lines[2:] == ["| a.py | 75% |", "| others | 25% |"]
