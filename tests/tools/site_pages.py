"""What Sphinx needs to make a site of this repository's Markdown. An extension of docs/conf.py.

- The menu is docs/index.md: the first link of each list item, under the heading that it stands under.
- A block ```{api} PACKAGE with public names, one a line, becomes their documentation, made of the docstrings; a
  block ```{help} with commands becomes what they say with --help; a block ```{messages} with modules becomes a table
  of their errors and warnings.
- Links to files that are no pages, and names of files in backticks, lead to a page with the file; public names in
  backticks to the reference.
- A picture of ours stands in the page as SVG, so that it has the colours of the page.
"""

import ast
import contextlib
import functools
import html
import inspect
import io
import json
import os
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.transforms import SphinxTransform

from hf_axonn.cli.main import main as hf_axonn_main
from hf_axonn_eval.__main__ import main as eval_main
from tests.helpers import ROOT
from tests.tools.messages_page import MESSAGES, messages_table
from tests.tools.site_docstrings import inline, options_of, shown_signature, to_rst


MENU = "docs/index"
FILES = "files/"  # where pages with files are
PICTURES = ROOT / "docs" / "pictures"
API = re.compile(r"^```\{api\} (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HELP = re.compile(r"^```\{help\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"(?P<path>(?:hf_axonn|eval|training_scripts|tests)(?:/[\w.-]+)+)(?:::(?P<name>[\w.]+))?")
PROGRAMS = {"hf-axonn": hf_axonn_main, "hf-axonn-eval": eval_main}


def read_source(app: Sphinx, docname: str, source: list[str]) -> None:
    """A page as MyST takes it."""
    if str(app.env.doc2path(docname)).endswith(".ipynb"):
        source[0] = notebook(json.loads(source[0]))
    source[0] = API.sub(lambda block: api(block[1], block[2].splitlines()), source[0])
    source[0] = HELP.sub(lambda block: commands(block[1].splitlines()), source[0])
    source[0] = MESSAGES.sub(lambda block: messages_table(block[1].splitlines()), source[0])
    if docname == MENU:
        source[0] += menu(source[0])


def menu(text: str) -> str:
    """A hidden toctree for each section with a list of pages."""
    trees = []
    for section in re.split(r"^## ", FENCED.sub("", text), flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        pages = []
        for name, target in re.findall(r"^- \[([^\]]+)\]\(([^)#]+)\)", body, re.MULTILINE):
            pages.append(f"{name} </{os.path.normpath(Path(MENU).parent / target).rsplit('.', 1)[0]}>")
        if pages:
            trees.append("\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```"]))
    return "\n".join(trees) + "\n"


def notebook(content: dict[str, Any]) -> str:
    """A notebook as Markdown, with what its cells printed."""
    parts = []
    for cell in content["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            parts.append("```text\n" + "".join(output["text"]).rstrip("\n") + "\n```")
    return "\n\n".join(parts) + "\n"


def api(package: str, entries: list[str]) -> str:
    """Directives of autodoc for the names of a package or module. An entry "name: text" is of data, which has no
    docstring of its own."""
    lines = ["```{eval-rst}"]
    for entry in entries:
        name, _, text = entry.partition(": ")
        value = getattr(import_module(package), name)
        if text:
            lines += [f".. py:data:: {package}.{name}", "", f"    {inline(text, {})}", ""]
            continue
        kind = "class" if inspect.isclass(value) else "function"
        kind = "exception" if kind == "class" and issubclass(value, Exception) else kind
        lines += [f".. auto{kind}:: {package}.{name}", *(["    :members:"] if kind == "class" else []), ""]
    return "\n".join([*lines, "```"])


def commands(lines: list[str]) -> str:
    """What the commands say with --help."""
    return "\n\n".join(f"## {line}\n\n```text\n{help_of(line)}```" for line in lines)


def help_of(command: str) -> str:
    """What a command prints with --help."""
    program, *words = command.split()
    said = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS="100"), contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        PROGRAMS[program]([*words, "--help"])
    return said.getvalue()


@functools.cache
def public_names() -> dict[str, str]:
    """name -> full name, of everything in the reference."""
    found = {}
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        for package, entries in API.findall(page.read_text(encoding="utf-8")):
            names = [entry.partition(":")[0] for entry in entries.splitlines()]
            found |= {name: f"{package}.{name}" for name in names}
    return found


def docstring(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    text = inspect.cleandoc("\n".join(lines))
    own = options_of(value)
    if own:
        before, raises, after = text.partition("\nRaises:")
        text = "\n".join([before, *own, raises.strip() + after])
    links = {short: full for short, full in public_names().items() if full != name}
    lines[:] = to_rst(text, links)


def signature(app: Sphinx, what: str, name: str, value: object, *others: object) -> tuple[str, None] | None:
    shown = shown_signature(value)
    return (shown, None) if shown else None


class Files(SphinxTransform):
    """Links to files; see the head of this file."""

    default_priority = 5

    def apply(self, **kwargs: Any) -> None:
        pages = self.env.found_docs
        here = Path(self.env.doc2path(self.env.docname)).parent
        for node in [*self.document.findall(_links_a_file)]:
            path = os.path.relpath(here / node["reftarget"].partition("#")[0], ROOT)
            if node.get("refdomain") == "doc":
                path = os.path.relpath(self.env.doc2path(node["reftarget"]), ROOT)
            if path.rsplit(".", 1)[0] in pages or not (ROOT / path).exists():
                continue
            node.replace_self(self.link(path, None, node.astext()))
        for node in [*self.document.findall(nodes.literal)]:
            found = PATH.fullmatch(node.astext())
            if found and not isinstance(node.parent, (nodes.reference, addnodes.pending_xref)):
                if (ROOT / found["path"]).is_file() and found["path"].rsplit(".", 1)[0] not in pages:
                    node.replace_self(self.link(found["path"], found["name"], node.astext()))

    def link(self, path: str, name: str | None, text: str) -> nodes.reference:
        path = path.rstrip("/")
        self.env.axonn_files.setdefault(self.env.docname, set()).add(path)  # type: ignore[attr-defined]
        uri = self.app.builder.get_relative_uri(self.env.docname, FILES + path)
        uri += f"#line-{line_of(ROOT / path, name)}" if name else ""
        shown = nodes.literal(text, text) if PATH.fullmatch(text) else nodes.inline(text, text)
        return nodes.reference("", "", shown, refuri=uri, internal=True)


def _links_a_file(node: nodes.Node) -> bool:
    return isinstance(node, (addnodes.download_reference, addnodes.pending_xref)) and node.get("reftype") == "myst"


class Names(SphinxTransform):
    """Public names in backticks; a name of one small word only where it is written in full: `extract` is a command."""

    default_priority = 7

    def apply(self, **kwargs: Any) -> None:
        names = public_names()
        names = {name: full for name, full in names.items() if not name.islower() or "_" in name}
        names |= {full: full for full in public_names().values()}
        for node in [*self.document.findall(nodes.literal)]:
            full = names.get(node.astext().partition("(")[0])
            if full and isinstance(node.parent, (nodes.paragraph, nodes.entry, nodes.list_item)):
                target = addnodes.pending_xref("", reftype="obj", refdomain="py", reftarget=full, refexplicit=True)
                target["refdoc"] = self.env.docname
                node.replace_self(target)
                target += node


class Pictures(SphinxTransform):
    """Pictures stand in the page itself. That of the packages takes the place of the one in Mermaid's language, too,
    which a browser draws only with a program from elsewhere."""

    default_priority = 6

    def apply(self, **kwargs: Any) -> None:
        for image in [*self.document.findall(nodes.image)]:
            path = (Path(self.env.doc2path(self.env.docname)).parent / image["uri"]).resolve()
            if path.parent == PICTURES:
                image.replace_self(self.inline(path))
            elif (
                path.suffix == ".svg"
            ):  # has its own colours, and stays a file; on a telephone it scrolls as the others
                image.replace_self(nodes.container("", image.deepcopy(), classes=["picture"]))
        for block in [*self.document.findall(nodes.literal_block)]:
            if block.get("language") == "mermaid":
                block.replace_self(self.inline(PICTURES / "packages.svg"))

    def inline(self, path: Path) -> nodes.raw:
        self.env.note_dependency(str(path))
        return nodes.raw("", f'<div class="picture">{path.read_text(encoding="utf-8")}</div>', format="html")


class Contents(SphinxTransform):
    """The list of a page's own headings, which GitHub needs and a theme with a column of them does not, goes."""

    default_priority = 4

    def apply(self, **kwargs: Any) -> None:
        for found in [*self.document.findall(nodes.bullet_list)]:
            if all(_only_an_anchor(item) for item in found.children):
                found.parent.remove(found)


def _only_an_anchor(item: nodes.Node) -> bool:
    links = [*item.findall(_is_link)]
    if len(links) != 1 or links[0].astext() != item.astext():
        return False
    return str(links[0].get("refuri") or links[0].get("reftarget") or f"#{links[0].get('refid')}").startswith("#")


def _is_link(node: nodes.Node) -> bool:
    return isinstance(node, (nodes.reference, addnodes.pending_xref))


@functools.cache
def line_of(path: Path, name: str) -> int:
    """Where a function, class or method of a file begins; 1 where it has none of this name."""
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    line = 1
    for part in name.split("."):
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == part:
                line, body = node.lineno, node.body
                break
    return line


def file_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for every file that a page links."""
    wanted = set().union(*app.env.axonn_files.values())  # type: ignore[attr-defined]
    wanted |= {str(below.relative_to(ROOT)) for path in wanted for below in listed(ROOT / path)}
    for path in sorted(wanted):
        where = ROOT / path
        if where.is_dir():
            items = (
                f'<li><a href="{app.builder.get_relative_uri(FILES + path, FILES + f"{path}/{below.name}")}">'
                f"<code>{html.escape(below.name)}</code></a></li>"
                for below in listed(where)
            )
            body = f"<ul>{''.join(items)}</ul>"
        else:
            body = highlighted(where)
        title = html.escape(path)
        yield FILES + path, {"title": title, "body": f"<h1><code>{title}</code></h1>{body}"}, "page.html"


def listed(folder: Path) -> list[Path]:
    """The files of a folder, if it is one."""
    return sorted(path for path in folder.glob("*") if path.is_file()) if folder.is_dir() else []


def highlighted(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    try:
        lexer = get_lexer_for_filename(path.name)
    except ClassNotFound:
        return f'<div class="highlight"><pre>{html.escape(text)}</pre></div>'
    formatted: str = highlight(text, lexer, HtmlFormatter(lineanchors="line", linenos="inline"))
    return formatted


LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc="(?:https?:)?//|<link\b[^>]*\bhref="(?:https?:)?//"""
)


def check(app: Sphinx, error: Exception | None) -> None:
    """Pages load nothing from elsewhere, and the address of the site itself leads to the first page."""
    if error or app.builder.name != "html":
        return
    out = Path(app.outdir)
    (out / "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={MENU}.html">\n', encoding="utf-8")
    for page in out.rglob("*.html"):
        found = LOADED.search(page.read_text(encoding="utf-8"))
        if found:
            raise ExtensionError(f"{page.relative_to(out)} loads something from elsewhere: {found[0]}")


def forget(app: Sphinx, env: Any, docname: str) -> None:
    env.axonn_files.pop(docname, None)


def begin(app: Sphinx) -> None:
    app.env.axonn_files = getattr(app.env, "axonn_files", {})  # type: ignore[attr-defined]


def merge(app: Sphinx, env: Any, docnames: object, other: Any) -> None:
    env.axonn_files |= other.axonn_files


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", begin)
    app.connect("env-purge-doc", forget)
    app.connect("env-merge-info", merge)
    app.connect("source-read", read_source)
    app.connect("autodoc-process-docstring", docstring)
    app.connect("autodoc-process-signature", signature)
    app.connect("html-collect-pages", file_pages)
    app.add_transform(Files)
    app.add_transform(Contents)
    app.add_transform(Names)
    app.add_transform(Pictures)
    app.connect("build-finished", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
