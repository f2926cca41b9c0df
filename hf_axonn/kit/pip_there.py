"""pip as another machine would run it: it sees that machine's packages and Python, and reaches an index from here.

pip prefers what is installed and upgrades only what a requirement excludes. So that machine's packages are shown to it
as installed ones, by metadata alone, and its dry run says which wheels are needed there beside them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from hf_axonn.kit.machine import Machine


OLDEST_PIP = "23.3"  # the first whose dry run takes another platform
NO_WHEEL = re.compile(r"No matching distribution found for ([^\s;]+)")
# Of a clone: where building would leave files, or find old ones.
NOT_BUILT = {".git", ".venv", "build", "dist", "runs", "docs", "tests"}


@dataclass(frozen=True)
class Package:
    """A package of a kit: its name and version, and the requirements of its metadata."""

    name: str
    version: str
    requires: tuple[str, ...]


class PipThere:
    """pip that sees another machine.

    Args:
        machine: that is seen.
        interpreter: runs pip, and should be of the machine's Python: pip reads markers by the Python that runs it.
        arguments: more arguments for pip, such as an index.
        scratch: a folder, for as long as this is used.
        built: a folder of wheels that count beside those of the index; more are built into it.

    Raises:
        ValueError: the pip of this Python is too old, or there is none.
    """

    def __init__(
        self, machine: Machine, interpreter: str, arguments: Sequence[str], scratch: Path, built: Path
    ) -> None:
        self.machine, self.built = machine, built
        self._interpreter, self._arguments, self._scratch = interpreter, arguments, scratch
        self._there = scratch / "there"
        found = list(distributions(name="pip"))  # find_spec would take setuptools its distutils
        release = found[0].version if found else "none"
        if not found or Version(release) < Version(OLDEST_PIP):
            raise ValueError(
                f"a kit needs pip {OLDEST_PIP} or newer, and {sys.executable} has {release}: "
                f"run {sys.executable} -m pip install --upgrade pip"
            )
        self._there.mkdir()
        (self._there / "pip").symlink_to(Path(str(found[0].locate_file("pip"))))
        for name, release in machine.packages.items():
            metadata = self._there / f"{name.replace('-', '_')}-{release}.dist-info" / "METADATA"
            metadata.parent.mkdir()
            metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")

    def resolve(self, requirements: Sequence[str]) -> dict[str, Package]:
        """Return what pip would install there, by canonical name. Builds pure Python packages that have no wheel.

        Raises:
            ValueError: pip finds no solution, or no wheel for that machine; the message is pip's.
        """
        report, tried = self._scratch / "report.json", set()
        while True:
            words = ("install", "--dry-run", "--quiet", "--report", str(report), *self._for_there(), *requirements)
            done = self._run(*words)
            if done.returncode == 0:
                break
            lacking = NO_WHEEL.search(done.stderr)
            if lacking is None or lacking[1] in tried:
                raise ValueError(f"pip finds no kit for that machine:\n{read_errors(done)}")
            tried.add(lacking[1])
            build_wheel(lacking[1], self.built, self._arguments)
        items = [item["metadata"] for item in json.loads(report.read_text())["install"]]
        found = [Package(item["name"], item["version"], tuple(item.get("requires_dist", ()))) for item in items]
        return {canonicalize_name(package.name): package for package in found}

    def download(self, packages: Sequence[Package], folder: Path) -> None:
        """Put the wheels of packages into a folder.

        Raises:
            ValueError: pip could not download one.
        """
        pins = [f"{package.name}=={package.version}" for package in packages]
        done = self._run("download", "--quiet", "--no-deps", "--dest", str(folder), *self._for_there(), *pins)
        if done.returncode:
            raise ValueError(f"pip could not download the kit:\n{read_errors(done)}")

    def _for_there(self) -> list[str]:
        there = self.machine
        words = ["--only-binary=:all:", f"--python-version={there.python}", "--implementation=cp"]
        words += [f"--platform={platform}" for platform in there.platforms]
        return [*words, f"--find-links={self.built}", *self._arguments]

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        # Neither packages of this machine (-S) nor those of the current folder (-P) count as installed there.
        command = [self._interpreter, "-S", "-P", "-m", "pip", *words]
        environment = {**os.environ, "PYTHONPATH": str(self._there)}
        return subprocess.run(command, env=environment, capture_output=True, text=True)


def find_unmet(root: str, found: dict[str, Package], machine: Machine) -> list[str]:
    """Return the requirements of a kit that neither it nor the machine meets, by that machine's markers.

    pip reads markers by the Python that runs it, so it can leave out what another Python needs. What packages of the
    machine require is taken to be there.

    Args:
        root: the requirement that the kit is made for.
        found: the packages of the kit by canonical name.
        machine: that the kit is for.
    """
    left, seen, lacking = [Requirement(root)], set(), []
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        plain = f"{requirement.name}{requirement.specifier}"
        package = found.get(name)
        there = package.version if package else machine.packages.get(name)
        if there is None or not requirement.specifier.contains(there, prereleases=True):
            lacking.append(plain)
        if package is None or (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        for text in package.requires:
            needed = Requirement(text)
            contexts = [{**machine.markers, "extra": extra} for extra in ("", *requirement.extras)]
            if needed.marker is None or any(needed.marker.evaluate(context) for context in contexts):
                left.append(needed)
    return sorted(set(lacking))


def build_wheel(source: str | Path, into: Path, arguments: Sequence[str]) -> Path:
    """Build the wheel of a requirement, or of a folder of sources, which stays as it is. Returns the wheel.

    Args:
        source: of the wheel.
        into: the folder that it is put into.
        arguments: for pip.

    Raises:
        ValueError: there is nothing to build, or the wheel is for this machine alone.
    """
    with tempfile.TemporaryDirectory() as scratch:
        what, folder = str(source), Path(scratch, "wheel")
        if isinstance(source, Path):
            what, leave = str(Path(scratch, "source")), shutil.ignore_patterns("__pycache__")
            shutil.copytree(
                source, what, ignore=lambda at, names: NOT_BUILT if at == str(source) else leave(at, names)
            )
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(folder), *arguments, what]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(
                f"there is no wheel of {source} for that machine, and none can be built:\n{read_errors(done)}"
            )
        (wheel,) = folder.iterdir()
        if not wheel.stem.endswith("-none-any"):
            raise ValueError(
                f"{source} has no wheel for that machine and is not pure Python: build its wheel there, and give "
                "--pip=--find-links=FOLDER"
            )
        return Path(shutil.move(wheel, into / wheel.name))


def read_errors(done: subprocess.CompletedProcess[str]) -> str:
    """Return the errors that pip printed, or its last lines."""
    lines = done.stderr.strip().splitlines()
    return "\n".join([line for line in lines if line.startswith("ERROR")] or lines[-5:])
