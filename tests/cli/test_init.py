"""`hf-axonn init`: the launch file that it writes, asked for and not, and what it refuses.

That a script starts from it is in tests/end_to_end/test_init.py.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import yaml

from hf_axonn.cli import init
from hf_axonn.cli.main import main
from hf_axonn.launch import launch_file
from hf_axonn.launch.command import read_launch_file
from hf_axonn.launch.launch_file import resolve
from hf_axonn.planner.from_settings import make_job
from hf_axonn.planner.machine import FOLDER, known_machines, load_machine, machine_of_gpus
from hf_axonn.planner.search import plan
from hf_axonn.planner.settings import EXACT
from hf_axonn.topology.axis_order import ORDER
from hf_axonn.topology.grid import Grid
from tests.helpers.models import tiny_config


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder, on a machine with four cores and no GPU, where nothing can be asked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init, "gpu_count", lambda: 0)
    monkeypatch.setattr(init, "core_count", lambda: 4)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    return tmp_path


@pytest.fixture
def gpus(here, monkeypatch):
    """The same with GPUs of this name, and whether they have bfloat16."""

    def there_are(*names, bf16=True):
        for module in (init, launch_file):
            monkeypatch.setattr(module, "gpu_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name=names[index]))
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)

    return there_are


@pytest.fixture
def answers(here, monkeypatch):
    """Answer questions with these; returns the questions."""

    def give(*texts):
        left, asked = list(texts), []

        def ask(question):
            asked.append(question)
            if not left:
                raise EOFError
            return left.pop(0)

        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", ask)
        return asked

    return give


def written(path="axonn.yaml", **options):
    """The launch file as a launch understands it."""
    return resolve(read_launch_file(init.Path(path)), options)


@pytest.mark.parametrize(
    ("gpu", "count", "machine"),
    [
        ("NVIDIA H100 80GB HBM3", 8, "dgx-h100"),
        ("NVIDIA H100 80GB HBM3", 4, "dgx-h100"),
        ("NVIDIA H200", 4, "hgx-h200-4"),
        ("NVIDIA H200", 5, "dgx-h200"),
        ("NVIDIA H200", 8, "dgx-h200"),
        ("NVIDIA A100-SXM4-40GB", 4, "perlmutter"),
        ("A100-SXM4-40GB", 8, "dgx-a100-40"),
        ("NVIDIA A100-SXM4-80GB", 8, "dgx-a100"),
        ("AMD Instinct MI250X", 8, "frontier"),
        ("NVIDIA GB200", 4, "b200-nvl72"),
        ("NVIDIA H200 NVL", 4, None),  # another card than the H200 of SXM
        ("NVIDIA H100 PCIe", 8, None),
        ("NVIDIA H100 80GB HBM3", 16, None),
        ("NVIDIA GeForce RTX 4090", 2, None),
    ],
)
def test_machines_are_known_by_their_gpus(gpu, count, machine):
    assert machine_of_gpus(gpu, count) == machine


def test_every_machine_names_its_gpu():
    assert all(load_machine(name).gpu for name in known_machines())


def test_without_a_terminal_everything_has_a_default(here, capsys):
    assert main(["init"]) == 0
    launch = written()
    assert launch.config.grid == Grid(z=4) and launch.settings["num_processes"] == 4
    assert launch.settings["use_cpu"] is True and launch.settings["mixed_precision"] == "no"
    printed = capsys.readouterr().out
    assert "the default grid, z=4, as the planner knows no such machine" in printed
    assert "torchrun --nproc-per-node 4 -m hf_axonn bench-links" in printed
    assert printed.splitlines()[-1] == "accelerate launch --config axonn.yaml train.py"


def test_the_grid_is_the_one_that_the_planner_ranks_first(here, gpus, capsys):
    gpus(*["NVIDIA H100 80GB HBM3"] * 8)
    command = ["init", "--model", "gpt-20b", "--nodes", "2", "--processes", "16", "--batch-tokens", "524288"]
    assert main([*command, "--seq", "2048", "--output", "a b.yaml"]) == 0
    job = make_job("gpt-20b", "dgx-h100", 256, 2048, compute_bytes=2, param_bytes=4)
    best, second, *_ = plan(job, 16, free=EXACT).ranked
    launch = written("a b.yaml", main_process_ip="10.0.0.1")
    assert launch.config.grid == best.grid and launch.config.order == best.order == ORDER
    assert str(launch.config.keep_gathered) == str(best.job.keep_gathered)
    assert launch.settings["mixed_precision"] == "bf16" and launch.settings["num_machines"] == 2
    assert launch.settings["use_cpu"] is False
    text = (here / "a b.yaml").read_text()
    rows = 256 // (best.grid.dp_size * best.micro_batches)
    trainer = f"for Trainer: gradient_accumulation_steps {best.micro_batches}, per_device_train_batch_size {rows}"
    printed = capsys.readouterr().out
    assert f"# {trainer}" in text and trainer in printed
    assert "8 x NVIDIA H100 80GB HBM3, planned as dgx-h100" in printed
    assert f"next: {init.sizes(second.grid)} ({second.total / best.total - 1:.1%} slower)" in printed
    assert f"{best.total:.3g} s a step" in printed
    assert printed.splitlines()[-2:] == [
        f"accelerate launch --config 'a b.yaml' --machine_rank {rank} --main_process_ip ADDRESS_OF_NODE_0 train.py"
        for rank in (0, 1)
    ]


def test_a_machine_that_was_measured(here, capsys):
    """A file of bench-links does not say whether it is of GPUs, unless it names one; a launch sees what there is."""
    text = json.loads((FOLDER / "dgx-h100.json").read_text())
    for gpu, use_cpu, precision in (("H100 80GB HBM3", False, "bf16"), (None, None, "no")):
        if gpu is None:
            del text["gpu"]
        (here / "this.json").write_text(json.dumps(text))
        tiny_config("llama").save_pretrained(here / "model")
        command = ["init", "--machine", "this.json", "--model", "model", "--seq", "64", "--force"]
        assert main(command) == 0
        settings = yaml.safe_load((here / "axonn.yaml").read_text())
        assert settings.get("use_cpu") is use_cpu and settings["mixed_precision"] == precision
        assert settings["num_processes"] == 8
        assert "The fastest of" in capsys.readouterr().out


def test_sequences_are_as_long_as_the_window_allows(here, capsys):
    tiny_config("llama", max_position_embeddings=512).save_pretrained(here / "model")
    command = ["init", "--machine", "dgx-h100", "--model", "model", "--force"]
    assert main(command) == 0
    assert "64 sequences of 512 tokens a step" in (here / "axonn.yaml").read_text()
    assert "longer than" not in capsys.readouterr().out
    assert main([*command, "--seq", "1024"]) == 0
    assert "sequences of 1,024 tokens are longer than the 512 that the config allows" in capsys.readouterr().out


def test_nodes_that_are_not_those_of_the_plan_are_said(here, capsys):
    command = ["init", "--machine", "dgx-h100", "--model", "gpt-5b", "--nodes", "4", "--processes", "16"]
    assert main(command) == 0
    assert "planned as if every 8 neighbours were a node of dgx-h100, not 4" in capsys.readouterr().out
    assert main([*command[:-3], "2", "--processes", "16", "--force"]) == 0
    assert "planned as if" not in capsys.readouterr().out


def test_on_a_terminal_what_no_option_says_is_asked_until_it_is_right(here, answers, gpus, capsys):
    gpus(*["NVIDIA H200"] * 8)
    asked = answers("", "8", "nowhere", "gpt-5b", "fp8", "", "4k")
    assert main(["init", "--seq", "2048"]) == 0  # so that it is not asked
    begin = [
        "nodes",
        "processes on all",
        "model (",
        "model (",
        "mixed precision",
        "mixed precision",
        "tokens of a step",
    ]
    assert [question[: len(start)] for question, start in zip(asked, begin, strict=True)] == begin
    launch = written()
    assert launch.config.grid.size == 8 and launch.settings["mixed_precision"] == "bf16"
    printed = capsys.readouterr().out
    assert "there is no model 'nowhere'" in printed and "'fp8' is none of bf16, fp16, no" in printed
    assert "gpt-5b on 8 GPUs of dgx-h200, for 2 sequences of 2,048 tokens" in (here / "axonn.yaml").read_text()


def test_no_answer_is_no_model_and_yes_asks_nothing(here, answers, gpus, capsys):
    gpus("NVIDIA H200", "NVIDIA H200")
    asked = answers(*[""] * 6)
    assert main(["init"]) == 0 and len(asked) == 6
    assert "the default grid, z=2, as no model was named" in capsys.readouterr().out
    assert main(["init", "--yes", "--force"]) == 0 and len(asked) == 6
    answers("1")
    assert main(["init", "--force"]) == 2
    assert "the answers ended before the questions" in capsys.readouterr().err


def test_gpus_without_bfloat16_get_fp16(gpus):
    gpus("Tesla V100-SXM2-32GB", "Tesla V100-SXM2-32GB", bf16=False)
    assert main(["init"]) == 0
    assert written().settings["mixed_precision"] == "fp16"


def test_a_file_that_is_there_stays(here, capsys):
    (here / "axonn.yaml").write_text("mine")
    assert main(["init"]) == 2
    assert "axonn.yaml is there" in capsys.readouterr().err and (here / "axonn.yaml").read_text() == "mine"
    assert main(["init", "--force"]) == 0 and written().config.grid.size == 4


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--nodes 2 --processes 3", "3 processes are not divisible by 2 nodes"),
        ("--mixed-precision fp16", "fp16, which accelerate ignores on CPUs"),
        ("--machine dgx-h100 --model gpt-640b", "no grid of 8 GPUs fits"),
        ("--machine dgx-h100 --model nowhere", "there is no model 'nowhere'"),
        ("--machine nowhere", "there is no machine 'nowhere'"),
        ("--seq 2048 --batch-tokens 1k", "less than one sequence"),
        ("--output nowhere/axonn.yaml", "nowhere/axonn.yaml"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(here, capsys, command, message):
    assert main(["init", *command.split()]) == 2
    assert message in capsys.readouterr().err and not list(here.iterdir())


def test_more_processes_than_gpus_and_gpus_of_two_kinds(here, gpus, capsys):
    gpus("NVIDIA H200", "NVIDIA H200")
    assert main(["init", "--processes", "8"]) == 2
    assert "need 8 GPUs each, and this machine has 2: give --nodes 4" in capsys.readouterr().err
    gpus("NVIDIA H200", "NVIDIA L4")
    assert main(["init"]) == 2
    assert "differ (NVIDIA H200, NVIDIA L4)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("processes", "nodes", "sequences", "grid"),
    [
        (4, 1, 32, Grid(z=4)),
        (4, 1, 2, Grid(z=2, x=2)),
        (4, 1, 1, Grid(x=4)),
        (16, 2, 64, Grid(data=2, z=8)),
        (16, 2, 8, Grid(data=2, z=4, x=2)),
        (6, 1, 4, Grid(z=2, x=3)),
    ],
)
def test_the_default_grid(processes, nodes, sequences, grid):
    assert init.default_grid(processes, nodes, sequences) == grid
