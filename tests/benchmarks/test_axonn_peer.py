"""AxoNN's own source among the contenders of tests/benchmarks/peers: what stands in for CUDA and NCCL is right.

HF_AXONN_TEST_AXONN names a folder with AxoNN's source for the tests that run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hf_axonn import Grid
from tests.benchmarks.peers import axonn_models, axonn_on_cpus, contenders, peers, ranks, report
from tests.helpers import ROOT
from tests.helpers.ranks import run_ranks
from tests.helpers.traffic_counter import count_traffic


SOURCE = os.environ.get("HF_AXONN_TEST_AXONN")
needs_source = pytest.mark.skipif(SOURCE is None, reason="HF_AXONN_TEST_AXONN names no folder with AxoNN's source")


@needs_source
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "grids", "counted"),
    [
        # A Linear of 15 at x=2: three collectives forward and two backward. 6 weights are replicated. By hand: a row
        # layer's output, a column layer's input, 4 and 10 of them.
        (2, ["data=2", "z=2", "x=2", "y=2"], {"AxoNN auto x=2": 81, "AxoNN by hand x=2": 14}),
        # Twice as many at y=2, x=2, where each has two groups to rearrange for.
        (4, ["z=2,x=2", "y=2,x=2", "data=2,x=2"], {"AxoNN auto y=2 x=2": 156}),
    ],
)
def test_axonn_trains_the_same_model(tmp_path, world, grids, counted):
    """Exit code 0 says that the losses agree."""
    output = tmp_path / "peers.md"
    sizes = ["--size", "tiny", "--sequence", "32", "--rounds", "2", "--ranks", str(world), "--others", "plain"]
    command = [sys.executable, "-m", "tests.benchmarks.peers.peers", *sizes, "--grids", *grids, "--axonn", SOURCE]
    done = subprocess.run(
        [*command, "--output", str(output)], capture_output=True, text=True, timeout=550, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.read_text().splitlines()]
    calls = {cells[0]: cells[1] for cells in lines if len(cells) == 3}
    assert {name: int(calls[name]) for name in counted} == counted
    names = [contenders.grid_name(contenders.parse_grid(name)) for name in grids]
    assert set(contenders.axonn_names(names)) <= {cells[0] for cells in lines if len(cells) > 3}


def test_a_folder_without_axonn_is_refused(capsys, tmp_path):
    with pytest.raises(SystemExit) as exit_:
        peers.main(["--axonn", str(tmp_path)])
    assert exit_.value.code == 2
    assert f"{tmp_path} has no axonn/intra_layer: git clone" in capsys.readouterr().err


def test_axonn_has_to_be_loaded():
    assert "axonn" not in sys.modules
    with pytest.raises(RuntimeError, match="give --axonn FOLDER"):
        axonn_on_cpus.loaded()


def test_by_hand_only_where_norms_need_not_be_written_anew():
    grids = ["data=2 x=2", "y=2 x=2", "z=4"]
    assert contenders.axonn_names(grids) == [*(f"AxoNN auto {name}" for name in grids), "AxoNN by hand data=2 x=2"]
    with pytest.raises(ValueError, match="y is 2: take a grid with y = 1"):
        axonn_models.axonn_llama(Path(), Grid(x=2, y=2), by_hand=True)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that names torch, CUDA and torch.distributed where AxoNN does."""
    folder = tmp_path / "axonn"
    (folder / "intra_layer").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "axonn.py").write_text("import torch\nimport torch.distributed as dist\n")
    (folder / "intra_layer" / "__init__.py").write_text(
        "from axonn import axonn\nfrom . import overlap_communication\n"
    )
    (folder / "intra_layer" / "overlap_communication.py").write_text(
        "import torch\nhandles = []\ndef clear_handles():\n    torch.cuda.synchronize()\n"
    )
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "axonn"]:
        del sys.modules[name]


class Handle:
    waited = False

    def wait(self):
        self.waited = True


def test_stand_ins_are_in_axonns_modules_alone(package):
    axonn_on_cpus.load(package)
    axonn = axonn_on_cpus.loaded()
    assert axonn.axonn.torch is axonn_on_cpus.TORCH and axonn.axonn.dist is axonn_on_cpus.DIST
    assert "dist" not in vars(axonn.intra_layer.overlap_communication)
    assert torch.cuda.set_device is not axonn_on_cpus.CUDA.set_device and dist.new_group is not axonn_on_cpus.new_group
    overlap, handle = axonn.intra_layer.overlap_communication, Handle()
    overlap.handles.append(handle)
    overlap.clear_handles()
    assert handle.waited and overlap.handles == []
    with pytest.raises(ValueError, match="start a new process"):
        axonn_on_cpus.load(package)


