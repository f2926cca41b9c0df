"""Finds words that make code hard to read, and fails where there are some: `make lint` calls this.

A word that stands twice in a row is looked for in the documents, too.

    python -m tests.tools.words                    each place, file:line
    python -m tests.tools.words hf_axonn/engine    those in some packages
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

from tests.helpers import ROOT
from tests.tools.documents import DOCUMENTS, FENCE


FOLDERS = ("hf_axonn", "eval", "training_scripts")
# A docstring that begins with one of these is a part of a sentence ("What a rank has"), and says no verb.
OPENERS = frozenset(
    "what how as of which where who whose whether when why that with without for from by in on at to if while "
    "because after before until like than and or but so".split()
)
PRONOUNS = frozenset("its told said mine asked wanted".split())  # as names of variables they name no thing
PARTICIPLES = frozenset(
    "built cut drawn done dealt found gone given held kept known left lost made meant met paid put read run said seen "
    "sent set shown sold sought spent spread taken taught told thought won worn written".split()
)
VERBS = frozenset("put read run set cut spread embed feed need seed shed speed exceed proceed succeed".split())
STATES = frozenset(("property", "cached_property", "functools.cached_property", "pytest.fixture"))  # decorators
# Two spaces separate columns of a table, and a table may begin a line with the word that ends the line above.
TWICE = re.compile(r"(?<![\w./=*-])([A-Z]?[a-z]+)(?: |\n[ #]*)(?i:\1)(?![\w/=*-]|\.\w|  )")
COMMENTS = re.compile(r"(?:^[ \t]*#.*\n)+|#.*", re.MULTILINE)
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def find_words(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind and text of each place: docstrings, variables and functions.

    A property or a fixture may be a participle, as it reads as a state.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, FUNCTIONS | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node) or ""
            if match := re.match(r"\w+", text):
                if match[0].lower() in OPENERS:
                    yield getattr(node, "lineno", 1), "docstrings", text.splitlines()[0]
        if isinstance(node, FUNCTIONS):
            yield from _judge_function(node)
        if isinstance(node, ast.arg) and node.arg in PRONOUNS:
            yield node.lineno, "variables", node.arg
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in PRONOUNS:
            yield node.lineno, "variables", node.id
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from find_doubled_words(node.value, node.lineno)
    for comments in COMMENTS.finditer(source):
        yield from find_doubled_words(comments[0], source.count("\n", 0, comments.start()) + 1)


def find_doubled_words(text: str, line: int = 1) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind and text of each word that stands twice in a row, in a text that begins on this line."""
    for match in TWICE.finditer(text):
        yield line + text.count("\n", 0, match.start()), "doubled words", " ".join(match[0].replace("#", "").split())


def _judge_function(node: FUNCTIONS) -> Iterator[tuple[int, str, str]]:
    name = node.name.strip("_")
    decorators = {ast.unparse(line).partition("(")[0] for line in node.decorator_list}
    if "deprecated" in decorators:  # the name of before
        return
    if re.search(r"^_?of(_|$)", node.name):
        yield node.lineno, "functions", node.name
    elif not STATES & decorators and name not in VERBS:
        if name in PARTICIPLES or re.fullmatch(r"[a-z]{2,}ed", name):
            yield node.lineno, "functions", node.name


def list_places(packages: list[str]) -> Iterator[tuple[str, int, str, str]]:
    """Yield file, line, kind and text of each place in these packages, in all and in documents by default."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            file = path.relative_to(ROOT).as_posix()
            if not packages or any(file.startswith(name.rstrip("/") + "/") or file == name for name in packages):
                for line, kind, text in find_words(path.read_text(encoding="utf-8")):
                    yield file, line, kind, text
    for path in () if packages else DOCUMENTS:
        text = FENCE.sub(lambda block: "\n" * block[0].count("\n"), path.read_text(encoding="utf-8"))
        for line, kind, words in find_doubled_words(text):
            yield path.relative_to(ROOT).as_posix(), line, kind, words


def main(packages: list[str]) -> int:
    """Print each place; returns the exit code, 1 where there is one."""
    places = list(list_places(packages))
    for file, line, kind, text in places:
        print(f"{file}:{line}: {kind}: {text}")
    print(f"words: {len(places)} places")
    return int(bool(places))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
