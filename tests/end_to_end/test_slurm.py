"""training_scripts/slurm: what each node would run, and a real launch of two machines with a network between them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from tests.helpers import ROOT
from tests.helpers.models import tiny_batch, tiny_model


FOLDER = ROOT / "training_scripts" / "slurm"
SITES = {"perlmutter": 4, "frontier": 8, "alps": 4}
SCRIPTS = sorted(FOLDER.glob("*.sh"))
BIN = Path(sys.executable).parent
YAML = """\
distributed_type: MULTI_GPU
num_processes: {processes}
mixed_precision: no
axonn_config:
  grid: {{z: {z}, x: {x}}}
"""
# In place of the programs of a cluster. `srun` runs its command once for each node; NODE_PREFIX comes before it.
SRUN = """\
#!/bin/bash
printf '%s\\n' "$*" > "$RECORD/asked"
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < SLURM_NNODES; node++)); do
    SLURM_NODEID=$node SLURM_PROCID=$node ${NODE_PREFIX:+$NODE_PREFIX$node} "$@" &
    nodes+=($!)
done
for node in "${nodes[@]}"; do wait "$node" || failed=$?; done
exit "${failed:-0}"
"""
SCONTROL = """\
#!/bin/bash
[[ "$*" == "show hostnames nid[001-003]" ]] && printf 'nid001\\nnid002\\nnid003\\n'
"""
ACCELERATE = """\
#!/bin/bash
{ printf '%s\\n' "$@"; env | grep -E '^(NCCL|GLOO|FI|OMP|CUDA|MODULES)'; } > "$RECORD/node$SLURM_NODEID"
"""


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def cluster(tmp_path):
    """A folder with the programs of a cluster, and a Python environment to activate."""
    program(tmp_path / "srun", SRUN)
    program(tmp_path / "scontrol", SCONTROL)
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").write_text(f'PATH="{tmp_path}:{BIN}:$PATH"\nexport PATH\n')
    (tmp_path / "axonn.yaml").write_text(YAML.format(processes=12, z=3, x=4))
    return tmp_path


def submit(cluster: Path, script: Path, *words: object, nodes: int = 3, **environment: object):
    """Run a batch script as Slurm would on the first node of a job."""
    functions = 'module() { MODULES="${MODULES:-}$* "; export MODULES; }; export -f module'
    slurm = {"SLURM_NNODES": nodes, "SLURM_JOB_ID": 1234567, "SLURM_JOB_NODELIST": "nid[001-003]"}
    slurm |= {"SLURM_SUBMIT_DIR": ROOT, "RECORD": cluster, "VENV": cluster / "venv"}
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("NCCL", "GLOO", "OMP"))}
    inherited["PATH"] = f"{cluster}:{inherited['PATH']}"
    return subprocess.run(
        ["bash", "-c", f'{functions}; exec bash "$0" "$@"', str(script), *map(str, words)],
        cwd=cluster,
        env=inherited | {key: str(value) for key, value in (slurm | environment).items()},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_shell_finds_nothing_wrong(script):
    shellcheck = Path(sysconfig.get_path("scripts")) / "shellcheck"
    for command in (["bash", "-n"], [str(shellcheck), "--enable=quote-safe-variables", "--severity=style"]):
        done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
    assert max(map(len, script.read_text(encoding="ascii").splitlines())) < 120


@pytest.mark.parametrize("site", [*SITES, "cluster"])
def test_what_is_asked_of_slurm(site):
    """All devices of a node; who pays is for the user to say. A number of tasks would keep Slurm from the upper end of
    a range of nodes."""
    lines = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", (FOLDER / f"{site}.sh").read_text(), flags=re.MULTILINE)
    asked = dict(lines)
    assert len(lines) == (FOLDER / f"{site}.sh").read_text().count("#SBATCH")
    assert not [name for name in asked if name.startswith("ntasks")] and "account" not in asked
    if site != "cluster":
        assert int(asked["gpus-per-node"]) == SITES[site]
        # Each process may use its share of the node's cores, and no more.
        threads = int(re.search(r"OMP_NUM_THREADS=(\d+)", (FOLDER / f"{site}.sh").read_text())[1])
        assert threads * SITES[site] <= int(asked["cpus-per-task"])


@pytest.mark.parametrize("site", [*SITES, "cluster"])
def test_every_node_runs_the_launcher_with_its_number(cluster, site):
    program(cluster / "accelerate", ACCELERATE)
    (cluster / "hostname").write_text("#!/bin/bash\n[[ ${1:-} == -i ]] && echo 10.0.0.7 fe80::1 || echo nid001\n")
    (cluster / "hostname").chmod(0o755)
    processes = 3 * SITES.get(site, 4)
    (cluster / "axonn.yaml").write_text(YAML.format(processes=processes, z=3, x=processes // 3))
    extra = {"CONTAINER": "pytorch"} if site == "alps" else {"GPUS_PER_NODE": 4, "NETWORK": "ib0"}
    words = ["axonn.yaml", "my script.py", "--data", "a b", "--model", "c"]
    done = submit(cluster, FOLDER / f"{site}.sh", *words, **(extra if site in ("alps", "cluster") else {}))
    assert done.returncode == 0, done.stderr
    head = "10.0.0.7" if site == "frontier" else "nid001"
    for node in range(3):
        given = (cluster / f"node{node}").read_text().splitlines()
        launcher = shlex.split(
            f"launch --config axonn.yaml --num_machines 3 --machine_rank {node} --main_process_ip {head} "
            "--main_process_port 24567 --same_network"
        )
        assert given[: len(launcher) + 5] == [*launcher, *words[1:]]
    srun = (cluster / "asked").read_text()
    assert srun.startswith("--ntasks=3 --ntasks-per-node=1 ") and "--kill-on-bad-exit=1" in srun
    assert ("--environment=pytorch" in srun) == (site == "alps")
    settings = dict(line.split("=", 1) for line in given if re.match("[A-Z_]+=", line))
    network = {"perlmutter": "hsn", "cluster": "ib0"}  # on Frontier the module says it
    assert settings.get("NCCL_SOCKET_IFNAME") == network.get(site)
    assert ("rocm" in settings.get("MODULES", "")) == (site == "frontier")
    assert settings.get("MODULES", "").endswith("rccl-net-plugin ") == (site == "frontier")  # after rocm
    assert settings.get("NCCL_NET") == ("AWS Libfabric" if site in ("perlmutter", "alps") else None)


def test_what_cannot_be_right_ends_before_a_launch(cluster):
    program(cluster / "accelerate", ACCELERATE)
    done = submit(cluster, FOLDER / "cluster.sh", "axonn.yaml", "script.py", GPUS_PER_NODE=8)
    assert done.returncode == 2
    assert "num_processes is 12, but 3 nodes with 8 GPUs each are 24: change --nodes" in done.stderr
    done = submit(cluster, FOLDER / "cluster.sh", "axonn.yaml")
    assert done.returncode != 0 and "the training script is missing" in done.stderr
    done = submit(cluster, FOLDER / "cluster.sh", "axonn.yaml", "script.py", VENV="")
    assert done.returncode != 0 and "the Python environment that has hf_axonn" in done.stderr
    assert not list(cluster.glob("node*"))


# Two steps of a tiny model on whatever grid the launch file has; rank 0 writes the losses.
TRAIN = """\
import json, socket, sys
import torch
from accelerate import Accelerator
import hf_axonn
from hf_axonn import AxonnConfig

