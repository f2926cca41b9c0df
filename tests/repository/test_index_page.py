"""The page of an index is README.md, with links that lead somewhere from there."""

from __future__ import annotations

import importlib.util
import re

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
