"""The documents of the repository, and which functions and classes a file of code has."""

import ast
import functools
from pathlib import Path

from tests.helpers import ROOT


FOLDERS = ("docs", "docs/tutorials", "docs/how_to", "docs/reference")
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *(path for name in FOLDERS for path in sorted((ROOT / name).glob("*.md")))]


@functools.cache
def defined_in(path: Path) -> set[str]:
    """The functions, classes and methods of a file, without running it: `name`, and `Class.name` of a method."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{own.name}" for own in node.body if isinstance(own, ast.FunctionDef)}
    return names
