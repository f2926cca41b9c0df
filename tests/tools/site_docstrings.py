"""Docstrings as this repository writes them, turned into reStructuredText for the reference of the site.

Text is what Markdown takes: `code` in single backticks, lists with "- ", code indented by four. It ends with sections
(SECTIONS), each of which becomes a field. Items of Args and Raises are "name: text", one below the other:

    Args:
        grid: sizes of the axes.
    Collectives: those of `parallelize`.

A word in backticks that is a public name becomes a link to it.
"""

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator


SECTIONS = {"Args": "Parameters", "Returns": "Returns", "Yields": "Yields", "Raises": "Raises"}
SECTIONS |= {"Attributes": "Attributes", "Collectives": "Collectives", "Source": "Source"}
ITEMS = ("Args", "Raises", "Attributes")  # of these sections the body is named items
HEADING = re.compile(rf"({'|'.join(SECTIONS)}):(?: (.*))?$")
ITEM = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*): ")
BULLET = re.compile(r"( *)- ")
CODE = re.compile(r"(\w?)`([^`]+)`(\w?)")


def to_rst(docstring: str, links: dict[str, str]) -> list[str]:
    """A docstring, cleaned as `inspect.cleandoc` does, as lines of reStructuredText.

    Args:
        docstring: the text.
        links: public name -> its full name.
    """
    rst: list[str] = []
    for heading, lines in sections(docstring):
        if heading is None:
            rst += ["", *prose(lines, links)]
            continue
        items = named_items(lines) if heading in ITEMS else None
        if items is None:
            body = prose(lines, links)
        else:
            body = []
            for name, text in items:
                shown = ", ".join(f"**{escaped(part)}**" for part in name.split(", "))
                first, *others = prose([*text], links)
                body += [f"- {shown}: {first}", *(f"  {line}".rstrip() for line in others)]
        rst += ["", f":{SECTIONS[heading]}:", *(f"    {line}".rstrip() for line in body)]
    return [*rst, ""]


def sections(docstring: str) -> Iterator[tuple[str | None, list[str]]]:
    """(heading, lines of its body) one after the other; the heading is None for text.

    Text beside a heading goes on to the next empty line, text below it as long as it is indented.
    """
    heading: str | None = None
    beside = False
    body: list[str] = []
    for line in docstring.splitlines():
        found = HEADING.match(line)
        over = heading is not None and (not line if beside else line and not line.startswith(" "))
        if found or over:
            yield heading, _body(body)
            heading, beside = (found[1], bool(found[2])) if found else (None, False)
            body = [found[2]] if beside else [] if found else [line]
        else:
            body.append(line.strip() if beside else line)
    yield heading, _body(body)


def _body(lines: list[str]) -> list[str]:
    return textwrap.dedent("\n".join(lines)).strip("\n").splitlines()


def named_items(lines: list[str]) -> list[tuple[str, list[str]]] | None:
    """(name, lines of text) of each "name: text"; None where the first line is not one."""
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        match = ITEM.match(line)
        if match:
            found.append((match[1], [line[match.end() :]]))
        elif not found:
            return None
        else:
            found[-1][1].append(line)
    return [(name, [text[0], *textwrap.dedent("\n".join(text[1:])).splitlines()]) for name, text in found]


def prose(lines: list[str], links: dict[str, str]) -> list[str]:
    """Paragraphs, lists and indented code."""
    rst: list[str] = []
    paragraph: list[str] = []
    listed: str | None = None  # the indentation of the list item that this is in

    def flush() -> None:
        if paragraph:
            rst.extend(inline("\n".join(paragraph), links).splitlines())
            paragraph.clear()

    lines = [*lines, ""]
    place = 0
    while place < len(lines):
        line = lines[place]
        if line.startswith("    ") and not paragraph and listed is None:
            code = []
            while place < len(lines) and (not lines[place] or lines[place].startswith("    ")):
                code.append(lines[place])
                place += 1
            text = textwrap.dedent("\n".join(code)).strip("\n")
            rst += ["", f".. code-block:: {language(text)}", "", *textwrap.indent(text, "    ").splitlines(), ""]
            continue
        bullet = BULLET.match(line)
        if bullet or (line and not line.startswith(" ") and listed is not None):
            flush()
            indent = bullet[1] if bullet else None
            if rst and rst[-1] and indent != listed:
                rst.append("")
            listed = indent
        if line:
            paragraph.append(line)
        else:
            flush()
            rst.append("")
        place += 1
    while rst and not rst[-1]:
        rst.pop()
    return rst


def language(text: str) -> str:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return "text"
    return "python" if any(not isinstance(node, ast.Expr) for node in tree.body) else "text"


def inline(text: str, links: dict[str, str]) -> str:
    """Code in backticks, and everything else escaped."""
    parts, end = [], 0
    for match in CODE.finditer(text):
        parts.append(escaped(text[end : match.start()]) + match[1] + ("\\ " if match[1] else ""))
        name = match[2].removesuffix("()")
        if name in links:
            parts.append(f":py:obj:`{match[2]} <{links[name]}>`")
        else:
            parts.append(f"``{match[2]}``")
        parts.append(("\\ " if match[3] else "") + match[3])
        end = match.end()
    return "".join(parts) + escaped(text[end:])


def escaped(text: str) -> str:
    return re.sub(r"([\\*|])|(?<=\w)(_)(?!\w)", lambda match: f"\\{match[0]}", text)


def options_of(value: object) -> list[str]:
    """Lines for the own fields of a dataclass of training arguments, which say what they are in `help`."""
    if not (inspect.isclass(value) and dataclasses.is_dataclass(value)):
        return []
    own = inspect.get_annotations(value)
    said = [field for field in dataclasses.fields(value) if "help" in field.metadata and field.name in own]
    lines = [f"    {field.name}: {field.metadata['help']} By default {field.default!r}." for field in said]
    return ["Args:", *lines] if lines else []


def shown_signature(value: object) -> str | None:
    """The signature of training arguments: their own fields, and **others for what they inherit."""
    if not options_of(value):
        return None
    own = [field for field in dataclasses.fields(value) if field.name in inspect.get_annotations(value)]
    return "(" + ", ".join([*(f"{field.name}={field.default!r}" for field in own), "**others"]) + ")"
