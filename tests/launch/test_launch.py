"""The command line of a launch, and real launches through stock accelerate."""

import errno
import functools
import os
import pwd
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from hf_axonn.launch import command
from hf_axonn.launch.command import Command, accelerate_options, prepare
from hf_axonn.launch.command import main as axonn_launch
from hf_axonn.launch.failed_ranks import describe_failures, exit_code, shorten_child_failures
from tests.helpers.models import tiny_model


BIN = Path(sys.executable).parent
LAUNCHERS = {
    "accelerate launch": [BIN / "accelerate", "launch"],
    "accelerate-launch": [BIN / "accelerate-launch"],
    "python -m launch": [sys.executable, "-m", "accelerate.commands.launch"],
    "python -m cli": [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"],
    "axonn-launch": [BIN / "axonn-launch"],
    "python -m hf_axonn.launch": [sys.executable, "-m", "hf_axonn.launch"],
}
GOOD = """\
distributed_type: MULTI_CPU
num_processes: 2
mixed_precision: no
axonn_config:
  grid: {x: 2}
"""
# The processes need no torch: what they were given is in their environment and their arguments.
SCRIPT = """\
import json, os, sys
names = ("AXONN_CONFIG", "WORLD_SIZE", "ACCELERATE_USE_CPU", "OMP_NUM_THREADS", "ACCELERATE_MIXED_PRECISION")
names += ("AXONN_LAUNCH_FILE", "TORCH_DEVICE_BACKEND_AUTOLOAD")
with open("rank" + os.environ["RANK"] + ".json", "w") as file:
    json.dump({**{name: os.environ.get(name) for name in names}, "argv": sys.argv[1:]}, file)
"""


SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


def start(directory, *words, file=GOOD, script=SCRIPT, **environment):
    """Run a command in `directory`, where axonn.yaml and script.py are, and return it with what its ranks wrote."""
    (directory / "axonn.yaml").write_text(file)
    (directory / "script.py").write_text(script)
    (directory / "tmp").mkdir()
    inherited = {key: value for key, value in os.environ.items() if key not in ("AXONN_CONFIG", "OMP_NUM_THREADS")}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=directory,
        env={**inherited, "HF_HOME": str(directory / "home"), "TMPDIR": str(directory / "tmp"), **environment},
        capture_output=True,
        text=True,
        timeout=180,
    )
    ranks = [yaml.safe_load(path.read_text()) for path in sorted(directory.glob("rank*.json"))]
    return done, ranks


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A good launch file; nothing that prepare() does outlives the test."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for variable in ("AXONN_CONFIG", "AXONN_LAUNCH_FILE", "ACCELERATE_USE_CPU", "OMP_NUM_THREADS"):
        monkeypatch.setenv(variable, "")
    path = tmp_path / "axonn.yaml"
    path.write_text(GOOD)
    return path


def test_option_arities_are_those_of_the_real_parser():
    from accelerate.commands.launch import launch_command_parser

    actions = launch_command_parser()._actions
    assert accelerate_options() == {name: action.nargs != 0 for action in actions for name in action.option_strings}


@pytest.mark.parametrize(
    ("words", "values", "rest"),
    [
        ("--config a.yaml t.py --config b.yaml", {"config": "a.yaml"}, "t.py --config b.yaml"),
        ("--config=a.yaml t.py", {"config": "a.yaml"}, "t.py"),
        ("--num-processes 4 --num_processes=8 t.py", {"num_processes": "8"}, "t.py"),
        ("--multi_gpu -m mine.train --config b", {"multi_gpu": None, "m": None}, "mine.train --config b"),
        ("-q --tee 3 t.py", {"q": None, "tee": "3"}, "t.py"),
        ("--cpu -- --odd.py --config b", {"cpu": None}, "-- --odd.py --config b"),
        ("t.py --config_file b", {}, "t.py --config_file b"),
        ("--unknown t.py --config b", {"unknown": None}, "t.py --config b"),
        ("--config", {"config": ""}, ""),
    ],
)
def test_a_command_line_is_divided_where_the_script_begins(words, values, rest):
    parsed = Command.parse(words.split())
    assert parsed.values() == values
    assert list(parsed.rest) == rest.split()
    assert parsed.arguments() == words.split()


