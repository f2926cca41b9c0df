"""The machine that a kit is for: its packages, its Python, and the wheels that it can use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version


# Tied to the driver or the build of torch: they are there, or nothing of this package runs.
NEVER_BROUGHT = re.compile(r"torch|triton|pytorch-triton(-.*)?|(nvidia|cuda|rocm)-.*")
OLDEST_GLIBC = 5  # of 2.5, the first that manylinux tags name


@dataclass(frozen=True)
class Machine:
    """The machine that a kit is for, as far as pip has to know it.

    Args:
        packages: versions by canonical name.
        python: its version, two or three numbers, such as 3.12.
        glibc: major and minor version of its C library.
        architecture: as `uname -m` prints it.
    """

    packages: dict[str, str]
    python: str
    glibc: tuple[int, int] = (2, 28)
    architecture: str = "x86_64"

    @property
    def minor(self) -> str:
        """The version of Python without the patch release."""
        return ".".join(self.python.split(".")[:2])

    @property
    def platforms(self) -> list[str]:
        """The tags of wheels that run there, the best first."""
        major, minor = self.glibc
        tags = [f"manylinux_{major}_{older}" for older in range(minor, OLDEST_GLIBC - 1, -1)]
        for name, older in (("manylinux2014", 17), ("manylinux2010", 12), ("manylinux1", 5)):
            if minor >= older:
                tags.insert(tags.index(f"manylinux_{major}_{older}") + 1, name)
        return [f"{tag}_{self.architecture}" for tag in [*tags, "linux"]]

    @property
    def markers(self) -> dict[str, str]:
        """Values of that machine for the markers of requirements."""
        return {
            "python_version": self.minor,
            "python_full_version": self.python if self.python != self.minor else f"{self.python}.0",
            "platform_machine": self.architecture,
            "platform_system": "Linux",
            "sys_platform": "linux",
            "os_name": "posix",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
        }


def read_packages(path: Path) -> dict[str, str]:
    """Return the versions by canonical name of a file that `pip list --format=freeze` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not of that form; the message has its number.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, equals, version = line.strip().partition("==")
        try:
            if not equals:
                raise InvalidVersion
            Version(version)
        except InvalidVersion:
            raise ValueError(
                f"{path}, line {number} is {line.strip()!r} and not NAME==VERSION: write the file there with "
                "python3 -m pip list --format=freeze"
            ) from None
        found[canonicalize_name(name)] = version
    return found


def read_glibc(text: str) -> tuple[int, int]:
    """Return the version of glibc that 2.28, manylinux_2_28 or manylinux_2_28_x86_64 names.

    Raises:
        ValueError: the text names none, or one that no manylinux tag is for.
    """
    match = re.fullmatch(r"(?:manylinux_)?2[._](\d+)(?:_\w+)?", text)
    if match is None or int(match[1]) < OLDEST_GLIBC:
        raise ValueError(f"{text!r} is no version of glibc from 2.{OLDEST_GLIBC} on: give it as 2.28")
    return 2, int(match[1])
