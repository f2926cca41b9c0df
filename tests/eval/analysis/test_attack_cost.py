"""What it costs to extract, against hand computation, simulation and enumeration."""

from itertools import product
from math import e, inf, log, prod

import numpy as np
import pytest
from scipy.stats import binom

from hf_axonn_eval.analysis.attack_cost import attack_cost, expected_share, share_lower_bounds
from tests.helpers.eval_support import result


def sample(place, chance, *, document=None, bucket=1, prefix=30, suffix=20):
    return result(
        f"s{place}",
        document_id=document or f"d{place}",
        bucket=bucket,
        prefix_length=prefix,
        suffix_length=suffix,
        logprobs=None,
        hits=None,
        sampled_logprob=log(chance) if chance else -inf,
    )


def test_by_hand():
    """Two samples, q = 1/2 and 1/4, of 50 and 100 tokens a query."""
    found = attack_cost([sample(0, 0.5), sample(1, 0.25, prefix=80)], tries=(1, 2), queries=(5,), tokens=(75,))["1"]
    assert (found["samples"], found["documents"], found["tokens"], found["never"]) == (2, 2, 150, 0)
    one, two = found["tries"]["1"], found["tries"]["2"]
    assert (one["queries"], one["tokens"]) == (2, 150) and (two["queries"], two["tokens"]) == (4, 300)
    assert one["expected"] == pytest.approx(0.75) and one["share"] == pytest.approx(0.375)
    assert two["expected"] == pytest.approx(0.75 + 7 / 16)
    assert two["tokens_each"] == pytest.approx(300 / (0.75 + 7 / 16))
    queries, tokens = found["budgets"]
    # 2.5 of each: two for sure, one more with a chance of a half; and half a query of each
    assert (queries["budget"], queries["unit"], queries["draws"], queries["queries"]) == (5, "queries", 2.5, 5)
    assert queries["expected"] == pytest.approx((1 - 1 / 4 * 3 / 4) + (1 - 9 / 16 * 7 / 8))
    assert (tokens["unit"], tokens["draws"], tokens["tokens"]) == ("tokens", 0.5, 75)
    assert tokens["expected"] == pytest.approx(0.25 + 0.125)
    assert found["bounds"]["count"] == 4
    assert found["to_extract"]["0.5"] == {"queries": pytest.approx(2), "tokens": pytest.approx(100)}
    assert found["to_extract"]["0.01"] == found["to_extract"]["0.5"]


def test_the_hardest_of_a_share():
    """Sorted by queries and by tokens apart: a likely one may have a long prefix."""
    chances = [0.5, 0.1, 0.01, 0.0]
    samples = [sample(place, chance, prefix=980 if chance == 0.5 else 30) for place, chance in enumerate(chances)]
    found = attack_cost(samples)["1"]
    assert found["to_extract"]["0.25"] == {"queries": pytest.approx(2), "tokens": pytest.approx(500)}
    assert found["to_extract"]["0.5"] == {"queries": pytest.approx(10), "tokens": pytest.approx(2000)}
    never = attack_cost(samples[2:], tries=(1,))["1"]
    assert never["never"] == 1 and never["to_extract"]["0.5"]["queries"] == pytest.approx(100)
    never = attack_cost(samples[3:], tries=(1,))["1"]
    assert never["to_extract"]["0.01"] == {"queries": None, "tokens": None}
    assert never["tries"]["1"]["tokens_each"] is None and never["tries"]["1"]["low"] is None


def test_expected_queries_are_those_of_a_geometric_draw():
    generator = np.random.default_rng(3)
    drawn = generator.geometric(0.05, size=200_000)
    cost = attack_cost([sample(0, 0.05)], tries=(7,))["1"]
    assert cost["to_extract"]["0.5"]["queries"] == pytest.approx(drawn.mean(), rel=0.01)
    assert cost["tries"]["7"]["expected"] == pytest.approx((drawn <= 7).mean(), abs=0.005)


