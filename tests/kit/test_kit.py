"""hf_axonn/kit: which wheels a machine needs beside what it has, with pip and a folder of wheels as its index."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

from hf_axonn.cli import kit as command
from hf_axonn.cli.main import main
from hf_axonn.kit.machine import Machine, read_glibc, read_packages
from hf_axonn.kit.make import find_wheels
from hf_axonn.kit.pip_there import OLDEST_PIP, Package, find_unmet
from hf_axonn.kit.try_imports import try_imports
from tests.helpers import ROOT


PIP = importlib.metadata.version("pip")  # to import it would take setuptools its distutils
if Version(PIP) < Version(OLDEST_PIP):
    pytest.skip(f"a kit needs pip {OLDEST_PIP}", allow_module_level=True)
VERSIONS = "def check_versions():\n    {}\n"


def make_wheel(folder, name, version="1.0", requires=(), tag="py3-none-any", extras=(), files=None) -> Path:
    """Write a wheel with a module of its name, or with `files`."""
    files = dict(files or {f"{name}.py": f"version = {version!r}\n"})
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Provides-Extra: {extra}" for extra in extras] + [f"Requires-Dist: {text}" for text in requires]
    info = f"{name}-{version}.dist-info"
    files[f"{info}/METADATA"] = "\n".join(metadata) + "\n"
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n"
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def make_sources(folder: Path, **wheel) -> Path:
    """Write sources whose build copies a wheel that is among them, so that it needs no other package."""
    folder.mkdir()
    name = make_wheel(folder, **wheel).name
    (folder / "setup.cfg").touch()
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (folder / "backend.py").write_text(
        "import shutil\ndef build_wheel(directory, config_settings=None, metadata_directory=None):\n"
        f"    shutil.copy({name!r}, directory)\n    return {name!r}\n"
    )
    return folder


def make_archive(folder: Path, scratch: Path, **wheel) -> None:
    """Write a source archive, for a package without a wheel."""
    name = f"{wheel['name']}-{wheel.get('version', '1.0')}"
    sources = make_sources(scratch / name, **wheel)
    (sources / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: {wheel['name']}\nVersion: 1.0\n")
    with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as archive:
        archive.add(sources, name)


class Place:
    """An index of wheels, a project named hf_axonn, the list of a machine, and the command on them."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        self.folder, self.index, self.output = folder, folder / "index", folder / "build" / "kit"
        self.index.mkdir()
        self.monkeypatch = monkeypatch
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.delenv("PIP_FIND_LINKS", raising=False)

    def project(self, requires, extras=("data",), check="pass", **files) -> None:
        contents = {"hf_axonn/__init__.py": "", "hf_axonn/compat/__init__.py": ""}
        contents["hf_axonn/compat/versions.py"] = VERSIONS.format(check)
        contents |= {f"hf_axonn/{name}.py": text for name, text in files.items()}
        sources = make_sources(
            self.folder / "project", name="hf_axonn", version="0.2", requires=requires, extras=extras, files=contents
        )
        self.monkeypatch.setattr(command, "SOURCES", sources)
        self.monkeypatch.setattr(command, "PACKAGES", ("hf_axonn",))

    def wheel(self, name, version="1.0", *requires, **more) -> None:
        make_wheel(self.index, name, version, requires, **more)

    def kit(self, *have: str, options=(), tried=False) -> int:
        if not tried:  # which takes seconds
            self.monkeypatch.setattr(command, "find_interpreter", lambda minor: None)
        machine = self.folder / "machine.txt"
        machine.write_text("\n".join(have) + "\n")
        words = ["--have", str(machine), "--output", str(self.output), "--extras", "data"]
        index = ["--pip=--no-index", f"--pip=--find-links={self.index}"]
        return main(["kit", *words, "--architecture", "x86_64", *index, *options])

    @property
    def wheels(self) -> set[str]:
        return {wheel.name.rsplit("-", 3)[0] for wheel in find_wheels(self.output).values()}


