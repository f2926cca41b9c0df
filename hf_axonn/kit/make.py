"""Makes a kit, a folder with wheels and install.sh, and installs it on trial."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.utils import parse_wheel_filename

from hf_axonn.kit.machine import NEVER_BROUGHT, Machine, read_glibc
from hf_axonn.kit.pip_there import PipThere, build_wheel, find_unmet


HERE = Path(__file__).parent
INSTALL = "install.sh"
CHECK = "from hf_axonn.compat.versions import check_versions; check_versions()"


@dataclass(frozen=True)
class Kit:
    """A kit that was made.

    Args:
        folder: where it is.
        wheels: its files, by canonical name of the package.
        built: those of `wheels` that were built here.
        missing: requirements that have to be met there, and are not as far as is known.
    """

    folder: Path
    wheels: dict[str, Path]
    built: frozenset[str]
    missing: list[str]

    @property
    def nbytes(self) -> int:
        """The size of all wheels."""
        return sum(wheel.stat().st_size for wheel in self.wheels.values())


def find_wheels(folder: Path) -> dict[str, Path]:
    """Return the wheels of a folder by canonical name of the package."""
    return {parse_wheel_filename(wheel.name)[0]: wheel for wheel in sorted(folder.glob("*.whl"))}


def read_version(wheel: Path) -> str:
    """Return the version in the name of a wheel."""
    return str(parse_wheel_filename(wheel.name)[1])


def make_kit(
    source: Path | str,
    extras: Sequence[str],
    machine: Machine,
    output: Path,
    *,
    interpreter: str,
    arguments: Sequence[str] = (),
    beside: Path | None = None,
) -> Kit:
    """Make the kit of a project for a machine in the folder `output`, in place of a kit that is there.

    Args:
        source: a folder with the project's sources, or a requirement such as hf_axonn==0.2.0.
        extras: of the project.
        machine: that the kit is for.
        output: the folder of the kit.
        interpreter: runs pip; see `PipThere`.
        arguments: for pip.
        beside: a kit that the machine gets as well, whose packages are left out of this one.

    Raises:
        ValueError: `beside` is no kit, `output` holds something else, pip is too old, or it finds no solution or no
            wheel.
    """
    if beside and not (beside / INSTALL).is_file():
        raise ValueError(f"{beside} is no kit: it has no {INSTALL}")
    others = {name: read_version(wheel) for name, wheel in find_wheels(beside).items()} if beside else {}
    check_output(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".kit-") as scratch:
        built, made = Path(scratch, "built"), Path(scratch, "kit")
        built.mkdir()
        made.mkdir()
        chosen = f"[{','.join(extras)}]"
        if isinstance(source, Path):
            wheel = build_wheel(source, built, arguments)
            project = str(parse_wheel_filename(wheel.name)[0])
            root, argument = f"{project}{chosen}", f"{wheel}{chosen}"
        else:
            project, _, version = source.partition("==")
            root = argument = f"{project}{chosen}=={version}"
        # Another release of the project may be there; the kit's takes its place, and its metadata is needed.
        there = {name: version for name, version in {**machine.packages, **others}.items() if name != project}
        machine = replace(machine, packages=there)
        pip = PipThere(machine, interpreter, arguments, Path(scratch), built)
        found = pip.resolve([argument])
        if more := find_unmet(root, found, machine):
            found = pip.resolve([argument, *more])
        kept = {name: package for name, package in found.items() if not NEVER_BROUGHT.fullmatch(name)}
        missing = find_unmet(root, kept, machine)
        kept = {name: package for name, package in kept.items() if others.get(name) != package.version}
        ours = {name: wheel for name, wheel in find_wheels(built).items() if name in kept}
        for wheel in ours.values():
            shutil.copy(wheel, made)
        if fetched := [package for name, package in kept.items() if name not in ours]:
            pip.download(fetched, made)
        check = CHECK if "hf-axonn" in kept else "pass"
        script = (HERE / INSTALL).read_text().replace("@PYTHON@", machine.minor).replace("@CHECK@", check)
        (made / INSTALL).write_text(script)
        if output.exists():
            shutil.rmtree(output)
        made.rename(output)
    return Kit(output, find_wheels(output), frozenset(ours), missing)


def check_output(output: Path) -> None:
    """Raise ValueError if it is no folder, or holds anything that is not a kit's."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file: give another --output")
    for path in output.iterdir() if output.exists() else ():
        if path.suffix != ".whl" and path.name != INSTALL:
            raise ValueError(f"{output} holds {path.name}, which is not of a kit: give another --output")


def find_interpreter(minor: str) -> str | None:
    """Return an interpreter of this version of Python: this one, or one on the path."""
    for python in (sys.executable, shutil.which(f"python{minor}")):
        if python is not None and read_python_version(python) == minor:
            return python
    return None


def read_python_version(interpreter: str) -> str:
    """Return the version of an interpreter, as 3.12; empty if it does not run."""
    command = [interpreter, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def find_unusable(kit: Path) -> str:
    """Return the name of a wheel that this machine cannot use and the kit's can, or nothing."""
    here = Machine({}, platform.python_version(), read_glibc(platform.libc_ver()[1] or "2.17"), platform.machine())
    usable = {"any", *here.platforms}
    for wheel in find_wheels(kit).values():
        if not any(tag.platform in usable for tag in parse_wheel_filename(wheel.name)[3]):
            return wheel.name
    return ""


def try_kit(kits: Sequence[Path], interpreter: str, packages: Sequence[str]) -> dict[str, Any]:
    """Install kits with an interpreter into temporary folders and import what is in the last.

    Args:
        kits: folders, those that the last one is made beside first.
        interpreter: of the kits' Python.
        packages: import names, of which every module is imported; of others in the kit the top alone.

    Returns:
        What `try_imports` returns; without `imported` if the interpreter has no torch.

    Raises:
        ValueError: a kit cannot be installed, or the imports end the process.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHON": interpreter}
    with tempfile.TemporaryDirectory() as scratch:
        for number, kit in enumerate(kits):
            site = Path(scratch, str(number))
            installed = run(["bash", kit.resolve() / INSTALL, site], environment, scratch)
            if installed.returncode:
                raise ValueError(f"{kit} cannot be installed with {interpreter}:\n{installed.stderr.strip()}")
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), environment.get("PYTHONPATH"))))
        has_torch = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
        if run([interpreter, "-P", "-c", has_torch], environment, scratch).returncode:
            return {}
        tried = run([interpreter, "-P", HERE / "try_imports.py", site, *packages], environment, scratch)
        if tried.returncode:
            raise ValueError(f"importing what is in {kits[-1]} ended with code {tried.returncode}:\n{tried.stderr}")
        found: dict[str, Any] = json.loads(tried.stdout.splitlines()[-1])
        return found


def run(command: Sequence[str | Path], environment: dict[str, str], folder: str) -> subprocess.CompletedProcess[str]:
    """Run a command and keep what it prints."""
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
