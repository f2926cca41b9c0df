"""Upper bounds of extraction by ranks: how many queries at least, however tokens are drawn.

A token of rank r has r - 1 others that are likelier. Temperature, top-k and top-p keep that order, so whatever is set,
these r tokens share a probability of at most 1 and the last of them has at most 1 / r. Of a suffix,

    P(suffix) <= prod_t 1 / r_t = 2^-b        b = sum_t log2 r_t, in bits

so 2^b queries are expected at least until it has come. With a threshold m, tokens of a rank above m have their
probability at temperature 1 in place of 1 / r. That is the estimate of the authors' code (m = 20); it is no bound for
temperatures above 1, which raise what is unlikely, and so nothing here uses it by default.

It holds for drawing token after token after the true text. It does not hold for beam search, for penalties or biases
that change the order of tokens, or for other prompts.

Source: Liu, Evans and Xiong 2026, arXiv 2604.18697, (l, b)-inextractability; Emory-AIMS/Inextractability at 6486898,
inextractability/core.py, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log, log2
from typing import NamedTuple

from hf_axonn_eval.metrics.registry import register_metric


class EasiestWindow(NamedTuple):
    """The window of a suffix that takes fewest bits, and the place of its first token."""

    bits: float
    begin: int


@register_metric("rank_bits", "bits, by ranks", shown_in="summary", least=0)
def rank_bits(ranks: Sequence[int]) -> float:
    """Bits that the suffix takes at least: the sum of the log2 of the ranks of its tokens."""
    return sum(map(log2, ranks))


def easiest_window(
    ranks: Sequence[int],
    length: int,
    *,
    logprobs: Sequence[float] | None = None,
    threshold: int | None = None,
) -> EasiestWindow:
    """Find the run of `length` tokens that takes fewest bits, of equal ones the first.

    The text before a run, prefix and suffix, is what the attacker shows.

    Args:
        ranks: of the tokens of a suffix, from 1 on.
        length: l, in tokens.
        logprobs: of the same tokens, in nats; needed with a threshold.
        threshold: m; a token of a higher rank has its probability in place of 1 / rank. None: no token has.
    Raises:
        ValueError: fewer tokens than `length`, a length below 1, or a threshold without as many log-probabilities.
    """
    if not 1 <= length <= len(ranks):
        raise ValueError(f"there are {len(ranks)} ranks, and a window of {length} tokens was to be found in them.")
    if threshold is not None and (logprobs is None or len(logprobs) != len(ranks)):
        raise ValueError(f"a threshold needs the log-probabilities of all {len(ranks)} tokens.")
    bits = list(map(log2, ranks))
    if threshold is not None and logprobs is not None:
        pairs = zip(bits, ranks, logprobs, strict=True)
        bits = [-logprob / log(2) if rank > threshold else of_rank for of_rank, rank, logprob in pairs]
    windows = [sum(bits[begin : begin + length]) for begin in range(len(bits) - length + 1)]
    least = min(windows)
    return EasiestWindow(least, windows.index(least))
