"""Plain text of the Wikipedia articles that gensim ships among its test data.

The text is English Wikipedia, dump of May 2016, under CC BY-SA 3.0 and the GFDL. It is read from the downloaded
wheel and never installed, committed or redistributed.
"""

import bz2
import html
import io
import re
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Iterator
from pathlib import Path


DUMP = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"

# What follows one of these headings is lists of links and sources, not prose.
BACK_MATTER = {
    "bibliography", "citations", "external links", "footnotes", "further reading", "gallery", "literature", "notes",
    "notes and references", "publications", "references", "see also", "sources",
}  # fmt: skip

# The innermost pair has no bracket of its kind inside, so that repeating the substitution peels nested ones.
TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
TABLE = re.compile(r"\{\|(?:(?!\{\||\|\}).)*\|\}", re.DOTALL)
LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
# A footnote or a formula: what is between the tags is not running text. Self-closing tags first.
NOT_PROSE = re.compile(r"<ref\b[^<>]*/>|<(ref|math|gallery|timeline|imagemap|score)\b.*?</\1\s*>", re.DOTALL | re.I)
UNPRINTED_NAMESPACES = ("file:", "image:", "category:", "media:")


def articles(wheel: Path, *, minimum_characters: int = 500) -> dict[str, str]:
    """Read every article of the dump inside gensim's wheel.

    Args:
        wheel: the downloaded wheel; nothing of it is installed.
        minimum_characters: articles whose prose is shorter are left out: disambiguation pages and stubs.
    Returns:
        Title -> prose, in the order of the dump.
    Raises:
        ValueError: the file is no gensim wheel with that dump.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            dump = bz2.decompress(archive.read(DUMP))
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise ValueError(f"{wheel} holds no Wikipedia dump ({error}): delete the file, it is fetched again") from error
    texts = {title: prose(wikitext) for title, wikitext in pages(dump)}
    return {title: text for title, text in texts.items() if len(text) >= minimum_characters}


def pages(dump: bytes) -> Iterator[tuple[str, str]]:
    """Yield (title, wikitext) of every encyclopaedic page of a MediaWiki export; redirects are left out."""
    page: dict[str, str] = {}
    for _, element in ElementTree.iterparse(io.BytesIO(dump)):
        tag = element.tag.rsplit("}", 1)[-1]
        if tag in ("title", "ns", "text", "redirect"):
            page[tag] = element.text or ""
        elif tag == "page":
            if page.get("ns") == "0" and "redirect" not in page:
                yield page["title"], page.get("text", "")
            page = {}
            element.clear()


def prose(wikitext: str) -> str:
    """Keep the running text of an article: paragraphs separated by blank lines, without mark-up.

    Templates, tables, pictures, footnotes, headings, list items and everything after the last section of prose are
    dropped, so that a passage taken from the start of the result is what a reader sees as the article's first lines.
    """
    text = re.sub(r"<!--.*?-->", "", wikitext, flags=re.DOTALL)
    text = NOT_PROSE.sub("", text)
    text = _peel(TEMPLATE, text, _render)
    text = _peel(TABLE, text)
    text = _peel(LINK, text, _print_link)
    text = re.sub(r"\[(?:https?:|ftp:)?//\S+\s*([^\]]*)\]", r"\1", text)
    text = re.sub(r"'{2,}", "", text)
    text = re.sub(r"<[^<>]+>", "", text)
    # Twice, because the dump escapes mark-up that itself holds entities: &amp;nbsp;
    text = html.unescape(html.unescape(text)).replace("\u00a0", " ")
    text = re.sub(r"__[A-Z]+__", "", text)
    # Templates leave holes where a pronunciation or a coordinate was: "Achilles (, Akhilleus,)".
    text = re.sub(r"\(\s*(?:[;,:]\s*)+", "(", text)
    text = re.sub(r"(?:[;,:]\s*)+\)", ")", text)
    text = re.sub(r"\(\s*\)", "", text)

    paragraphs: list[str] = []
    for line in text.splitlines():
        line = re.sub(r"[ \t]+", " ", line).strip()
        line = re.sub(r" ([,.;:)])", r"\1", line)
        heading = re.fullmatch(r"=+\s*(.*?)\s*=+", line)
        if heading and heading.group(1).lower() in BACK_MATTER:
            break
        if line and not heading and line[0] not in "*#:;|!{}":
            paragraphs.append(line)
    return "\n\n".join(paragraphs)


def _peel(pattern: re.Pattern, text: str, replacement="") -> str:
    """Substitute from the inside out until nothing matches."""
    while True:
        text, count = pattern.subn(replacement, text)
        if not count:
            return text


def _render(template: re.Match) -> str:
    """Return the text of the few templates that stand inside sentences; nothing for infoboxes and navigation."""
    name, *fields = [field.strip() for field in template.group(0)[2:-2].split("|")]
    plain = [field for field in fields if "=" not in field]
    match name.lower():
        case "convert" | "cvt" if len(plain) >= 2:
            return " ".join(plain[:2])
        case "lang" | "transl" if len(plain) >= 2:
            return plain[-1]
        case "nihongo" | "nowrap" if plain:
            return plain[0]
        case "ndash" | "snd" | "spaced ndash":
            return "\u2013"
        case _:
            return ""


def _print_link(link: re.Match) -> str:
    """Return the text of a [[link]]: its label, else its target; nothing for pictures and categories."""
    target, _, label = link.group(1).partition("|")
    if target.strip().lower().startswith(UNPRINTED_NAMESPACES):
        return ""
    return label or target.lstrip(":")