def test_the_version_is_the_commit_or_what_pip_says(package):
    assert axonn_on_cpus.version(package) == "of unknown version"
    metadata = package / "axonn-0.2.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: axonn\nVersion: 0.2.0\n")
    assert axonn_on_cpus.version(package) == "0.2.0"
    git = ["git", "-C", str(package), "-c", "user.name=x", "-c", "user.email=x@x"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert len(axonn_on_cpus.version(package)) >= 7 and commit.startswith(axonn_on_cpus.version(package))
    (package / "axonn" / "axonn.py").write_text("changed = True\n")
    assert axonn_on_cpus.version(package).endswith("-dirty")


def test_tensors_for_cuda_are_made_on_the_cpu():
    axonn_torch = axonn_on_cpus.TORCH
    device = axonn_torch.cuda.current_device()
    assert axonn_torch.empty((2, 3), dtype=torch.int64, device=device).shape == (2, 3)
    assert axonn_torch.tensor(7, device="cuda").device.type == "cpu" and axonn_torch.empty(1, device="cuda").is_cpu
    axonn_torch.cuda.set_device(1)
    assert axonn_torch.matmul is torch.matmul and axonn_torch.distributed.get_rank is dist.get_rank
    with pytest.raises(AttributeError):
        axonn_torch.no_such_name  # noqa: B018


def collectives_as_axonn_calls_them():
    """Each stand-in with what AxoNN hands to it, on two ranks; (what came back, collectives, payloads)."""
    axonn_dist, rank = axonn_on_cpus.DIST, dist.get_rank()
    pair = axonn_dist.new_group(ranks=[0, 1], backend="nccl")
    alone = [axonn_dist.new_group(ranks=[one], backend="nccl") for one in range(2)][rank]
    weight = torch.nn.Parameter(torch.full((3,), float(rank)))
    found = {}
    with count_traffic(Grid(x=2)) as counter:
        scaled = weight * weight  # autograd keeps the weight
        with torch.no_grad():
            gathered = [torch.empty_like(weight) for _ in range(2)]
            gathered[rank] = weight
            axonn_dist.all_gather(gathered, weight, group=pair)
        found["all_gather"] = torch.cat(gathered).tolist()
        scaled.sum().backward()
        found["gradient"] = weight.grad.tolist()

        ahead = torch.empty(6)
        axonn_dist.all_gather_into_tensor(ahead, weight, group=pair, async_op=True).wait()
        found["ahead"] = ahead.tolist()
        sizes = torch.empty(2, dtype=torch.int64)
        axonn_dist.all_gather_into_tensor(sizes, torch.tensor(rank + 5), group=pair)
        found["sizes"] = sizes.tolist()
        part = torch.empty(2)
        axonn_dist.reduce_scatter_tensor(part, torch.arange(4.0), group=pair, async_op=True).wait()
        found["reduce_scatter"] = part.tolist()
        arrived = [torch.empty(2) for _ in range(2)]
        axonn_dist.all_to_all(arrived, [torch.full((2,), 10.0 * rank + to) for to in range(2)], group=pair)
        found["all_to_all"] = torch.cat(arrived).tolist()
        total = torch.ones(1)
        axonn_dist.all_reduce(total)
        axonn_dist.all_reduce(total, group=alone, async_op=True).wait()
        found["all_reduce"] = total.tolist()
    entries = {key.kind: tuple(volume) for key, volume in counter.ledger.entries.items()}
    return found, entries, {key.axes for key in counter.ledger.entries}


def test_collectives_give_what_nccl_would_and_are_counted_as_ours():
    for rank, (found, entries, axes) in enumerate(run_ranks(collectives_as_axonn_calls_them, 2)):
        both = [0.0] * 3 + [1.0] * 3
        assert found == {
            "all_gather": both,
            "gradient": [2.0 * rank] * 3,
            "ahead": both,
            "sizes": [5, 6],
            "reduce_scatter": [4.0 * rank, 4.0 * rank + 2],
            "all_to_all": [rank, rank, 10.0 + rank, 10.0 + rank],
            "all_reduce": [2.0],
        }
        # calls and bytes; a group of one rank communicates nothing
        assert entries == {
            "all_gather": (3, 12 + 12 + 8),
            "reduce_scatter": (1, 8),
            "all_to_all": (1, 16),
            "all_reduce": (1, 4),
        }
        assert axes == {("x",)}


def test_a_grid_is_compared_with_axonn_on_that_grid():
    def turns(seconds):
        return [ranks.Turn(seconds, seconds, [1.0], 0, 0.0)] * 3

    names = {"x=2": 1.0, "z=2": 2.0, "AxoNN auto x=2": 3.0, "AxoNN auto z=2": 5.0, "AxoNN by hand x=2": 2.0}
    runs = [{name: turns(seconds) for name, seconds in names.items()}]
    rows = [line.split("|")[1:-1] for line in report.table(runs, 6).splitlines()]
    ratios = {cells[0].strip(): [cell.strip() for cell in cells[-2:]] for cells in rows if "---" not in cells[0]}
    assert ratios == {
        "contender": ["speed / AxoNN auto", "speed / AxoNN by hand"],
        "x=2": ["3.00 (3.00-3.00)", "2.00 (2.00-2.00)"],
        "z=2": ["2.50 (2.50-2.50)", ""],
        **{name: ["", ""] for name in names if name.startswith("AxoNN")},
    }


def test_traffic_has_a_line_for_what_was_counted():
    table = report.traffic_table({"x=2": ranks.Traffic(24, 3 * 2**19)})
    assert table.splitlines()[-1] == "| x=2 | 24 | 1.5 |"
