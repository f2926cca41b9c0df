"""conda/recipe.yaml says what setup.cfg says. No test builds it: that takes packages of conda-forge."""

from __future__ import annotations

import configparser
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement

import hf_axonn
from tests.helpers import ROOT


EXTRAS = ("data", "peft", "trl", "eval", "completion")  # of users; the others are for the demo and for developers
NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}  # on conda-forge


@pytest.fixture(scope="module")
def recipe():
    """With the values of its context, as rattler-build puts them in."""
    text = (ROOT / "conda" / "recipe.yaml").read_text(encoding="ascii")
    for name, value in yaml.safe_load(text)["context"].items():
        text = text.replace("${{ " + name + " }}", value)
    return yaml.safe_load(text)


@pytest.fixture(scope="module")
def configuration():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def ranges(lines) -> dict[str, set[str]]:
    """Name to bounds, of requirements as pip or as conda writes them."""
    found = {}
    for line in lines:
        requirement = Requirement(line)
        assert requirement.name not in found
        found[requirement.name] = {str(bound) for bound in requirement.specifier}
    return found


def of_pip(text: str) -> dict[str, set[str]]:
    return {NAMES.get(name, name): bounds for name, bounds in ranges(text.strip().splitlines()).items()}


def test_what_it_requires_is_what_pip_installs(recipe, configuration):
    wanted = of_pip(configuration["options"]["install_requires"])
    python = {configuration["options"]["python_requires"]}
    assert ranges(recipe["requirements"]["run"]) == {"python": python, **wanted}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    host = ranges(line for line in recipe["requirements"]["host"] if not line.startswith("python "))
    assert host == {"pip": set(), **ranges(project["build-system"]["requires"])}
    lowest = recipe["context"]["python_min"]
    assert python == {f">={lowest}"} and f"python {lowest}.*" in recipe["requirements"]["host"]


def test_what_it_allows_beside_it_are_the_releases_of_the_extras(recipe, configuration):
    wanted = {}
    for extra in EXTRAS:
        wanted |= of_pip(configuration["options.extras_require"][extra])
    # What an extra narrows of the package's own requirements holds with the extra alone.
    own = of_pip(configuration["options"]["install_requires"])
    assert ranges(recipe["requirements"]["run_constraints"]) == {
        name: bounds for name, bounds in wanted.items() if name not in own
    }


def test_version_and_commands_are_the_same(recipe, configuration):
    assert recipe["package"]["version"] == hf_axonn.__version__
    commands = configuration["options.entry_points"]["console_scripts"].strip().splitlines()
    assert recipe["build"]["python"]["entry_points"] == commands