@pytest.mark.parametrize("draws", [0, 0.3, 1, 2.75, 40, 1e6])
def test_the_chance_of_at_least_one(draws):
    chances = np.array([0.0, 1e-20, 1e-3, 0.4, 1.0])
    whole = int(draws)
    expected = [1 - (1 - q) ** whole * (1 - (draws - whole) * q) for q in chances]
    assert expected_share(chances, draws) == pytest.approx(expected, abs=1e-12)
    assert expected_share(chances, draws)[1] == pytest.approx(draws * 1e-20, rel=1e-9), "no 1 - 1"


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="-1 queries"):
        expected_share(np.array([0.5]), -1)
    with pytest.raises(ValueError, match="a chance outside"):
        expected_share(np.array([1.5]), 1)
    with pytest.raises(ValueError, match="budgets of tokens are"):
        attack_cost([sample(0, 0.5)], tokens=(0,))
    with pytest.raises(ValueError, match="tries are"):
        attack_cost([sample(0, 0.5)], tries=())
    with pytest.raises(ValueError, match="cannot be"):
        share_lower_bounds(np.array([3.5]), 3)


def test_groups():
    samples = [sample(0, 0.5, bucket=0), sample(1, 0.5, bucket=3), sample(2, 0.1, bucket=9)]
    found = attack_cost(samples)
    assert list(found) == ["0", "3", "9", "trained"] and found["trained"]["samples"] == 2
    assert list(attack_cost(samples[:2])) == ["0", "3"], "one bucket is all that was trained on"
    assert attack_cost([result("without a sampler")]) == {}


def test_a_document_is_one_trial():
    """Windows of a document are its mean; of a single document nothing is said of others."""
    windows = [sample(place, 1.0 if place < 3 else 0.0, document="d") for place in range(4)]
    others = [sample(9, 0.5, document="other")]
    found = attack_cost([*windows, *others], tries=(1,))["1"]
    assert found["tries"]["1"]["low"] == pytest.approx(share_lower_bounds(np.array([0.75 + 0.5]), 2)[0])
    assert attack_cost(windows, tries=(1,))["1"]["tries"]["1"]["low"] is None


def test_a_bound_for_fewer_queries_is_one_for_more():
    found = attack_cost([sample(place, 0.3) for place in range(30)], tries=(1, 10, 100))["1"]["tries"]
    lows = [found[tries]["low"] for tries in ("1", "10", "100")]
    assert lows == sorted(lows)
    for tries, low in zip(("1", "10", "100"), lows, strict=True):
        assert 0 < low < found[tries]["share"]


@pytest.mark.parametrize(
    ("yes", "trials", "bounds"), [(1, 8, 1), (3, 100, 1), (3, 100, 7), (100, 100, 2), (50, 60, 3)]
)
def test_the_bound_is_where_its_tail_is_the_level(yes, trials, bounds):
    found = share_lower_bounds(np.full(bounds, float(yes)), trials, confidence=0.9)
    assert e * binom.sf(yes - 1, trials, found[0]) == pytest.approx(0.1 / bounds, rel=1e-6)
    assert (found == found[0]).all() and found[0] < yes / trials


def test_between_whole_numbers_the_tail_is_a_geometric_mean():
    low = share_lower_bounds(np.array([2.25]), 10)[0]
    tails = [binom.sf(count - 1, 10, low) for count in (2, 3)]
    assert e * tails[0] ** 0.75 * tails[1] ** 0.25 == pytest.approx(0.05, rel=1e-6)
    below_one = share_lower_bounds(np.array([0.5]), 10)[0]
    assert e * (1 - (1 - below_one) ** 10) ** 0.5 == pytest.approx(0.05, rel=1e-6)
    assert share_lower_bounds(np.array([0.0]), 10)[0] == 0


def test_the_bound_holds_by_enumeration():
    """Three documents, of three kinds: every outcome and its chance. Two numbers of queries, both bounds at once."""
    shares, kinds = (0.2, 0.3, 0.5), np.array([[0.9, 1.0], [0.05, 0.4], [0.0, 0.001]])
    truth = np.array(shares) @ kinds
    missed = 0.0
    for drawn in product(range(3), repeat=3):
        low = share_lower_bounds(kinds[list(drawn)].sum(axis=0), 3, confidence=0.6)
        missed += prod(shares[kind] for kind in drawn) * bool((low > truth).any())
    assert missed <= 0.4
    assert missed > 0, "a bound that never misses would be no bound of 60%"
