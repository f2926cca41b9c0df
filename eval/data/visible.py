"""Text from outside, made visible: what would act on a terminal, break a line or fit into no file is escaped.

Names of runs and documents, texts, paths and settings come from command lines, files and models. Every output passes
them through `visible`, and then escapes its own markup: rich, Markdown, HTML.
"""

import re


PAGE = "\t\n\r\u2028\u2029"  # what HTML and SVG can hold
DIRECTIONS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # of writing, and the ends of these
_ACTS = re.compile(rf"[\x00-\x1f\x7f-\x9f{PAGE}{DIRECTIONS}\ud800-\udfff\ufffe\uffff]")


def visible(text: str, keep: str = "") -> str:
    r"""The text with control characters, breaks of lines, overrides of direction and half pairs escaped.

    Args:
        text: any; an escape looks as in Python, such as \x1b or \ud83d.
        keep: characters that stay, such as the line ends of a message.
    """
    return _ACTS.sub(lambda one: one[0] if one[0] in keep else one[0].encode("unicode_escape").decode(), text)
