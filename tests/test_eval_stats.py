"""Intervals against published values, and against what they promise."""

import numpy as np
import pytest

from hf_axonn_eval.stats import bootstrap, wilson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_equals_published_values(successes, trials, low, high):
    interval = wilson(successes, trials)
    assert interval.low == pytest.approx(low, abs=5e-5)
    assert interval.high == pytest.approx(high, abs=5e-5)


def test_wilson_is_symmetric_and_closes_at_the_ends():
    assert wilson(0, 12).low == 0 and wilson(12, 12).high == 1
    assert wilson(12, 12).low == pytest.approx(1 - wilson(0, 12).high)
    assert wilson(3, 12, confidence=0.99).high > wilson(3, 12, confidence=0.9).high


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_what_is_no_share(successes, trials):
    with pytest.raises(ValueError, match="is not a share"):
        wilson(successes, trials)


def test_confidence_must_be_a_share():
    with pytest.raises(ValueError, match="95"):
        wilson(1, 2, confidence=95)
    with pytest.raises(ValueError, match="95"):
        bootstrap([1.0, 2.0], ["a", "b"], confidence=95)


def test_bootstrap_of_independent_values_agrees_with_the_standard_error():
    values = np.random.default_rng(1).normal(3.0, 2.0, size=400).tolist()
    interval = bootstrap(values, range(400))
    half = 1.96 * np.std(values) / np.sqrt(400)
    assert interval.low == pytest.approx(np.mean(values) - half, abs=0.15 * half)
    assert interval.high == pytest.approx(np.mean(values) + half, abs=0.15 * half)


def test_bootstrap_resamples_documents_and_not_samples():
    values = np.random.default_rng(2).normal(size=20)
    alone = bootstrap(values.tolist(), range(20))
    # ten copies of each value inside its document bring no new information
    copied = bootstrap(np.repeat(values, 10).tolist(), np.repeat(np.arange(20), 10).tolist())
    assert copied == pytest.approx(alone)
    unaware = bootstrap(np.repeat(values, 10).tolist(), range(200))
    assert unaware.high - unaware.low < 0.5 * (alone.high - alone.low)


def test_bootstrap_repeats_itself_with_its_seed():
    values, documents = np.random.default_rng(3).normal(size=30).tolist(), range(30)
    assert bootstrap(values, documents, seed=7) == bootstrap(values, documents, seed=7)
    assert bootstrap(values, documents, seed=7) != bootstrap(values, documents, seed=8)


def test_one_document_has_no_interval():
    assert bootstrap([0.1, 0.2, 0.3], ["a", "a", "a"]) is None


def test_bootstrap_names_wrong_input():
    with pytest.raises(ValueError, match="2 values of 1 documents"):
        bootstrap([1.0, 2.0], ["a"])
    with pytest.raises(ValueError, match="10 resamples"):
        bootstrap([1.0, 2.0], ["a", "b"], resamples=10)
