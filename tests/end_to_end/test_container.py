"""The Dockerfile, which no test builds: by hadolint, by what it copies and installs, and by what the documents say."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import pytest
from packaging.specifiers import SpecifierSet

from hf_axonn.cli.main import main as hf_axonn_main
from tests.end_to_end.test_packaging import FOLDERS
from tests.helpers import ROOT


TEXT = (ROOT / "Dockerfile").read_text(encoding="ascii")
# Instructions with their arguments on one line.
STEPS = [
    tuple(line.split(maxsplit=1))
    for line in re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE)).splitlines()
    if line
]
IMAGE = re.compile(r"BASE=(\S+)")


@pytest.fixture(scope="module")
def configuration():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def of_the_clone() -> list[str]:
    """What the Dockerfile copies, not from another stage."""
    sources = [rest.split()[:-1] for name, rest in STEPS if name == "COPY" and "--from" not in rest]
    return sorted(source for words in sources for source in words)


def test_hadolint_finds_nothing_wrong():
    folders = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    done = subprocess.run(
        [
            shutil.which("hadolint", path=folders) or "hadolint",
            "--failure-threshold",
            "style",
            str(ROOT / "Dockerfile"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_docker_sees_what_is_copied_and_nothing_else():
    lines = (ROOT / ".dockerignore").read_text(encoding="ascii").splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    assert rules[0] == "*" and rules[-2:] == ["**/__pycache__", "**/*.pyc"]
    assert [rule.removeprefix("!") for rule in rules[1:-2]] == of_the_clone()


@pytest.mark.slow  # a quick one of the same sources is in test_packaging.py
def test_the_wheel_is_built_of_what_is_copied(tmp_path):
    for name in of_the_clone():
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    # The step of the Dockerfile, with the setuptools that is here.
    (step,) = [rest for name, rest in STEPS if name == "RUN" and " pip wheel " in rest]
    words = step.replace("/wheels", str(tmp_path / "wheels")).split()
    assert words[:4] == ["python3", "-m", "pip", "wheel"]
    done = subprocess.run(
        [sys.executable, *words[1:], "--no-build-isolation", "--no-index"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheels").glob("hf_axonn-*.whl")  # the pattern of the step that installs it
    assert "/wheels/hf_axonn-*.whl" in TEXT
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {
        f"{name}/{path.relative_to(folder)}" for name, folder in FOLDERS.items() for path in folder.rglob("*.py")
    } <= names


def test_what_is_installed_and_run_is_there(configuration):
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", TEXT, re.MULTILINE)
    assert set(extras.split(",")) <= set(configuration["options.extras_require"])
    assert ("ENTRYPOINT", '["hf-axonn"]') in STEPS and "hf-axonn = " in configuration["options.entry_points"][
        "console_scripts"
    ]
    (user,) = [rest for name, rest in STEPS if name == "USER"]
    assert user == "1000:1000" and STEPS.index(("USER", user)) > max(
        place for place, (name, _) in enumerate(STEPS) if name == "RUN"
    )
    (command,) = re.findall(r"hf-axonn (finetune --config axonn.yaml) \.\.\.", TEXT)
    with pytest.raises(SystemExit) as end:
        hf_axonn_main([command.split()[0], "--help"])
    assert end.value.code == 0


def test_the_images_that_are_named_have_what_is_needed(configuration):
    """Their tags name the release of torch, or of Python; the documents name the same ones."""
    named = IMAGE.findall(TEXT)
    assert len(set(named)) == 3 and {image.partition(":")[0] for image in named} == {
        "pytorch/pytorch",
        "rocm/pytorch",
        "python",
    }
    (default,) = re.findall(r"^ARG BASE=(\S+)$", TEXT, re.MULTILINE)
    assert default in named
    (torch,) = re.findall(r"^torch(\S+)$", configuration["options"]["install_requires"], re.MULTILINE)
    for image in named:
        found = re.search(r"(?:pytorch:|pytorch_release_)(\d+\.\d+\.\d+)", image)
        if found:
            assert SpecifierSet(torch).contains(found[1]), image
        python = re.search(r"py(?:thon:)?(3\.\d+)", image)
        if python:
            assert f"Python :: {python[1]}\n" in configuration["metadata"]["classifiers"] + "\n", image
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert set(IMAGE.findall(page)) == set(named)
