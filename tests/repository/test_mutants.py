"""`make mutants` knows where the tests of every module are."""

from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.tools.mutants import EQUALITY, where_tested


@pytest.mark.parametrize("package", ["hf_axonn", "eval"])
def test_every_module_has_tests_to_run(package):
    for path in (ROOT / package).rglob("*.py"):
        module = str(path.relative_to(ROOT))
        places = where_tested(module)
        assert places and all((ROOT / place).exists() for place in places), module
        assert places[0] not in ("tests", "tests/eval"), f"{module} has no tests of its own"


def test_the_nearest_tests_run_first():
    assert where_tested("hf_axonn/topology/grid.py") == ["tests/topology/test_grid.py", "tests/topology"]
    assert where_tested("hf_axonn/engine/matmul3d.py") == ["tests/engine/test_matmul3d.py", "tests/engine", EQUALITY]
    assert where_tested("eval/report/maps.py")[0] == str(Path("tests/eval/report/test_maps.py"))
