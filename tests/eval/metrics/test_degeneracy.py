"""Texts that repeat themselves are told from prose."""

import random
import zlib
from pydoc_data.topics import topics

import pytest

from hf_axonn_eval.metrics.text import is_degenerate, type_token_ratio, zlib_ratio
from tests.helpers.eval_support import topics_tokenizer


def test_type_token_ratio_by_hand():
    assert type_token_ratio([1, 2, 3]) == 1
    assert type_token_ratio([1, 1, 1, 1]) == 0.25
    # windows of two: 1 1, 1 2, 2 1 have 1, 2, 2 types
    assert type_token_ratio([1, 1, 2, 1], window=2) == pytest.approx(5 / 6)
    with pytest.raises(ValueError, match="0 tokens"):
        type_token_ratio([])


def test_type_token_ratio_equals_the_mean_over_windows():
    rng = random.Random(0)
    for _ in range(60):
        tokens = [rng.randrange(8) for _ in range(rng.randrange(1, 40))]
        window = rng.randrange(1, 12)
        width = min(window, len(tokens))
        ratios = [len(set(tokens[start : start + width])) / width for start in range(len(tokens) - width + 1)]
        assert type_token_ratio(tokens, window=window) == pytest.approx(sum(ratios) / len(ratios))


def test_zlib_ratio():
    assert zlib_ratio("ab" * 500) == len(zlib.compress(b"ab" * 500)) / 1000
    assert zlib_ratio("") is None
    assert zlib_ratio("\ud800\u00e9") > 1, "a lone surrogate is no reason to stop"


def test_loops_are_degenerate_and_prose_is_not():
    tokenizer = topics_tokenizer()

    def judged(text, length=50):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][:length]
        return is_degenerate(type_token_ratio(ids), zlib_ratio(tokenizer.decode(ids)))

    for loop in ("ha " * 40, "| --- " * 30, "0" * 200, "=" * 500, "Yes, sir. " * 40):
        assert judged(loop)
    prose = [name for name in sorted(topics) if len(topics[name]) > 8000]
    for length in (20, 50, 500):
        assert not any(judged(topics[name], length) for name in prose), length
    assert is_degenerate(None, None) is None
    assert is_degenerate(0.9, 0.1) and is_degenerate(0.1, None) and not is_degenerate(None, 0.9)


def test_a_suffix_at_a_bound_is_not_degenerate():
    assert is_degenerate(0.40, 0.25) is False
    assert is_degenerate(0.39, 0.25) is is_degenerate(0.40, 0.24) is is_degenerate(0.39, None) is True
    assert is_degenerate(None, 0.24) is True and is_degenerate(0.40, None) is is_degenerate(None, 0.25) is False


def test_windows_are_of_fifty_tokens():
    assert type_token_ratio([*range(50), 0]) == 1, "the repeated token is never in a window with the first"
    assert type_token_ratio([*range(49), 0]) == 49 / 50, "here it is"
    assert type_token_ratio([7, 7, 8], window=1) == 1
    with pytest.raises(ValueError, match="3 tokens in windows of 0"):
        type_token_ratio([7, 7, 8], window=0)
