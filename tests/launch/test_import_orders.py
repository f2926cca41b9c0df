"""Every public name can be the first import of a program, in plain Python and in a rank of a launch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

import hf_axonn
import hf_axonn_eval
from tests.helpers import ROOT
from tests.helpers.import_orders import RANK, exports


BOTH = (hf_axonn, hf_axonn_eval)
# One name of each module: the others are there with it.
NAMES = {package.__name__: [*{module: name for name, module in exports(package).items()}.values()] for package in BOTH}
CORE = ("AxonnPlugin", "GoldfishTrainer", "from_pretrained")
BEFORE = (
    "import accelerate",
    "from accelerate import Accelerator, ParallelismConfig",
    "import torch",
    "import transformers",
    "from transformers import TrainingArguments",
    "from transformers import Trainer",
    "import peft",
    "import trl",
)


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in RANK}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env={**kept, **environment}, cwd=ROOT, capture_output=True, text=True)


def check(cases: list[tuple[bool, str, str, str]]) -> None:
    ended = run_python("-m", "tests.helpers.import_orders", json.dumps(cases))
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]


def test_the_first_import_of_a_script_in_a_rank():
    ended = run_python("-c", "from hf_axonn import AxonnPlugin; assert AxonnPlugin().grid.z == 2", **RANK)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_names_of_a_script_first_in_a_rank():
    check([(True, "", "hf_axonn", name) for name in CORE])


@pytest.mark.slow
@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize("package", NAMES)
def test_every_name_first(package, launched):
    check([(launched, "", package, name) for name in NAMES[package]])


@pytest.mark.slow
@pytest.mark.parametrize("before", BEFORE)
def test_after_another_library_in_a_rank(before):
    check([(True, before, "hf_axonn", name) for name in CORE])


@pytest.mark.slow
def test_modules_that_import_accelerate_first_in_a_rank():
    """Nobody should need to begin with one of them, but pickles and tracebacks name them."""
    libraries = re.compile(r"^(from|import) (accelerate|transformers|peft|trl)\b", re.MULTILINE)
    found = [path for path in sorted((ROOT / "hf_axonn").rglob("*.py")) if libraries.search(path.read_text())]
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in found]
    assert len(parts) > 15
    check([(True, "", ".".join(each[:-1]), each[-1]) for each in parts])
