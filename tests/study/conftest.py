"""Recipes of the study, for every file of tests here."""

from __future__ import annotations

import pytest

from hf_axonn_scripts.study.recipe.reader import read_recipe
from tests.helpers import ROOT


FOLDER = ROOT / "training_scripts" / "study"


@pytest.fixture(scope="module")
def cpu():
    """The recipe that runs on two cores."""
    return read_recipe(FOLDER / "recipes" / "cpu.yaml")


@pytest.fixture(scope="module")
def sc24():
    """The recipe of the publication."""
    return read_recipe(FOLDER / "recipes" / "sc24.yaml")
