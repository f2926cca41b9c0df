"""Answers that a server must give so that the model behind it can be measured, and their meaning.

One request gives, for each token of a prompt, its log-probability and those of the most likely tokens at its place.
That is a teacher-forced pass (extraction/scoring.py), seen through a keyhole: the `alternatives` of a place are all
that is known of its distribution. Scores that they leave open are refused before the first sample is asked
(`alternatives_needed`) or stay unknown; nothing is filled in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, NamedTuple, Protocol

from hf_axonn_eval.data.samples import Sample
from hf_axonn_eval.extraction.scoring import Score
from hf_axonn_eval.metrics import membership
from hf_axonn_eval.metrics.discoverability import Sampler


LEAST_ALTERNATIVES = 2  # the true token and the best other one, which the margin compares
UNKNOWN_SCORES = ("min_k_plus_plus",)  # membership scores that need the full distribution of each place


class Place(NamedTuple):
    """One place: `logprob` of the token there, in nats, and the `alternatives`, the most likely ones by id."""

    logprob: float
    alternatives: Mapping[int, float]


class Backend(Protocol):
    """A server, or anything else, that answers in token ids."""

    @property
    def record(self) -> dict[str, Any]:
        """Entries for run.json: `base_url`, `name`, `server` (its version, None if it does not say), and
        `max_tokens` of prompt and continuation together (None if it does not say)."""
        ...

    def check(self, token_ids: Sequence[int], *, least: int, better: int) -> int:
        """Ask for a short prompt once, and again for fewer alternatives if there are not as many.

        Returns:
            The number of alternatives that it gives: `better` or `least`.
        Raises:
            ValueError: it gives fewer, or no log-probabilities of prompts at all; the message has both numbers.
        """
        ...

    def score(self, token_ids: Sequence[int], *, last: int, alternatives: int) -> list[Place]:
        """Score the last `last` tokens of a prompt, with that number of alternatives each.

        A token that is not among its alternatives is added to them.

        Raises:
            ValueError: the server refuses, fails, or answers something else than it was asked.
        """
        ...

    def generate(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Return the greedy continuation of a prompt, `count` tokens.

        Raises:
            ValueError: likewise, or the continuation ends before.
        """
        ...

    def encode(self, text: str) -> list[int] | None:
        """Return the ids of a text, without special tokens; None from a server that does not tell."""
        ...

    def stop(self) -> None:
        """Let requests that wait for another attempt fail now."""
        ...


def alternatives_needed(sampler: Sampler | None) -> tuple[int, int]:
    """Return how many log-probabilities of a place must be known, and how many are better.

    A sampler that keeps the k most likely tokens also keeps all that equal the k-th, so one more than k is needed: it
    says whether there are such. Logits of 16 bits are often equal, so twice k is better: where all that are known
    beyond the k-th equal it, the probability of the sample is unknown. Top-p after top-k needs no more than that. At
    temperature 1, and with nothing cut off, the log-probabilities of the suffix are those of the sampler.

    Returns:
        the least, and the better number.
    Raises:
        ValueError: the sampler needs the probability of every token.
    """
    if sampler is None or _changes_nothing(sampler):
        return LEAST_ALTERNATIVES, LEAST_ALTERNATIVES
    if sampler.top_k is None:
        raise ValueError(
            f"the sampler ({sampler.text}) needs the probability of every token of the vocabulary, and a server gives "
            "those of the most likely ones: add a top_k (--sampler temperature=1,top_k=40,...), give --sampler none, "
            "or load the model here, without --server."
        )
    return sampler.top_k + 1, max(2 * sampler.top_k, sampler.top_k + 1)


def score_of(
    sample: Sample, places: Sequence[Place], *, sampler: Sampler | None, alternatives: int, tokenizer: Any = None
) -> Score:
    """Make the score that a pass would give a sample.

    Args:
        sample: that the server was asked.
        places: of its last tokens; at least those of the suffix, and with `tokenizer` all but the first.
        sampler: whose log-probability of the suffix is computed too, None where the alternatives leave it open.
        alternatives: how many there are of each place.
        tokenizer: if given, membership scores are computed, without UNKNOWN_SCORES.
    """
    suffix = places[-len(sample.suffix) :]
    choices, leads, ranks = [], [], []
    for token, place in zip(sample.suffix, suffix, strict=True):
        # of equal ones the smallest id, as argmax takes it
        choices.append(min(place.alternatives, key=lambda other: (-place.alternatives[other], other)))
        # A server's own ranks count equal tokens as likelier, which a bound may not; beyond what it shows is no less.
        ranks.append(1 + sum(value > place.logprob for value in place.alternatives.values()))
        leads.append(place.logprob - max(value for other, value in place.alternatives.items() if other != token))
    of_members = None
    if tokenizer is not None:
        scored = [place.logprob for place in places]
        text = tokenizer.decode([*sample.prefix, *sample.suffix])
        nothing, one = [0.0] * len(scored), [1.0] * len(scored)
        of_members = membership.scores(scored, nothing, one, text)
        of_members = {name: score for name, score in of_members.items() if name not in UNKNOWN_SCORES}
    return Score(
        logprobs=[place.logprob for place in suffix],
        choices=choices,
        leads=leads,
        ranks=ranks,
        sampled_logprob=_sampled_logprob(sampler, sample.suffix, suffix, alternatives)
        if sampler is not None
        else None,
        membership=of_members,
    )


def _sampled_logprob(
    sampler: Sampler, suffix: Sequence[int], places: Sequence[Place], alternatives: int
) -> float | None:
    """Score a suffix in one draw, in nats; None where more tokens equal the k-th than are known."""
    import torch

    if _changes_nothing(sampler):
        return sum(place.logprob for place in places)
    rows = []
    for token, place in zip(suffix, places, strict=True):
        most_likely = sorted(place.alternatives, key=lambda other: (-place.alternatives[other], other))
        kept = place.alternatives[most_likely[(sampler.top_k or 0) - 1]]
        if kept == place.alternatives[most_likely[alternatives - 1]]:  # so may be the next one, which is not known
            return None
        # the token itself stands first; a place has one more where it is not among the most likely
        row = [place.alternatives.get(token, place.logprob)]
        row += [place.alternatives[other] for other in most_likely if other != token]
        rows.append((row + [-inf])[: alternatives + 1])
    logits = torch.tensor(rows, dtype=torch.float64)
    return float(sampler.logprobs(logits, torch.zeros(len(rows), dtype=torch.long)).sum())


def _changes_nothing(sampler: Sampler) -> bool:
    return sampler.temperature == 1 and sampler.top_k is None and sampler.top_p in (None, 1)
