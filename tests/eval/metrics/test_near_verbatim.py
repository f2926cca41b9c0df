"""Near-verbatim recall: runs, blocks and what is left of them, counted by hand."""

import random

import pytest

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
