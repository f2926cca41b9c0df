"""ROUGE against package rouge-score, which defines it, and against cases worked out by hand."""

import timeit
from pydoc_data.topics import topics

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenize import tokenize

from hf_axonn_eval.metrics.text import rouge, words


SCORER = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False)
# few words, so that texts share some; capitals, digits, marks, letters that lower-case oddly, and none at all
PIECES = [
    "the",
    "The",
    "cat",
    "a",
    "7",
    "x9",
    "it's",
    "\u212a",
    "\u0130s",
    "\u00e9t\u00e9",
    "\u4f60",
    "\U0001f600",
    "_",
    "-",
]
SPACES = [" ", "  ", "\n", "\t", "", "\u00a0", "\u2028", ", "]
TEXTS = st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from(SPACES)), max_size=25).map(
    lambda pieces: "".join(map("".join, pieces))
) | st.text(max_size=60)


@settings(max_examples=400)
@given(TEXTS, TEXTS)
@example("", "")
@example("word", "")
@example("", "word")
@example("\u4f60\u597d", "\u4f60\u597d")
def test_every_text_scores_as_rouge_score_says(prediction, reference):
    assert [word.decode() for word in words(reference)] == tokenize(reference, None)
    truth = SCORER.score(reference, prediction)
    least = {"rouge1": 1, "rouge2": 2, "rougeL": 1}
    for name, measured in rouge(prediction, reference).items():
        if len(tokenize(reference, None)) < least[name]:
            assert measured is None
        else:
            assert measured == pytest.approx(truth[name].fmeasure, abs=1e-12)


def test_f1_by_hand():
    scores = rouge("the cat sat there", "The cat was sitting, the mat. Sat!")
    # reference: the cat was sitting the mat sat (7 words); overlap the, cat, sat = 3; P = 3/4, R = 3/7
    assert scores["rouge1"] == pytest.approx(2 * (3 / 4) * (3 / 7) / (3 / 4 + 3 / 7))
    # bigrams: (the cat) is the only one shared; P = 1/3, R = 1/6
    assert scores["rouge2"] == pytest.approx(2 * (1 / 3) * (1 / 6) / (1 / 3 + 1 / 6))
    # longest common subsequence: the cat sat = 3
    assert scores["rougeL"] == scores["rouge1"]


def test_it_does_not_stem():
    assert rouge("sitting cats", "sit cat")["rouge1"] == 0


def test_a_text_without_latin_letters_is_undefined_not_zero():
    assert rouge("\u4f60\u597d", "\u4f60\u597d") == {"rouge1": None, "rouge2": None, "rougeL": None}
    assert rouge("word", "word") == {"rouge1": 1.0, "rouge2": None, "rougeL": 1.0}


def test_it_takes_a_tenth_of_the_time_of_rouge_score():
    prose = " ".join(topics[name] for name in sorted(topics)[:20]).split()
    pairs = []
    for start in range(0, 2000, 50):  # 40 words, as 50 tokens are; the second half is another text
        reference, other = prose[start : start + 40], prose[start + 500 : start + 520]
        pairs.append((" ".join(reference[:20] + other), " ".join(reference)))
    theirs = min(timeit.repeat(lambda: [SCORER.score(true, mine) for mine, true in pairs], number=1, repeat=3))
    ours = min(timeit.repeat(lambda: [rouge(mine, true) for mine, true in pairs], number=1, repeat=5))
    assert theirs > 10 * ours, f"{theirs / ours:.1f} times"
