"""A comparison of a model with guessing evenly among all tokens.

A model that does no better knows nothing of these ids: what it does not reproduce says nothing of what it has seen.
"""

from collections.abc import Mapping
from math import log
from typing import Any


def against_chance(loss: float | None, vocabulary: int) -> dict[str, Any] | None:
    """Compare a mean loss with that of guessing evenly among all tokens, ln(vocabulary).

    Args:
        loss: of the suffixes, in nats a token.
        vocabulary: how many tokens there are.
    Returns:
        `nll`, `chance_nll` and `no_better`; None if no log-probabilities were measured.
    """
    if loss is None:
        return None
    chance = log(vocabulary)
    return {"nll": loss, "chance_nll": chance, "no_better": loss >= chance}


def chance_of(summary: Mapping[str, Any], record: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Compare the numbers of a run with chance (`against_chance`), by the vocabulary that its run.json has.

    Args:
        summary: the numbers of all samples of the run.
        record: run.json. Without the vocabulary of the model that of the tokenizer counts, which may lack padding.
    Returns:
        None also where no size is known.
    """
    record = record or {}
    vocabulary = record.get("vocabulary") or (record.get("tokenizer") or {}).get("size")
    if not isinstance(vocabulary, int) or vocabulary < 1:
        return None
    return against_chance(summary["metrics"].get("nll", {}).get("mean"), vocabulary)
