"""The packages: all of them installed, public names documented and alone in `dir`, old paths loadable, arrows held.

Which package may import which, and what a file must say of itself, is checked by `make lint` (import-linter, ruff).
"""

import importlib
import pickle
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

import hf_axonn
import hf_axonn_eval
from tests.helpers import ROOT
from tests.helpers.launching import forked


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


def test_what_pickles_and_documents_of_the_first_version_name_is_found(tmp_path):
    """training_args.bin of a checkpoint is such a pickle. In a fork that has nothing of ours imported yet."""
    named = {
        "hf_axonn.trainer": "GoldfishConfig",
        "hf_axonn.trl": "GoldfishSFTConfig",
        "hf_axonn.grid": "Grid",
        "hf_axonn.config": "AxonnConfig",
        "hf_axonn.plugin": "AxonnPlugin",
    }
    # protocol 0: push the global, stop
    pickles = {name: f"c{module}\n{name}\n.".encode() for module, name in named.items()}
    for name, text in pickles.items():
        assert pickle.loads(text) is getattr(hf_axonn, name)
    code = tmp_path / "code.py"
    code.write_text(
        'from tests.helpers.launching import forget\nforget("hf_axonn", "hf_axonn_eval")\n'
        f"import pickle\nfor name, text in {pickles!r}.items(): assert pickle.loads(text).__name__ == name\n"
        # modules that documents of the first version name
        "from hf_axonn.gradients import syncing\n"
        "from hf_axonn.failures import failures_told\n"
        "from hf_axonn.perf.volumes import volumes\n"
        "from hf_axonn.perf import models\n"
        "from hf_axonn_eval.report import plot, terminal_table\n"
        "assert models.FAMILIES\n"
    )
    ended = forked(tmp_path, None, code)
    assert ended.code == 0, ended.output


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
    cost = scripts / "study/recipe/cost.py"
    cost.write_text(cost.read_text() + "\nimport hf_axonn_scripts.study.recipe.reader\n")
    said = lint_imports(tmp_path)
    assert "hf_axonn.topology -> hf_axonn.engine" in said.replace("is not allowed to import", "->"), said
    assert "no circle, inside of a package either BROKEN" in said, said
    assert "hf_axonn.planner.search -> torch" in said.replace("is not allowed to import", "->"), said


@pytest.mark.parametrize("folder", ["hf_axonn", "eval", "training_scripts", "tests", "."])
def test_text_is_ascii_and_names_no_machine(folder):
    for path in TRACKED:
        if path.relative_to(ROOT).parts[0] == folder or (folder == "." and path.parent == ROOT):
            text = path.read_text(encoding="ascii")
            for place in ("work", "root", "home/runner"):
                assert f"/{place}/" not in text, path