@pytest.fixture
def place(tmp_path, monkeypatch) -> Place:
    return Place(tmp_path, monkeypatch)


def test_a_list_of_packages_is_read_by_canonical_names(tmp_path):
    path = tmp_path / "machine.txt"
    path.write_text("# a comment\nPyYAML==6.0.4\nruamel.yaml_x==1.0\n\ntorch==2.11.0+cu130\n")
    assert read_packages(path) == {"pyyaml": "6.0.4", "ruamel-yaml-x": "1.0", "torch": "2.11.0+cu130"}


@pytest.mark.parametrize("line", ["numpy 2.5.2", "numpy>=2", "numpy @ file:///numpy", "numpy==new"])
def test_a_line_that_pip_list_does_not_write_is_refused_by_its_number(tmp_path, line):
    path = tmp_path / "machine.txt"
    path.write_text(f"torch==2.11.0\n{line}\n")
    with pytest.raises(ValueError, match=r"line 2 is .* and not NAME==VERSION: .* --format=freeze"):
        read_packages(path)


def test_wheels_up_to_the_glibc_of_the_machine_run_there():
    assert [read_glibc(text) for text in ("2.39", "manylinux_2_28", "manylinux_2_17_x86_64")] == [
        (2, 39), (2, 28), (2, 17),
    ]  # fmt: skip
    for text in ("2.4", "3.0", "musl", "2"):
        with pytest.raises(ValueError, match="give it as 2.28"):
            read_glibc(text)
    tags = Machine({}, "3.12", (2, 18), "aarch64").platforms
    assert tags[:3] == ["manylinux_2_18_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64"]
    assert tags[-3:] == ["manylinux_2_5_aarch64", "manylinux1_aarch64", "linux_aarch64"]


def test_what_is_unmet_follows_extras_markers_and_versions_of_the_machine():
    found = {
        "project": Package(
            "project", "1", ("one>=2", "torch>=2.11", "two[fast]; extra == 'data'", "other; extra == 'more'")
        ),
        "two": Package(
            "two", "1", ("old; python_version < '3.12'", "new>=1; python_version >= '3.12'", "quick; extra == 'fast'")
        ),
    }
    machine = Machine({"torch": "2.11.0+cu130", "one": "1.9"}, "3.12.3")
    assert find_unmet("project[data]", found, machine) == ["new>=1", "one>=2", "quick"]
    assert find_unmet("project", found, machine) == ["one>=2"]


def test_a_kit_has_what_is_not_there_in_a_release_that_fits(place, capsys):
    place.project(
        ["torch>=2.11", "there>=1", "old>=2", "Pure_Sources", "compiled", "more; extra == 'data'", "no; extra == 'x'"]
    )
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    for name, version in (("there", "3.0"), ("old", "2.5"), ("more", "1.0"), ("torch", "2.12")):
        place.wheel(name, version)
    place.wheel("compiled", "1.0", tag=f"{python}-{python}-manylinux_2_28_x86_64")
    place.wheel("compiled", "1.1", tag="cp39-cp39-manylinux_2_28_x86_64")
    place.wheel("compiled", "1.2", tag=f"{python}-{python}-manylinux_2_29_x86_64")
    make_archive(place.index, place.folder, name="pure_sources")
    have = ("torch==2.11.0+cu130", "there==1.5", "old==1.9", "hf_axonn==0.1")
    assert place.kit(*have, tried=True) == 0
    assert place.wheels == {"hf_axonn-0.2", "old-2.5", "more-1.0", "compiled-1.0", "pure_sources-1.0"}
    printed = capsys.readouterr().out
    assert "in place of 1.9" in printed and "5 wheels" in printed and "7 modules can be imported" in printed
    assert [line.split()[0] for line in printed.splitlines() if "built here" in line] == ["hf-axonn", "pure-sources"]
    assert [path.name for path in place.output.parent.iterdir()] == ["kit"]