def test_prepare_writes_a_copy_without_the_section(file):
    words = prepare(["--cpu", "--config", str(file), "--debug", "t.py", "--config", "mine"])
    option, _, copy = words[0].partition("=")
    assert option == "--config_file"
    assert words[1:] == ["--debug", "t.py", "--config", "mine"]
    assert "axonn_config" not in yaml.safe_load(Path(copy).read_text())
    assert yaml.safe_load(file.read_text())["axonn_config"] == {"grid": {"x": 2}}
    assert os.environ["AXONN_CONFIG"].startswith('{"grid": {"data": 1, "z": 1, "y": 1, "x": 2}')


def test_prepare_without_the_section_only_respells_the_option(file):
    file.write_text("{distributed_type: 'NO', num_processes: 1}")
    assert prepare(["--config", str(file), "t.py"]) == [f"--config_file={file}", "t.py"]
    assert prepare(["--config-file", str(file), "t.py"]) == [f"--config_file={file}", "t.py"]
    assert prepare(["--cpu", "t.py", "--config", "none.yaml"]) == ["--cpu", "t.py", "--config", "none.yaml"]
    assert os.environ["AXONN_CONFIG"] == ""


def test_accelerates_default_file_may_have_the_section(file):
    default = Path(os.environ["HF_HOME"]) / "accelerate" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text(GOOD)
    words = prepare(["t.py"])
    assert words[0].startswith("--config_file=") and words[1:] == ["t.py"]
    assert os.environ["AXONN_CONFIG"]


def test_a_process_without_a_home_launches_as_accelerate_does(monkeypatch):
    """A container may run under a user whom its passwd does not name."""
    for variable in ("HOME", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda user: {}[user])
    assert prepare(["--cpu", "t.py"]) == ["--cpu", "t.py"]


def test_a_full_disk_is_said(file, monkeypatch, capsys):
    def write(settings):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(command, "write_temporary", write)
    with pytest.raises(SystemExit, match="2"):
        command.prepare_or_exit(["--config", str(file), "t.py"])
    assert "nothing was started. [Errno 28] No space left on device" in capsys.readouterr().err


def test_unreadable_launch_files(file):
    with pytest.raises(ValueError, match=r"launch file nowhere.yaml cannot be read: No such file"):
        prepare(["--config", "nowhere.yaml", "t.py"])
    file.write_text("a: [1\n")
    with pytest.raises(ValueError, match="is not YAML"):
        prepare(["--config", str(file), "t.py"])
    for repeated in ("num_processes: 2\nnum_processes: 4\n", "axonn_config:\n  grid: {x: 2,\n    x: 1}\n"):
        file.write_text(repeated)
        with pytest.raises(ValueError, match=r"not YAML: the key '\w+' has two values, in lines (1 and 2|2 and 3)\."):
            prepare(["--config", str(file), "t.py"])
    file.write_text("")
    with pytest.raises(ValueError, match="holds no settings"):
        prepare(["--config", str(file), "t.py"])


