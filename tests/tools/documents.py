"""The documents of the repository and their fenced blocks, and which functions and classes a file of code has."""

import ast
import functools
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import ROOT


FOLDERS = ("docs", "docs/tutorials", "docs/how_to", "docs/reference")
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *(path for name in FOLDERS for path in sorted((ROOT / name).glob("*.md")))]
FENCE = re.compile(r"^( *)```([^`\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
SHELL = ("bash", "console", "sh")


@dataclass(frozen=True)
class Block:
    """A fenced block, and where it stands."""

    place: str
    language: str
    text: str


def blocks(*languages: str) -> list[Block]:
    """All fenced blocks in one of the languages; in any, if none is given."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            body = textwrap.dedent(match[3]).strip("\n")  # blocks in a list are indented
            found.append(Block(f"{document.relative_to(ROOT)}:{line}", match[2], body))
    return [block for block in found if not languages or block.language in languages]


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
