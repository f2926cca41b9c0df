"""What the drivers of published protocols share: saying what was run, and writing numbers.

A driver takes the path of a checkout of the authors' repository. It imports their files as they are, gives them the
inputs of tests/eval/published/inputs.py in place of data sets and models that need a network, and writes one JSON file
of numbers beside these.
"""

import argparse
import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.eval.published import inputs
from tests.helpers import ROOT


FOLDER = ROOT / "tests" / "eval" / "published"
PACKAGES = ("torch", "transformers", "tokenizers", "numpy")


def arguments(doc: str | None) -> argparse.Namespace:
    """`checkout`, and `output`, a directory that is there."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a checkout of the authors' repository")
    parser.add_argument("--output", type=Path, default=FOLDER, help="where the numbers go")
    return parser.parse_args()


def about(
    checkout: Path, repository: str, files: Sequence[str], *, stands_in: Sequence[str], packages: Sequence[str] = ()
) -> dict[str, Any]:
    """What was run, for the head of a JSON file.

    Args:
        checkout: where the repository is.
        repository: its owner and name on GitHub.
        files: those of its files that were run; none may differ from the commit.
        stands_in: what of theirs was replaced, and by what.
        packages: more packages whose versions matter.
    Raises:
        RuntimeError: a file differs from the commit.
    """
    for file in files:
        recorded = _git(checkout, "rev-parse", f"HEAD:{file}")
        if _git(checkout, "hash-object", file) != recorded:
            raise RuntimeError(f"{file} in {checkout} differs from the commit: check it out again.")
    module = Path(sys.argv[0]).stem
    return {
        "repository": repository,
        "commit": _git(checkout, "rev-parse", "HEAD"),
        "files": list(files),
        "stands_in": list(stands_in),
        "command": f"python -m tests.benchmarks.eval.published.{module} CHECKOUT",
        **versions(*packages),
    }


def versions(*packages: str) -> dict[str, Any]:
    """Versions of Python and of packages, where the inputs come from, and what tells the model (`model_check`)."""
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in (*PACKAGES, *packages)}},
        "inputs": "tests/eval/published/inputs.py",
        "model": inputs.model_check(),
    }


def write(folder: Path, protocol: str, about: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
    """Write `PROTOCOL.json`: one value a line, lists of numbers on one line."""
    rows = {"protocol": protocol, "about": about, "outputs": outputs}
    path = folder / f"{protocol}.json"
    path.write_text(_pretty(rows) + "\n", encoding="utf-8")
    print(f"{path}: {path.stat().st_size} bytes")


def digest(ids: Iterable[int]) -> str:
    """Sha256 of token ids, its first 16 hex digits."""
    return hashlib.sha256(json.dumps([int(one) for one in ids]).encode()).hexdigest()[:16]


def saved_model(folder: Path, *, bos: bool = True, dtype: torch.dtype = torch.float64) -> Path:
    """Save the model and its tokenizer as the authors' code loads them."""
    inputs.model().config.dtype = dtype
    inputs.model().save_pretrained(folder)
    inputs.tokenizer(bos=bos).save_pretrained(folder)
    return folder


def _git(checkout: Path, *command: str) -> str:
    return subprocess.run(
        ["git", "-C", str(checkout), *command], check=True, capture_output=True, text=True
    ).stdout.strip()


def _pretty(value: Any, indent: str = "") -> str:
    if isinstance(value, Mapping) and value:
        inner = ",\n".join(
            f"{indent}  {json.dumps(key)}: {_pretty(item, indent + '  ')}" for key, item in value.items()
        )
        return f"{{\n{inner}\n{indent}}}"
    if isinstance(value, (list, tuple)) and any(isinstance(item, (Mapping, list, str)) for item in value):
        inner = ",\n".join(f"{indent}  {json.dumps(item, ensure_ascii=False)}" for item in value)
        return f"[\n{inner}\n{indent}]"
    return json.dumps(value, ensure_ascii=False)
