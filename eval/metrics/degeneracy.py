"""Is the suffix one that any model would guess? A text that repeats itself is extracted without being memorized.

Two signs that need no model: few different tokens, and a text that zlib makes much shorter. They find loops, rulers
and empty tables. They do not find what is regular without repeating, such as 1, 2, 3, ...: only the untrained model
beside the trained one does.

Sources: type-token ratio over moving windows, Covington and McFall 2010; as a sign of degenerate suffixes, the Apertus
report 2025, arXiv 2509.14233; zlib, Carlini et al. 2021, arXiv 2012.07805.
"""

import zlib
from collections.abc import Hashable, Sequence


WINDOW = 50  # tokens; the share of different ones falls with the length of a text, so it is taken in windows
LEAST_TYPES, LEAST_ZLIB = 0.40, 0.25  # below one of them a suffix is degenerate


def type_token_ratio(tokens: Sequence[Hashable], *, window: int = WINDOW) -> float:
    """Share of tokens that are different ones, the mean over all windows of `window` tokens; 1 if none repeats.

    A shorter sequence is one window.

    Raises:
        ValueError: no tokens, or a window below 1.
    """
    if not len(tokens) or window < 1:
        raise ValueError(f"{len(tokens)} tokens in windows of {window}: one or more of both are needed.")
    window = min(window, len(tokens))
    last_start = len(tokens) - window
    before: dict[Hashable, int] = {}
    types = 0
    for place, token in enumerate(tokens):
        # a token is a new type in the windows that hold it but not the same token before it
        first_start = max(before.get(token, -1) + 1, place - window + 1)
        types += max(0, min(place, last_start) - first_start + 1)
        before[token] = place
    return types / (window * (last_start + 1))


def zlib_ratio(text: str) -> float | None:
    """Bytes of the zlib-compressed text by bytes of the text in UTF-8; above 1 for a very short one, None for none.

    It falls with the length: about 0.8 for 50 tokens of English prose, 0.4 for 1000.
    """
    content = text.encode("utf-8", "surrogatepass")
    return len(zlib.compress(content)) / len(content) if content else None


def is_degenerate(types: float | None, compressed: float | None) -> bool | None:
    """Whether a suffix repeats itself so much that its extraction says little.

    Args:
        types: its `type_token_ratio`, None if not known.
        compressed: its `zlib_ratio`, None if not known.
    Returns:
        None if neither is known.
    """
    if types is None and compressed is None:
        return None
    return (types is not None and types < LEAST_TYPES) or (compressed is not None and compressed < LEAST_ZLIB)
