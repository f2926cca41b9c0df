"""The packages: all installed, public names documented and alone in `dir`, pickled classes in place, arrows held.

Which package may import which, and what a file must say of itself, is checked by `make lint` (import-linter, ruff).
"""

import importlib
import pickle
import pickletools
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

import hf_axonn
import hf_axonn_eval
from tests.helpers import ROOT


TRACKED = [
    path
    for folder in ("hf_axonn", "eval", "training_scripts", "tests")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".yaml", ".css", ".html")
]
TRACKED += [ROOT / name for name in ("setup.cfg", "setup.py", "pyproject.toml", "Makefile", ".ci/run")]


def test_every_package_is_installed():
    """setup.cfg lists them one by one: `find:` would install the folder eval as eval."""
    configuration = ConfigParser()
    configuration.read(ROOT / "setup.cfg")
    listed = configuration["options"]["packages"].split()
    found = [".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "hf_axonn").rglob("__init__.py")]
    for name, folder in (("hf_axonn_eval", ROOT / "eval"), ("hf_axonn_scripts", ROOT / "training_scripts")):
        for path in folder.rglob("__init__.py"):
            found.append(".".join((name, *path.parent.relative_to(folder).parts)))
    assert listed == sorted(found)


@pytest.mark.parametrize("package", [hf_axonn, hf_axonn_eval], ids=lambda package: package.__name__)
def test_public_names_resolve_and_are_documented(package):
    assert dir(package) == sorted(package.__all__)
    for name in set(package.__all__) - {"__version__", "PROTOCOLS"}:
        value = getattr(package, name)
        assert value.__module__.startswith(package.__name__ + "."), name
        doc = value.__doc__ or ""
        # A dataclass without a docstring is given its signature as one.
        assert len(doc.strip()) > 30 and not doc.startswith(f"{name}("), name


def test_a_name_that_is_not_there_is_refused():
    with pytest.raises(AttributeError, match="no attribute 'paralelize'"):
        _ = hf_axonn.paralelize
    with pytest.raises(ImportError, match="paralelize"):
        importlib.import_module("hf_axonn.paralelize")


def run_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_no_library():
    run_python(
        "import sys; import hf_axonn, hf_axonn.config, hf_axonn.launch.command; assert 'torch' not in sys.modules"
    )


def test_classes_that_training_args_bin_names_stay_where_they_are():
    """A checkpoint's training_args.bin is a pickle of the Trainer's arguments: it names classes by their modules."""
    plugin = hf_axonn.AxonnPlugin(grid=hf_axonn.Grid())
    named = set()
    for kind in (hf_axonn.GoldfishConfig, hf_axonn.GoldfishSFTConfig):
        text = pickle.dumps(kind(use_cpu=True, report_to=[], parallelism_config=plugin), protocol=2)  # torch.save's
        names = [argument for code, argument, _ in pickletools.genops(text) if code.name == "GLOBAL"]
        named |= {tuple(name.split()) for name in names if name.startswith("hf_axonn")}
        assert pickle.loads(text).parallelism_config.config == plugin.config
    assert named == {
        ("hf_axonn.config", "AxonnConfig"),
        ("hf_axonn.config", "Overlap"),
        ("hf_axonn.goldfish.config", "GoldfishConfig"),
        ("hf_axonn.goldfish.sft", "GoldfishSFTConfig"),
        ("hf_axonn.plugin", "AxonnPlugin"),
        ("hf_axonn.topology.grid", "Grid"),
    }


def lint_imports(folder: Path) -> str:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, env={"PYTHONPATH": "."})
    return done.stdout + done.stderr


def test_an_import_upward_is_refused(tmp_path):
    """That the contracts of setup.cfg hold is seen by `make lint`; here, that they can break."""
    shutil.copytree(ROOT / "hf_axonn", tmp_path / "hf_axonn", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "eval", tmp_path / "hf_axonn_eval", ignore=shutil.ignore_patterns("__pycache__"))
    scripts = tmp_path / "hf_axonn_scripts"
    shutil.copytree(ROOT / "training_scripts", scripts, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    grid, search = tmp_path / "hf_axonn/topology/grid.py", tmp_path / "hf_axonn/planner/search.py"
    grid.write_text(grid.read_text() + "\nimport hf_axonn.engine.state\n")
    search.write_text(search.read_text() + "\nimport torch\n")
    root = tmp_path / "hf_axonn/compat/new.py"
    root.write_text("from hf_axonn import Grid\n")
    cost = scripts / "study/recipe/cost.py"
    cost.write_text(cost.read_text() + "\nimport hf_axonn_scripts.study.recipe.reader\n")
    said = lint_imports(tmp_path)
    assert "hf_axonn.topology -> hf_axonn.engine" in said.replace("is not allowed to import", "->"), said
    assert "no circle, inside of a package either BROKEN" in said, said
    assert "whose names are for users BROKEN" in said, said
    assert "hf_axonn.planner.search -> torch" in said.replace("is not allowed to import", "->"), said


@pytest.mark.parametrize("folder", ["hf_axonn", "eval", "training_scripts", "tests", "."])
def test_text_is_ascii_and_names_no_machine(folder):
    for path in TRACKED:
        if path.relative_to(ROOT).parts[0] == folder or (folder == "." and path.parent == ROOT):
            text = path.read_text(encoding="ascii")
            for place in ("work", "root", "home/runner"):
                assert f"/{place}/" not in text, path
