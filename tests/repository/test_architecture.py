"""docs/architecture.md: the packages as the imports have them, and walks through files and functions that exist."""

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.tools import package_graph
from tests.tools.documents import DOCUMENTS, defined_in
from tests.tools.package_graph import imports, mermaid, reachable, reduced, written


TEXT = package_graph.DOCUMENT.read_text(encoding="utf-8")
# `path/of/file.py::name` or `path/of/file.py::Class.name`
PLACE = re.compile(r"`([\w./]+/[\w.]+\.py)::([\w.]+)`")
WALKS = ("A batch", "A checkpoint", "A launch file", "A sample")


def places(text: str) -> list[tuple[str, str]]:
    return PLACE.findall(text)


def test_the_picture_and_the_table_are_those_of_the_imports():
    assert TEXT == written(TEXT), "the packages have changed: run  make picture  and look at what it says"


def test_a_place_for_what_is_made_is_asked_for():
    with pytest.raises(ValueError, match="no lines <!-- made by `make picture`: picture"):
        written("# The architecture\n")


def test_what_the_picture_leaves_out_can_be_reached():
    graph = imports()
    few = reduced(graph)
    assert all(few[name] <= graph[name] for name in graph)
    assert all(reachable(few, name) == reachable(graph, name) for name in graph)
    without_one = {**few, "hf_axonn.layers": few["hf_axonn.layers"] - {"hf_axonn.engine"}}
    assert reachable(without_one, "hf_axonn.layers") != reachable(graph, "hf_axonn.layers")
    assert "hf_axonn__goldfish --> hf_axonn__trainer" in mermaid(graph)
    assert (
        "hf_axonn__goldfish --> hf_axonn__engine" not in mermaid(graph)
        and "hf_axonn.engine" in graph["hf_axonn.goldfish"]
    )


def imports_across(root: str) -> Iterator[tuple[Path, str, str]]:
    """Yield file, module and name of each import from another of the folders; of `import module` the name is empty."""
    for path in sorted(package_graph.FOLDERS[root].rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            for name in names:
                module, name = (node.module or "", name) if isinstance(node, ast.ImportFrom) else (name, "")
                if module.partition(".")[0] in {*package_graph.PUBLIC, "hf_axonn_scripts"} - {root}:
                    yield path, module, name


@pytest.mark.parametrize("root", ["hf_axonn_eval", "hf_axonn_scripts"])
def test_an_import_between_the_folders_takes_a_public_name(root):
    section = TEXT.split("\n### Public modules\n")[1].split("\nruff")[0]
    public = re.findall(r"`(hf_axonn[\w.*]*)`", section)
    found, wrong = 0, []
    for path, module, name in imports_across(root):
        found += 1
        exports = import_module(module.partition(".")[0]).__all__
        from_root = module in package_graph.PUBLIC and (not name or name in exports)
        from_module = name not in exports and any(fnmatchcase(module, pattern) for pattern in public)
        if name.startswith("_") or not (from_root or from_module):
            wrong.append(f"{path.relative_to(ROOT)}: {module}: {name}")
    assert found > 20 and not wrong


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_goes_through_code_that_exists(walk):
    section = TEXT.split(f"\n## {walk}\n")[1].split("\n## ")[0]
    assert len(places(section)) > 12
    assert not [f"{file}::{name}" for file, name in places(section) if name not in defined_in(ROOT / file)]


def test_places_in_all_documents_exist():
    wrong = []
    for document in DOCUMENTS:
        for file, name in places(document.read_text(encoding="utf-8")):
            if not (ROOT / file).is_file() or name not in defined_in(ROOT / file):
                wrong.append(f"{document.relative_to(ROOT)}: {file}::{name}")
    assert wrong == []


def test_every_package_has_its_row():
    rows = set(re.findall(r"^\| \[`([\w/.]+)`\]", TEXT, re.MULTILINE))
    for name, folder in package_graph.FOLDERS.items():
        below: set[Path] = {path.parent for path in folder.glob("*/__init__.py")}
        below |= {path for path in folder.glob("*.py") if not path.name.startswith("__")}
        below -= set(package_graph.FOLDERS.values())
        assert {path.relative_to(ROOT).as_posix() for path in below} <= rows, name
