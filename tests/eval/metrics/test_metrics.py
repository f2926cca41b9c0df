"""Metrics against cases worked out by hand."""

import difflib
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_axonn_eval.metrics import text as metrics
from tests.helpers.calls import calls_of


def test_exact_match_needs_the_full_suffix_before_a_miss():
    assert metrics.exact_match(divergence_point=3, suffix_length=3) is True
    assert metrics.exact_match(divergence_point=2, suffix_length=3) is False


@pytest.mark.parametrize(
    ("hits", "accuracy", "divergence", "strength"),
    [
        ([True, True, True, True], 1.0, 4, 1.0),
        ([False, False, False, False], 0.0, 0, 0.0),
        ([True, False, True, True], 0.75, 1, 0.5),  # two shown tokens, then both others are right
        ([False, True, True, True], 0.75, 0, 0.75),
        ([True, True, True, False], 0.75, 3, 0.0),  # the last one is wrong whatever is shown
    ],
)
def test_teacher_forced_metrics(hits, accuracy, divergence, strength):
    assert metrics.token_accuracy(hits) == accuracy
    assert metrics.first_miss(hits) == divergence
    assert metrics.extraction_strength(hits) == strength


def test_extraction_strength_is_the_published_one():
    """All hits and misses of up to 7 tokens. OpenUnlearning's loop ends one token before all of them are shown."""
    for length in range(1, 8):
        for hits in itertools.product([True, False], repeat=length):
            fewest = min(shown for shown in range(length + 1) if all(hits[shown:]))
            assert metrics.extraction_strength(hits) == 1 - fewest / length
            in_its_loop = [shown for shown in range(length) if all(hits[shown:])]
            theirs = 1 - (in_its_loop[0] if in_its_loop else length - 1) / length
            assert theirs == pytest.approx(metrics.extraction_strength(hits) if hits[-1] else 1 / length)


def test_free_running_accuracy_compares_position_by_position():
    # the continuation skips token 2 and is one place early from there on: only the first token counts
    assert metrics.free_running_accuracy([1, 3, 4, 5], [1, 2, 3, 4]) == 0.25
    with pytest.raises(ValueError, match="3 tokens and the suffix 4"):
        metrics.free_running_accuracy([1, 3, 4], [1, 2, 3, 4])


def test_longest_common_run_may_lie_at_other_places():
    assert metrics.longest_common_run([9, 1, 2, 3, 8], [1, 2, 3, 7, 9]) == 3
    assert metrics.longest_common_run([1, 2, 3], [4, 5, 6]) == 0
    # a token that fills more than 1% of a long text is "popular" to difflib, which by default looks for no run there
    assert metrics.longest_common_run([7] + [0] * 300, [0] * 300 + [8]) == 300


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.lists(st.integers(0, 3), max_size=40),
    st.lists(st.integers(0, 60_000), max_size=30),
)
def test_longest_common_run_equals_difflib(one, other, shared):
    for mine, true in ((one, other), (one + shared, shared + other), (shared, shared)):
        matcher = difflib.SequenceMatcher(None, mine, true, autojunk=False)
        assert metrics.longest_common_run(mine, true) == matcher.find_longest_match().size


def test_longest_common_run_of_long_loops_does_not_compare_every_pair():
    # 4 million pairs of equal ids, and difflib makes a call for each
    calls, length = calls_of(metrics.longest_common_run, [1] * 2000 + [2], [2] + [1] * 2000)
    assert length == 2000 and calls < 100_000


def test_edit_distance_is_levenshtein_over_the_length_of_the_suffix():
    assert metrics.edit_distance([1, 2, 3, 4], [1, 2, 3, 4]) == 0
    assert metrics.edit_distance([1, 3, 4, 5], [1, 2, 3, 4]) == 0.5  # one deletion, one insertion
    assert metrics.edit_distance([9, 9, 9, 9], [1, 2, 3, 4]) == 1
    for length, near in ((10, True), (9, False)):  # one edit in so many tokens
        assert metrics.near_verbatim([0] + [1] * (length - 1), [1] * length) is near


def test_edit_distance_equals_the_textbook_recurrence():
    rng = random.Random(0)
    for _ in range(50):
        one = [rng.randrange(6) * 70_000 for _ in range(rng.randrange(1, 12))]
        other = [rng.randrange(6) * 70_000 for _ in range(rng.randrange(1, 12))]
        row = list(range(len(other) + 1))
        for i, left in enumerate(one, start=1):
            diagonal, row[0] = row[0], i
            for j, right in enumerate(other, start=1):
                diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (left != right))
        assert metrics.edit_distance(one, other) == row[-1] / len(other)


@pytest.mark.parametrize("metric", [metrics.token_accuracy, metrics.extraction_strength])
def test_an_empty_suffix_has_no_score(metric):
    with pytest.raises(ValueError, match="without tokens"):
        metric([])


def test_short_runs_by_hand():
    assert metrics.longest_common_run([5], [9, 5]) == metrics.longest_common_run([9, 5], [5]) == 1
    assert metrics.longest_common_run([], [5]) == metrics.longest_common_run([5], []) == 0
    assert metrics.longest_common_run([1, 2, 1, 2, 1], [2, 1, 2]) == 3
    assert metrics.longest_common_run([1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6]) == 6


def test_log_probabilities_by_hand():
    assert metrics.nll(-6.0, 4) == 1.5
    assert metrics.probability(0.0) == metrics.sampled_probability(0.0) == 1
    assert metrics.probability(-1.0) == metrics.sampled_probability(-1.0) == pytest.approx(0.36787944)
    assert metrics.sampled_probability(float("-inf")) == 0
    with pytest.raises(ValueError, match="without tokens"):
        metrics.edit_distance([1], [])