def test_torch_and_cuda_are_named_and_not_brought(place, capsys):
    place.project(["torch>=2.11", "nvidia-thing", "triton>=3"])
    for name, version in (("torch", "2.12"), ("nvidia_thing", "1.0"), ("triton", "3.6")):
        place.wheel(name, version)
    assert place.kit("torch==2.10.0", "triton==3.6.0") == 1
    assert place.wheels == {"hf_axonn-0.2"}
    assert "missing there: nvidia-thing, torch>=2.11. A kit brings no torch" in capsys.readouterr().out


@pytest.mark.slow
def test_a_second_kit_leaves_out_what_the_first_has(place, capsys):
    place.project(["torch", "one; extra == 'data'", "two; extra == 'more'", "one; extra == 'more'"], ("data", "more"))
    place.wheel("one", tag="py3-none-manylinux_2_28_x86_64")
    place.wheel("one", "1.1", tag="py3-none-manylinux_2_98_x86_64")
    place.wheel("two")
    place.output.mkdir(parents=True)
    make_wheel(place.output, "stale")
    assert place.kit("torch==2.11.0", options=("--glibc", "2.99")) == 0
    assert place.wheels == {"hf_axonn-0.2", "one-1.1"}
    assert "not tried: one-1.1-py3-none-manylinux_2_98_x86_64.whl is not for" in capsys.readouterr().out
    first, place.output = place.output, place.folder / "second"
    assert place.kit("torch==2.11.0", options=("--beside", str(first), "--extras", "more")) == 0
    assert place.wheels == {"two-1.0"}


def test_a_module_that_cannot_be_imported_makes_a_kit_fail(place, capsys):
    place.project(["torch"], ends="import sys; sys.exit(3)", lacks="import lightning_bolt", __main__="1 / 0")
    assert place.kit("torch==2.11.0", tried=True) == 1
    printed = capsys.readouterr().out
    assert "FAILED: hf_axonn.ends: SystemExit: 3" in printed
    assert "not there: lightning_bolt, for hf_axonn.lacks" in printed


