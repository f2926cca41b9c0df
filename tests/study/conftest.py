"""The study's modules, for every file of tests here."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.helpers import ROOT


SCRIPTS = ROOT / "training_scripts"
FOLDER = SCRIPTS / "study"


class Modules(dict[str, ModuleType]):
    """Modules of the study by name, imported when first asked for."""

    def __missing__(self, name: str) -> ModuleType:
        self[name] = importlib.import_module(name)
        return self[name]


@pytest.fixture(scope="module")
def study() -> Iterator[Modules]:
    """`study["recipe"]` is training_scripts/study/recipe.py; they import each other and the demo as a script's do."""
    paths = [str(FOLDER), str(SCRIPTS / "demo"), str(SCRIPTS)]
    kept = os.environ.copy()  # study.py sets variables for the processes that it starts
    sys.path[:0] = paths
    try:
        yield Modules()
    finally:
        for path in paths:
            sys.path.remove(path)
        os.environ.clear()
        os.environ.update(kept)


@pytest.fixture(scope="module")
def cpu(study):
    """The recipe that runs on two cores."""
    return study["recipe"].read_recipe(FOLDER / "recipes" / "cpu.yaml")


@pytest.fixture(scope="module")
def sc24(study):
    """The recipe of the publication."""
    return study["recipe"].read_recipe(FOLDER / "recipes" / "sc24.yaml")