def assert_given(rank):
    """Assert what a rank was given by a launch of GOOD that ends with `script.py --config mine`."""
    assert rank["AXONN_CONFIG"].startswith('{"grid": {"data": 1, "z": 1, "y": 1, "x": 2}')
    assert rank["AXONN_LAUNCH_FILE"] == "axonn.yaml"
    assert rank["argv"] == ["--config", "mine"]
    assert (rank["WORLD_SIZE"], rank["ACCELERATE_USE_CPU"], rank["ACCELERATE_MIXED_PRECISION"]) == ("2", "true", "no")
    assert rank["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "1"


# Below, python -m hf_axonn.launch starts ranks, and accelerate launch those of two machines.
@pytest.mark.parametrize("launcher", [name if name == "axonn-launch" else SLOW(name) for name in LAUNCHERS])
def test_every_launcher_starts_the_ranks(launcher, tmp_path):
    option = ["--config_file=axonn.yaml"] if "-m" in launcher else ["--config", "axonn.yaml"]
    autoload = "0" if launcher == "axonn-launch" else "1"
    words = [*LAUNCHERS[launcher], *option, "script.py", "--config", "mine"]
    done, ranks = start(tmp_path, *words, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
    assert done.returncode == 0, done.stderr
    assert len(ranks) == 2
    for rank in ranks:
        assert_given(rank)
        assert 1 <= int(rank["OMP_NUM_THREADS"]) <= max(1, os.cpu_count() // 2)
    assert list((tmp_path / "tmp").glob("axonn-*")) == []


UPSTREAM = """\
import torch
from accelerate import Accelerator, ParallelismConfig

accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2, dp_shard_size=1))
model = torch.nn.Linear(4, 6)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.backward(model(torch.ones(3, 4)).sum())
optimizer.step()
print(f"{accelerator.num_processes} {model.weight.to_local().shape}\\n", end="", flush=True)  # in one write
"""


@pytest.mark.slow
def test_accelerates_own_sizes_start_a_grid(tmp_path):
    """Launch file and script name sizes as for stock Accelerate, beside an axonn_config without a grid."""
    file = GOOD.replace("  grid: {x: 2}", "  layout: token\nparallelism_config: {parallelism_config_tp_size: 2}")
    done, _ = start(
        tmp_path, *LAUNCHERS["accelerate launch"], "--config", "axonn.yaml", "script.py", file=file, script=UPSTREAM
    )
    assert done.returncode == 0, done.stderr
    assert "hf_axonn: parallelism_config means the grid data=1,z=1,y=1,x=2." in done.stderr
    assert done.stdout.count("1 torch.Size([3, 4])") == 2, done.stdout  # out_features halved, samples shared


UNMODIFIED = """\
import sys
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).train()
held = sum(getattr(parameter, "to_local", parameter.detach)().nbytes for parameter in model.parameters())
accelerator = Accelerator()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
ids = torch.arange(3, 13).view(2, 5)
for _ in range(3):
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.5f} held {held}", flush=True)
"""


@pytest.mark.slow
def test_an_unmodified_script_loads_slices_where_the_file_says_so(tmp_path):
    """Its model is loaded before anything knows of ranks; losses are those of whole models that are sharded later."""
    tiny_model("qwen3", dtype=torch.float32).save_pretrained(tmp_path / "model")
    printed = {}
    for load in ("whole", "sharded"):
        place = tmp_path / load
        place.mkdir()
        words = [*LAUNCHERS["accelerate launch"], "--config", "axonn.yaml", "script.py", str(tmp_path / "model")]
        done, _ = start(place, *words, file=f"{GOOD}  load: {load}\n", script=UNMODIFIED)
        assert done.returncode == 0, done.stderr
        assert ("loaded whole on every rank" in done.stderr) == (load == "whole")
        printed[load] = re.findall(r"loss (\S+) held (\d+)", done.stdout)
        assert len(printed[load]) == 2, done.stdout
    assert {loss for load in printed.values() for loss, _ in load} == {printed["whole"][0][0]}
    assert all(int(held) < 0.6 * int(printed["whole"][0][1]) for _, held in printed["sharded"])


WRONG = {
    "unknown key": (
        "grid: {x: 2}\n  overlp: {}",
        "unknown key 'overlp'; it may hold grid, overlap, reduce_dtype, residual_dtype, keep_gathered, prefetch, "
        "tune_matmuls, layout, experts, context_attention, allow_untested, offload, async_save, save_failure, "
        "schedule, stages_per_rank, stage_layers, order, load: did you",
    ),
    "load": ("grid: {x: 2}\n  load: lazy", "load is 'lazy', but it is one of whole, sharded."),
    "product": ("grid: {x: 4}", "= 4, but 2 process(es) are to run: start 4 processes (num_processes: 4), or choose"),
    "fraction": ("grid: {x: 2.5}", "grid axis x is 2.5, but the size of an axis is a whole number"),
    "negative": ("grid: {x: -2}", "grid axis x is -2, but the size of an axis is a whole number"),
}


def test_a_wrong_file_ends_the_launch_before_any_process_starts(tmp_path):
    wrong, message = WRONG["product"]
    words = [*LAUNCHERS["accelerate launch"], "--config", "axonn.yaml", "script.py"]
    done, ranks = start(tmp_path, *words, file=GOOD.replace("grid: {x: 2}", wrong))
    assert done.returncode == 2, done.stderr
    assert ranks == []
    assert done.stderr.startswith("hf_axonn: nothing was started. axonn.yaml: axonn_config")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_in_a_file_is_said(file, name):
    wrong, message = WRONG[name]
    file.write_text(GOOD.replace("grid: {x: 2}", wrong))
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare(["--config", str(file), "script.py"])


def test_axonn_launch_refuses_alike(file, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["axonn-launch", "--config", str(file), "--num_processes", "3", "script.py"])
    with pytest.raises(SystemExit) as ended:
        axonn_launch()
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and printed.startswith("hf_axonn: nothing was started. ")
    assert "but 3 process(es) are to run" in printed


@pytest.mark.parametrize(
    ("launcher", "fails", "code", "reason"),
    [
        (
            "python -m hf_axonn.launch",
            "print('nothing to train', file=sys.stderr); sys.exit(2)",
            2,
            "nothing to train",
        ),
        SLOW("accelerate launch", "sys.exit('script.py: no such data')", 1, "script.py: no such data"),
        SLOW("accelerate launch", "raise ValueError('of the script')", 1, "ValueError: of the script"),
    ],
)
def test_a_line_for_each_rank_that_failed_follows_what_it_printed(launcher, fails, code, reason, tmp_path):
    """There is no traceback but the script's own."""
    fails = f"import os, sys\nif os.environ['RANK'] == '1': {fails}\n"
    done, _ = start(tmp_path, *LAUNCHERS[launcher], "--config_file=axonn.yaml", "script.py", script=fails)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("Traceback") == ("raise" in fails) and reason in done.stderr
    *_, failed, why = done.stderr.splitlines()
    assert re.fullmatch(rf"hf_axonn: rank 1 \(process \d+\) ended with exit code {code}\.", failed)
    assert why == "hf_axonn: the reason is above, or in the files of --log_dir."
    assert list((tmp_path / "tmp").glob("axonn-*")) == []


def test_a_rank_that_a_signal_ended_is_named_with_it():
    killed = ProcessFailure(0, 12, -9, "")
    other = ProcessFailure(1, 13, 3, "")
    other.timestamp = killed.timestamp + 1
    error = ChildFailedError("script.py", {1: other, 0: killed})
    assert describe_failures(error)[:2] == [
        "hf_axonn: rank 0 (process 12) ended by SIGKILL.",
        "hf_axonn: rank 1 (process 13) ended with exit code 3.",
    ]
    assert exit_code(error) == 1


def test_a_signal_to_the_launcher_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    shorten_child_failures()
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(SignalException, SignalException("Process 3 got signal: 2", signal.SIGINT), None)
    assert ended.value.code == 130
    assert capsys.readouterr().err == "hf_axonn: the launcher got SIGINT, and has ended its ranks.\n"


def test_two_machines_make_one_world(tmp_path):
    """Two launchers on this machine stand for two machines, each with one of the two ranks."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def run(rank):
        directory = tmp_path / str(rank)
        directory.mkdir()
        nodes = [
            "--num_machines=2",
            "--machine_rank",
            rank,
            "--main_process_ip=127.0.0.1",
            "--main_process_port",
            port,
        ]
        words = [*LAUNCHERS["accelerate launch"], "--config", "axonn.yaml", "--same_network", *nodes]
        return start(directory, *words, "script.py", "--config", "mine", TORCH_DEVICE_BACKEND_AUTOLOAD="1")

    with ThreadPoolExecutor(2) as pool:
        for rank, (done, ranks) in enumerate(pool.map(run, range(2))):
            assert done.returncode == 0, done.stderr
            assert [path.name for path in (tmp_path / str(rank)).glob("rank*")] == [f"rank{rank}.json"]
            assert_given(ranks[0])
