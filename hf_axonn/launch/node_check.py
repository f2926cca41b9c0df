"""Several nodes of one launch: whether their launch files say the same of who is which rank.

Each node has a launch file of its own. Where they differ in the order of the axes, or in the grid, two processes take
one rank, and all would wait for each other in init_process_group until it times out. So the first process of each node
says what its file says before it takes its rank, through the store that the launcher of node 0 keeps for
init_process_group. A node sends a handful of short messages, however many there are:

    first      what the node says that came first
    other      what the first of those says that say something else
    said       how many have spoken; the last one writes `all`, for which everybody waits
    heard      after a difference: how many have read it; the last one writes `over`, and then the store may go
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import MutableMapping
from datetime import timedelta

from hf_axonn.topology.axis_order import ORDER, check_order
from hf_axonn.topology.grid import Grid


PATIENCE = timedelta(minutes=5)  # nodes start together, but read Python's modules from a disk that all of them share
HASTE = timedelta(seconds=10)  # for reading a difference
KEYS = ("grid", "order")
MET = "AXONN_MET"  # set in a process that has spoken, for those that it starts


def compare_or_exit(environ: MutableMapping[str, str]) -> None:
    """`compare`, with a difference reported on stderr and exit code 2."""
    try:
        compare(environ)
    except ValueError as error:
        print(f"hf_axonn: nothing was started. {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def compare(environ: MutableMapping[str, str]) -> None:
    """Compare the launch files of several nodes, in a process that one of their launchers started under AXONN_CONFIG.

    Do nothing in the other processes of a node, which its launcher ends with the first one; in processes that such a
    process starts; and where no launcher keeps a store. Of a node that says nothing within PATIENCE the others print
    a note and go on.

    Raises:
        ValueError: two nodes differ in grid or order; on every node, with the same words.
    """
    nodes = int(environ.get("GROUP_WORLD_SIZE", "1"))
    kept = environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    if nodes == 1 or environ.get("LOCAL_RANK") != "0" or not kept:
        return
    job = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}:{environ['GROUP_RANK']}"
    if environ.get(MET) == job:
        return
    environ[MET] = job
    section = json.loads(environ["AXONN_CONFIG"])
    grid, order = Grid(**section["grid"]), check_order(section.get("order") or ORDER)
    axes = [axis for axis in order if axis != "pipe" or grid.pipe > 1]
    says = {"grid": str(grid), "order": f"[{', '.join(axes)}]", "node": int(environ["GROUP_RANK"])}
    with contextlib.suppress(RuntimeError):  # a store that is gone is told by init_process_group
        found = _difference(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), nodes, says)
        if found:
            raise ValueError(found)


def _difference(address: str, port: int, nodes: int, says: dict) -> str:
    """The message where two of the nodes differ; empty if all agree, or those that have spoken in time."""
    from torch.distributed import PrefixStore, TCPStore

    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=PATIENCE)
    store = PrefixStore("hf_axonn/nodes", store)
    first = json.loads(store.compare_set("first", "", json.dumps(says)))
    if any(first[key] != says[key] for key in KEYS):
        store.compare_set("other", "", json.dumps(says))
    if store.add("said", 1) == nodes:
        store.set("all", "")
    try:
        store.wait(["all"], PATIENCE)
    except RuntimeError:
        note = f"hf_axonn: after {PATIENCE} not all of the {nodes} nodes have said which grid and order they have."
        print(note, file=sys.stderr, flush=True)
    if not store.check(["other"]):
        return ""
    other = json.loads(store.get("other"))
    if store.add("heard", 1) == nodes:
        store.set("over", "")
    with contextlib.suppress(RuntimeError):
        store.wait(["over"], HASTE)
    return describe(first, other)


def describe(*nodes: dict) -> str:
    """The message: how the launch files of two nodes differ, and what to do."""
    one, two = sorted(nodes, key=lambda node: node["node"])
    differences = "; ".join(
        f"{key} is {one[key]} on node {one['node']}, but {two[key]} on node {two['node']}"
        for key in KEYS
        if one[key] != two[key]
    )
    return (
        f"the launch files of the nodes differ: {differences}. Give every node (--machine_rank) the same file, or at "
        "least the same axonn_config."
    )
