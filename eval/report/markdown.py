"""Text as Markdown that shows it, whatever it says."""

import re
from collections.abc import Sequence

from hf_axonn_eval.data.visible import visible


# what begins something in Markdown, formulas and tables of GitHub too; "_" within a word and [low, high] do not
_MARKDOWN = re.compile(r"[\\`*~$|]|(?<![^\W_])_|_(?![^\W_])|\](?=[\[(:])")


def plain(text: str) -> str:
    """Escape a text, so that Markdown shows it."""
    return _MARKDOWN.sub(r"\\\g<0>", visible(text).replace("&", "&amp;").replace("<", "&lt;"))


def code(text: str) -> str:
    """Make a code span of a text: between more backticks than it has in a row."""
    text = visible(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if text.startswith("`") or text.endswith("`") else f"{fence}{text}{fence}"


def table(headings: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Write the lines of a table."""
    lines = [headings, ["---"] * len(headings), *body]
    return ["| " + " | ".join(map(plain, line)) + " |" for line in lines]
