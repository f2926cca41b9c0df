"""`hf-axonn env`: what a report says, and what it must not say."""

from __future__ import annotations

import getpass
import os
import platform
import socket
import sys
from importlib.metadata import version
from pathlib import Path

import peft
import pytest
import transformers

from hf_axonn import __version__
from hf_axonn.cli import env as environment
from hf_axonn.compat.versions import SWITCH


SECRETS = {
    "HF_TOKEN": "hf_abcdefghijk",
    "NCCL_API_KEY": "k1",
    "TORCH_PASSWORD": "p4",
    "WANDB_API_KEY": "w5",
    "NCCL_TOPO_FILE": "/folder/of/someone/topo.xml",
    "GLOO_HOSTNAME": "nid004242",
    "TORCH_HOME": "/folder/of/someone",
    "ACCELERATE_NOTE": "x" * 70,
    "SLURM_JOB_USER": "someone",
}
SETTINGS = {"NCCL_SOCKET_IFNAME": "hsn0,hsn1", "OMP_NUM_THREADS": "4", "FI_CXI_ATS": "0", "NCCL_NET": "AWS Libfabric"}


@pytest.fixture
def report(monkeypatch):
    for name, value in (SECRETS | SETTINGS).items():
        monkeypatch.setenv(name, value)
    return list(environment.environment_report())


def test_versions_devices_and_links(report):
    assert report[0] == f"hf_axonn {__version__}"
    assert f"transformers {transformers.__version__}" in report and f"torch {version('torch')}" in report
    assert any(line.startswith(f"python {platform.python_version()}, {platform.system()}") for line in report)
    (backends,) = (line for line in report if line.startswith("torch.distributed backends: "))
    assert "gloo" in backends
    for start in ("devices: ", "processor: ", "network: ", "torch is built for "):
        assert sum(line.startswith(start) for line in report) == 1, start
    assert "launch hook: registered" in report
    assert not [line for line in report if line.startswith("NOT MET")]


def test_settings_are_shown_and_nothing_that_is_somebodys_own(report):
    for name, value in SETTINGS.items():
        assert f"{name}={value}" in report
    text = "\n".join(report)
    for value in SECRETS.values():
        assert value not in text
    assert "NCCL_API_KEY is set" in report and "TORCH_HOME is set" in report
    assert "HF_TOKEN" not in text and "WANDB" not in text and "SLURM_JOB_USER" not in text
    own = [str(Path.home()), os.getcwd(), sys.prefix, socket.gethostname()]
    own += [getpass.getuser()] if getpass.getuser() != "root" else []
    for value in own:
        assert value not in text
    for interface in socket.if_nameindex():
        mac = Path(f"/sys/class/net/{interface[1]}/address")
        if mac.is_file() and mac.read_text().strip("0:\n"):
            assert mac.read_text().strip() not in text


def test_requirements_that_are_not_met_are_named(monkeypatch):
    wanted = ["transformers<5", "nowhere>=2", "numpy>=1", 'torch>=2; python_version>"3"']
    wanted += ['peft<0.1; extra == "peft"', 'pytest<1; extra == "test"', 'nowhere-else; extra == "test"']
    monkeypatch.setattr(environment, "requires", lambda _: wanted)
    found = [line for line in environment.environment_report() if line.startswith("NOT MET")]
    assert found == [
        f"NOT MET: transformers<5: there is {transformers.__version__}",
        "NOT MET: nowhere>=2: nowhere is not installed",
        f"NOT MET: peft<0.1: there is {peft.__version__}",
    ]


def test_the_setting_that_lets_releases_pass_is_named(monkeypatch, report):
    assert not [line for line in report if SWITCH in line]
    monkeypatch.setenv(SWITCH, "0")
    assert f"releases that are not proven are let pass by {SWITCH}=0" in environment.environment_report()


def test_programs_that_fail_or_hang_do_not_end_the_report(monkeypatch, tmp_path):
    nvidia = 'if [ "$1" = topo ]; then sleep 60; fi; echo 570.1; echo 570.1'
    for name, text in {"nvidia-smi": nvidia, "rocm-smi": "exit 9"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(environment, "PROGRAM_SECONDS", 0.5)
    report = list(environment.environment_report())
    place = report.index("nvidia-smi --query-gpu=driver_version --format=csv,noheader:")
    assert report[place + 1 : place + 4] == ["    570.1", "nvidia-smi topo -m:", "    gave no answer"]
    assert report[report.index("rocm-smi --showtopotype:") + 1] == "    gave no answer"


def test_the_hook_that_is_switched_off_is_named(monkeypatch):
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert "launch hook: switched off by TORCH_DEVICE_BACKEND_AUTOLOAD=0" in environment.environment_report()