folder, batch = sys.argv[1], torch.load(sys.argv[2], weights_only=True)
accelerator = Accelerator()
grid = AxonnConfig.from_env().grid
model = hf_axonn.from_pretrained(folder, grid=grid, dtype=torch.float64).train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer = accelerator.prepare(model, optimizer)
losses = []
for _ in range(3):
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
here = [None] * accelerator.state.num_processes
torch.distributed.all_gather_object(here, socket.if_nameindex()[-1][1])
if accelerator.is_main_process:
    with open(sys.argv[3], "w") as file:
        json.dump({"losses": losses, "ranks": accelerator.state.num_processes, "interfaces": here}, file)
accelerator.end_training()
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@pytest.fixture
def two_machines():
    """Two network namespaces, joined by a virtual cable; the prefix of their names."""
    prefix = f"axonn{os.getpid()}n"
    made = []
    try:
        if shutil.which("ip") is None or os.geteuid() != 0:
            raise PermissionError
        for node in range(2):
            ip("netns", "add", f"{prefix}{node}")
            made.append(f"{prefix}{node}")
        ip("link", "add", "cable0", "netns", made[0], "type", "veth", "peer", "name", "cable1", "netns", made[1])
        for node, name in enumerate(made):
            ip("-n", name, "addr", "add", f"10.77.0.{node + 1}/24", "dev", f"cable{node}")
            ip("-n", name, "link", "set", f"cable{node}", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (PermissionError, subprocess.CalledProcessError):
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30)
        pytest.skip("network namespaces need root and iproute2; test_launch.py starts two launchers without them")
    try:
        yield prefix
    finally:
        for name in made:
            ip("netns", "del", name)


@pytest.mark.slow
def test_two_machines_with_a_cable_train_as_one_process(cluster, two_machines):
    """The script for any cluster, for real: accelerate, gloo and the weights of a grid across two machines."""
    torch.manual_seed(0)
    model = tiny_model("llama", dtype=torch.float64)
    model.save_pretrained(cluster / "model")
    batch = tiny_batch(4, 8)
    torch.save(batch, cluster / "batch.pt")
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.5)
    truth = []
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        truth.append(loss.item())
    (cluster / "train.py").write_text(TRAIN)
    (cluster / "axonn.yaml").write_text("use_cpu: true\n" + YAML.format(processes=2, z=1, x=2))
    # The interfaces have different names on the two machines, as they may have on a cluster.
    enter = cluster / "enter"
    enter.mkdir()
    for node in range(2):
        text = f'#!/bin/bash\nexec ip netns exec {two_machines}{node} env GLOO_SOCKET_IFNAME=cable{node} "$@"\n'
        program(enter / f"node{node}", text)
    words = ["axonn.yaml", cluster / "train.py", cluster / "model", cluster / "batch.pt", cluster / "result.json"]
    settings = {"HEAD_ADDRESS": "10.77.0.1", "NODE_PREFIX": f"{enter}/node", "OMP_NUM_THREADS": 1}
    done = submit(cluster, FOLDER / "cluster.sh", *words, nodes=2, GPUS_PER_NODE=1, **settings)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((cluster / "result.json").read_text())
    assert result["ranks"] == 2 and result["interfaces"] == ["cable0", "cable1"]
    assert max(abs(ours - theirs) for ours, theirs in zip(result["losses"], truth, strict=True)) < 1e-6
    assert truth[0] > truth[1] > truth[2]


def test_the_grid_of_the_documented_example_fills_its_nodes():
    """Every command in the heads of the scripts asks for as many nodes as its grid needs."""
    for site, devices in SITES.items():
        text = (FOLDER / f"{site}.sh").read_text()
        ranks = int(re.search(r"for a grid of (\d+)", text)[1])
        nodes = int(re.search(r"--nodes=(\d+)", text)[1])
        assert nodes * devices == ranks
