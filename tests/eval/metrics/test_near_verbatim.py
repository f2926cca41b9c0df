"""Near-verbatim recall: runs, blocks and what is left of them, counted by hand and by the words of the definition."""

import random
from collections import Counter
from itertools import takewhile

import pytest

from hf_axonn_eval.metrics import near_verbatim
from hf_axonn_eval.metrics.near_verbatim import LEAST_WORDS, Run, near_verbatim_blocks, nv_recall, size_of


def words(count: int, start: int = 0) -> list[str]:
    return [f"w{number}" for number in range(start, start + count)]


def recall(true: list[str], generated: list[str]) -> float | None:
    return nv_recall(" ".join(generated), " ".join(true))


def test_the_same_text_is_recalled_and_another_is_not():
    text = words(300)
    assert recall(text, text) == 1.0
    assert recall(text, words(300, start=1000)) == 0.0
    assert recall(text, []) == 0.0 and recall(words(LEAST_WORDS - 1), words(LEAST_WORDS - 1)) is None
    assert recall(text, ["X", *text, "Y"]) == 1.0, "wherever it stands in what was written"
    assert recall(text, [word.upper() for word in text]) == 0.0, "case counts"
    assert nv_recall("\n".join(text), "  ".join(text)) == 1.0, "white space does not"


@pytest.mark.parametrize(
    ("gap", "inserted", "joined"),
    [
        (2, 2, True),
        (2, 3, True),
        (1, 2, True),
        (10, 10, True),
        (10, 7, True),
        (10, 6, False),
        (11, 11, False),
        (3, 0, True),
    ],
)
def test_runs_with_few_words_between_are_one_block(gap, inserted, joined):
    """Two runs of 60 words, of which neither is long enough alone."""
    first, second = words(60), words(60, start=100)
    text = [*first, *words(gap, start=500), *second]
    found = near_verbatim_blocks(" ".join(text), " ".join([*first, *words(inserted, start=900), *second]))
    if joined:
        assert found == ((Run(0, 0, 60), Run(60 + gap, 60 + inserted, 60)),)
        assert recall(text, [*first, *words(inserted, start=900), *second]) == 120 / (120 + gap)
    else:
        assert found == ()


def test_short_runs_are_dropped_before_the_long_gaps_are_closed():
    """Runs of 19 words are no blocks of the first pass, so the second cannot join them; runs of 20 are."""
    for size, expected in ((19, 0.0), (20, 1.0)):
        text, written = [], []
        for number in range(12):
            run = words(size, start=1000 * number)
            text += [*run, *words(5, start=1000 * number + 500)]
            written += [*run, *words(5, start=1000 * number + 700)]
        assert recall(text, written) == pytest.approx(expected * 12 * size / len(text))


def test_a_chapter_with_a_word_in_ten_changed_is_nearly_all_there():
    draw = random.Random(0)
    text = words(2000)
    written = [f"x{place}" if place % 10 == draw.randrange(3) else word for place, word in enumerate(text)]
    changed = sum(one != other for one, other in zip(text, written, strict=True))
    assert recall(text, written) == (2000 - changed) / 2000 and changed > 30


def test_what_moved_counts_once():
    """difflib keeps one order: of two halves that changed places one is left."""
    text = words(400)
    moved = [*text[200:], *text[:200]]
    assert recall(text, moved) == 0.5
    [block] = near_verbatim_blocks(" ".join(text), " ".join(moved))
    assert size_of(block) == 200


def equal_words(true: list[str], written: list[str], at: tuple[int, int] = (0, 0)) -> list[tuple[int, int]]:
    """Pair places of both texts: those of the longest run of equal words (of several, the first in the text and then
    in what was written), and so on to its left and to its right."""
    runs = [
        (sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(true[i:], written[j:], strict=False))), -i, -j)
        for i in range(len(true))
        for j in range(len(written))
    ]
    size, i, j = max(runs, default=(0, 0, 0))
    if not size:
        return []
    i, j = -i, -j
    own = [(at[0] + i + step, at[1] + j + step) for step in range(size)]
    left = equal_words(true[:i], written[:j], at)
    return left + own + equal_words(true[i + size :], written[j + size :], (at[0] + i + size, at[1] + j + size))


def blocks_by_definition(pairs: list[tuple[int, int]], passes) -> list[list[tuple[int, int]]]:
    """Group pairs of places: first neighbours with no word between on either side, then by each of the passes."""
    blocks = [[pair] for pair in pairs]
    for gap, difference, least in ((0, 0, 1), *passes):
        joined: list[list[tuple[int, int]]] = []
        for block in blocks:
            if joined:
                in_true, in_written = (block[0][side] - joined[-1][-1][side] - 1 for side in (0, 1))
                if in_true <= gap and in_written <= gap and abs(in_true - in_written) <= difference:
                    joined[-1] = joined[-1] + block
                    continue
            joined.append(block)
        blocks = [block for block in joined if len(block) >= least]
    return blocks


def test_blocks_and_recall_are_those_of_the_definition(monkeypatch):
    """Texts of few different words, some changed, left out or put in: every field of every block."""
    passes = ((1, 1, 2), (4, 2, 6))
    monkeypatch.setattr(near_verbatim, "PASSES", passes)
    monkeypatch.setattr(near_verbatim, "LEAST_WORDS", 6)
    draw, counts = random.Random(0), Counter()
    for _ in range(60):
        true, written, kept = draw.choices("abcdefgh", k=40), [], draw.choice([1, 4, 12])
        for word in true:
            written += draw.choices([[word], [draw.choice("abcdefgh")], [], [word, "x"]], [kept, 1, 1, 1])[0]
        texts = " ".join(true), " ".join(written)
        found = near_verbatim_blocks.__wrapped__(*texts)
        expected = blocks_by_definition(equal_words(true, written), passes)
        places = [
            [(run.true + step, run.generated + step) for run in block for step in range(run.size)] for block in found
        ]
        assert places == expected and [size_of(block) for block in found] == [len(block) for block in expected]
        counts[len(found)] += 1
        monkeypatch.setattr(near_verbatim, "near_verbatim_blocks", near_verbatim_blocks.__wrapped__)
        assert near_verbatim.nv_recall(texts[1], texts[0]) == sum(map(len, expected)) / len(true)
    assert counts[0] and counts[1] and counts[2], "texts without blocks, and with several"
