"""docs/environment.md has the environment variables of the code, and no others."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.helpers import ROOT


PAGE = ROOT / "docs" / "environment.md"
OTHERS = "Of other libraries"  # the part of the page that may name what no code here reads
OURS = re.compile(r"\b(?:HF_)?AXONN_[A-Z_]+[A-Z]\b")
NAME = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*")
WHERE = ("environ", "environment")  # variables of the code that hold an environment, or what is to be added to it


def sources(*folders: str) -> Iterator[Path]:
    """The Python files of some folders."""
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def constants(tree: ast.AST) -> dict[str, str]:
    """Module variables that are texts."""
    return {
        node.targets[0].id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def is_environment(node: ast.expr) -> bool:
    """Whether an expression is called environ or environment, or is an attribute of that name."""
    return getattr(node, "id", getattr(node, "attr", None)) in WHERE


def used(tree: ast.AST, known: dict[str, str]) -> set[str]:
    """Names that are looked up in, put into or asked of an environment."""
    keys: list[ast.expr | None] = []
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and is_environment(node.value):
            keys.append(node.slice)
        if isinstance(node, ast.Compare) and is_environment(node.comparators[0]):
            keys.append(node.left)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_environment(node.func.value):
            keys += node.args[:1]
            names |= {keyword.arg for keyword in node.keywords if keyword.arg}
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            if is_environment(node.targets[0]) or getattr(node.targets[0], "id", "") == "fitting":  # gpu_settings.py
                keys += node.value.keys
    for key in keys:
        value = key.value if isinstance(key, ast.Constant) else known.get(getattr(key, "id", ""))
        if isinstance(value, str) and NAME.fullmatch(value):
            names.add(value)
    return names


@functools.cache
def of_the_code() -> set[str]:
    """Every variable that the packages read or set, and our own of tests and benchmarks."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sources("hf_axonn", "eval")}
    shared: dict[str, str] = {}
    for tree in trees.values():
        shared |= constants(tree)
    found: set[str] = set()
    for tree in trees.values():
        found |= used(tree, shared | constants(tree))
        found |= {name for text in constants(tree).values() if (match := OURS.fullmatch(text)) for name in [match[0]]}
    for path in sources("tests"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if OURS.search(text) else ():  # parsing takes seconds
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and OURS.fullmatch(node.value):
                found.add(node.value)
    return found


def of_the_page(*, others: bool) -> set[str]:
    """The variables in the first columns of the page's tables."""
    text = PAGE.read_text(encoding="utf-8")
    parts = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    rows = [line for part in parts if part.startswith(OTHERS) == others for line in part.splitlines()]
    cells = [line.split("|")[1] for line in rows if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_every_variable_of_the_code_is_on_the_page():
    missing = of_the_code() - of_the_page(others=False) - of_the_page(others=True)
    assert not missing, f"docs/environment.md does not have {', '.join(sorted(missing))}"


def test_the_page_has_no_variable_that_the_code_does_not():
    assert len(of_the_code()) > 20
    gone = of_the_page(others=False) - of_the_code()
    assert not gone, f"no code has {', '.join(sorted(gone))}"


def test_a_variable_of_ours_is_nowhere_else_either():
    """In documents, the Makefile and what builds and tests: a name that was changed, or misspelt."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "Makefile", ROOT / ".ci" / "run"]
    known = of_the_page(others=False)
    for path in files:
        unknown = set(OURS.findall(path.read_text(encoding="utf-8"))) - known
        assert not unknown, f"{path.relative_to(ROOT)} has {', '.join(sorted(unknown))}"
