"""The cost of extracting texts from a model: queries and tokens, the yield of a budget, and lower bounds of it.

A query is one draw of a full suffix by the sampler of the run, given the prefix. q, the chance that it is the true
suffix, is known of every sample from one pass, so nothing is drawn here:

    queries until sample i comes    geometric: 1 / q_i in expectation, each of prefix + suffix tokens
    n queries of each sample        give sum_i 1 - (1 - q_i)^n of them in expectation

Of these samples that is exact. Of other documents like these the samples tell less; `share_lower_bounds` says how much
at least, for all numbers of queries at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, exp, inf
from typing import Any

import numpy as np
from scipy.special import betainc

from hf_axonn_eval.analysis.intervals import check_confidence, number_documents
from hf_axonn_eval.data.jsonl import is_count
from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.metrics.discoverability import TRIES, check_tries


EASIEST = (0.01, 0.1, 0.25, 0.5)  # shares of the samples, the easiest first
BOUND = "bentkus, bonferroni, documents as trials"
TRAINED = "trained"  # every bucket but 0
_HALVINGS = 70  # of the range of a logarithm
_NOTHING = 1e-300  # bounds below are 0


@dataclass(frozen=True)
class _Samples:
    """Samples as columns: q, tokens a query (prefix and suffix), documents."""

    chances: np.ndarray
    tokens: np.ndarray
    documents: Sequence[str]

    def rows(self, chosen: np.ndarray) -> "_Samples":
        documents = [self.documents[place] for place in np.flatnonzero(chosen).tolist()]
        return _Samples(self.chances[chosen], self.tokens[chosen], documents)


def attack_cost(
    results: Iterable[SampleResult],
    *,
    tries: Sequence[int] = TRIES,
    queries: Sequence[int] = (),
    tokens: Sequence[int] = (),
    confidence: float = 0.95,
) -> dict[str, Any]:
    """Estimate the cost of drawing the suffixes of a run, by bucket.

    Args:
        results: of one run; read once. Samples without `sampled_logprob` do not enter.
        tries: numbers of queries of each sample.
        queries: budgets in queries, spread evenly over the samples.
        tokens: budgets in tokens, prefixes and suffixes, likewise.
        confidence: of the lower bounds.
    Returns:
        By bucket as text, and "trained" for all but bucket 0 if these are several; {} without a sampler:

        - `samples`, `documents`, and `tokens`, those of one query of each sample;
        - `never`: samples that the sampler cannot draw, or with a chance below 1e-308;
        - `to_extract`: by share of EASIEST, as text, the expected `queries` and `tokens` that suffice for each of this
          share of the samples, those that take least; None where the sampler never draws one of them;
        - `tries`: by number of queries of each sample, as text, their `queries` and `tokens` in all, the number of
          samples that is `expected` of them, its `share`, `tokens_each` (tokens for each of these; None for 0), and
          `low`, the lower bound of the share for other documents (None for a single document);
        - `budgets`: a list of the same with the `budget`, its `unit` ("queries", "tokens") and `draws`, the queries of
          each sample. Of 2.5 everyone gets 2, and each a third one with a chance of a half.
        - `bounds`: the `count` of bounds that hold together, their `confidence` and `kind`.
    Raises:
        ValueError: tries or budgets that are not whole numbers of at least 1, or not 0 < confidence < 1.
    """
    check_confidence(confidence)
    check_tries(tries)
    for name, budgets in (("queries", queries), ("tokens", tokens)):
        if not all(is_count(budget, least=1) for budget in budgets):
            raise ValueError(f"budgets of {name} are {list(budgets)!r}, but they must be whole numbers of at least 1.")
    kept = [result for result in map(_columns, results) if result is not None]
    if not kept:
        return {}
    buckets, chances, lengths, documents = zip(*kept, strict=True)
    everything = _Samples(np.array(chances), np.array(lengths, dtype=np.float64), documents)
    bucket_of = np.array(buckets)
    groups = {str(bucket): bucket_of == bucket for bucket in np.unique(bucket_of)}
    if len(set(bucket_of[bucket_of != 0])) > 1:
        groups[TRAINED] = bucket_of != 0
    limits = [("queries", budget) for budget in queries] + [("tokens", budget) for budget in tokens]
    return {name: _group(everything.rows(chosen), list(tries), limits, confidence) for name, chosen in groups.items()}


def expected_share(chances: np.ndarray, draws: float) -> np.ndarray:
    """Compute the chance of each sample to come at least once in `draws` queries.

    1 - (1 - q)^k (1 - f q) for k + f queries: k for sure, and one more with chance f.

    Args:
        chances: [samples] q.
        draws: at least 0; need not be a whole number.
    Raises:
        ValueError: a negative number of queries, or chances that are none.
    """
    if draws < 0 or ((chances < 0) | (chances > 1)).any():
        raise ValueError(f"{draws} queries, or a chance outside of 0 to 1: neither can be.")
    whole = int(draws)
    with np.errstate(divide="ignore"):
        missed = whole * np.log1p(-chances) if whole else np.zeros(len(chances))
        rest = draws - whole
        missed = missed + (np.log1p(-rest * chances) if rest else 0.0)
    return -np.expm1(missed)


def share_lower_bounds(sums: np.ndarray, trials: int, *, confidence: float = 0.95) -> np.ndarray:
    """Compute lower bounds of the means of several numbers of documents, which hold all at once.

    Each is a `lower_bound` at (1 - confidence) / `len(sums)`, so that the chance that any of them is wrong is at most
    1 - confidence (Bonferroni).

    Args:
        sums: [numbers] the sum of each over documents.
        trials: the documents.
        confidence: that all of them hold.
    Raises:
        ValueError: sums outside of 0 to `trials`, or not 0 < confidence < 1.
    """
    check_confidence(confidence)
    return lower_bound(sums, trials, level=(1 - confidence) / len(sums))


def lower_bound(sums: np.ndarray, trials: int, *, level: float) -> np.ndarray:
    """Compute lower bounds of means of numbers from 0 to 1, each wrong with a chance of at most `level`.

    Let S be the sum of n independent numbers from 0 to 1 with mean p, and B binomial with n trials and chance p. Then
    P(S >= x) <= e P(B >= x), where P(B >= x) between whole numbers is the geometric mean, by distance, of those next
    to it. The bound is the p at which that is `level`.

    Args:
        sums: [means] S.
        trials: n.
        level: above 0, below 1.
    Raises:
        ValueError: sums outside of 0 to n.
    Source: Bentkus 2004, Annals of Probability 32, 1650-1673, theorem 1.2 (hull of the binomial: log-concave).
    """
    sums = np.asarray(sums, dtype=np.float64)
    if trials < 1 or (sums < 0).any() or (sums > trials * (1 + 1e-12)).any():
        raise ValueError(f"sums {sums.tolist()} of {trials} numbers from 0 to 1 cannot be.")
    sums = np.minimum(sums, trials)
    below, above = np.floor(sums), np.ceil(sums)
    low, high = np.full(len(sums), np.log(_NOTHING)), np.zeros(len(sums))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        with np.errstate(divide="ignore"):
            under, over = (np.log(_at_least(count, trials, np.exp(middle))) for count in (below, above))
        share = sums - below
        tail = (1 - share) * under + share * np.where(share == 0, 0, over)  # not 0 times minus infinity
        likely = 1 + tail > np.log(level)
        low, high = np.where(likely, low, middle), np.where(likely, middle, high)
    return np.where((sums > 0) & (low > np.log(_NOTHING)), np.exp(low), 0.0)


def _at_least(count: np.ndarray, trials: int, chance: np.ndarray) -> np.ndarray:
    """Compute P(B >= count) for B binomial."""
    least = np.maximum(count, 1)
    return np.where(count == 0, 1.0, betainc(least, np.maximum(trials - least + 1, 1), chance))


def _columns(result: SampleResult) -> tuple[int, float, int, str] | None:
    if result.sampled_logprob is None:
        return None
    chance = exp(min(result.sampled_logprob, 0.0))
    return result.bucket, chance, result.prefix_length + result.suffix_length, result.document_id


def _group(samples: _Samples, tries: list[int], limits: list[tuple[str, int]], confidence: float) -> dict[str, Any]:
    count, each = len(samples.chances), float(samples.tokens.sum())
    index, documents = number_documents(samples.documents)
    sizes = np.bincount(index)
    plans: list[tuple[dict[str, Any], float]] = [({}, float(number)) for number in tries]
    for unit, budget in limits:
        draws = budget / (count if unit == "queries" else each)
        plans.append(({"budget": budget, "unit": unit, "draws": draws}, draws))
    chances = [expected_share(samples.chances, draws) for _, draws in plans]
    sums = [float((np.bincount(index, weights=chance) / sizes).sum()) for chance in chances]
    bounds = share_lower_bounds(np.array(sums), documents, confidence=confidence)
    rows = []
    for (about, draws), chance, bound in zip(plans, chances, bounds, strict=True):
        expected, tokens = float(chance.sum()), draws * each
        share = {"expected": expected, "share": expected / count}
        each_text = tokens / expected if expected > 0 else None
        low = float(bound) if documents > 1 else None
        whole = {**about, "queries": draws * count, "tokens": tokens}
        rows.append({**whole, **share, "tokens_each": each_text, "low": low})
    return {
        "samples": count,
        "documents": documents,
        "tokens": each,
        "never": int((samples.chances == 0).sum()),
        "to_extract": _easiest(samples),
        "tries": {str(number): row for number, row in zip(tries, rows, strict=False)},
        "budgets": rows[len(tries) :],
        "bounds": {"count": len(plans), "confidence": confidence, "kind": BOUND},
    }


def _easiest(samples: _Samples) -> dict[str, dict[str, float | None]]:
    with np.errstate(divide="ignore"):
        queries = 1 / samples.chances
    costs = {"queries": np.sort(queries), "tokens": np.sort(queries * samples.tokens)}
    found: dict[str, dict[str, float | None]] = {}
    for share in EASIEST:
        place = ceil(share * len(queries)) - 1
        found[f"{share:g}"] = {unit: float(cost[place]) if cost[place] < inf else None for unit, cost in costs.items()}
    return found