@pytest.mark.parametrize(
    ("requires", "have", "options", "message"),
    [
        ([], ["numpy==2.5.2"], (), r"which torch is there\? .*machine.txt has none: .*--torch 2.11"),
        ([], ["torch==2.11.0"], ("--torch", "2.12"), "has torch 2.11.0: leave --torch 2.12 out"),
        ([], ["torch==2.11.0"], ("--python", "three"), "--python three is no version"),
        ([], ["torch==2.11.0"], ("--interpreter", "/bin/false"), "/bin/false is no Python that runs"),
        ([], ["torch==2.11.0"], ("--beside", "/usr"), "/usr is no kit: it has no install.sh"),
        (["absent"], ["torch==2.11.0"], (), "no wheel of absent for that machine, and none can be built:\nERROR"),
        pytest.param(
            ["odd>1", "even"],
            ["torch==2.11.0"],
            (),
            "pip finds no kit for that machine:\nERROR: .*conflicting",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["bound"],
            ["torch==2.11.0"],
            (),
            "bound has no wheel for that machine and is not pure Python",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_bad_input_ends_with_a_remedy_and_leaves_no_kit(place, capsys, requires, have, options, message):
    place.wheel("odd", "2.0")
    place.wheel("odd", "1.0")
    place.wheel("even", "1.0", "odd<=1")
    make_archive(place.index, place.folder, name="bound", tag="py3-none-linux_x86_64")
    place.project(requires)
    assert place.kit(*have, options=options) == 2
    error = capsys.readouterr().err
    assert error.startswith("hf-axonn kit: ")
    assert re.search(message, error, re.DOTALL), error
    assert not place.output.exists()


def test_a_folder_that_is_no_kit_is_left_alone(place, capsys):
    place.project(["torch"])
    place.output.mkdir(parents=True)
    (place.output / "thesis.tex").touch()
    assert place.kit("torch==2.11.0") == 2
    assert "holds thesis.tex, which is not of a kit: give another --output" in capsys.readouterr().err
    assert (place.output / "thesis.tex").exists()
    file = place.output / "thesis.tex"
    assert place.kit("torch==2.11.0", options=["--output", str(file)]) == 2
    assert f"{file} is a file: give another --output" in capsys.readouterr().err


def install(kit: Path, site: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(["bash", kit / "install.sh", site], env=variables, capture_output=True, text=True)


def test_install_fills_a_folder_prints_its_path_and_compares_releases(place):
    place.project(["torch"], check="import os\n    if os.environ.get('OLD'):\n        raise ValueError('5.17 is old')")
    assert place.kit("torch==2.11.0") == 0
    site = place.folder / "a site"
    done = install(place.output, site, PIP_INDEX_URL="https://index.invalid", PYTHONPATH="/other")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"export PYTHONPATH={site}${{PYTHONPATH:+:$PYTHONPATH}}\n"
    assert (site / "hf_axonn" / "compat" / "versions.py").is_file()
    done = install(place.output, site, OLD="1")
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "5.17 is old" and not done.stdout


@pytest.mark.slow
def test_a_kit_is_tried_with_a_python_that_has_no_packages(place, capsys):
    """As a python3.12 beside the one of this package has none: the releases there are not those of the machine."""
    pip, bare = place.folder / "pip", place.folder / "bare"
    pip.mkdir()
    (pip / "pip").symlink_to(importlib.metadata.distribution("pip").locate_file("pip"))
    bare.write_text(f'#!/bin/sh\nPYTHONPATH={pip}:$PYTHONPATH exec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    place.project(["torch"], check="import packaging")
    assert place.kit("torch==2.11.0", options=["--interpreter", str(bare)]) == 0
    assert f"tried: it installs with {bare}, which has no torch, so nothing was imported" in capsys.readouterr().out
    done = install(place.output, place.folder / "site", PYTHON=str(bare))
    assert done.returncode == 0 and "no torch" in done.stderr and done.stdout.startswith("export PYTHONPATH=")


def test_install_refuses_another_python(place, capsys):
    place.project(["torch"])
    assert place.kit("torch==2.11.0", options=("--python", "3.99")) == 0
    assert "not tried: there is no python3.99 here; --interpreter names one" in capsys.readouterr().out
    done = install(place.output, place.folder / "site")
    assert done.returncode == 1 and not (place.folder / "site").exists()
    assert "this kit is for Python 3.99, and" in done.stderr and "set PYTHON" in done.stderr


@pytest.mark.slow
def test_the_kit_of_the_rehearsed_machine_is_small(tmp_path, capsys):
    """Needs an index."""
    have, output = ROOT / "tests" / "benchmarks" / "gpu" / "machine.txt", tmp_path / "kit"
    words = ["--have", str(have), "--python", "3.12", "--extras", "test-gpu", "--output", str(output)]
    assert main(["kit", *words]) == 0, capsys.readouterr().err
    wheels = find_wheels(output)
    assert {"hf-axonn", "transformers", "datasets", "trl", "rapidfuzz", "tensorboardx", "rouge-score"} <= set(wheels)
    assert not {"torch", "numpy", "tokenizers", "pyarrow"} & set(wheels)
    assert sum(wheel.stat().st_size for wheel in wheels.values()) < 35 * 2**20


def test_imports_are_counted_and_failures_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in (
        ("kit_a/__init__", ""),
        ("kit_a/inner", "1 / 0"),
        ("kit_b/__init__", ""),
        ("kit_b/no", "1 / 0"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    found = try_imports(str(tmp_path), ["kit_a"])
    assert found == {"imported": 2, "lacking": {}, "failed": {"kit_a.inner": "ZeroDivisionError: division by zero"}}
    missing = {"a.one": "torch", "a.two": "torch", "b": "numpy"}
    assert command.describe_trial({"imported": 2, "lacking": missing, "failed": {}}, "python3")[1:] == [
        "  not there: torch, for a.one and 1 more",
        "  not there: numpy, for b",
    ]
