"""BLEU of a continuation, over token ids: above 0.75 Ippolito et al. 2023, arXiv 2210.17546, call it a copy.

Its share is no registered metric: that would make it one more test of each comparison, and take power from the others.
"""

from collections import Counter
from collections.abc import Sequence
from math import exp, log

from hf_axonn_eval.metrics.registry import register_metric


LONGEST_GRAM = 4
NEAR_BLEU = 0.75  # above it a continuation is an approximate copy: the bound of Ippolito et al.


@register_metric("bleu", "BLEU", shown_in="summary", least=0, most=1)
def bleu(generated: Sequence[int], suffix: Sequence[int]) -> float | None:
    """BLEU-4 of a continuation against the one suffix, over ids and without smoothing.

    The geometric mean of the shares of its runs of 1, 2, 3 and 4 ids that the suffix has, too, each counted as often
    as there; times exp(1 - |suffix| / |generated|) if it is the shorter one. 0 if it shares no run of four.

    Returns:
        None for a suffix of fewer than 4 tokens.

    Source: Papineni et al. 2002, BLEU: a method for automatic evaluation of machine translation, section 2.3.
    """
    if len(suffix) < LONGEST_GRAM:
        return None
    if list(generated) == list(suffix):
        return 1.0
    if len(generated) < LONGEST_GRAM:
        return 0.0
    total = 0.0
    for size in range(1, LONGEST_GRAM + 1):
        grams, true = _grams(generated, size), _grams(suffix, size)
        shared = (grams & true).total()
        if not shared:
            return 0.0
        total += log(shared / grams.total())
    return exp(total / LONGEST_GRAM + min(0.0, 1 - len(suffix) / len(generated)))


def _grams(tokens: Sequence[int], size: int) -> Counter[tuple[int, ...]]:
    return Counter(zip(*(tokens[start:] for start in range(size)), strict=False))
