"""The first sentence of a document, in tokens: the seed of a recital."""

import re
from collections.abc import Sequence


LEAST, MOST = 5, 100  # words of a sentence, as "Mr." is none; tokens, as some texts have no full stop
_END = re.compile(r"""[.!?]["')\]]*(?=\s)""")


def first_sentence(tokens: Sequence[int], tokenizer) -> int:
    """Return how many tokens the first sentence has.

    It ends at the first full stop, question or exclamation mark before white space that has five words or more before
    it, with the quotes and brackets that close after it; at the 100th token where there is none before.

    Args:
        tokens: of the document.
        tokenizer: to decode them.
    """
    most = min(len(tokens), MOST)
    text = tokenizer.decode(list(tokens[: most + 1]))
    ends = (match.end() for match in _END.finditer(text) if len(text[: match.end()].split()) >= LEAST)
    end = next(ends, len(text))
    return next((count for count in range(1, most) if len(tokenizer.decode(list(tokens[:count]))) >= end), most)
