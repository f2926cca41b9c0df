"""The code that made a bundle: release, and commit where that is known."""

import json
import re
import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any


_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_FOLDER = Path(__file__).resolve().parent


def origin() -> dict[str, Any]:
    """Return release and commit of this package.

    Returns:
        `hf_axonn`, the release, `numpy` and `scipy`, which compute the intervals; `commit`, in hex, and `modified`,
        whether tracked files differ from it. The commit is that of the checkout in which this file is tracked, or of
        the repository that pip installed from (PEP 610); else it is "unknown", and `modified` is None.
    """
    entry: dict[str, Any] = {package: _release(package) for package in ("hf_axonn", "numpy", "scipy")}
    head = _git("rev-parse", "HEAD") if _git("ls-files", "--error-unmatch", Path(__file__).name) else None
    if head and _COMMIT.fullmatch(head):
        return {**entry, "commit": head, "modified": _git("status", "--porcelain", "--untracked-files=no") != ""}
    return {**entry, "commit": _installed_from() or "unknown", "modified": None}


def _release(package: str) -> str:
    try:
        return distribution(package).version
    except PackageNotFoundError:
        return "unknown"


def _git(*words: str) -> str | None:
    """Return the output of git; None if there is no git, or it fails."""
    command = ["git", "-C", str(_FOLDER), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _installed_from() -> str | None:
    try:
        source = json.loads(distribution("hf_axonn").read_text("direct_url.json") or "{}")
        commit = str(source.get("vcs_info", {}).get("commit_id", ""))
    except (PackageNotFoundError, ValueError, AttributeError):
        return None
    return commit if _COMMIT.fullmatch(commit) else None
