"""README.md: what its table says of plans, and its links where it is the page of an index."""

from __future__ import annotations

import importlib.util
import re

import pytest

from hf_axonn.cli.init import plan_grid
from hf_axonn.profiling.read_shape import read_shape
from hf_axonn.topology.grid import Grid
from tests.helpers import ROOT


LINK = re.compile(r"\]\(([^)\s]+)\)")
ADDRESS = "https://example.org/hf_axonn"


def long_description(*arguments):
    spec = importlib.util.spec_from_file_location("setup_of_hf_axonn", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.long_description(*arguments)


def test_relative_links_lead_to_the_files_of_the_version():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    relative = [link for link in LINK.findall(readme) if not link.startswith("https://")]
    page = long_description(readme, ADDRESS + "/", "1.2.3")
    links = LINK.findall(page)
    assert len(relative) > 10 and len(links) == len(LINK.findall(readme))
    assert all(link.startswith("https://") for link in links)
    here = {re.sub(f"^{ADDRESS}/(blob|raw)/v1.2.3/", "", link) for link in links if link.startswith(ADDRESS)}
    assert here == set(relative)
    assert re.findall(r"!\[[^\]]*\]\(([^)]*)\)", page) == [f"{ADDRESS}/raw/v1.2.3/docs/pictures/grid.svg"]


def test_without_an_address_a_link_is_its_text():
    readme = "[docs](docs/usage.md), [part](#part), [paper](https://arxiv.org/abs/1), `a[0](b)` ![x](picture.png)"
    page = long_description(readme, None, "1.2.3")
    assert page.startswith("docs, [part](#part), [paper](https://arxiv.org/abs/1),")
    assert "(docs/usage.md)" not in page and page.endswith("`a0` ")


@pytest.mark.parametrize(
    ("model", "machine", "gpus", "sequences", "seq", "grid"),
    [
        ("gpt-20b", "dgx-h100", 64, 512, 2048, Grid(data=2, z=32)),
        ("gpt-80b", "dgx-h100@400", 256, 512, 2048, Grid(z=64, x=4)),
        ("gpt-80b", "dgx-h100", 512, 128, 32768, Grid(data=8, z=32, x=2, context=8)),
        ("gpt-320b", "perlmutter", 4096, 8192, 2048, Grid(data=2, z=512, x=4)),
    ],
)
def test_the_plans_of_the_table_when_to_use_this(model, machine, gpus, sequences, seq, grid):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = plan_grid(read_shape(model), machine, sequences, seq, gpus, "bf16")
    assert found.best.grid == grid
    sizes = ", ".join(f"{axis}={size}" for axis, size in grid.as_dict().items() if size > 1)
    (row,) = [line for line in readme.splitlines() if f"the plan is {sizes}" in line]
    assert f"{seq:,} tokens" in row and f"{gpus:,}" in row and model.removeprefix("gpt-").upper() in row
    without = [each for each in found.ranked if each.grid.x == each.grid.y == 1]
    longer = without[0].total / found.best.total
    if grid == Grid(z=64, x=4):
        assert round(longer, 2) == 1.26
    if grid == Grid(data=2, z=512, x=4):
        assert round(longer, 1) == 2.2 and all(each.grid.context > 1 for each in without)
