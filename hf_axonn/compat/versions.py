"""The releases of other libraries that this package is proven with: those that its metadata (setup.cfg) requires.

With others a result can be wrong without a word: their methods are replaced, and their private names used. A patch
release of a proven minor release counts as proven.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from importlib import metadata
from importlib.metadata import PackageNotFoundError, version

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version


SWITCH = "AXONN_CHECK_VERSIONS"
NEEDED = ("torch", "transformers", "accelerate")
OPTIONAL = ("peft", "trl", "lightning", "liger-kernel")  # checked where they are used, not because they are installed


def check_versions(*libraries: str) -> None:
    """Refuse releases of libraries (`NEEDED` if none is given) that are not proven. AXONN_CHECK_VERSIONS=0: warn.

    Raises:
        ValueError: a release is not proven, or this package is not installed, so that nothing is known.
    """
    if reason := refusal(*libraries):
        raise ValueError(reason)


def refusal(*libraries: str) -> str:
    """Return the message of `check_versions`; empty if nothing is refused."""
    try:
        found = [item for item in requirements(*(libraries or NEEDED)) if outside(item)]
    except PackageNotFoundError:
        reason = (
            "hf_axonn is imported from a folder and not installed, so the releases that it is proven with are not "
            'known: run "pip install --no-deps --editable ." there'
        )
    else:
        if not found:
            return ""
        wrong = " and ".join(
            f"{item.name} {outside(item)} is installed, proven is {bounds(item)}{_last_proven(item)}" for item in found
        )
        proven = " ".join(f'"{item.name}{bounds(item)}"' for item in found)
        reason = f"{wrong}: losses could be wrong without a word. Run pip install {proven}"
    if os.environ.get(SWITCH) == "0":
        warnings.warn(f"{reason}. {SWITCH}=0: going on.", stacklevel=3)
        return ""
    return f"{reason}, or set {SWITCH}=0 to go on at your own risk."


def requirements(*libraries: str) -> list[Requirement]:
    """Return the requirements of these libraries in this package's metadata, of those in OPTIONAL in extras.

    An extra may ask for less of a needed library, by what can be installed with it; that refuses nothing.

    Raises:
        PackageNotFoundError: it is not installed.
    """
    found = [item for item in map(_parse, requires("hf_axonn")) if item.name in libraries]
    return [item for item in found if item.marker is None or item.name not in NEEDED]


# Reading and parsing takes milliseconds, and every grid asks.
_parse = functools.cache(Requirement)


@functools.cache
def requires(package: str) -> tuple[str, ...]:
    """Return what the metadata of a package requires, each in the words of a requirements file.

    Raises:
        PackageNotFoundError: it is not installed.
    """
    return tuple(metadata.requires(package) or ())


def outside(requirement: Requirement) -> str:
    """The release of a library that a requirement does not allow; empty if it does, or if there is none.

    It is the one that has been imported, which another on the search path may hide, or else the installed one.
    """
    try:
        found = getattr(sys.modules.get(requirement.name), "__version__", None) or version(requirement.name)
    except PackageNotFoundError:
        return ""
    try:
        proven = requirement.specifier.contains(Version(str(found)), prereleases=True)
    except InvalidVersion:
        proven = False
    return "" if proven else str(found)


def bounds(requirement: Requirement) -> str:
    """The range of a requirement, the lower bound first."""
    return ",".join(sorted(map(str, requirement.specifier), reverse=True))


def _last_proven(requirement: Requirement) -> str:
    """Name the last minor release below the upper bound of a requirement: 5.24 of <5.25."""
    for upper in (Version(item.version) for item in requirement.specifier if item.operator == "<"):
        last = f"{upper.major}.{upper.minor - 1}" if upper.minor else str(upper.major - 1)
        return f", the last is {last}"
    return ""
