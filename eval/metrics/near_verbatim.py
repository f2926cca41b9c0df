"""Near-verbatim recall of a long text: the share of its words in long blocks that a continuation has as well.

    1. Words that both texts have in the same order, as runs (difflib, the longest run first).
    2. Runs become one block where few words lie between them on either side, and about as many on both.
    3. Short blocks are dropped.

Steps 2 and 3 are done twice: with gaps of 2 words, a difference of 1 and blocks of 20 words; then with gaps of 10, a
difference of 3 and blocks of 100. What is left is counted in equal words. So a famous phrase counts for nothing, and a
chapter with a few words changed for nearly all of it.

Source: Ahmed, Cooper, Koyejo and Liang 2026, arXiv 2601.02671 (nv-recall). Its text was not at hand: the passes and
their numbers are those of GEizaguirre/memorization-LLM-prod at 95f0933, src/long_form_metrics.py, which says that it
follows the paper. There a block of which the continuation has more words between than the text is joined whatever the
difference; here the difference counts either way.
"""

from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from typing import NamedTuple

from hf_axonn_eval.metrics.registry import register_metric


PASSES = ((2, 1, 20), (10, 3, 100))  # words: gap, difference of gaps, least length of a block
LEAST_WORDS = PASSES[-1][2]


class Run(NamedTuple):
    """Equal words: the place of the first in the text and in the continuation, and how many."""

    true: int
    generated: int
    size: int


Block = tuple[Run, ...]


@register_metric("nv_recall", "near-verbatim recall", shown_in="report", least=0, most=1)
def nv_recall(generated_text: str, suffix_text: str) -> float | None:
    """Share of the words of the suffix in near-verbatim blocks; None of a suffix of fewer than 100 words."""
    words = suffix_text.split()
    if len(words) < LEAST_WORDS:
        return None
    return sum(size_of(block) for block in near_verbatim_blocks(suffix_text, generated_text)) / len(words)


@lru_cache(maxsize=4)  # the metric and the page ask for the same texts
def near_verbatim_blocks(true: str, generated: str) -> tuple[Block, ...]:
    """Find the blocks of two texts, in their order; words are parted by white space, and their case counts."""
    matcher = SequenceMatcher(None, true.split(), generated.split(), autojunk=False)
    blocks: list[Block] = [(Run(*match),) for match in matcher.get_matching_blocks() if match.size]
    for gap, difference, least in PASSES:
        blocks = [block for block in _merge(blocks, gap, difference) if size_of(block) >= least]
    return tuple(blocks)


def size_of(block: Block) -> int:
    """Return the equal words of a block."""
    return sum(run.size for run in block)


def _merge(blocks: Sequence[Block], gap: int, difference: int) -> list[Block]:
    """Join neighbours with no more than `gap` words between them on either side, and about as many on both."""
    merged: list[Block] = []
    for block in blocks:
        if merged:
            last, first = merged[-1][-1], block[0]
            between = first.true - last.true - last.size, first.generated - last.generated - last.size
            if max(between) <= gap and abs(between[0] - between[1]) <= difference:
                merged[-1] = (*merged[-1], *block)
                continue
        merged.append(block)
    return merged
