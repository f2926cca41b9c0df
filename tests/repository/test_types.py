"""What a type checker says of a user's script, and that the numbers of type errors can only fall."""

import importlib
import re

import pytest

import hf_axonn
import hf_axonn_eval
from tests.helpers.import_orders import exports
from tests.tools.type_errors import PACKAGES, compare, mypy, package_of


CORRECT = """\
import hf_axonn
from hf_axonn import GoldfishConfig, GoldfishTrainer, Grid, from_pretrained, parallel_state
from hf_axonn_eval.metrics.exposure import exposure

grid: Grid = Grid(z=2, x=2)
ranks: int = grid.size
version: str = hf_axonn.__version__
load = from_pretrained
trainer: type[GoldfishTrainer] = hf_axonn.GoldfishTrainer
"""
# A line, and what mypy says of it.
WRONG = {
    "import hf_axonn": "",
    "from hf_axonn import Grid, from_pretraned": '"hf_axonn" has no attribute "from_pretraned"',
    "Grid(w=3)": 'Unexpected keyword argument "w" for "Grid"',
    'Grid(x="3")': 'incompatible type "str"; expected "int"',
    "name: str = Grid(x=2).size": 'expression has type "int", variable has type "str"',
    "hf_axonn.nonsense": 'Module has no attribute "nonsense"',
    "hf_axonn.AxonnConfig.nonsense": 'has no attribute "nonsense"',
    "import hf_axonn_eval.nonsense": 'Cannot find implementation or library stub for module named "hf_axonn_eval.n',
}
# What mypy can only know of a class whose base class is of Transformers.
WRONG_OF_TRAINER = {"hf_axonn.GoldfishTrainer.nonsense": 'has no attribute "nonsense"'}
# Reading torch and Transformers costs most of a minute. Without them their classes are Any.
OURS_ONLY = f"""\
[mypy]
mypy_path = {PACKAGES}
[mypy-accelerate.*,datasets.*,numpy.*,peft.*,torch.*,transformers.*,trl.*]
follow_imports = skip
"""


@pytest.mark.parametrize("package", [hf_axonn, hf_axonn_eval], ids=lambda package: package.__name__)
def test_python_finds_every_name_that_type_checkers_see_and_no_other(package):
    """Type checkers read the stub, and so does `lazy_names`, a line at a time; what mypy makes of it is slow."""
    names = exports(package)
    assert len(names) > 25 and {*dir(package)} - {"__version__"} == names.keys()
    for name, module in names.items():
        assert getattr(package, name) is getattr(importlib.import_module(module), name)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("libraries", [False, True])
def test_errors_in_a_users_script_are_seen_and_no_others(tmp_path, libraries):
    right, wrong, settings = tmp_path / "right.py", tmp_path / "wrong.py", tmp_path / "mypy.ini"
    lines = WRONG | WRONG_OF_TRAINER if libraries else WRONG
    right.write_text(CORRECT)
    wrong.write_text("\n".join(lines) + "\n")
    settings.write_text(OURS_ONLY)
    options = [] if libraries else ["--config-file", str(settings), "--cache-dir", str(tmp_path)]
    messages = mypy(str(right), str(wrong), *options)
    assert not [message for message in messages if "right.py" in message]
    errors = {}
    for message in messages:
        place = re.search(r"wrong\.py:(\d+): error: (.*)", message)
        if place:
            errors.setdefault(int(place[1]), []).append(place[2])
    expected = {number: text for number, text in enumerate(lines.values(), start=1) if text}
    assert errors.keys() == expected.keys()
    for number, text in expected.items():
        assert text in errors[number][0], errors[number]


def test_a_number_of_errors_that_rises_is_refused_and_one_that_falls_is_named():
    errors = {"hf_axonn/engine": ["a: error: b", "c: error: d"], "eval/report": ["e: error: f"]}
    assert compare({"hf_axonn/engine": 2, "eval/report": 1}, errors) == ([], [])
    worse, better = compare({"hf_axonn/engine": 1, "eval/report": 3, "eval/data": 1}, errors)
    assert worse == [
        "a: error: b",
        "c: error: d",
        "hf_axonn/engine has 2 type errors, 1 more than the 1 allowed",
    ]
    assert better == [
        "eval/data has 0 type errors, fewer than the 1 allowed",
        "eval/report has 1 type errors, fewer than the 3 allowed",
    ]
    worse, _ = compare({}, {"hf_axonn/topology": ["g: error: h"]})
    assert worse[-1] == "hf_axonn/topology has 1 type errors, 1 more than the 0 allowed"


def test_an_error_belongs_to_the_package_of_its_file():
    assert package_of("hf_axonn/plugin.py:3: error: x") == "hf_axonn"
    assert package_of("hf_axonn/planner/time/links.py:3: error: x") == "hf_axonn/planner"
    assert package_of("eval/data/jsonl.py:3: error: x") == "eval/data"
