"""The packages of the extras of setup.cfg, and one sentence where some are not installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement


def missing(*extras: str) -> list[str]:
    """Return the packages of these extras that are not installed, sorted; [] where this package is not, either."""
    try:
        required = [Requirement(text) for text in requires("hf_axonn") or ()]
    except PackageNotFoundError:
        return []
    found: set[str] = set()
    for extra in extras:
        for item in required:
            if item.marker is None or not item.marker.evaluate({"extra": extra}):
                continue
            if item.name.replace("-", "_") == "hf_axonn":
                found.update(missing(*item.extras))
            elif not _is_installed(item.name):
                found.add(item.name)
    return sorted(found)


def lacking(extra: str, *parts: str) -> str:
    """Return a sentence on packages of an extra that are not installed, and what to do; empty if they all are.

    Args:
        extra: the extra to install.
        parts: the extras that are looked at, if not all that `extra` brings.
    """
    names = missing(*(parts or (extra,)))
    if not names:
        return ""
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not installed: pip install 'hf_axonn[{extra}]'"


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
