"""How Sphinx builds the site: `make docs`. Pages are Markdown that GitHub shows, too; docs/index.md is the menu."""

import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hf_axonn import __version__  # noqa: E402


project = "hf_axonn"
author = "the authors of hf_axonn"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "tests.tools.site_pages"]

# Sources are those of the repository, so that links between the files in docs and beside it are the same on GitHub.
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "docs/*/*.md", "docs/*.ipynb", "tests/benchmarks/README.md"]
exclude_patterns = [".*", "build", "dist", "runs", "*.egg-info", "hf_axonn", "eval", "training_scripts"]
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
myst_heading_anchors = 6  # made as GitHub makes them
highlight_language = "none"  # of blocks that name none
smartquotes = False  # quotes and -- are those of code

html_theme = "furo"
html_title = f"hf_axonn {version}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_copyright = html_show_sphinx = False
html_copy_source = False
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
