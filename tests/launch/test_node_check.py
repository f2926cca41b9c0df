"""Nodes of one launch compare their launch files before a process takes its rank."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
import yaml

from hf_axonn.config import AxonnConfig
from hf_axonn.launch import node_check as nodes
from hf_axonn.topology.grid import Grid


ORDER = ("z", "y", "x", "data")


@pytest.fixture
def store():
    """What the launcher of node 0 keeps."""
    its = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    yield its
    del its


def environment(store, node, size, config, **others):
    its = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    its |= {"GROUP_WORLD_SIZE": str(size), "GROUP_RANK": str(node), "LOCAL_RANK": "0", "RANK": str(node)}
    return its | {"AXONN_CONFIG": config.to_json()} | others


def told(store, configs, **others):
    """What nodes with these configurations are told, each in a thread of its own."""

    def speak(node):
        its = environment(store, node, len(configs), configs[node], **others)
        try:
            nodes.compare(its)
        except ValueError as error:
            return str(error)
        nodes.compare(its)  # as in a process that it starts: does not wait for anybody
        return None

    with ThreadPoolExecutor(len(configs)) as pool:
        return list(pool.map(speak, range(len(configs))))


def test_nodes_that_say_the_same_go_on(store):
    plain = AxonnConfig(grid=Grid(z=2, y=2))
    assert told(store, [plain] * 3) == [None] * 3
    assert store.check(["hf_axonn/nodes/all"]) and not store.check(["hf_axonn/nodes/other"])
    # As after a restart by the launcher: the store still knows what was said.
    assert told(store, [plain] * 3) == [None] * 3


@pytest.mark.parametrize("places", [(0, 1), (2, 0), (1, 2)])
def test_every_node_is_told_the_same_of_one_that_differs(store, places):
    plain, other = AxonnConfig(grid=Grid(z=2, y=2)), AxonnConfig(grid=Grid(z=2, y=2), order=ORDER)
    configs = [plain] * 3
    for place in places[:1]:
        configs[place] = other
    messages = told(store, configs)
    assert len(set(messages)) == 1
    ours = re.escape(f"[{', '.join(ORDER)}] on node {places[0]}")
    theirs = re.escape("[y, x, z, data] on node ") + "[0-2]"
    assert re.search(f"order is ({ours}, but {theirs}|{theirs}, but {ours}). Give every node", messages[0])
    assert "grid is" not in messages[0]


def test_a_grid_that_differs_is_told_too(store):
    messages = told(store, [AxonnConfig(grid=Grid(z=2, y=2)), AxonnConfig(grid=Grid(z=4), order=ORDER)])
    assert messages[0] == messages[1]
    assert messages[0].startswith(
        "the launch files of the nodes differ: grid is data=1,z=2,y=2,x=1 on node 0, but data=1,z=4,y=1,x=1 on node "
        "1; order is [y, x, z, data] on node 0, but [z, y, x, data] on node 1. Give every node"
    )


def test_nobody_waits_for_ever(store, monkeypatch, capsys):
    monkeypatch.setattr(nodes, "PATIENCE", timedelta(seconds=0.3))
    nodes.compare(environment(store, 0, 2, AxonnConfig(grid=Grid(x=2))))
    assert "not all of the 2 nodes have said" in capsys.readouterr().err
    with socket.socket() as its:  # bound and not listening: nobody answers there
        its.bind(("127.0.0.1", 0))
        port = str(its.getsockname()[1])
        nodes.compare(environment(store, 0, 2, AxonnConfig(grid=Grid(x=2)), MASTER_PORT=port))


@pytest.mark.parametrize(
    "others", [{"GROUP_WORLD_SIZE": "1"}, {"LOCAL_RANK": "1"}, {"TORCHELASTIC_USE_AGENT_STORE": "False"}], ids=str
)
def test_where_there_is_nothing_to_compare_nobody_speaks(store, others):
    its = environment(store, 0, 2, AxonnConfig(grid=Grid(x=2))) | others
    nodes.compare(its)
    assert not store.check(["hf_axonn/nodes/first"]) and nodes.MET not in its


SCRIPT = """
import torch
torch.distributed.init_process_group("gloo")
torch.distributed.barrier()
"""


@pytest.mark.slow
def test_two_launch_files_that_differ_end_with_one_message_each(tmp_path):
    """Two launchers on this machine stand for two machines with two processes each."""
    (tmp_path / "script.py").write_text(SCRIPT)
    settings = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "use_cpu": True}
    settings |= {"num_machines": 2, "num_processes": 4, "mixed_precision": "no", "main_process_ip": "127.0.0.1"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        settings["main_process_port"] = probe.getsockname()[1]

    def run(node):
        section = {"grid": {"z": 2, "y": 2}} | ({"order": list(ORDER)} if node else {})
        file = tmp_path / f"node{node}.yaml"
        file.write_text(yaml.safe_dump(settings | {"machine_rank": node, "axonn_config": section}))
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config", str(file), "--same_network"]
        inherited = {name: value for name, value in os.environ.items() if name != "AXONN_CONFIG"}
        return subprocess.run(
            [*command, str(tmp_path / "script.py")],
            env=inherited | {"HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,  # gloo alone would wait for half an hour
        )

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(run, range(2)))
    for its in done:
        assert its.returncode != 0
        assert its.stderr.count("the launch files of the nodes differ: order is [y, x, z, data] on node 0, but ") == 1
        assert its.stderr.count("[z, y, x, data] on node 1. Give every node (--machine_rank) the same file") == 1
