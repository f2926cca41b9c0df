"""The messages of the packages, read off their code, for docs/reference/messages.md and its test."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import ROOT


FOLDERS = {"hf_axonn": "hf_axonn", "hf_axonn_eval": "eval", "hf_axonn_scripts": "training_scripts"}
MESSAGES = re.compile(r"^```\{messages\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)  # a block of modules in a page
GAP = "..."  # stands for what differs from case to case
WARNS = ("warning", "warning_once")


@dataclass(frozen=True)
class Message:
    """An error or a warning, with the file that it comes from."""

    text: str
    kind: str  # the class of the error, or "warning"
    file: str  # relative to the root of the repository

    @property
    def cause(self) -> str:
        return self._halves[0]

    @property
    def remedy(self) -> str:
        """What follows the first colon, unless that is only what differs from case to case."""
        return self._halves[1]

    @property
    def _halves(self) -> tuple[str, str]:
        cause, _, remedy = self.text.partition(": ")
        return (cause, remedy) if remedy.replace(GAP, "").strip(" .;,") else (self.text, "")


def module_files(module: str) -> list[Path]:
    """Return the files of a module or of a package with all that is in it."""
    package, _, rest = module.partition(".")
    path = ROOT / FOLDERS[package] / rest.replace(".", "/")
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def messages_of(module: str) -> list[Message]:
    """Return the errors and warnings of a module or package whose text is written where they are raised."""
    return [message for file in module_files(module) for message in _messages_of_file(file)]


@functools.cache
def literals() -> frozenset[str]:
    """Return every string of the three packages, with `GAP` for expressions in it."""
    files = [file for package in FOLDERS for file in module_files(package)]
    return frozenset(text for file in files for node in _nodes(file) if (text := _text_of(node)))


def messages_table(modules: list[str]) -> str:
    """Return a table of the messages of some modules, as Markdown."""
    rows = [message for module in modules for message in messages_of(module)]
    cells = [(message.cause, message.remedy, message.kind, f"`{message.file}`") for message in rows]
    lines = [" | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in sorted(set(cells))]
    head = ["| message | what to do | kind | file |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *(f"| {line} |" for line in lines)])


def _messages_of_file(file: Path) -> Iterator[Message]:
    name = str(file.relative_to(ROOT))
    for node in _nodes(file):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            call, kind = node.exc, ast.unparse(node.exc.func).rpartition(".")[2]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WARNS:
            call, kind = node, "warning"
        else:
            continue
        if call.args and (text := _text_of(call.args[0])):
            yield Message(text, kind, name)


def _nodes(file: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(file.read_text(encoding="utf-8")))


def _text_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)
    return ""
