"""The Dockerfile, which no test builds: by hadolint, and by what it copies and installs."""

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

from tests.end_to_end.test_packaging import FOLDERS
from tests.helpers import ROOT


TEXT = (ROOT / "Dockerfile").read_text(encoding="ascii")
# Instructions with their arguments on one line.
STEPS = [
    tuple(line.split(maxsplit=1))
    for line in re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE)).splitlines()
    if line
]


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


def test_extras_and_base_images_are_those_of_setup_cfg():
    """pip only warns of an extra that is not there, and puts another torch in place of one that is out of range."""
    configuration = configparser.ConfigParser()
    configuration.read(ROOT / "setup.cfg")
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", TEXT, re.MULTILINE)
    assert set(extras.split(",")) <= set(configuration["options.extras_require"])
    (torch,) = re.findall(r"^torch(\S+)$", configuration["options"]["install_requires"], re.MULTILINE)
    releases = re.findall(r"BASE=\S*(?:pytorch:|pytorch_release_)(\d+\.\d+\.\d+)", TEXT)
    assert len(releases) > 1 and all(SpecifierSet(torch).contains(release) for release in releases)
